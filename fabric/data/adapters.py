"""`LoaderAdapter`: batches of a loader with their positions, and resuming at a position.

An adapter starts epochs and pairs each batch with a position. It converts the position of the last received
batch into a state (plain data) for a checkpoint. `IndexSource` is for map-style datasets; `StreamSource`
(iterable/) for iterable ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.slices import use_slice
from fabric.data.order import epoch_of, generator_state_accessors, generators_of, has_state, set_epoch_of
from fabric.data.rules import Shard
from fabric.utilities.data import sized_len
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.seed import derive_seed, host_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.rank_batches import RankBatchSampler
    from fabric.data.rank_consistency import RankGroup

_NOTHING = object()
_WORKERS = 1  # salt, so that the workers' random streams differ from the order's


class LoaderAdapter:
    """Base class; used directly for a loader whose position is in its own `state_dict()`, or unknown.

    Args:
        loader: The loader that is iterated.
    """

    kind = "loader"
    is_resolved = True
    """Whether `resolve_sharding` is done: Fabric shards the samples, or the dataset shards itself."""
    per_rank = True
    """Whether positions differ between ranks, so that a checkpoint needs the positions of all ranks."""
    can_prefetch = False
    """Whether batches may be fetched before the loop requests them; positions then count received batches."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        # An epoch above 0 was set by the user: it must differ from the recorded one. An initial -1 must not.
        self._last_epochs = [epoch and min(epoch, 0) for epoch in self._epochs()]

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration, at a saved position if there is one."""
        if saved is not None:
            self.loader.load_state_dict(saved["loader"])

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, position) for every batch of an iteration that has begun."""
        return ((batch, True) for batch in batches)

    def state(self, position: Any) -> dict[str, Any]:
        """Return the state after the batch at `position`; None: at the beginning of this iteration.

        Raises:
            UsageError: The loader has no `state_dict()`.
        """
        if not has_state(self.loader):
            raise UsageError(
                f"The position of {type(self.loader).__name__} is unknown: it overrides __iter__ and has no "
                "state_dict() and load_state_dict(). Add both to it, or pass fabric.setup_dataloaders a "
                "DataLoader that does not override __iter__."
            )
        return {"loader": self.loader.state_dict()}

    def initial_state(self) -> dict[str, Any]:
        """Return the state at the beginning of the next epoch."""
        return self.state(None)

    def length(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self.loader)

    def remaining(self) -> int | None:
        """Return the number of batches from the position on; None: unknown, since a length may be inexact."""
        return None

    def uneven_rows(self) -> int:
        """Return the rows of the last global batch, if ranks get unequal or repeated shares of it; else 0."""
        return 0

    def repeats(self) -> str:
        """Return which samples of an epoch ranks get twice, for a warning; else an empty string."""
        return ""

    def switch_kind(self, kind: str) -> bool:
        """Switch the adapter to this kind of state if it can; return success."""
        return False

    def epoch(self, loader_epoch: int) -> int:
        """Return the epoch of the next iteration, and call `set_epoch` of sampler and dataset with it.

        Args:
            loader_epoch: The loader's counter. An epoch that the user has set on the sampler or dataset
                since the last iteration takes precedence.
        """
        pairs = zip(self._epochs(), self._last_epochs, strict=True)
        epoch = next((now for now, old in pairs if now is not None and now != old), loader_epoch)
        for part in self.epoch_parts():
            set_epoch_of(part, epoch)
        self._last_epochs = self._epochs()
        return epoch

    def resolve_sharding(self, batches: Iterator[Any], rank_group: RankGroup) -> bool:
        """Decide before the first batch whether Fabric shards the samples; return whether to start again."""
        return False

    def epoch_parts(self) -> list[Any]:
        """Return the objects whose `set_epoch` each iteration calls."""
        batches = getattr(self.loader, "batch_sampler", None)
        order = getattr(self.loader, "sampler", None) if batches is None else batches
        return [order, getattr(self.loader, "dataset", None)]

    def _epochs(self) -> list[int | None]:
        return [epoch_of(part) for part in self.epoch_parts()]

    def consistency_key(self) -> dict[str, Any] | None:
        """Return the values that ranks compare before the second batch of an iteration; None: no check."""
        return None

    def at(self, position: Any) -> dict[str, Any]:
        """Return `state(position)` if it counts batches, else an empty dictionary; never raises."""
        return {}

    def done(self, state: dict[str, Any]) -> int | None:
        """Return the number of batches that this rank has received in `state`'s epoch; None: unknown."""
        return None


