"""`StreamSource`: the loader adapter for iterable datasets, which Fabric shards or which shard themselves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.data._torch import drop_workers
from fabric.data.adapters import SeededLoaderAdapter, check_same
from fabric.data.rank_batches import digest
from fabric.data.rank_consistency import table
from fabric.data.rules import reject_padding
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.iterable.iterables import ShardedIterableDataset, StreamFingerprint
    from fabric.data.rank_consistency import RankGroup

_INCOMPLETE_ROUND = (
    "Some ranks get no batch in the last round, and gradients are enabled. That round is left out, so that "
    'all ranks take the same number of steps. Write setup_dataloaders(loader, uneven="exact") to get it, '
    "or evaluate under torch.no_grad()."
)

_ONE_STREAM_HINT = (
    "If all ranks should read one stream, seed its order equally on all of them, and sort items of a set or "
    "a directory."
)
"""The advice for ranks whose streams unintentionally differ."""


class StreamSource(SeededLoaderAdapter):
    """The adapter for iterable datasets.

    Args:
        loader: The copy that is iterated.
        dataset: Its dataset.
        seed: The base of the dataset's random states.
        seed_generator: Fabric's generator of workers' seeds, set on the copy; None: the user's is in use.
        uneven: The argument of `setup_dataloaders`.
    """

    def __init__(
        self,
        loader: Any,
        dataset: ShardedIterableDataset,
        seed: int,
        seed_generator: torch.Generator | None,
        uneven: str | None,
    ) -> None:
        super().__init__(loader, seed, seed_generator)
        self.dataset = dataset
        self.uneven = uneven
        self._can_switch = not dataset.shards_itself
        self._fingerprint: StreamFingerprint | None = None
        self._set_mode(dataset.shards_itself, dataset.per_rank_rng)

    def switch_kind(self, kind: str) -> bool:
        """Set by the kind of a saved position whether the dataset shards itself; return success."""
        if not self._can_switch or kind not in ("stream", "own stream"):
            return False
        self._set_mode(kind == "own stream", self.loader.num_workers > 0)
        return True

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration, at a saved position if there is one.

        Raises:
            UsageError: The position was saved with another number of workers.
        """
        if saved and self.dataset.shards_itself:
            check_same("workers", saved["num_workers"], self.loader.num_workers)
        super().begin(epoch, saved)
        if saved:
            self.dataset.seed_parts = (self.seed, self.dataset.seed_parts[1])
            drop_workers(self.loader)  # persistent workers would not get the saved position
        self._fingerprint = None
        self.dataset.begin(epoch, saved)

    def resolve_sharding(self, batches: Iterator[Any], rank_group: RankGroup) -> bool:
        """Decide at the first iteration whether Fabric shards the samples. All ranks must call this.

        Args:
            batches: The iteration that has begun.
            rank_group: The ranks that compare their first samples.

        Returns:
            Whether the iteration must be restarted, since its workers read the stream as one for all ranks.

        Raises:
            ConfigurationError: Ranks read neither one stream nor disjoint shards.
            UsageError: They read disjoint shards, but the position was saved in one stream.
        """
        first = next(batches, None)
        self._fingerprint = None if first is None else first.items
        by_rank = rank_group.exchange((self.dataset.sharding_rule.shard.rank, self._fingerprint))
        if any([fingerprint is None for _, fingerprint in by_rank]):  # a finished epoch was resumed
            return False
        name = type(self.dataset.wrapped).__name__
        if not dataset_shards_itself(name, by_rank):
            self.is_resolved = True
            return False
        reject_padding(self.uneven, name)
        if self.start["streams"]:
            raise UsageError(
                f"The loader's position was saved when all ranks read one stream of {name}, but now each "
                "reads other samples. Resume on the number of ranks that saved it (perhaps one), or remove "
                "the loader from the state passed to fabric.load()."
            )
        rank_zero_warn(
            f"The ranks' streams of {name} begin with different samples:\n"
            f"{table([fingerprint.preview for _, fingerprint in by_rank])}\n"
            "So Fabric assumes that the dataset shards itself: each rank uses all samples of its stream, and "
            "len(loader) is that of torch. Write setup_dataloaders(loader, shard_iterable=False) if that is "
            f"right. {_ONE_STREAM_HINT}",
            category=PossibleUserWarning,
        )
        self._set_mode(True, self.loader.num_workers > 0)
        self.start = {**self.initial_state(), "generators": self.start["generators"]}
        drop_workers(self.loader)
        return bool(self.loader.num_workers)

    def _set_mode(self, shards_itself: bool, per_rank_rng: bool) -> None:
        # `per_rank_rng` is False in the loop's process, where the stream has begun with equal random states.
        self.dataset.shards_itself = shards_itself
        self.dataset.per_rank_rng = shards_itself and per_rank_rng
        self.kind, self.per_rank = ("own stream" if shards_itself else "stream"), shards_itself
        self.is_resolved = shards_itself or not self.dataset.compares

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, position) for every batch of an iteration that has begun."""
        streams = self.start["streams"]
        turns = max(1, self.loader.num_workers) if self.dataset.shards_itself else 1
        stops = self.uneven is None and self.dataset.rule.batch is None and torch.is_grad_enabled()
        if any([not each["ended"] and each["dataset"] is None for each in streams.values()]):
            name = type(self.dataset.wrapped).__name__
            rank_zero_warn(
                f"{name} is read again from the epoch's beginning up to the saved "
                "position. Add state_dict() and load_state_dict() to it to resume without rereading."
            )
        saved = {number: each.get("order", []) for number, each in streams.items() if each["dataset"] is None}
        for batch in batches:
            if batch.position is None:
                self._fingerprint = batch.items or self._fingerprint
                continue
            number, entry, incomplete = batch.position
            if saved:
                self._check_reread(saved.pop(number, []), entry["order"])
            if incomplete and stops and not self.dataset.shards_itself:
                rank_zero_warn(_INCOMPLETE_ROUND)
                return
            streams = {**streams, number: entry}
            yield batch.items, (streams, (number + 1) % turns)

    def _check_reread(self, saved: list[str], now: list[str]) -> None:
        """Warn if a stream that was read again has begun with other samples than before the save."""
        if any([before != after for before, after in zip(saved, now, strict=False)]):
            name = type(self.dataset.wrapped).__name__
            rank_zero_warn(
                f"{name} has begun with other samples than in the run that saved the position, so samples of "
                "this epoch are repeated and lost. Its order depends on a value that is not in the "
                "checkpoint, such as epochs that it counts itself, or the clock. Seed the order by the epoch "
                "that Fabric passes to set_epoch(epoch) of the dataset, or add state_dict() and "
                "load_state_dict() to it."
            )

    def position_update(self, position: Any) -> dict[str, Any]:
        """Return the states of the streams and the number of the next one."""
        return {"streams": position[0], "next": position[1]}

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state of an epoch."""
        workers = self.loader.num_workers if self.dataset.shards_itself else None
        return {"streams": {}, "next": 0, "num_workers": workers, **super().initial_state()}

    def length(self) -> int:
        """Return the number of batches; like torch's loader if the dataset shards itself.

        Raises:
            ArgumentTypeError: The dataset has no `__len__`.
        """
        dataset = self.dataset.wrapped
        if not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(
                f"{type(dataset).__name__} has no length, so its loader has none. Write `for step, batch in "
                "enumerate(loader):`, with a fixed number of steps for schedules and progress bars "
                "(loader.batches_done counts this epoch's), or add __len__ to the dataset."
            )
        return self.dataset.rule.count(len(dataset))

    def consistency_key(self) -> dict[str, Any] | None:
        """Return position and digest of the first samples for comparison by ranks; None: no check.

        No check for samples that are whole batches, since a rank may have one less."""
        if self.dataset.rule.batch is None and self.uneven is not None:
            return None
        first = self.start["streams"].get(0, {"samples": 0})
        return {
            "position": first["samples"],
            "order": self._fingerprint and digest(self._fingerprint.samples),
        }

    def done(self, state: dict[str, Any]) -> int:
        """Return the number of batches that this rank has received in `state`'s epoch."""
        return sum([self.dataset.rule.count(entry["samples"]) for entry in state["streams"].values()])


