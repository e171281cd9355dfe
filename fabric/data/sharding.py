"""From a user's DataLoader to one rank's: a shallow copy with another stream of indices. No constructor is run."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from fabric.core.errors import ConfigurationError
from fabric.data.streams import UNEVEN, SeededOrder, ShardedBatches, ShardedStream, Share
from fabric.utilities.seed import pl_worker_init_function

if TYPE_CHECKING:
    from collections.abc import Callable

_CUSTOM_CHUNK = 64
"""Items drawn at a time from a sampler of unknown kind; switching generators costs some 50 us."""


def shard_loader(loader: DataLoader[Any], share: Share, seed: int, uneven: str | None) -> DataLoader[Any]:
    """A copy of `loader` that yields this rank's part; the user's loader and sampler are left as they are.

    Args:
        loader: Any DataLoader, subclasses with foreign constructors included.
        share: This rank's part.
        seed: The base of the sample order, the same on all ranks.
        uneven: "pad", "exact", "drop", "error"; None: "exact" for loaders in dataset order, else "pad".

    Raises:
        ConfigurationError: Unknown `uneven`.
    """
    if uneven is not None and uneven not in UNEVEN:
        raise ConfigurationError(f"uneven={uneven!r} is not one of {', '.join(map(repr, UNEVEN))}.")
    copied = copy_loader(loader)
    fields = copied.__dict__  # DataLoader.__setattr__ refuses to change these after construction
    if loader.num_workers > 0:
        fields["worker_init_fn"] = SeedWorker(share.rank, loader.worker_init_fn)
    if isinstance(loader.dataset, IterableDataset) or _shards_itself(loader):
        return copied
    ordered = isinstance(loader.sampler, SequentialSampler)
    policy = uneven or ("exact" if ordered else "pad")
    if loader.batch_sampler is None:  # batch_size=None: the sampler's items go to the dataset one by one
        fields["sampler"] = ShardedStream(SeededOrder(loader.sampler, seed, _CUSTOM_CHUNK), share, policy)
    elif type(loader.batch_sampler) is BatchSampler:
        batches = loader.batch_sampler
        order = SeededOrder(batches.sampler, seed, batches.batch_size * share.world)
        fields["batch_sampler"] = ShardedBatches(order, batches.batch_size, batches.drop_last, share, policy)
    elif share.world > 1:
        order = SeededOrder(loader.batch_sampler, seed, share.world)
        fields["batch_sampler"] = ShardedStream(order, share, uneven or "pad")
    return copied


def copy_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A shallow copy that shares dataset, collate function and generator, and starts its own workers."""
    copied = copy.copy(loader)
    copied.__dict__["_iterator"] = None
    return copied


class SeedWorker:
    """A worker_init_fn: streams of its own for each (rank, worker), then the user's function."""

    def __init__(self, rank: int, then: Callable[[int], Any] | None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Run in the worker process, before its first sample."""
        pl_worker_init_function(worker_id, self.rank)
        if self.then is not None:
            self.then(worker_id)


def _shards_itself(loader: DataLoader[Any]) -> bool:
    """Whether the user sharded this loader already, with torch's DistributedSampler."""
    from torch.utils.data.distributed import DistributedSampler

    return isinstance(loader.sampler, DistributedSampler)
