"""`ShardedIterableDataset`: replaces a loader's iterable dataset; yields batches of this rank and worker.

Every batch has a position at which a run can resume, in another process and (if Fabric shards the samples)
on another number of ranks. Positions are sent with batches, so prefetched batches are not counted.
"""

from __future__ import annotations

import copy
import reprlib
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fabric.core.tree import flatten
from fabric.data._torch import pin_memory, without_worker_info
from fabric.data.order import PrivateRandomness, has_state, seed_draws
from fabric.data.proxies import DatasetProxy
from fabric.data.rank_batches import digest
from fabric.data.rules import Shard
from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.data.rules import ShardingRule


_COMPARED_SAMPLES = 32
"""Number of first samples by which streams are compared."""
_COMPARED_COLUMNS = 8
"""Number of values of each sample that are also compared separately."""
_REREAD_SAMPLES = 8
"""Number of first samples by which a stream that is read again is recognised."""


@dataclass(slots=True)
class Batch:
    """A batch and the position after it, sent from worker to loop.

    If `position` is None, `items` is a `StreamFingerprint` for the adapter, or None: the worker skips a turn.
    """

    items: Any
    position: Any = None
    seed: int | None = None

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; called by torch for types that it does not support."""
        return Batch(pin_memory(self.items), self.position)


class StreamFingerprint(NamedTuple):
    """The first samples of one rank's stream."""

    samples: list[str]
    """A digest of each."""
    columns: list[list[str]]
    """If samples are tuples, dictionaries, ...: one list of digests per position or key."""
    preview: str
    """The text of the first sample, for messages."""

    @classmethod
    def of(cls, samples: list[Any]) -> StreamFingerprint:
        """Return the fingerprint of a stream that begins with `samples`."""
        compared = samples[:_COMPARED_SAMPLES]
        rows = [[digest(leaf) for leaf in flatten(sample)[0][:_COMPARED_COLUMNS]] for sample in compared]
        columns = [list(column) for column in zip(*rows, strict=False)]
        preview = " ".join(reprlib.repr(samples[0]).split()) if samples else "nothing"
        return cls([digest(sample) for sample in compared], columns, f"{preview:.70}")


