"""`LoaderAdapter`: where a loader's batches come from, and how to come back to a position in them.

A source begins epochs, pairs every batch with a note, and turns the note of the last batch that the loop
received into plain data for a checkpoint. Here: indices that Fabric deals out or that are in the user's own
order; iterable datasets have `StreamSource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.slices import use_slice
from fabric.data.order import epoch_of, generator_state_accessors, generators_of, has_state, set_epoch_of
from fabric.data.rules import Shard
from fabric.utilities.data import sized_len
from fabric.utilities.seed import derive_seed, host_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.rank_batches import RankBatchSampler
    from fabric.data.rank_consistency import RankGroup

_NOTHING = object()
_WORKERS = 1  # salt: the workers' streams are not the order's


class LoaderAdapter:
    """Base: the batches of a loader that keeps its position itself, or cannot say it.

    Args:
        loader: The loader that is iterated.
    """

    kind = "loader"
    is_resolved = True
    """Whether it is known who shares the samples out."""
    per_rank = True
    """Whether ranks have positions of their own, so that a checkpoint needs those of all."""
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
        if not has_state(self.loader):
            raise UsageError(
                f"{type(self.loader).__name__} cannot say how far it has come. Give fabric.setup_dataloaders "
                "a DataLoader without an __iter__ of its own, or one with state_dict() and load_state_dict()."
            )
        return {"loader": self.loader.state_dict()}

    def initial_state(self) -> dict[str, Any]:
        """The position at the beginning of the epoch to come."""
        return self.state(None)

    def length(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self.loader)

    def left(self) -> int | None:
        """Return the number of batches from the position on; None: unknown, as a length may be inexact."""
        return None

    def switch_kind(self, kind: str) -> bool:
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
            set_epoch_of(part, epoch)
        self._told = self._epochs()
        return epoch

    def resolve_sharding(self, batches: Iterator[Any], peers: RankGroup) -> bool:
        """Find out what all ranks must know before the first batch; whether to begin again."""
        return False

    def _listeners(self) -> list[Any]:
        batches = getattr(self.loader, "batch_sampler", None)
        order = getattr(self.loader, "sampler", None) if batches is None else batches
        return [order, getattr(self.loader, "dataset", None)]

    def _epochs(self) -> list[int | None]:
        return [epoch_of(part) for part in self._listeners()]

    def consistency_key(self) -> dict[str, Any] | None:
        """Return the values that ranks compare at the second batch of an iteration; None: no check."""
        return None

    def at(self, note: Any) -> dict[str, Any]:
        """Return `state` for a source that counts batches by it, else an empty dictionary; never raises."""
        return {}

    def done(self, state: dict[str, Any]) -> int | None:
        """Return the number of batches received by this rank at this position of the epoch; None: unknown."""
        return None


class SeededLoaderAdapter(LoaderAdapter):
    """A source whose order may come from random generators of the user's own.

    Args:
        loader: The copy that is iterated.
        seed: The base of the order, and of what workers draw.
        own: The generator for workers' seeds that Fabric gave the copy; None: it is the user's.
    """

    ahead = True

    def __init__(self, loader: Any, seed: int, own: torch.Generator | None) -> None:
        super().__init__(loader)
        self.seed = seed
        self.own = own
        self.generators = generators_of([loader, *samplers_of(loader)], own)
        self.start: dict[str, Any] = {}
        """The position at which this iteration began."""

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration with the generator states and the seed of the saved position, if there is one.

        Raises:
            UsageError: There are other generators now.
        """
        if saved is not None:
            check_same("random generators of its own", len(saved["generators"]), len(self.generators))
            for generator, state in zip(self.generators, saved["generators"], strict=True):
                generator_state_accessors(generator)[1](state)
            self.seed = saved["seed"]
        if self.own is not None:
            self.own.manual_seed(derive_seed(self.seed, epoch, _WORKERS))
        self.start = saved or self.initial_state()

    def initial_state(self) -> dict[str, Any]:
        """Return the initial position of an epoch: the seed and the states of the generators."""
        return {
            "seed": self.seed,
            "generators": [generator_state_accessors(generator)[0]() for generator in self.generators],
        }

    def position_update(self, note: Any) -> dict[str, Any]:
        """Return the entries of the position that have changed after the batch with this note."""
        raise NotImplementedError

    def at(self, note: Any) -> dict[str, Any]:
        """Return the position after the batch with this note; None: at the beginning of this iteration."""
        return self.start if note is None else {**self.start, **self.position_update(note)}

    def state(self, note: Any) -> dict[str, Any]:
        """Return the position after the batch with this note; None: at the beginning of this iteration.

        Raises:
            UsageError: Batches may come in another order than they were asked for.
        """
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            raise UsageError(
                "A loader with in_order=False cannot say how far it has come: batches arrive in any order. "
                "Leave in_order=False out, or ask for the position between epochs only."
            )
        return self.at(note)


