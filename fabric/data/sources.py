"""`Source`: where a loader's batches come from, and how to come back to a position in them.

A source begins epochs, pairs every batch with a note, and turns the note of the last batch that the loop
received into plain data for a checkpoint. Indices that Fabric deals out or that are in the user's own order;
iterable datasets that Fabric deals out or that share themselves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.data.dealing import check_padding
from fabric.data.heads import ONE_STREAM, shares_itself, table
from fabric.data.order import SeededOrder, epoch_of, tell
from fabric.data.randomness import OwnGenerators
from fabric.data.streams import checksum
from fabric.data.workers import JobMaker
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.seed import collect_rng_states
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.heads import Head
    from fabric.data.iterables import Batched
    from fabric.data.streams import IndexStream
    from fabric.data.together import Peers

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
    counts = False
    """Whether the length is that of each iteration, in any case."""
    settled = True
    """Whether it is known who shares the samples out."""
    per_rank = True
    """Whether ranks have positions of their own, so that a checkpoint needs those of all."""
    replays = False
    """Whether going on means reading again what has been read."""
    ahead = False
    """Whether batches may be fetched before the loop asks for them: a note says which it has received."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        # One that was told an epoch before is to be asked; one that begins with -1, say, is not.
        self._told = [epoch and min(epoch, 0) for epoch in self._epochs()]

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

    def become(self, kind: str) -> bool:
        """Whether the loader can be one of this kind, and is from now on."""
        return False

    def epoch(self, counted: int) -> int:
        """The epoch of an iteration that is about to start, of which sampler and dataset are told.

        Args:
            counted: The loader's own number. The user's comes first, if they have told their sampler or
                dataset another one than it had.
        """
        pairs = zip(self._epochs(), self._told, strict=True)
        epoch = next((now for now, old in pairs if now is not None and now != old), counted)
        for part in self._listeners():
            tell(part, epoch)
        self._told = self._epochs()
        return epoch

    def settle(self, batches: Iterator[Any], peers: Peers) -> bool:
        """Find out what all ranks must know before the first batch; whether to begin again."""
        return False

    def _listeners(self) -> list[Any]:
        batches = getattr(self.loader, "batch_sampler", None)
        order = getattr(self.loader, "sampler", None) if batches is None else batches
        return [order, getattr(self.loader, "dataset", None)]

    def _epochs(self) -> list[int | None]:
        return [epoch_of(part) for part in self._listeners()]

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

    counts = True

    def __init__(
        self,
        loader: Any,
        stream: IndexStream,
        seed: int,
        rank: int,
        own: torch.Generator | None,
    ) -> None:
        self.stream = stream
        super().__init__(loader, seed, own)
        self.rank = rank
        self.dealt = isinstance(stream.order, SeededOrder)
        self.per_rank = not self.dealt
        self.kind = "batches" if not self.dealt else "samples" if stream.rule.batch else "whole batches"
        self._random: dict[str, Any] | None = None

    def _listeners(self) -> list[Any]:
        return [self.stream.order, self.loader.dataset]

    def _epochs(self) -> list[int | None]:
        asked, self.stream.asked = self.stream.asked, None
        return [asked, epoch_of(self.stream.order.sampler), epoch_of(self.loader.dataset)]

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


