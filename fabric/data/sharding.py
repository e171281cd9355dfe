"""`shard_loader`: a shallow copy of a user's DataLoader with one rank's indices, or with a dataset proxy."""

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
from fabric.data.rules import UNEVEN, Shard, ShardingRule, reject_padding
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

_TORCHDATA = "torchdata.stateful_dataloader"


def shard_loader(
    loader: DataLoader[Any],
    shard: Shard,
    seed: int,
    uneven: str | None,
    shard_iterable: bool | None = None,
    world_size: int = 1,
    *,
    use_distributed_sampler: bool = True,
) -> LoaderAdapter:
    """Return the adapter of a copy of `loader` that yields this rank's shard; `loader` is unchanged.

    Loaders that the user has sharded (DistributedSampler, or any sampler or iterable dataset with
    `num_replicas` and `rank`) keep their order; their workers are seeded by rank, worker and batch, too.
    A generator of the user stays in use. Without one, torch draws the workers' base seed from the global
    generator at each iteration; the copy gets a generator for that, so the loop's draws do not change.

    Args:
        loader: Any DataLoader, including subclasses with another constructor.
        shard: This rank's shard.
        seed: The base of the sample order, equal on all ranks.
        uneven: "pad", "exact", "drop", "error"; None: "exact" for batches in dataset order and iterable
            datasets, else "pad". Whole batches (a user's batch sampler, or batch_size=None) cannot be
            split; "pad" keeps their number of steps equal.
        shard_iterable: False: an iterable dataset shards itself. None: the ranks compare first samples.
        world_size: The number of ranks; more than shards if several ranks hold one model.
        use_distributed_sampler: False: the user has sharded the data.

    Raises:
        ConfigurationError: Unknown `uneven`, or "pad" for data that Fabric does not shard; a remainder under
            "error"; a loader that cannot be sharded.
    """
    if uneven not in (None, *UNEVEN):
        raise ConfigurationError(
            f"uneven={uneven!r} is unknown. Write one of {', '.join(map(repr, UNEVEN))}."
        )
    loader = _as_plain_loader(loader)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    # The loader does not iterate as torch's does, so its batches need not correspond to the sampler's.
    custom_iteration = type(loader).__iter__ is not DataLoader.__iter__ or isinstance(
        loader.dataset, IterDataPipe
    )
    parts = [loader.dataset] if is_iterable else samplers_of(loader)
    user_sharded = (
        not use_distributed_sampler
        or (is_iterable and shard_iterable is False)
        or any([shards_by_rank(part) for part in parts])
    )
    if not user_sharded and is_iterable and custom_iteration and shard.world > 1:
        _warn_of_repeats(loader.dataset, shard.world)
    user_sharded = user_sharded or (is_iterable and custom_iteration)
    if user_sharded:
        reject_padding(uneven, type(loader).__name__)
    elif shard.world > 1:
        _check_no_running_iterator(loader)
    copied, generator = _copy_loader(loader, shard.rank, seed)
    if not is_iterable:
        stream = _rank_batch_sampler(loader, shard, seed, uneven, user_sharded)
        stream.check_even()
        # Before the samplers are replaced: the adapter collects the generators in them.
        adapter = IndexSource(copied, stream, seed, shard.rank, generator)
        copied.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = stream
    if custom_iteration:
        return LoaderAdapter(copied)
    if is_iterable:
        compares = not user_sharded and shard_iterable is None and world_size > 1
        rule = ShardingRule(shard, loader.batch_size, loader.drop_last, uneven or "exact")
        return _stream_source(copied, rule, seed, generator, uneven, compares, user_sharded)
    if loader.num_workers:
        from fabric.data.proxies import SeededDataset

        copied.__dict__["dataset"] = SeededDataset(loader.dataset)
    return adapter


def _as_plain_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return torchdata's StatefulDataLoader as a plain DataLoader, and any other loader unchanged."""
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
    copied: DataLoader[Any] = plain
    return copied


