"""`StreamSource`: iterable datasets whose samples Fabric deals out, or that share themselves out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.data._torch import drop_workers
from fabric.data.adapters import SeededLoaderAdapter, check_same
from fabric.data.rank_batches import digest
from fabric.data.rank_consistency import table
from fabric.data.rules import check_padding
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.iterable.iterables import ShardedIterableDataset, StreamFingerprint
    from fabric.data.rank_consistency import RankGroup

_FEWER = (
    "Not all ranks get a batch in every round, and gradients are enabled: rounds in which some have none "
    'are left out, so that all ranks take the same number of steps. Write uneven="exact" to get them, or '
    "evaluate under torch.no_grad()."
)

_ONE_STREAM = (
    "Where all ranks shall read one stream, seed its order alike on all of them, and sort what comes from a "
    "set or a directory."
)
"""What to do about ranks that begin differently, and should not."""


class StreamSource(SeededLoaderAdapter):
    """An iterable dataset: Fabric deals out its samples, or it shares itself out.

    Args:
        loader: The copy that is iterated.
        dataset: Its dataset.
        seed: The base of the dataset's random streams.
        own: The generator for workers' seeds that Fabric gave the copy.
        uneven: As given to `setup_dataloaders`.
    """

    def __init__(
        self,
        loader: Any,
        dataset: ShardedIterableDataset,
        seed: int,
        own: torch.Generator | None,
        uneven: str | None,
    ) -> None:
        super().__init__(loader, seed, own)
        self.dataset = dataset
        self.uneven = uneven
        self._open = not dataset.own
        self._head: StreamFingerprint | None = None
        self._share(dataset.own, dataset.per_rank_rng)

    def switch_kind(self, kind: str) -> bool:
        """Set whether the dataset shards itself, by the kind of a saved position; return success."""
        if not self._open or kind not in ("stream", "own stream"):
            return False
        self._share(kind == "own stream", self.loader.num_workers > 0)
        return True

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> None:
        """Start an iteration, at a saved position if there is one.

        Raises:
            UsageError: The position is that of another number of workers.
        """
        if saved and self.dataset.own:
            check_same("workers", saved["num_workers"], self.loader.num_workers)
        super().begin(epoch, saved)
        if saved:
            self.dataset.salts = (self.seed, self.dataset.salts[1])
            drop_workers(self.loader)  # workers that live on would not hear of it
        self._head = None
        self.dataset.begin(epoch, saved)

    def resolve_sharding(self, batches: Iterator[Any], peers: RankGroup) -> bool:
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
        self._head = None if first is None else first.items
        held = peers.exchange((self.dataset.dealt.share.rank, self._head))
        if any([head is None for _, head in held]):  # a finished epoch was resumed
            return False
        name = type(self.dataset.given).__name__
        if not shares_itself(name, held):
            self.is_resolved = True
            return False
        check_padding(self.uneven, name)
        if self.start["streams"]:
            raise UsageError(
                f"The loader's position was saved where all ranks read one stream of {name}, and now each "
                "reads other samples. Go on on as many ranks as it was saved on (one, perhaps), or leave the "
                "position out of the state that is loaded."
            )
        rank_zero_warn(
            f"The ranks' streams of {name} begin with other samples:\n"
            f"{table([head.shown for _, head in held])}\n"
            "So it is taken to share itself out over ranks: each rank sees all that its stream gives, and "
            f"len(loader) is that of torch. shard_iterable=False says so beforehand. {_ONE_STREAM}",
            category=PossibleUserWarning,
        )
        self._share(True, self.loader.num_workers > 0)
        self.start = {**self.initial_state(), "generators": self.start["generators"]}
        drop_workers(self.loader)
        return bool(self.loader.num_workers)

    def _share(self, own: bool, apart: bool) -> None:
        # In the loop's process a stream that was asked has begun with random numbers alike on all ranks.
        self.dataset.own, self.dataset.per_rank_rng = own, own and apart
        self.kind, self.per_rank = ("own stream" if own else "stream"), own
        self.is_resolved = own or not self.dataset.asks

    def pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield every batch of an iteration that has begun, with its note."""
        streams = self.start["streams"]
        turns = max(1, self.loader.num_workers) if self.dataset.own else 1
        stops = self.uneven is None and self.dataset.rule.batch is None and torch.is_grad_enabled()
        if any([not each["ended"] and each["dataset"] is None for each in streams.values()]):
            name = type(self.dataset.given).__name__
            rank_zero_warn(
                f"{name} is read again from the epoch's beginning up to the saved "
                "position. Give it state_dict() and load_state_dict() to go on at once."
            )
        for arrived in batches:
            if arrived.note is None:
                self._head = arrived.items or self._head
                continue
            number, entry, short = arrived.note
            if short and stops and not self.dataset.own:
                rank_zero_warn(_FEWER)
                return
            streams = {**streams, number: entry}
            yield arrived.items, (streams, (number + 1) % turns)

    def position_update(self, note: Any) -> dict[str, Any]:
        """Return the states of the streams and the number of the next one."""
        return {"streams": note[0], "next": note[1]}

    def initial_state(self) -> dict[str, Any]:
        """Return the initial position of an epoch."""
        workers = self.loader.num_workers if self.dataset.own else None
        return {"streams": {}, "next": 0, "num_workers": workers, **super().initial_state()}

    def length(self) -> int:
        """Return the number of batches; like torch's loader, for a dataset that shards itself.

        Raises:
            ArgumentTypeError: A stream whose end is not known.
        """
        dataset = self.dataset.given
        if not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(
                f"{type(dataset).__name__} is a stream without a length, and so is its loader. Write `for "
                "step, batch in enumerate(loader):`, with a number of steps of your own for schedules and "
                "progress bars (loader.batches_done counts this epoch's), or give the dataset a __len__."
            )
        return self.dataset.rule.count(len(dataset))

    def consistency_key(self) -> dict[str, Any] | None:
        """Return position and digest of the first samples for comparison by ranks; None: no check.

        Without a check: samples that are whole batches, of which some ranks may have one less."""
        if self.dataset.rule.batch is None and self.uneven is not None:
            return None
        first = self.start["streams"].get(0, {"samples": 0})
        return {"position": first["samples"], "order": self._head and digest(self._head.samples)}

    def done(self, state: dict[str, Any]) -> int:
        """Return the number of batches of the epoch that this rank has received at this position."""
        return sum([self.dataset.rule.count(entry["samples"]) for entry in state["streams"].values()])


