"""From a user's DataLoader to one rank's: a shallow copy with another stream of indices."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fabric.core.errors import ConfigurationError
from fabric.data.order import SeededOrder, seed_worker_generator
from fabric.data.streams import UNEVEN, ShardedBatches, ShardedStream, Share
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.seed import pl_worker_init_function
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Callable


def shard_loader(loader: DataLoader[Any], share: Share, seed: int, uneven: str | None) -> DataLoader[Any]:
    """A copy of `loader` that yields this rank's part; the user's loader and sampler are left as they are.

    Iterable datasets and loaders that the user has sharded (DistributedSampler, or any sampler with
    `num_replicas` and `rank`) keep their stream.

    Args:
        loader: Any DataLoader, subclasses with foreign constructors included.
        share: This rank's part.
        seed: The base of the sample order, the same on all ranks.
        uneven: "pad", "exact", "drop", "error"; None: "exact" for batches in dataset order, else "pad". Whole
            batches (a batch sampler of the user's own, or batch_size=None) cannot be split, so there "pad"
            keeps steps equal.

    Raises:
        ConfigurationError: Unknown `uneven`; samples left over under "error"; a loader that cannot be
            sharded.
    """
    if uneven is not None and uneven not in UNEVEN:
        raise ConfigurationError(f"uneven={uneven!r} is not one of {', '.join(map(repr, UNEVEN))}.")
    copied = own_loader(loader, share.rank, seed)
    if isinstance(loader.dataset, IterableDataset):
        if share.world > 1 and not _knows_its_rank(loader.dataset):
            _warn_of_repeats(loader.dataset, share.world)
        return copied
    if any(_knows_its_rank(part) for part in _samplers(loader)):
        return copied
    if share.world > 1:
        _refuse_running(loader)
    stream = _stream(loader, share, seed, uneven, copied.generator if loader.generator is None else None)
    stream.check_even()
    # DataLoader.__setattr__ refuses to change these after construction.
    copied.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = stream
    return copied


def own_loader(loader: DataLoader[Any], rank: int, seed: int) -> DataLoader[Any]:
    """A shallow copy with workers of its own, seeded apart by rank, worker and epoch; the order is unchanged.

    A generator that the user gave stays in use. Without one, torch draws the workers' seed from the training
    loop's global stream whenever an iteration starts; here it comes from a generator of the copy.
    """
    copied = copy.copy(loader)
    fields = copied.__dict__
    fields["_iterator"] = None
    if loader.num_workers > 0:
        fields["worker_init_fn"] = SeedWorker(rank, loader.worker_init_fn)
    # torch draws on the default device, and a generator of another device would be refused.
    if loader.generator is None and torch.get_default_device().type == "cpu":
        fields["generator"] = torch.Generator()
        seed_worker_generator(fields["generator"], seed, 0)
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


def _stream(
    loader: DataLoader[Any], share: Share, seed: int, uneven: str | None, workers: torch.Generator | None
) -> ShardedStream:
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        order = SeededOrder(batches.sampler, seed, batches.batch_size * share.world, workers)
        policy = uneven or ("exact" if order.is_sequential else "pad")
        return ShardedBatches(order, batches.batch_size, batches.drop_last, share, policy)
    items = loader.sampler if batches is None else batches
    order = SeededOrder(items, seed, share.world, workers)
    return ShardedStream(order, share, uneven or "pad")


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]


def _knows_its_rank(part: Any) -> bool:
    """Whether a user's sampler or dataset takes one rank's part already, like torch's DistributedSampler."""
    sizes = ("num_replicas", "world_size")
    return hasattr(part, "rank") and any([hasattr(part, name) for name in sizes])


def _warn_of_repeats(dataset: Any, world: int) -> None:
    rank_zero_warn(
        f"Each of the {world} ranks will see all of {type(dataset).__name__}: an iterable dataset has "
        f"no indices to share out. Take a part in its __iter__, for example `yield from itertools.islice("
        f"items, fabric.global_rank, None, fabric.world_size)`, and pass use_distributed_sampler=False to "
        f"say so.",
        category=PossibleUserWarning,
    )


def _refuse_running(loader: DataLoader[Any]) -> None:
    """Raise if a DataLoader subclass yields from an iterator made before: it would ignore the shard."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    for name, value in vars(loader).items():
        if name != "_iterator" and isinstance(value, _BaseDataLoaderIter):
            raise ConfigurationError(
                f"{type(loader).__name__} keeps a running iterator in .{name}, so every rank would see all "
                f"data. Pass a plain DataLoader, or shard it with a DistributedSampler and pass "
                f"use_distributed_sampler=False."
            )
