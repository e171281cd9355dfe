"""Lengths of loaders, the number of workers, and `AttributeDict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from fabric.core.cores import usable_cores
from fabric.core.errors import ConfigurationError
from fabric.core.lazy import lazy_names
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Sized
    from typing import TypeGuard

__getattr__ = lazy_names(__name__)


class AttributeDict(dict[str, Any]):
    """A dict whose entries are also attributes: `state.step` is `state["step"]`."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(
                f"Missing attribute {key!r}; existing: {', '.join(map(repr, self)) or 'none'}"
            ) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise AttributeError(f"Missing attribute {key!r}")
        del self[key]

    def __repr__(self) -> str:
        labels = {key: f'"{key}":' for key in sorted(self, key=str)}
        width = max(map(len, labels.values()), default=0)
        return "\n".join(f"{label:<{width}} {self[key]}" for key, label in labels.items())


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether the dataset of `dataloader` is an `IterableDataset`."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: object) -> TypeGuard[Sized]:
    """Whether `len(dataloader)` works. Warns if it is 0, or may be wrong because of several workers."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(
            f"`{type(dataloader).__name__}` has length 0: its loop will not run. Is this intended?"
        )
    if length and has_iterable_dataset(dataloader) and getattr(dataloader, "num_workers", 0) > 1:
        rank_zero_warn(
            f"`{type(dataloader).__name__}` has the length of its IterableDataset and several workers. "
            f"Split the data in `__iter__` by `torch.utils.data.get_worker_info()`, else every worker yields "
            f"all of it."
        )
    return length is not None


def sized_len(dataloader: object) -> int | None:
    """Return `len(dataloader)`; None: it has no length."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the number of dataloader workers per process, an equal share of this node's cores.

    Args:
        local_world_size: Processes on this node, at least 1.

    Raises:
        ConfigurationError: `local_world_size` is below 1.
    """
    if local_world_size < 1:
        raise ConfigurationError(
            f"local_world_size={local_world_size} is below 1. Pass the number of processes on this node."
        )
    return max(1, usable_cores() // local_world_size)
