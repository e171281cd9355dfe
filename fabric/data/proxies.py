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
    """Stands in for `given`, an object of the user's: what it does not have itself is that object's."""

    _OWN = frozenset({"given"})
    """Its own attributes, by name."""
    whole = False
    """Of a dataset, whether each worker must read all of it."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        # Dunder names belong to protocols (pickle, copy) that must not reach the user's object through this.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.given, name, value)


class SamplerProxy(DatasetProxy):
    """A user's (batch) sampler as a loader shows it: `set_epoch` chooses the loader's next epoch.

    Args:
        given: The user's.
        stream: What the loader draws from in its place.
        set_epoch: The loader's.
    """

    _OWN = frozenset({"given", "_stream", "set_epoch"})

    def __init__(self, given: Any, stream: Any, set_epoch: Callable[[int], None]) -> None:
        super().__init__(given)
        self._stream = stream
        self.set_epoch = set_epoch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() is for the user's
        return type(self.given)

    @property
    def sampler(self) -> Any:
        """The one inside a batch sampler, likewise."""
        return SamplerProxy(self.given.sampler, self.given.sampler, self.set_epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def __len__(self) -> int:
        return len(self._stream)


class SeededDataset(DatasetProxy):
    """A map-style dataset for workers: takes jobs, and seeds the worker for each."""

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, job: Any) -> Any:
        return self.given[_begun(job)]

    def __getitems__(self, job: Any) -> Any:
        indices = _begun(job)
        fetch = getattr(self.given, "__getitems__", None)
        return fetch(indices) if fetch else [self.given[index] for index in indices]


def _begun(job: Any) -> Any:
    if type(job) is not SamplerJob:
        return job
    seed_draws(job.seed)
    return job.index


class SeedWorker:
    """A worker_init_fn: streams of its own for each (rank, worker), then the user's function."""

    def __init__(self, rank: int, then: Callable[[int], Any] | None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Run in the worker process, before its first sample."""
        from fabric.launch.garbage import forked  # neither is loaded where there are no workers
        from fabric.launch.parent_death import die_with_creator

        die_with_creator()  # torch looks for the rank every 5 s only, and under forkserver never
        forked()
        pl_worker_init_function(worker_id, self.rank)
        info = get_worker_info()
        inner, before = None, {}
        if info is not None and isinstance(info.dataset, DatasetProxy):
            inner, whole = info.dataset.given, info.dataset.whole
            # The user's own, which their function may change; WorkerInfo refuses the plain way.
            object.__setattr__(info, "dataset", inner)
            before = dict(getattr(inner, "__dict__", {})) if whole else {}
        if self.then is not None:
            self.then(worker_id)
        _check_whole(inner, before)


def _check_whole(dataset: Any, before: dict[str, Any]) -> None:
    """Raise if a worker_init_fn has given the worker a part of a stream that Fabric deals out.

    Raises:
        ConfigurationError: It has changed numbers or lists of the dataset.
    """
    for name, old in before.items():
        new = getattr(dataset, name, old)
        if new is not old and isinstance(new, int | float | str | list | tuple | range) and new != old:
            raise ConfigurationError(
                f"worker_init_fn has set {type(dataset).__name__}.{name} to {new!r:.60} in one worker. "
                "Fabric deals the samples out by itself, for which every worker must read the same stream. "
                "Leave that out of worker_init_fn, or pass shard_iterable=False and let the dataset take "
                "the part of its rank and worker."
            )
