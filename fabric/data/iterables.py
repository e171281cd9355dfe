"""Iterable datasets in place of which a loader gets one that gives whole batches of this rank and worker.

Every batch carries a note: how to go on after it, in another process and (where Fabric deals the samples out)
on another number of ranks. Notes travel with batches, so what workers have read ahead is not counted.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as workers_module

from fabric.data.randomness import PrivateRandomness
from fabric.data.workers import Forwarding, seed_draws
from fabric.utilities.seed import derive_seed, isolate_rng, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.data.dealing import Rule


class Batch(NamedTuple):
    """What `Collate` makes one batch of."""

    items: Any
    seed: int | None
    note: Any


class Arrived:
    """A batch on its way to the loop, with its note."""

    __slots__ = ("batch", "note")

    def __init__(self, batch: Any, note: Any) -> None:
        self.batch = batch
        self.note = note

    def pin_memory(self) -> Arrived:
        """Asked by torch of types that it does not know."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Arrived(pin_memory(self.batch), self.note)


class Collate:
    """The user's collate_fn, for samples that come with a note."""

    def __init__(self, then: Callable[[Any], Any]) -> None:
        self.then = then

    def __call__(self, batch: Batch) -> Arrived:
        """The collated batch, with its note; without one, nothing to collate."""
        if batch.note is None:
            return Arrived(None, None)
        if batch.seed is not None:
            seed_draws(batch.seed)
        return Arrived(self.then(batch.items), batch.note)


class Batched(Forwarding, IterableDataset[Batch]):
    """Base: begins epochs, also in workers that live through several.

    Args:
        dataset: The user's.
        batch: Samples of one batch; None: samples are whole batches.
        drop_last: Leave an incomplete last batch out.
        salts: Of random streams: the loader's seed and the rank.
        persistent: Whether workers live through several epochs, and hear of a new one through shared memory.
    """

    _OWN = frozenset({"dataset", "batch", "drop_last", "salts", "saved", "cell"})

    def __init__(
        self, dataset: Any, batch: int | None, drop_last: bool, salts: tuple[int, int], persistent: bool
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.drop_last = drop_last
        self.salts = salts
        self.saved: dict[str, Any] | None = None
        # The epoch, and whether it begins with what is saved.
        self.cell = torch.zeros(2, dtype=torch.int64)
        if persistent:
            self.cell.share_memory_()

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """What the next iteration is: an epoch, perhaps from a saved position on."""
        self.saved = saved
        self.cell.copy_(torch.tensor([epoch, saved is not None]))

    def __iter__(self) -> Iterator[Batch]:
        epoch, resumes = self.cell.tolist()
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):  # workers have copies, which the loop does not reach
            set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 0) if info is None else (info.id, info.num_workers)
        return self.batches(epoch, self.saved if resumes else None, worker, workers)

    def batches(self, epoch: int, saved: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Batch]:
        """The batches of this process; `workers` is 0 in the loop's own."""
        raise NotImplementedError

    @property
    def has_state(self) -> bool:
        """Whether the dataset can say where it is, and go there."""
        return all([callable(getattr(self.dataset, n, None)) for n in ("state_dict", "load_state_dict")])


class DealtIterable(Batched):
    """This rank's part of a stream that is the same on all ranks.

    Every process reads the whole stream, under random streams that are the same everywhere, and keeps the
    samples that are its own. Global batches are formed as for indices; batch k of a rank is worker k's.
    """

    _OWN = Batched._OWN | {"rule"}
    whole = True

    def __init__(self, dataset: Any, rule: Rule, salts: tuple[int, int], persistent: bool) -> None:
        super().__init__(dataset, rule.batch, rule.drop_last, salts, persistent)
        self.rule = rule

    @property
    def has_state(self) -> bool:
        """Whether it goes on without reading again. Padding reads: it needs the epoch's first samples."""
        return super().has_state and self.rule.uneven != "pad"

    def batches(self, epoch: int, saved: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Batch]:
        """Batches that `worker` gives, of this rank's; notes: (position, states of dataset and randomness,
        ended, short).
        """
        if saved and saved["ended"]:
            return
        start = saved["samples"] if saved else 0
        jumps = saved is not None and saved.get("dataset") is not None
        private = PrivateRandomness(
            derive_seed(self.salts[0], epoch),
            saved["random"] if saved and jumps else None,
            restores=workers == 0,
        )
        if saved and jumps:
            self.dataset.load_state_dict(copy.deepcopy(saved["dataset"]))
        with private, _as_one_process():
            stream = iter(self.dataset)
            first = [] if jumps else list(islice(stream, min(start, self.rule.share.world)))
            if not jumps:
                next(islice(stream, start - len(first), start - len(first)), None)

        def draw(count: int) -> list[Any]:
            with private, _as_one_process():
                return list(islice(stream, count))

        turns, has_state = max(workers, 1), self.has_state

        def mark(number: int) -> Any:
            if number % turns != worker or not has_state:
                return None, None
            return copy.deepcopy(self.dataset.state_dict()), private.states()

        for number, dealt in enumerate(self.rule.deal(draw, start, first, mark)):
            if number % turns == worker:
                items = dealt.items if self.batch is not None else dealt.items[0]
                note = (dealt.end, *dealt.mark, dealt.last, dealt.short)
                seed = derive_seed(*self.salts, epoch, dealt.end) if workers else None
                yield Batch(items, seed, note)


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Within, `get_worker_info()` is None: a dataset that splits itself by worker gives all it has."""
    info, workers_module._worker_info = workers_module._worker_info, None
    try:
        yield
    finally:
        workers_module._worker_info = info


class OwnIterable(Batched):
    """A stream that the dataset itself makes for its rank and worker. Positions are per rank and worker."""

    def batches(self, epoch: int, saved: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Batch]:
        """The worker's batches; notes are (worker, where it is)."""
        # Batches come from workers in turn, beginning with the first: those that are not next let one pass.
        if saved and worker < saved["next"]:
            yield Batch(None, None, None)
        mine = (saved["workers"].get(worker) if saved else None) or {"batches": 0, "state": None}
        if mine.get("ended"):
            return
        size, done, number = self.batch or 1, mine["batches"], 0
        if mine["state"] is not None:
            self.dataset.load_state_dict(copy.deepcopy(mine["state"]))
            number = done
        with isolate_rng() if saved and not workers else nullcontext():
            if saved and not workers:
                set_rng_states(saved["random"])
            self._seed_draws(workers, epoch, worker, number)
            stream = iter(self.dataset)
            while number < done:
                self._seed_draws(workers, epoch, worker, number)
                next(islice(stream, size, size), None)
                number += 1
        has_state = self.has_state
        while True:
            self._seed_draws(workers, epoch, worker, number)
            block = list(islice(stream, size))
            if not block or (self.drop_last and len(block) < size):
                return
            number += 1
            state = copy.deepcopy(self.dataset.state_dict()) if has_state else None
            entry = {"batches": number, "state": state, "ended": len(block) < size}
            yield Batch(block if self.batch is not None else block[0], None, (worker, entry))

    def _seed_draws(self, workers: int, *numbers: int) -> None:
        if workers:  # the loop's own streams are not touched
            seed_draws(derive_seed(*self.salts, *numbers))