class SeededLoaderAdapter(LoaderAdapter):
    """An adapter whose state has the states of the user's random generators.

    Args:
        loader: The copy that is iterated.
        seed: The base of the order and of the workers' seeds.
        seed_generator: Fabric's generator of workers' seeds, set on the copy; None: the user's is in use.
    """

    can_prefetch = True

    def __init__(self, loader: Any, seed: int, seed_generator: torch.Generator | None) -> None:
        super().__init__(loader)
        self.seed = seed
        self.seed_generator = seed_generator
        self.generators = generators_of([loader, *samplers_of(loader)], seed_generator)
        self.start: dict[str, Any] = {}
        """The state at which this iteration began."""

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration with the generator states and the seed of the saved state, if there is one.

        Raises:
            UsageError: The number of generators has changed.
        """
        if saved is not None:
            check_same("random generators", len(saved["generators"]), len(self.generators))
            for generator, state in zip(self.generators, saved["generators"], strict=True):
                generator_state_accessors(generator)[1](state)
            self.seed = saved["seed"]
        if self.seed_generator is not None:
            self.seed_generator.manual_seed(derive_seed(self.seed, epoch, _WORKERS))
        self.start = saved or self.initial_state()

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state of an epoch: the seed and the states of the generators."""
        return {
            "seed": self.seed,
            "generators": [generator_state_accessors(generator)[0]() for generator in self.generators],
        }

    def position_update(self, position: Any) -> dict[str, Any]:
        """Return the entries of the state that have changed after the batch at `position`."""
        raise NotImplementedError

    def at(self, position: Any) -> dict[str, Any]:
        """Return the state after the batch at `position`; None: at the beginning of this iteration."""
        return self.start if position is None else {**self.start, **self.position_update(position)}

    def state(self, position: Any) -> dict[str, Any]:
        """Return the state after the batch at `position`; None: at the beginning of this iteration.

        Raises:
            UsageError: The loader has `in_order=False`.
        """
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            raise UsageError(
                "The position of a loader with in_order=False is unknown: its batches arrive in any order. "
                "Leave in_order=False out, or call state_dict() between epochs only."
            )
        return self.at(position)


