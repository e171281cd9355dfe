"""`DistributedSamplerWrapper` and `is_shared_filesystem`. Never starts a process group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.lazy import lazy_names
from fabric.core.types import ReduceOp as ReduceOp
from fabric.utilities.seed import derive_seed, isolate_rng, seed_streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fabric.core.types import PathLike

__getattr__ = lazy_names(__name__)


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Each rank's shard of the samples of any `sampler`.

    All ranks iterate `sampler` with equal random generators, seeded by `seed`, the epoch, and the number of
    iterations since `set_epoch`. Shards never overlap, even if the ranks' own generators differ. A sampler
    with its own generator must have equal ones on all ranks.

    Args:
        sampler: Yields indices, or lists of them; must have a length.
        args: As for `torch.utils.data.DistributedSampler`, without its dataset.
        kwargs: As for the same (`num_replicas`, `rank`, `shuffle`, `seed`, `drop_last`).

    Raises:
        ArgumentTypeError: `sampler` has no length.
    """

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if not isinstance(sampler, Sized):
            raise ArgumentTypeError(
                f"{type(sampler).__name__} has no `__len__`, so its indices cannot be sharded evenly. "
                f"Add a `__len__`, or pass use_distributed_sampler=False and split the data yourself."
            )
        super().__init__(sampler, *args, **kwargs)  # type: ignore[arg-type]  # only its length is used
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:
        with isolate_rng():
            seed_streams(derive_seed(self.seed, self.epoch, self._iterations))
            samples = list(self.dataset)  # type: ignore[call-overload]
        self._iterations += 1
        order = super().__iter__()
        return (samples[index] for index in order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of epoch number `epoch`, from 0. All ranks must call this before iterating."""
        super().set_epoch(epoch)
        self._iterations = 0
        if callable(inner := getattr(self.dataset, "set_epoch", None)):
            inner(epoch)


def is_shared_filesystem(strategy: Any, path: PathLike | None = None, timeout: int = 3) -> bool:
    """Whether all ranks see the same directory. All ranks must call this.

    Args:
        strategy: A launched strategy.
        path: An existing directory or file; None: the working directory. URLs count as shared.
        timeout: Seconds that a rank waits for rank zero's file to appear.

    Raises:
        FileNotFoundError: On all ranks, if the path is missing on one of them.
        ConfigurationError: On all ranks, if rank zero may not write there.
    """
    if path is not None and "://" in str(path):
        return True
    if getattr(strategy, "world_size", None) == 1:
        return True
    local = Path.cwd() if path is None else Path(path).absolute()
    if not strategy.reduce_boolean_decision(strategy.broadcast(str(local)) == str(local), all=True):
        return False  # whether different paths are one directory is unknown
    if not strategy.reduce_boolean_decision(local.exists(), all=True):
        raise FileNotFoundError(f"{local} does not exist on every rank. Create it on all nodes first.")
    if getattr(strategy, "num_nodes", None) == 1:
        return True
    return _all_see_file(strategy, local if local.is_dir() else local.parent, timeout)


def _all_see_file(strategy: Any, directory: Path, timeout: int) -> bool:
    written = ""
    if strategy.is_global_zero:
        try:
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".fabric-shared-", delete=False) as file:
                written = file.name
        except OSError as error:
            written = f"!{error}"
    written = strategy.broadcast(written)
    if written.startswith("!"):  # raised on all ranks, which would otherwise wait for rank zero
        raise ConfigurationError(
            f"Rank zero cannot write into {directory}: {written[1:]}. Pass another path."
        )
    deadline = time.monotonic() + timeout
    while not (seen := Path(written).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    shared: bool = strategy.reduce_boolean_decision(seen, all=True)
    if strategy.is_global_zero:
        Path(written).unlink(missing_ok=True)
    return shared