def dataset_shards_itself(name: str, by_rank: list[tuple[int, StreamFingerprint]]) -> bool:
    """Whether a dataset shards itself, by the first samples of each rank; else all ranks read one stream.

    Args:
        name: The dataset's name, for messages.
        by_rank: (index of the shard, fingerprint) of each rank. Ranks of one shard must read the same.

    Raises:
        ConfigurationError: Neither: streams have equal samples in different orders, or share some of them.
    """
    fingerprints = [fingerprint for _, fingerprint in by_rank]
    if all([fingerprint.samples == fingerprints[0].samples for fingerprint in fingerprints]):
        return False
    parts = dict(reversed(by_rank))
    shares = list(parts.values())
    # Samples that are unique within their stream.
    single = [
        {x for x, count in Counter(fingerprint.samples).items() if count == 1} for fingerprint in shares
    ]
    if (
        all([fingerprint.samples == parts[shard].samples for shard, fingerprint in by_rank])
        and len(set().union(*single)) == sum(map(len, single))
        and not any(
            [
                _is_shared_column(columns)
                for columns in zip(*[fingerprint.columns for fingerprint in shares], strict=False)
            ]
        )
    ):
        return True
    raise ConfigurationError(
        f"The ranks' streams of {name} are neither one stream nor disjoint shards: some of their samples, or "
        "parts of them, are equal, or ranks that must read the same data (of one pipeline, sequence or model)"
        " do not. They begin with\n"
        f"{table([each.preview for each in fingerprints])}\n{_ONE_STREAM_HINT} Else write "
        "setup_dataloaders(loader, shard_iterable=False) if each rank's samples are its own shard, or "
        "shard_iterable=True if all read the same samples in the same order, with different noise."
    )


def _is_shared_column(columns: tuple[list[str], ...]) -> bool:
    """Whether all streams have the same, not constant, values in this column."""
    return len(set(columns[0])) > 1 and all([column == columns[0] for column in columns])