class IndexSource(SeededLoaderAdapter):
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
        stream: RankBatchSampler,
        seed: int,
        rank: int,
        own: torch.Generator | None,
    ) -> None:
        self.stream = stream
        self._given = loader.generator
        self._keeps_workers = False
        """Whether this iteration has the workers of the last one."""
        super().__init__(loader, seed, own)
        self.rank = rank
        self.dealt = stream.order.seed is not None
        self.per_rank = not self.dealt
        self.kind = "batches" if not self.dealt else "samples" if stream.rule.batch else "whole batches"

    def _listeners(self) -> list[Any]:
        return [self.stream.order.sampler, self.loader.dataset]

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration, at a saved position if there is one.

        Raises:
            UsageError: The position is one in data of another length.
        """
        order, stream = self.stream.order, self.stream
        if saved and saved["samples"] and (now := self._items()) != saved["length"]:
            raise UsageError(
                f"The position {saved['samples']} was saved in data of length {saved['length']}, but they "
                f"have {now} now, in another order. Use the same data, or begin an epoch: "
                f"loader.set_epoch({epoch + 1})."
            )
        super().begin(epoch, saved)
        self._draw_seed(saved)
        self.start = {**self.start, "length": self._items()}
        stream.start = self.start["samples"]
        stream.expected = self.start["check"] if stream.start else None
        order.epoch = epoch
        if self.dealt:
            order.seed = self.seed
        else:
            order.states = saved["random"] if saved else None
        if self.loader.num_workers:
            given = [g.initial_seed() % 2**63 for g in self.generators if isinstance(g, torch.Generator)]
            stream.salts = (self.seed, epoch, self.rank, *given)

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Batches with the positions after them; no Python frame of ours per batch."""
        return zip(batches, iter(self.stream.ends.popleft, _NOTHING), strict=False)

    def consistency_key(self) -> dict[str, Any] | None:
        """Return position, length and order for comparison by ranks; None: no check.

        Without a check: ranks with different numbers of batches, since some may have no second batch."""
        items, rule = self._items(), self.stream.rule
        if not self.dealt or (rule.batch is None and rule.uneven == "exact"):
            return None
        last = rule._replace(share=Shard(rule.share.world - 1, rule.share.world))
        if items is not None and last.count(items) < 2 + rule.count(self.stream.start):
            return None
        shown = _stored(self.loader.dataset)
        return {"position": self.stream.start, "length": items, "order": self.stream.check, "data": shown}

    def position_update(self, note: Any) -> dict[str, Any]:
        """Return the number of samples after this batch and the check of the order."""
        return {"samples": note, "check": self.stream.check}

    def initial_state(self) -> dict[str, Any]:
        """Return the initial position of an epoch."""
        state = {"samples": 0, "length": self._items(), "check": None, **super().initial_state()}
        state["kept"] = self._keeps_workers
        return state if self.dealt else {**state, "random": host_states()}

    def length(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self.stream)

    def left(self) -> int | None:
        """Return the number of batches from the position on; None: the number of samples is unknown."""
        return None if self._items() is None else self.length() - self.done(self.start)

    def done(self, state: dict[str, Any]) -> int:
        """Return the number of batches of the epoch that this rank has received at this position."""
        return self.stream.rule.count(state["samples"])

    def _items(self) -> int | None:
        return sized_len(self.stream.order)

    def _draw_seed(self, saved: dict[str, Any] | None) -> None:
        """Let the user's generator draw as often as where the position was saved: torch draws the seed of
        workers from it, but not again of workers that it keeps.
        """
        given, keeps = self._given, self._keeps_workers
        kept = keeps if saved is None else saved.get("kept", keeps)
        if self.own is None and given is not None and kept != keeps:
            if kept:
                self.loader.generator = torch.Generator(given.device)
            else:
                torch.empty((), dtype=torch.int64, device=given.device).random_(generator=given)
        self._keeps_workers = bool(self.loader.num_workers) and self.loader.persistent_workers


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers that determine the order of a loader."""
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _stored(dataset: Any) -> str | None:
    """First and last row of a Hugging Face dataset, before transforms; they show `split_dataset_by_node`."""
    as_stored = getattr(dataset, "with_format", None)
    if not callable(as_stored):
        return None
    rows = as_stored(None)
    head = use_slice("iterable").StreamFingerprint.of([rows[0], rows[len(rows) - 1]])
    return f"{head.shown} ({head.samples[0]} to {head.samples[-1]})"


def check_same(what: str, saved: Any, now: Any) -> None:
    """Raise if a position was saved in a loader that was made otherwise.

    Raises:
        UsageError: It was.
    """
    if saved != now:
        raise UsageError(
            f"The loader's position was saved with {saved} {what}, but the loader has {now}. Make the loader "
            "as it was, or leave its position out of the state that is loaded."
        )
