"""What runs in a loader's worker processes: random streams that are a function of the batch, not of the past.

So a run that goes on in the middle of an epoch draws in its workers what it would have drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from fabric.core.errors import ConfigurationError
from fabric.data.randomness import seed_draws
from fabric.data.streams import Forwarding, Job
from fabric.processes.garbage import forked
from fabric.utilities.seed import pl_worker_init_function

if TYPE_CHECKING:
    from collections.abc import Callable


class Dataset(Forwarding):
    """Stands in for a dataset of the user's."""

    _OWN = frozenset({"dataset"})

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def whole(self) -> bool:
        """Whether each worker must read all of it."""
        return False

    def users(self) -> Any:
        """The user's dataset."""
        return self.dataset


class SeededDataset(Dataset):
    """A map-style dataset for workers: takes jobs, and seeds the worker for each."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, job: Any) -> Any:
        return self.dataset[_begun(job)]

    def __getitems__(self, job: Any) -> Any:
        indices = _begun(job)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch else [self.dataset[index] for index in indices]


class SeedWorker:
    """A worker_init_fn: streams of its own for each (rank, worker), then the user's function."""

    def __init__(self, rank: int, then: Callable[[int], Any] | None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Run in the worker process, before its first sample."""
        from fabric.processes.lifeline import die_with_creator  # not loaded where there are no workers

        die_with_creator()  # torch looks for the rank every 5 s only, and under forkserver never
        forked()
        pl_worker_init_function(worker_id, self.rank)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Dataset):
            inner, whole = info.dataset.dataset, info.dataset.whole
            # The user's own, which their function may change; WorkerInfo refuses the plain way.
            object.__setattr__(info, "dataset", inner)
            before = dict(getattr(inner, "__dict__", {})) if whole else {}
        else:
            inner, before = None, {}
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


def _begun(job: Any) -> Any:
    if type(job) is not Job:
        return job
    seed_draws(job.seed)
    return job.index
