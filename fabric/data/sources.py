"""`Source`: where a loader's batches come from, and how to come back to a position in them.

A source begins epochs, pairs every batch with a note, and turns the note of the last batch that the loop
received into plain data for a checkpoint. Four kinds: indices that Fabric deals out, indices in the user's
own order, iterable datasets that Fabric deals out, and those that share themselves out.
"""

from __future__ import annotations

from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.data.order import SeededOrder
from fabric.data.randomness import OwnGenerators
from fabric.data.workers import JobMaker
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.seed import collect_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.iterables import DealtIterable, OwnIterable
    from fabric.data.streams import IndexStream

_NOTHING = object()
_FEWER = (
    "Not all ranks get a batch in every round, and gradients are enabled: rounds in which some have none "
    'are left out, so that all ranks take the same number of steps. Write uneven="exact" to get them, or '
    "evaluate under torch.no_grad()."
)


class Source:
    """Base: the batches of a loader that keeps its position itself, or cannot say it.

    Args:
        loader: The loader that is iterated.
    """

    kind = "loader"
    per_rank = True
    """Whether ranks have positions of their own, so that a checkpoint needs those of all."""
    replays = False
    """Whether going on means reading again what has been read."""
    ahead = False
    """Whether batches may be fetched before the loop asks for them: a note says which it has received."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """An iteration is about to start, perhaps at a saved position."""
        if saved is not None:
            self.loader.load_state_dict(saved["loader"])

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch of an iteration that has begun, with its note."""
        return ((batch, True) for batch in batches)

    def state(self, note: Any) -> dict[str, Any]:
        """The position after the batch with this note; None: at the beginning of this iteration."""
        if not all(
            [callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict")]
        ):
            raise UsageError(
                f"{type(self.loader).__name__} cannot say how far it has come. Give fabric.setup_dataloaders "
                "a DataLoader without an __iter__ of its own, or one with state_dict() and load_state_dict()."
            )
        return {"loader": self.loader.state_dict()}

    def fresh(self) -> dict[str, Any]:
        """The position at the beginning of the epoch to come."""
        return self.state(None)

    def length(self) -> int:
        """How many batches this rank gets in an epoch."""
        return len(self.loader)

    def epoch(self, counted: int) -> int:
        """The epoch of an iteration that is about to start; `counted` is the loader's own number."""
        return counted

    def agreed(self) -> dict[str, Any] | None:
        """What all ranks must have alike at the second batch of an iteration; None: they need not."""
        return None

    def done(self, note: Any) -> int | None:
        """How many batches of the epoch this rank has received after this note; None: unknown."""
        return None


class _Drawing(Source):
    """A source whose order may come from random generators of the user's own."""

    ahead = True

    def __init__(self, loader: Any, seed: int, own: torch.Generator | None) -> None:
        super().__init__(loader)
        self.seed = seed
        self.generators = OwnGenerators([loader, *_samplers(loader)], own)
        self._began: list[Any] = []

    def _begin_generators(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            _check("random generators of its own", len(saved["generators"]), len(self.generators))
            self.generators.set_states(saved["generators"])
        self._began = self.generators.states()

    def _check_in_order(self) -> None:
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            raise UsageError(
                "A loader with in_order=False cannot say how far it has come: batches arrive in any order. "
                "Leave in_order=False out, or ask for the position between epochs only."
            )


class IndexSource(_Drawing):
    """Indices that a stream gives: dealt out by Fabric, or in the user's own order and part.

    Args:
        loader: The copy that is iterated; the stream is its sampler or batch sampler.
        stream: The indices.
        seed: The base of the order.
        rank: This rank's, for workers' random streams.
        own: The generator for workers' seeds that Fabric gave the copy.
    """

    def __init__(
        self,
        loader: Any,
        stream: IndexStream,
        seed: int,
        rank: int,
        own: torch.Generator | None,
    ) -> None:
        super().__init__(loader, seed, own)
        self.stream = stream
        self.rank = rank
        self.dealt = isinstance(stream.order, SeededOrder)
        self.per_rank = not self.dealt
        self.kind = "batches" if not self.dealt else "samples" if stream.rule.batch else "whole batches"
        self._told = stream.order.told()
        self._random: dict[str, Any] | None = None

    def epoch(self, counted: int) -> int:
        """The user's own, if they have told their sampler another one than it had last."""
        if not self.dealt and (told := self.stream.order.told()) != self._told:
            counted = told if told is not None else counted
        self._told = counted
        return counted

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """See the base.

        Raises:
            UsageError: The position is one in data of another length.
        """
        order, stream = self.stream.order, self.stream
        stream.start = saved["samples"] if saved else 0
        stream.expected = saved["check"] if saved and stream.start else None
        if stream.start and saved and (now := self._items()) != saved["length"]:
            raise UsageError(
                f"The position {saved['samples']} was saved in data of length {saved['length']}, but they "
                f"have {now} now, in another order. Use the same data, or begin an epoch: "
                f"loader.set_epoch({epoch + 1})."
            )
        self._begin_generators(saved)
        if isinstance(order, SeededOrder):
            order.seed = self.seed = saved["seed"] if saved else self.seed
        else:
            self._random = saved["random"] if saved else collect_rng_states()
            order.begin_with = saved["random"] if saved else None
        if self.loader.num_workers:
            stream.item = JobMaker(self.seed, epoch, self.rank, *self.generators.seeds())

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Batches with the positions after them; no Python frame of ours per batch."""
        return zip(batches, iter(self.stream.ends.popleft, _NOTHING), strict=False)

    def agreed(self) -> dict[str, Any] | None:
        """See the base. Ranks with other numbers of batches do not all come to the second."""
        items, rule = self._items(), self.stream.rule
        if not self.dealt or (rule.batch is None and rule.uneven == "exact"):
            return None
        if items is not None and min(rule.counts(items)) < 2 + rule.count(self.stream.start):
            return None
        return {"position": self.stream.start, "length": items, "order": self.stream.check}

    def state(self, note: Any) -> dict[str, Any]:
        """See the base."""
        self._check_in_order()
        if note is None:
            return self._state(self.stream.start, self._began, self._random, self.stream.expected)
        return self._state(note, self._began, self._random, self.stream.check)

    def fresh(self) -> dict[str, Any]:
        """See the base."""
        random = None if self.dealt else collect_rng_states()
        return self._state(0, self.generators.states(), random, None)

    def length(self) -> int:
        """See the base."""
        return len(self.stream)

    def done(self, note: Any) -> int:
        """See the base."""
        return self.stream.rule.count(self.stream.start if note is None else note)

    def _state(self, samples: int, generators: list[Any], random: Any, check: Any) -> dict[str, Any]:
        parts = {"samples": samples, "length": self._items(), "check": check}
        state = {**parts, "seed": self.seed, "generators": generators}
        return state if self.dealt else {**state, "random": random}

    def _items(self) -> int | None:
        try:
            return len(self.stream.order)
        except TypeError:
            return None


class DealtSource(_Drawing):
    """An iterable dataset whose samples Fabric deals out.

    Args:
        loader: The copy that is iterated.
        dataset: Its dataset.
        seed: The base of the dataset's random streams.
        own: The generator for workers' seeds that Fabric gave the copy.
        stops: Whether, while gradients are enabled, ranks stop before a round in which some have no batch.
    """

    kind = "stream"
    per_rank = False

    def __init__(
        self, loader: Any, dataset: DealtIterable, seed: int, own: torch.Generator | None, stops: bool
    ) -> None:
        super().__init__(loader, seed, own)
        self.dataset = dataset
        self.stops = stops
        self._start: dict[str, Any] = {}

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """See the base."""
        self._begin_generators(saved)
        if saved:
            self.seed = saved["seed"]
            self.dataset.salts = (self.seed, self.dataset.salts[1])
            self.loader._iterator = None  # workers that live on would not hear of it
        self.replays = bool(saved and saved["samples"] and saved["dataset"] is None and not saved["ended"])
        self._start = saved or self.fresh()
        self.dataset.begin(epoch, saved)

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """See the base."""
        pairs = map(attrgetter("batch", "note"), batches)
        if self.stops and self.dataset.rule.share.world > 1 and torch.is_grad_enabled():
            return takewhile(_round_is_full, pairs)
        return pairs

    def state(self, note: Any) -> dict[str, Any]:
        """See the base."""
        self._check_in_order()
        if note is None:
            return self._start
        samples, dataset, random, ended, _ = note
        return self._state(samples, dataset, random, self._began, ended)

    def fresh(self) -> dict[str, Any]:
        """See the base."""
        return self._state(0, None, None, self.generators.states(), False)

    def length(self) -> int:
        """See the base."""
        return self.dataset.rule.count(len(self.dataset.dataset))

    def agreed(self) -> dict[str, Any] | None:
        """See the base. Where samples are whole batches, some ranks may have one less."""
        if self.dataset.rule.batch is None and not self.stops:
            return None
        return {"position": self._start["samples"]}

    def done(self, note: Any) -> int | None:
        """See the base."""
        return self.dataset.rule.count(self._start["samples"] if note is None else note[0])

    def _state(
        self, samples: int, dataset: Any, random: Any, generators: list[Any], ended: bool
    ) -> dict[str, Any]:
        parts = {"samples": samples, "dataset": dataset, "random": random, "ended": ended}
        return {**parts, "seed": self.seed, "generators": generators}


class OwnSource(_Drawing):
    """An iterable dataset that shares itself out: every rank and worker has a position of its own."""

    kind = "own stream"

    def __init__(self, loader: Any, dataset: OwnIterable, seed: int, own: torch.Generator | None) -> None:
        super().__init__(loader, seed, own)
        self.dataset = dataset
        self._start: dict[str, Any] = {}

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """See the base.

        Raises:
            UsageError: The position is that of another number of workers.
        """
        self._begin_generators(saved)
        if saved:
            _check("workers", saved["num_workers"], self.loader.num_workers)
            self.seed = saved["seed"]
            self.dataset.salts = (self.seed, self.dataset.salts[1])
            self.loader._iterator = None
        entries = saved["workers"].values() if saved else ()
        self.replays = any([entry["state"] is None and not entry["ended"] for entry in entries])
        self._start = saved or self.fresh()
        self.dataset.begin(epoch, saved)

    def length(self) -> int:
        """As torch's own loader says."""
        items, size = len(self.dataset.dataset), self.dataset.batch
        if size is None:
            return items
        return items // size if self.dataset.drop_last else -(-items // size)

    def done(self, note: Any) -> int | None:
        """See the base."""
        workers = self._start["workers"] if note is None else note[0]
        return sum([int(entry["batches"]) for entry in workers.values()])

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """See the base."""
        workers = self._start["workers"]
        turns = max(1, self.loader.num_workers)
        for arrived in batches:
            if arrived.note is None:
                continue
            worker, entry = arrived.note
            workers = {**workers, worker: entry}
            yield arrived.batch, (workers, (worker + 1) % turns)

    def state(self, note: Any) -> dict[str, Any]:
        """See the base."""
        self._check_in_order()
        if note is None:
            return self._start
        return {**self._start, "workers": note[0], "next": note[1]}

    def fresh(self) -> dict[str, Any]:
        """See the base."""
        return {
            "workers": {},
            "next": 0,
            "num_workers": self.loader.num_workers,
            "random": collect_rng_states(),
            "seed": self.seed,
            "generators": self.generators.states(),
        }


def _round_is_full(pair: tuple[Any, Any]) -> bool:
    short: bool = pair[1][-1]
    if short:
        rank_zero_warn(_FEWER)
    return not short


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _check(what: str, saved: Any, now: Any) -> None:
    if saved != now:
        raise UsageError(
            f"The loader's position was saved with {saved} {what}, but the loader has {now}. Make the loader "
            "as it was, or leave its position out of the state that is loaded."
        )
