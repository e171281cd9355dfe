"""Proxies of the user's objects: datasets in workers, and the samplers that a loader exposes.

Random draws in workers are a function of the batch, not of the batches before it. So a run that resumes in
the middle of an epoch draws the same numbers in its workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from fabric.core.errors import ConfigurationError
from fabric.data.order import seed_draws
from fabric.data.rank_batches import SamplerJob
from fabric.utilities.seed import pl_worker_init_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DatasetProxy:
    """Proxy of a user's object: attributes that are not its own are those of `wrapped`."""

    _PROXY_ATTRIBUTES = frozenset({"wrapped"})
    """Names of the proxy's own attributes."""
    reads_all = False
    """Whether each worker must read the whole dataset."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        # Dunder names belong to protocols (pickle, copy) that must apply to the proxy.
        if name in self._PROXY_ATTRIBUTES or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._PROXY_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)


class SamplerProxy(DatasetProxy):
    """The `loader.sampler` or `loader.batch_sampler` of a set-up loader: its `set_epoch` is the loader's.

    Args:
        wrapped: The user's sampler.
        replacement: The sampler that the loader iterates in its place.
        set_epoch: The loader's method.
    """

    _PROXY_ATTRIBUTES = frozenset({"wrapped", "_replacement", "set_epoch"})

    def __init__(self, wrapped: Any, replacement: Any, set_epoch: Callable[[int], None]) -> None:
        super().__init__(wrapped)
        self._replacement = replacement
        self.set_epoch = set_epoch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() checks the user's sampler
        return type(self.wrapped)

    @property
    def sampler(self) -> Any:
        """Return the proxy of the sampler inside a batch sampler."""
        return SamplerProxy(self.wrapped.sampler, self.wrapped.sampler, self.set_epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._replacement)

    def __len__(self) -> int:
        return len(self._replacement)


class SeededDataset(DatasetProxy):
    """A map-style dataset in workers: seeds the worker for each `SamplerJob`, which it gets as index."""

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, job: Any) -> Any:
        return self.wrapped[_start_job(job)]

    def __getitems__(self, job: Any) -> Any:
        indices = _start_job(job)
        fetch = getattr(self.wrapped, "__getitems__", None)
        return fetch(indices) if fetch else [self.wrapped[index] for index in indices]


def _start_job(job: Any) -> Any:
    if type(job) is not SamplerJob:
        return job
    seed_draws(job.seed)
    return job.index


class SeedWorker:
    """A worker_init_fn: seeds each (rank, worker) differently, then calls the user's function."""

    def __init__(self, rank: int, user_function: Callable[[int], Any] | None) -> None:
        self.rank = rank
        self.user_function = user_function

    def __call__(self, worker_id: int) -> None:
        """Run in the worker process, before its first sample."""
        from fabric.launch.garbage import after_fork  # imported only if there are workers
        from fabric.launch.parent_death import die_with_creator

        die_with_creator()  # torch checks for the rank every 5 s only, and under forkserver never
        after_fork()
        pl_worker_init_function(worker_id, self.rank)
        info = get_worker_info()
        inner, old_attributes = None, {}
        if info is not None and isinstance(info.dataset, DatasetProxy):
            inner, reads_all = info.dataset.wrapped, info.dataset.reads_all
            # The user's function may change the user's dataset; WorkerInfo.__setattr__ raises.
            object.__setattr__(info, "dataset", inner)
            old_attributes = dict(getattr(inner, "__dict__", {})) if reads_all else {}
        if self.user_function is not None:
            self.user_function(worker_id)
        _check_not_split(inner, old_attributes)


def _check_not_split(dataset: Any, old_attributes: dict[str, Any]) -> None:
    """Raise if a worker_init_fn has given the worker a part of a dataset that Fabric shards.

    Raises:
        ConfigurationError: Numbers or lists in attributes of the dataset were changed.
    """
    for name, old_value in old_attributes.items():
        new_value = getattr(dataset, name, old_value)
        if (
            new_value is not old_value
            and isinstance(new_value, int | float | str | list | tuple | range)
            and new_value != old_value
        ):
            raise ConfigurationError(
                f"worker_init_fn has set {type(dataset).__name__}.{name} to {new_value!r:.60} in one worker. "
                "Fabric shards the samples, for which every worker must read the same stream. Remove that "
                "from worker_init_fn, or write setup_dataloaders(loader, shard_iterable=False) and let the "
                "dataset shard itself by rank and worker."
            )