def shares_itself(name: str, held: list[tuple[int, StreamFingerprint]]) -> bool:
    """Whether a dataset has shared itself out; else all ranks read one stream.

    Args:
        name: The dataset's, for messages.
        held: Of each rank the number of its share, and its head. Ranks of one share must read the same.

    Raises:
        ConfigurationError: Neither: the same samples in another order, or it cannot be told.
    """
    heads = [head for _, head in held]
    if all([head.samples == heads[0].samples for head in heads]):
        return False
    parts = dict(reversed(held))
    shares = list(parts.values())
    # Samples that are the only ones of their kind in their stream.
    single = [{x for x, count in Counter(head.samples).items() if count == 1} for head in shares]
    if (
        all([head.samples == parts[share].samples for share, head in held])
        and len(set().union(*single)) == sum(map(len, single))
        and not any([_alike(columns) for columns in zip(*[head.columns for head in shares], strict=False)])
    ):
        return True
    raise ConfigurationError(
        f"The ranks' streams of {name} are neither one stream nor shares of their own: some of their "
        "samples, or parts of them, are the same, or ranks that must see the same data (of one pipeline, "
        "sequence or model) do not. They begin with\n"
        f"{table([head.shown for head in heads])}\n{_ONE_STREAM} Else say what it is: "
        "setup_dataloaders(loader, shard_iterable=False) where each rank's samples are its own share, "
        "shard_iterable=True where all read the same samples in the same order, with noise of their own."
    )


def _alike(columns: tuple[list[str], ...]) -> bool:
    """Whether all streams have the same values at one place, and not one value only."""
    return len(set(columns[0])) > 1 and all([column == columns[0] for column in columns])