def _copy_loader(
    loader: DataLoader[Any], rank: int, seed: int
) -> tuple[DataLoader[Any], torch.Generator | None]:
    """Return a shallow copy, and its new generator for workers' seeds (None: it uses the user's)."""
    copied = copy.copy(loader)
    fields = copied.__dict__  # DataLoader.__setattr__ raises for some attributes after construction
    drop_workers(copied)
    if loader.num_workers > 0:
        from fabric.data.proxies import SeedWorker

        fields["worker_init_fn"] = SeedWorker(rank, loader.worker_init_fn)
    # torch draws on the default device, and raises for a generator of another device.
    if loader.generator is not None or torch.get_default_device().type != "cpu":
        return copied, None
    user_sharded = fields["generator"] = torch.Generator().manual_seed(seed)
    return copied, user_sharded


def _stream_source(
    loader: DataLoader[Any],
    rule: ShardingRule,
    seed: int,
    generator: torch.Generator | None,
    uneven: str | None,
    compares: bool,
    user_sharded: bool,
) -> LoaderAdapter:
    iterable = use_slice("iterable")
    persistent = loader.num_workers > 0 and loader.persistent_workers
    dataset = iterable.ShardedIterableDataset(
        loader.dataset, rule, (seed, rule.shard.rank), compares, persistent
    )
    dataset.shards_itself = dataset.per_rank_rng = user_sharded
    # The dataset yields whole batches, one for each index that torch draws.
    collate: Any = iterable.Collate(loader.collate_fn)
    loader.__dict__.update(dataset=dataset, batch_sampler=None, collate_fn=collate)
    adapter: LoaderAdapter = use_slice("streams").StreamSource(loader, dataset, seed, generator, uneven)
    return adapter


def _rank_batch_sampler(
    loader: DataLoader[Any], shard: Shard, seed: int, uneven: str | None, user_sharded: bool
) -> RankBatchSampler:
    batches = loader.batch_sampler
    items = loader.sampler if batches is None else batches
    if user_sharded:
        return RankBatchSampler(EpochOrder(items, None), ShardingRule(Shard(0, 1), None, False, "exact"))
    if type(batches) is not BatchSampler:
        return RankBatchSampler(
            EpochOrder(items, seed, shard.world), ShardingRule(shard, None, False, uneven or "pad")
        )
    order = EpochOrder(batches.sampler, seed, batches.batch_size * shard.world)
    policy = uneven or ("exact" if order.is_sequential else "pad")
    return RankBatchSampler(
        order, ShardingRule(shard, batches.batch_size, batches.drop_last, policy), batches
    )


def shards_by_rank(part: Any) -> bool:
    """Whether a user's sampler or dataset shards by rank already, like torch's DistributedSampler."""
    sizes = ("num_replicas", "world_size")
    return hasattr(part, "rank") and any([hasattr(part, name) for name in sizes])


def _warn_of_repeats(dataset: Any, world: int) -> None:
    rank_zero_warn(
        f"Each of the {world} ranks will read all of {type(dataset).__name__}: it is a data pipe, or its "
        "loader overrides __iter__, so Fabric cannot shard it. Shard in its __iter__, for example `yield "
        "from itertools.islice(items, fabric.global_rank, None, fabric.world_size)`, and write "
        "setup_dataloaders(loader, shard_iterable=False).",
        category=RanksDifferWarning,
    )


def _check_no_running_iterator(loader: DataLoader[Any]) -> None:
    """Raise if a DataLoader subclass has a running iterator, which ignores the copy's sampler."""
    for name, value in vars(loader).items():
        if name != ITERATOR and isinstance(value, loader_iterator()):
            raise ConfigurationError(
                f"{type(loader).__name__} keeps a running iterator in .{name}, so every rank would read all "
                "data. Pass a plain DataLoader, or shard it with a DistributedSampler and write "
                "setup_dataloaders(loader, use_distributed_sampler=False)."
            )
