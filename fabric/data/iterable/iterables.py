"""An iterable dataset in place of which a loader gets one that gives whole batches of this rank and worker.

Every batch carries a note: how to go on after it, in another process and (where Fabric deals the samples out)
on another number of ranks. Notes travel with batches, so what workers have read ahead is not counted.
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


_COMPARED = 32
"""Samples at a stream's beginning by which it is known."""
_COLUMNS = 8
"""Values of each of them that are looked at by themselves."""


@dataclass(slots=True)
class Batch:
    """A batch on its way to the loop. Without a note it is a message to the source, or a turn let pass."""

    items: Any
    note: Any = None
    seed: int | None = None

    def pin_memory(self) -> Batch:
        """Asked by torch of types that it does not know."""
        return Batch(pin_memory(self.items), self.note)


class StreamFingerprint(NamedTuple):
    """The first samples of one rank's stream."""

    samples: list[str]
    """A digest of each."""
    columns: list[list[str]]
    """Where samples are tuples, dictionaries, ...: the digests of the first, second, ... value in each."""
    shown: str
    """The first one, for messages."""

    @classmethod
    def of(cls, samples: list[Any]) -> StreamFingerprint:
        """The head of a stream that begins with these."""
        compared = samples[:_COMPARED]
        rows = [[digest(leaf) for leaf in flatten(sample)[0][:_COLUMNS]] for sample in compared]
        columns = [list(column) for column in zip(*rows, strict=False)]
        shown = " ".join(reprlib.repr(samples[0]).split()) if samples else "nothing"
        return cls([digest(sample) for sample in compared], columns, f"{shown:.70}")


class Collate:
    """The user's collate_fn, for samples that come with a note."""

    def __init__(self, then: Callable[[Any], Any]) -> None:
        self.then = then

    def __call__(self, batch: Batch) -> Batch:
        """The collated batch, with its note; without one, it is no batch of the user's."""
        if batch.note is None:
            return batch
        if batch.seed is not None:
            seed_draws(batch.seed)
        return Batch(self.then(batch.items), batch.note)


class ShardedIterableDataset(DatasetProxy, IterableDataset[Batch]):
    """This rank's batches of a stream: Fabric deals it out, or the dataset has shared itself out.

    Dealt out, every process reads the whole stream, under random streams that are the same everywhere, and
    keeps the samples that are its own: global batches are formed as for indices, and batch k of a rank is
    worker k's. A dataset that shares itself out keeps all, and each worker's part is a stream of its own.

    Args:
        given: The user's dataset.
        dealt: How it is dealt out, unless it shares itself out.
        salts: Of random streams: the loader's seed and the rank.
        asks: Whether a pass begins with a message that shows the first samples, by which ranks compare.
        persistent: Whether workers live through several epochs, and hear of a new one through shared memory.
    """

    _OWN = frozenset({"given", "dealt", "salts", "asks", "own", "per_rank_rng", "saved", "cell"})

    def __init__(
        self, given: Any, dealt: ShardingRule, salts: tuple[int, int], asks: bool, persistent: bool
    ) -> None:
        super().__init__(given)
        self.dealt = dealt
        self.salts = salts
        self.asks = asks
        self.own = False
        """Whether the dataset shares itself out over ranks and workers."""
        self.per_rank_rng = False
        """Whether each rank and worker then has random streams of its own."""
        self.saved: dict[str, Any] | None = None
        # The epoch, and whether it begins with what is saved.
        self.cell = torch.zeros(2, dtype=torch.int64)
        if persistent:
            self.cell.share_memory_()

    @property
    def whole(self) -> bool:  # type: ignore[override]
        """Whether each worker must read the whole dataset: if Fabric shards it."""
        return not self.own

    @property
    def rule(self) -> ShardingRule:
        """The sharding rule that forms this rank's batches."""
        return self.dealt._replace(share=Shard(0, 1), uneven="exact") if self.own else self.dealt

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Set the epoch of the next iteration, and its saved position if there is one."""
        self.saved = saved
        self.cell.copy_(torch.tensor([epoch, saved is not None]))

    def __iter__(self) -> Iterator[Batch]:
        epoch, resumes = self.cell.tolist()
        set_epoch = getattr(self.given, "set_epoch", None)
        if callable(set_epoch):  # workers have copies, which the loop does not reach
            set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 0) if info is None else (info.id, info.num_workers)
        return self.batches(epoch, self.saved if resumes else None, worker, workers)

    def batches(self, epoch: int, saved: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Batch]:
        """The batches of this process; `workers` is 0 in the loop's own.

        Notes: (the number of the rank's stream, how it goes on: position, states of dataset and randomness,
        whether it has ended; whether some ranks get no batch in this round).
        """
        number = worker if self.own else 0
        if saved and self.own and worker < saved["next"]:
            # Batches come from workers in turn, beginning with the first: who is not next lets one pass.
            yield Batch(None)
        entry = saved["streams"].get(number) if saved else None
        if entry and entry["ended"]:
            return
        draw, private, first, start = self._opened(epoch, entry, worker, workers)
        block: list[Any] = []
        if self.asks and not self.own:
            block = draw(self.rule.size)
            draw = _after(block, draw)
            yield Batch(StreamFingerprint.of(block) if worker == 0 else None)
        # By now the loop's process may have learned that the dataset shares itself out.
        turns, rule = 1 if self.own else max(workers, 1), self.rule

        def mark(count: int) -> Any:
            if count % turns != worker % turns or not self.has_state or (count + 1) * rule.size < len(block):
                return None, None
            return copy.deepcopy(self.given.state_dict()), private.states

        for count, dealt in enumerate(rule.rank_batches(draw, start, first, mark)):
            if count % turns == worker % turns:
                items = dealt.items if rule.batch is not None else dealt.items[0]
                dataset, random = dealt.mark
                note = {"samples": dealt.end, "dataset": dataset, "random": random, "ended": dealt.last}
                seed = derive_seed(*self.salts, epoch, dealt.end, number) if workers else None
                yield Batch(items, (number, note, dealt.short), seed)

    def _opened(self, epoch: int, entry: dict[str, Any] | None, worker: int, workers: int) -> Any:
        """(function that draws, its randomness, the first items, position) of this process's stream."""
        start = entry["samples"] if entry else 0
        jumps = entry is not None and entry["dataset"] is not None
        private = PrivateRandomness(
            derive_seed(*self.salts, epoch, worker)
            if self.per_rank_rng
            else derive_seed(self.salts[0], epoch),
            entry["random"] if entry and jumps else None,
            restores=workers == 0,
        )
        # Dealt out, a dataset that splits itself by worker gives all it has.
        as_read = nullcontext if self.own else without_worker_info
        if entry and jumps:
            self.given.load_state_dict(copy.deepcopy(entry["dataset"]))
        with private, as_read():
            stream = iter(self.given)
            first = [] if jumps else list(islice(stream, min(start, self.rule.share.world)))
            if not jumps:
                next(islice(stream, start - len(first), start - len(first)), None)

        def draw(count: int) -> list[Any]:
            with private, as_read():
                return list(islice(stream, count))

        return draw, private, first, start

    @property
    def has_state(self) -> bool:
        """Whether it need not be read again. Padding reads: it needs the epoch's first samples."""
        return self.rule.uneven != "pad" and has_state(self.given)


def _after(block: list[Any], draw: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """`draw`, once `block` has been given."""
    held = iter(block)

    def both(count: int) -> list[Any]:
        items = list(islice(held, count))
        return items + draw(count - len(items)) if len(items) < count else items

    return both