class IndexSource(SeededLoaderAdapter):
    """The adapter for map-style datasets: indices sharded by Fabric, or by the user's sampler.

    Args:
        loader: The copy that is iterated; `sampler` is its sampler or batch sampler.
        sampler: This rank's indices.
        seed: The base of the order.
        rank: This rank's number, for workers' random streams.
        seed_generator: Fabric's generator of workers' seeds, set on the copy; None: the user's is in use.
    """

    def __init__(
        self,
        loader: Any,
        sampler: RankBatchSampler,
        seed: int,
        rank: int,
        seed_generator: torch.Generator | None,
    ) -> None:
        self.sampler = sampler
        self._user_generator = loader.generator
        self._keeps_workers = False
        """Whether this iteration uses the workers of the last one."""
        self._orders: list[Any] = []
        """The digests of the orders of the first epoch of all and of the last one."""
        super().__init__(loader, seed, seed_generator)
        self.rank = rank
        self.is_sharded = sampler.order.seed is not None
        self.per_rank = not self.is_sharded
        self.kind = "batches" if not self.is_sharded else "samples" if sampler.rule.batch else "whole batches"

    def epoch_parts(self) -> list[Any]:
        """Return the user's order and dataset."""
        return [self.sampler.order.sampler, self.loader.dataset]

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration, at a saved position if there is one.

        Raises:
            UsageError: The position was saved with data of another length.
        """
        order, sampler = self.sampler.order, self.sampler
        if self.generators and sampler.start and sampler.order_digest is None:
            # A resumed iteration was left before its first batch, as by zip() with a loader at its end.
            next(order.stream(), None)  # the user's generator draws its order; the next one depends on it
        if saved and saved["samples"] and (now := self._num_items()) != saved["length"]:
            raise UsageError(
                f"The position {saved['samples']} was saved in data of length {saved['length']}, but the "
                f"length is {now} now, so the order is another one. Use the same data, or start an epoch "
                f"with loader.set_epoch({epoch + 1})."
            )
        self._orders = saved.get("orders", []) if saved else self._past_orders()
        super().begin(epoch, saved)
        self._align_user_generator(saved)
        if saved and saved["samples"] and (before := saved.get("batch")) not in (None, self._global_batch()):
            rank_zero_warn(
                f"The position was saved with {before} samples in a batch of all ranks, and there are "
                f"{self._global_batch()} now, so the numbers differ from those of a run without the break. "
                f"Write batch_size={before} // fabric.world_size."
            )
        self.start = {**self.start, "length": self._num_items(), "batch": self._global_batch()}
        sampler.start = self.start["samples"]
        sampler.expected_digest = self.start["check"] if sampler.start else None
        resumes_between_epochs = saved is not None and not sampler.start
        sampler.first_digest = _first_of_different(self._orders) if resumes_between_epochs else None
        order.epoch = epoch
        if self.is_sharded:
            order.seed = self.seed
        else:
            order.states = saved["random"] if saved else None
        if self.loader.num_workers:
            user_seeds = [g.initial_seed() % 2**63 for g in self.generators if isinstance(g, torch.Generator)]
            sampler.seed_parts = (self.seed, epoch, self.rank, *user_seeds)

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Return pairs (batch, position after it); a zip, so that no Python frame runs per batch."""
        return zip(batches, iter(self.sampler.end_positions.popleft, _NOTHING), strict=False)

    def consistency_key(self) -> dict[str, Any] | None:
        """Return position, length and order for comparison by ranks; None: no check.

        No check if numbers of batches may differ by rank, since a rank may have no second batch."""
        items, rule = self._num_items(), self.sampler.rule
        if not self.is_sharded or (rule.batch is None and rule.uneven == "exact"):
            return None
        last = rule._replace(shard=Shard(rule.shard.world - 1, rule.shard.world))
        if items is not None and last.count(items) < 2 + rule.count(self.sampler.start):
            return None
        rows_shown = _stored_rows(self.loader.dataset)
        return {
            "position": self.sampler.start,
            "length": items,
            "order": self.sampler.order_digest,
            "data": rows_shown,
        }

    def position_update(self, position: Any) -> dict[str, Any]:
        """Return the number of samples after this batch and the digest of the order."""
        return {"samples": position, "check": self.sampler.order_digest}

    def _past_orders(self) -> list[Any]:
        last = self.sampler.order_digest
        return self._orders if last is None else [(self._orders or [last])[0], last]

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state of an epoch."""
        state = {"samples": 0, "length": self._num_items(), "check": None, **super().initial_state()}
        state["batch"] = self._global_batch()
        state["kept"] = self._keeps_workers
        state["orders"] = self._past_orders()
        return state if self.is_sharded else {**state, "random": host_states()}

    def length(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self.sampler)

    def uneven_rows(self) -> int:
        """Return the rows of the last global batch, if ranks get unequal or repeated shares of it; else 0."""
        return self.sampler.rule.uneven_rows(self._num_items() or 0) if self.is_sharded else 0

    def repeats(self) -> str:
        """Return which samples of an epoch ranks get twice, for a warning; else an empty string."""
        items, rule = self._num_items() or 0, self.sampler.rule
        count, unit = rule.repeated(items), "batches" if rule.batch is None else "samples"
        return f"{count} of the {items} {unit} of this loader twice" if count else ""

    def remaining(self) -> int | None:
        """Return the number of batches from the position on; None: the number of samples is unknown."""
        return None if self._num_items() is None else self.length() - self.done(self.start)

    def done(self, state: dict[str, Any]) -> int:
        """Return the number of batches that this rank has received in `state`'s epoch."""
        return self.sampler.rule.count(state["samples"])

    def _num_items(self) -> int | None:
        return sized_len(self.sampler.order)

    def _global_batch(self) -> int | None:
        rule = self.sampler.rule
        return rule.size if self.is_sharded and rule.batch else None

    def _align_user_generator(self, saved: dict[str, Any] | None) -> None:
        """Make the user's generator draw as often as in the run that saved the position.

        torch draws the workers' base seed from it, but not again for persistent workers.
        """
        generator, keeps = self._user_generator, self._keeps_workers
        saved_keeps = keeps if saved is None else saved.get("kept", keeps)
        if self.seed_generator is None and generator is not None and saved_keeps != keeps:
            if saved_keeps:
                self.loader.generator = torch.Generator(generator.device)
            else:
                torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        self._keeps_workers = bool(self.loader.num_workers) and self.loader.persistent_workers


def _first_of_different(orders: Any) -> Any:
    """Return the digest of the first order if the last one differs from it in as many items; else None."""
    first, last = orders if orders and len(orders) == 2 else (None, None)
    return first if first and last and first[0] == last[0] and first[1] != last[1] else None


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers that determine the order of a loader."""
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _stored_rows(dataset: Any) -> str | None:
    """Return a text of a Hugging Face dataset's first and last row, before transforms.

    The rows differ by rank after `split_dataset_by_node`.
    """
    as_stored = getattr(dataset, "with_format", None)
    if not callable(as_stored):
        return None
    rows = as_stored(None)
    head = use_slice("iterable").StreamFingerprint.of([rows[0], rows[len(rows) - 1]])
    return f"{head.preview} ({head.samples[0]} to {head.samples[-1]})"


def check_same(what: str, saved: Any, now: Any) -> None:
    """Raise if a position was saved with another number of `what` than the loader has.

    Raises:
        UsageError: The numbers differ.
    """
    if saved != now:
        raise UsageError(
            f"The loader's position was saved with {saved} {what}, but the loader has {now}. Create the "
            "loader with the same arguments, or remove it from the state passed to fabric.load()."
        )