class Collate:
    """The user's collate_fn, applied to the items of a `Batch`."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, batch: Batch) -> Batch:
        """Return the collated batch with its position; a `Batch` without position is returned unchanged."""
        if batch.position is None:
            return batch
        if batch.seed is not None:
            seed_draws(batch.seed)
        return Batch(self.collate_fn(batch.items), batch.position)


class ShardedIterableDataset(DatasetProxy, IterableDataset[Batch]):
    """This rank's batches of an iterable dataset, which Fabric shards or which shards itself.

    If Fabric shards it, every process reads the whole stream with equal random states and keeps the samples
    of its shard. Global batches are formed as for indices; worker k yields batches k, k + workers, ... of the
    rank. If the dataset shards itself, all samples are kept, and each worker has a separate stream.

    Args:
        wrapped: The user's dataset.
        sharding_rule: How Fabric shards it; unused if the dataset shards itself.
        seed_parts: Inputs of random seeds: the loader's seed and the rank.
        compares: Whether an iteration begins with a fingerprint of the first samples, which ranks compare.
        persistent: Whether workers are persistent; they read the epoch from shared memory.
    """

    _PROXY_ATTRIBUTES = frozenset(
        {"wrapped", "sharding_rule", "seed_parts", "compares", "shards_itself", "per_rank_rng"}
        | {"saved", "shared_epoch"}
    )

    def __init__(
        self,
        wrapped: Any,
        sharding_rule: ShardingRule,
        seed_parts: tuple[int, int],
        compares: bool,
        persistent: bool,
    ) -> None:
        super().__init__(wrapped)
        self.sharding_rule = sharding_rule
        self.seed_parts = seed_parts
        self.compares = compares
        self.shards_itself = False
        """Whether the dataset shards itself over ranks and workers."""
        self.per_rank_rng = False
        """Whether each rank and worker then has different random states."""
        self.saved: dict[str, Any] | None = None
        # The epoch, and whether it begins at the saved position.
        self.shared_epoch = torch.zeros(2, dtype=torch.int64)
        if persistent:
            self.shared_epoch.share_memory_()

    @property
    def reads_all(self) -> bool:  # type: ignore[override]
        """Whether each worker must read the whole dataset: True if Fabric shards it."""
        return not self.shards_itself

    @property
    def rule(self) -> ShardingRule:
        """The sharding rule that forms this rank's batches."""
        return (
            self.sharding_rule._replace(shard=Shard(0, 1), uneven="exact")
            if self.shards_itself
            else self.sharding_rule
        )

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Set the epoch of the next iteration, and its saved position if there is one."""
        self.saved = saved
        self.shared_epoch.copy_(torch.tensor([epoch, saved is not None]))

    def __iter__(self) -> Iterator[Batch]:
        epoch, resumes = self.shared_epoch.tolist()
        set_epoch = getattr(self.wrapped, "set_epoch", None)
        if callable(set_epoch):  # workers have copies of the dataset
            set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 0) if info is None else (info.id, info.num_workers)
        return self.batches(epoch, self.saved if resumes else None, worker, workers)

    def batches(self, epoch: int, saved: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Batch]:
        """Yield the batches of this process; `workers` is 0 in the process of the loop.

        A position is a tuple: index of the rank's stream, state of the stream, whether some ranks get no
        batch of this global batch. The state has the number of samples, digests of the first ones, the states
        of the dataset and of the random generators, and whether the stream has ended.
        """
        number = worker if self.shards_itself else 0
        if saved and self.shards_itself and worker < saved["next"]:
            # torch takes batches from workers in turn, starting with worker 0. Workers before the saved next
            # one skip their first turn.
            yield Batch(None)
        entry = saved["streams"].get(number) if saved else None
        if entry and entry["ended"]:
            return
        order: list[str] = []
        draw, randomness, first, start = self._open_stream(epoch, entry, worker, workers, order)
        block: list[Any] = []
        if self.compares and not self.shards_itself:
            block = draw(self.rule.size)
            draw = _prepend(block, draw)
            yield Batch(StreamFingerprint.of(block) if worker == 0 else None)
        # In the loop's process, the adapter may have set `shards_itself` after that batch.
        turns, rule = 1 if self.shards_itself else max(workers, 1), self.rule

        def snapshot(count: int) -> Any:
            if count % turns != worker % turns or not self.has_state or (count + 1) * rule.size < len(block):
                return None, None
            return copy.deepcopy(self.wrapped.state_dict()), randomness.states

        for count, batch in enumerate(rule.rank_batches(draw, start, first, snapshot)):
            if count % turns == worker % turns:
                items = batch.items if rule.batch is not None else batch.items[0]
                dataset, random = batch.snapshot
                stream_state = {
                    "samples": batch.end,
                    "dataset": dataset,
                    "random": random,
                    "ended": batch.last,
                    "order": [*order],
                }
                seed = derive_seed(*self.seed_parts, epoch, batch.end, number) if workers else None
                yield Batch(items, (number, stream_state, batch.incomplete), seed)

    def _open_stream(
        self, epoch: int, entry: dict[str, Any] | None, worker: int, workers: int, order: list[str]
    ) -> Any:
        """Return (draw function, its random state, first items, position) of this process's stream.

        Unless the dataset has a state, digests of the epoch's first samples are added to `order`.
        """
        start = entry["samples"] if entry else 0
        restores = entry is not None and entry["dataset"] is not None
        randomness = PrivateRandomness(
            derive_seed(*self.seed_parts, epoch, worker)
            if self.per_rank_rng
            else derive_seed(self.seed_parts[0], epoch),
            entry["random"] if entry and restores else None,
            restores=workers == 0,
        )
        # If Fabric shards, a dataset that shards by worker must yield all samples in each worker.
        as_read = nullcontext if self.shards_itself else without_worker_info
        if entry and restores:
            self.wrapped.load_state_dict(copy.deepcopy(entry["dataset"]))
        with randomness, as_read():
            stream = iter(self.wrapped)
            kept = 0 if restores else min(start, max(self.rule.shard.world, _REREAD_SAMPLES))
            first = list(islice(stream, kept))
            if not restores:
                next(islice(stream, start - kept, start - kept), None)
        compared = 0 if self.has_state else _REREAD_SAMPLES
        order += [digest(sample) for sample in first[:compared]]

        def draw(count: int) -> list[Any]:
            with randomness, as_read():
                items = list(islice(stream, count))
            if len(order) < compared:
                order.extend([digest(sample) for sample in items[: compared - len(order)]])
            return items

        return draw, randomness, first[: self.rule.shard.world], start

    @property
    def has_state(self) -> bool:
        """Whether it resumes from a state without rereading. Padding rereads the epoch's first samples."""
        return self.rule.uneven != "pad" and has_state(self.wrapped)


def _prepend(block: list[Any], draw: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """Return a draw function that returns the items of `block` before those of `draw`."""
    remaining = iter(block)

    def chained_draw(count: int) -> list[Any]:
        items = list(islice(remaining, count))
        return items + draw(count - len(items)) if len(items) < count else items

    return chained_draw
