"""From a user's DataLoader to one rank's: a shallow copy with other indices, or another dataset."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, RandomSampler

from fabric.core.errors import ConfigurationError
from fabric.core.slices import use_slice
from fabric.data._torch import ITERATOR, drop_workers, loader_iterator
from fabric.data.adapters import IndexSource, LoaderAdapter, samplers_of
from fabric.data.order import EpochOrder
from fabric.data.rank_batches import RankBatchSampler
from fabric.data.rules import UNEVEN, Shard, ShardingRule, check_padding
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

_TORCHDATA = "torchdata.stateful_dataloader"


def shard_loader(
    loader: DataLoader[Any],
    share: Shard,
    seed: int,
    uneven: str | None,
    shard_iterable: bool | None = None,
    ranks: int = 1,
    *,
    shard: bool = True,
) -> LoaderAdapter:
    """A copy of `loader` that yields this rank's part, as a `LoaderAdapter`; the user's own is left as it is.

    Loaders that the user has sharded (DistributedSampler, or any sampler or iterable dataset with
    `num_replicas` and `rank`) keep their order; workers are seeded apart by rank, worker and batch all the
    same. A generator that the user gave stays in use. Without one, torch draws the workers' seed from the
    training loop's global stream whenever an iteration starts; here it comes from a generator of the copy.

    Args:
        loader: Any DataLoader, subclasses with foreign constructors included.
        share: This rank's part.
        seed: The base of the sample order, the same on all ranks.
        uneven: "pad", "exact", "drop", "error"; None: "exact" for batches in dataset order and iterable
            datasets, else "pad". Whole batches (a batch sampler of the user's own, or batch_size=None) cannot
            be split, so there "pad" keeps steps equal.
        shard_iterable: False: an iterable dataset takes its part itself. None: the ranks compare.
        ranks: How many there are to compare; more than shares where several hold one model.
        shard: False: the user has shared the data out.

    Raises:
        ConfigurationError: Unknown `uneven`, or "pad" where Fabric does not deal; samples left over under
            "error"; a loader that cannot be sharded.
    """
    if uneven not in (None, *UNEVEN):
        raise ConfigurationError(f"uneven={uneven!r} is not one of {', '.join(map(repr, UNEVEN))}.")
    loader = _of_torch(loader)
    streams = isinstance(loader.dataset, IterableDataset)
    # What goes on between dataset and loop is not torch's own way, which we could follow.
    opaque = type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.dataset, IterDataPipe)
    parts = [loader.dataset] if streams else samplers_of(loader)
    own = not shard or (streams and shard_iterable is False) or any([knows_its_rank(part) for part in parts])
    if not own and streams and opaque and share.world > 1:
        _warn_of_repeats(loader.dataset, share.world)
    own = own or (streams and opaque)
    if own:
        check_padding(uneven, type(loader).__name__)
    elif share.world > 1:
        _refuse_running(loader)
    copied, generator = _copied(loader, share.rank, seed)
    if not streams:
        stream = _stream(loader, share, seed, uneven, own)
        stream.check_even()
        # Before the samplers go: generators are in them.
        source = IndexSource(copied, stream, seed, share.rank, generator)
        copied.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = stream
    if opaque:  # what it yields need not be one for one
        return LoaderAdapter(copied)
    if streams:
        asks = not own and shard_iterable is None and ranks > 1
        rule = ShardingRule(share, loader.batch_size, loader.drop_last, uneven or "exact")
        return _stream_source(copied, rule, seed, generator, uneven, asks, own)
    if loader.num_workers:
        from fabric.data.proxies import SeededDataset

        copied.__dict__["dataset"] = SeededDataset(loader.dataset)
    return source


def _of_torch(loader: DataLoader[Any]) -> DataLoader[Any]:
    """torchdata's StatefulDataLoader as a plain one, whose position Fabric keeps; any other as it is."""
    if not type(loader).__module__.startswith(_TORCHDATA):
        return loader
    plain: Any = copy.copy(loader)
    plain.__class__ = DataLoader
    sampler: Any = loader.sampler
    batches: Any = loader.batch_sampler
    if type(sampler).__module__.startswith(_TORCHDATA):  # the one for shuffle=True
        replacement, count = sampler.replacement, sampler.num_samples
        sampler = RandomSampler(sampler.data_source, replacement, count, loader.generator)
    if type(batches).__module__.startswith(_TORCHDATA):
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    context = {"_DataLoader__multiprocessing_context": loader.multiprocessing_context}
    plain.__dict__.update(context, sampler=sampler, batch_sampler=batches)
    made: DataLoader[Any] = plain
    return made


def _copied(loader: DataLoader[Any], rank: int, seed: int) -> tuple[DataLoader[Any], torch.Generator | None]:
    """The copy, and the generator for workers' seeds that it has of its own."""
    copied = copy.copy(loader)
    fields = copied.__dict__  # DataLoader.__setattr__ refuses to change some of these after construction
    drop_workers(copied)
    if loader.num_workers > 0:
        from fabric.data.proxies import SeedWorker

        fields["worker_init_fn"] = SeedWorker(rank, loader.worker_init_fn)
    # torch draws on the default device, and a generator of another device would be refused.
    if loader.generator is not None or torch.get_default_device().type != "cpu":
        return copied, None
    own = fields["generator"] = torch.Generator().manual_seed(seed)
    return copied, own


def _stream_source(
    loader: DataLoader[Any],
    rule: ShardingRule,
    seed: int,
    generator: torch.Generator | None,
    uneven: str | None,
    asks: bool,
    own: bool,
) -> LoaderAdapter:
    iterable = use_slice("iterable")
    persistent = loader.num_workers > 0 and loader.persistent_workers
    dataset = iterable.ShardedIterableDataset(loader.dataset, rule, (seed, rule.share.rank), asks, persistent)
    dataset.own = dataset.per_rank_rng = own
    # The dataset gives whole batches, one for each index that torch draws.
    collate: Any = iterable.Collate(loader.collate_fn)
    loader.__dict__.update(dataset=dataset, batch_sampler=None, collate_fn=collate)
    source: LoaderAdapter = use_slice("streams").StreamSource(loader, dataset, seed, generator, uneven)
    return source


def _stream(
    loader: DataLoader[Any], share: Shard, seed: int, uneven: str | None, own: bool
) -> RankBatchSampler:
    batches = loader.batch_sampler
    items = loader.sampler if batches is None else batches
    if own:
        return RankBatchSampler(EpochOrder(items, None), ShardingRule(Shard(0, 1), None, False, "exact"))
    if type(batches) is not BatchSampler:
        return RankBatchSampler(
            EpochOrder(items, seed, share.world), ShardingRule(share, None, False, uneven or "pad")
        )
    order = EpochOrder(batches.sampler, seed, batches.batch_size * share.world)
    policy = uneven or ("exact" if order.is_sequential else "pad")
    return RankBatchSampler(
        order, ShardingRule(share, batches.batch_size, batches.drop_last, policy), batches
    )


def knows_its_rank(part: Any) -> bool:
    """Whether a user's sampler or dataset takes one rank's part already, like torch's DistributedSampler."""
    sizes = ("num_replicas", "world_size")
    return hasattr(part, "rank") and any([hasattr(part, name) for name in sizes])


def _warn_of_repeats(dataset: Any, world: int) -> None:
    rank_zero_warn(
        f"Each of the {world} ranks will see all of {type(dataset).__name__}: it is a data pipe, or its "
        "loader has an __iter__ of its own, and Fabric cannot share that out. Take a part in its __iter__, "
        "for example `yield from itertools.islice(items, fabric.global_rank, None, fabric.world_size)`, and "
        "pass shard_iterable=False to say so.",
        category=RanksDifferWarning,
    )


def _refuse_running(loader: DataLoader[Any]) -> None:
    """Raise if a DataLoader subclass yields from an iterator made before: it would ignore the shard."""
    for name, value in vars(loader).items():
        if name != ITERATOR and isinstance(value, loader_iterator()):
            raise ConfigurationError(
                f"{type(loader).__name__} keeps a running iterator in .{name}, so every rank would see all "
                f"data. Pass a plain DataLoader, or shard it with a DistributedSampler and pass "
                f"use_distributed_sampler=False."
            )