class StreamSource(_Drawing):
    """An iterable dataset: Fabric deals out its samples, or it shares itself out.

    Args:
        loader: The copy that is iterated.
        dataset: Its dataset.
        seed: The base of the dataset's random streams.
        own: The generator for workers' seeds that Fabric gave the copy.
        uneven: As given to `setup_dataloaders`.
    """

    def __init__(
        self, loader: Any, dataset: Batched, seed: int, own: torch.Generator | None, uneven: str | None
    ) -> None:
        super().__init__(loader, seed, own)
        self.dataset = dataset
        self.uneven = uneven
        self.settled = not dataset.asks
        self._open = not dataset.own
        self._head: Head | None = None
        self._start: dict[str, Any] = {}

    @property
    def kind(self) -> str:  # type: ignore[override]
        """See the base."""
        return "own stream" if self.dataset.own else "stream"

    @property
    def per_rank(self) -> bool:  # type: ignore[override]
        """See the base."""
        return self.dataset.own

    def become(self, kind: str) -> bool:
        """See the base: a position says who shared the samples out."""
        if not self._open or kind not in ("stream", "own stream"):
            return False
        self._share(own=kind == "own stream")
        return True

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """See the base.

        Raises:
            UsageError: The position is that of another number of workers.
        """
        self._begin_generators(saved)
        if saved:
            if self.dataset.own:
                _check("workers", saved["num_workers"], self.loader.num_workers)
            self.seed = saved["seed"]
            self.dataset.salts = (self.seed, self.dataset.salts[1])
            self.loader._iterator = None  # workers that live on would not hear of it
        entries = saved["streams"].values() if saved else ()
        self.replays = any([not each["ended"] and each["dataset"] is None for each in entries])
        self._start, self._head = saved or self.fresh(), None
        self.dataset.begin(epoch, saved)

    def settle(self, batches: Iterator[Any], peers: Peers) -> bool:
        """Find out, at the first iteration, who shares the samples out. All ranks.

        Args:
            batches: The iteration that has begun.
            peers: The ranks.

        Returns:
            Whether the iteration must begin again, in workers that know.

        Raises:
            ConfigurationError: Ranks read neither one stream nor shares of their own.
            UsageError: They read shares of their own, and the position is one in a stream of all.
        """
        first = next(batches, None)
        self._head = None if first is None else first.batch
        held = peers.exchange((self.dataset.dealt.share.rank, self._head))
        if any([head is None for _, head in held]):  # a finished epoch was resumed
            return False
        name = type(self.dataset.dataset).__name__
        if not shares_itself(name, held):
            self.settled = True
            return False
        check_padding(self.uneven, name)
        if self._start["streams"]:
            raise UsageError(
                f"The loader's position was saved where all ranks read one stream of {name}, and now each "
                "reads other samples. Go on on as many ranks as it was saved on (one, perhaps), or leave the "
                "position out of the state that is loaded."
            )
        rank_zero_warn(
            f"The ranks' streams of {name} begin with other samples:\n{table([head for _, head in held])}\n"
            "So it is taken to share itself out over ranks: each rank sees all that its stream gives, and "
            f"len(loader) is that of torch. shard_iterable=False says so beforehand. {ONE_STREAM}",
            category=PossibleUserWarning,
        )
        self._share(own=True)
        self._start = {**self.fresh(), "generators": self._start["generators"]}
        self.loader._iterator = None
        return bool(self.loader.num_workers)

    def _share(self, own: bool) -> None:
        self.dataset.own, self.settled = own, own or not self.dataset.asks
        # In the loop's process the stream has begun with random numbers that are alike on all ranks.
        self.dataset.apart = own and self.loader.num_workers > 0

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """See the base."""
        streams = self._start["streams"]
        turns = max(1, self.loader.num_workers) if self.dataset.own else 1
        stops = self.uneven is None and self.dataset.rule.batch is None and torch.is_grad_enabled()
        for arrived in batches:
            if arrived.note is None:
                self._head = arrived.batch or self._head
                continue
            number, entry, short = arrived.note
            if short and stops and not self.dataset.own:
                rank_zero_warn(_FEWER)
                return
            streams = {**streams, number: entry}
            yield arrived.batch, (streams, (number + 1) % turns)

    def state(self, note: Any) -> dict[str, Any]:
        """See the base."""
        self._check_in_order()
        if note is None:
            return self._start
        return {**self._start, "streams": note[0], "next": note[1]}

    def fresh(self) -> dict[str, Any]:
        """See the base."""
        workers = self.loader.num_workers if self.dataset.own else None
        drawn = {"seed": self.seed, "generators": self.generators.states()}
        return {"streams": {}, "next": 0, "num_workers": workers, **drawn}

    def length(self) -> int:
        """As torch's own loader says, of a dataset that shares itself out."""
        return self.dataset.rule.count(len(self.dataset.dataset))

    def agreed(self) -> dict[str, Any] | None:
        """See the base. Where samples are whole batches, some ranks may have one less."""
        if self.dataset.rule.batch is None and self.uneven is not None:
            return None
        first = self._start["streams"].get(0, {"samples": 0})
        return {"position": first["samples"], "order": self._head and checksum(self._head.samples)}

    def done(self, note: Any) -> int:
        """See the base."""
        streams = self._start["streams"] if note is None else note[0]
        return sum([self.dataset.rule.count(entry["samples"]) for entry in streams.values()])


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _check(what: str, saved: Any, now: Any) -> None:
    if saved != now:
        raise UsageError(
            f"The loader's position was saved with {saved} {what}, but the loader has {now}. Make the loader "
            "as it was, or leave its position out of the state that is loaded."
        )
