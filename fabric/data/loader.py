"""`FabricDataLoader`: a user's loader whose batches arrive on a device, and whose position can be saved."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader

    from fabric.data.adapters import LoaderAdapter
    from fabric.data.rank_consistency import RankGroup

    Loader = DataLoader[Any]  # to type checkers a loader that was set up can stand wherever the user's can
else:
    Loader = object

dealing: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterations in training of loaders whose data Fabric deals out."""
_running: list[_Pass] = []
"""Iterations that have begun and not ended."""
VERSION = 2
"""Of the state's form."""
_OF_THE_USER = ("dataset", "collate_fn", "worker_init_fn", "generator")
"""Attributes in place of which the copy that is iterated has others."""


class _Pass:
    """One iteration: its epoch, and the note of the last batch that the loop received."""

    def __init__(self, epoch: int, parts: Sequence[Any]) -> None:
        self.epoch = epoch
        self.begun = [part.epoch_begun() for part in parts]
        """What these parts noted at its begin."""
        self.note: Any = None


class _FabricDataLoader(Loader):
    """A loader whose batches arrive on a device. Everything else is the user's loader.

    Args:
        dataloader: The (sharded copy of the) user's loader.
        device: Where batches go; None leaves them where the loader puts them.
        move: Function (batch, device) that moves a batch.
        given: The user's own loader, if `dataloader` is a copy.
        source: Where the batches come from. None: a loader that keeps its position itself.
        together: Where data are the ranks' own, "drop" or "error" lets all stop or raise when the first has
            no more; "train" is "drop" while gradients are enabled. Else each goes its own way.
        peers: The ranks, for positions that each has of its own. None: there is one.
        parts: Of the strategy: they are called at the begin and at the end of each epoch.
    """

    def __init__(
        self,
        dataloader: Any,
        device: torch.device | None = None,
        *,
        move: Callable[[Any, torch.device], Any] | None = None,
        given: Any = None,
        source: LoaderAdapter | None = None,
        together: str | None = None,
        peers: RankGroup | None = None,
        parts: Sequence[Any] = (),
    ) -> None:
        self._dataloader = dataloader
        self._device = device
        if move is None:
            from fabric.utilities.apply_func import move_data_to_device

            move = move_data_to_device
        self._move = move
        self._given = dataloader if given is None else given
        if source is None:
            from fabric.data.adapters import LoaderAdapter

            source = LoaderAdapter(dataloader)
        self._source = source
        # What this process draws for a sample must come after what the loop draws before it; and a `move` of
        # the user's own may reuse its memory.
        workers = getattr(dataloader, "num_workers", 0)
        self._looks_ahead = source.ahead and workers > 0 and _is_plain(self._move)
        self._together = together
        self._peers = peers
        self._parts = parts
        self._epoch = 0
        self._pass: _Pass | None = None
        self._saved: dict[str, Any] | None = None
        self.wait_seconds = 0.0
        """Seconds that the loop has waited for batches, since the loader was made."""

    @property
    def device(self) -> torch.device | None:
        """The device that batches are moved to; None leaves them on the device of the loader."""
        return self._device

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is; counted by itself otherwise.

        A position that was loaded in this epoch is kept; one in another is given up.
        """
        if self._saved is not None and epoch != self._epoch:
            self._saved = None
        self._epoch, self._pass = epoch, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: what it has received, not what workers have read ahead.

        Plain data, the same on all ranks and good for any number of them. Where the user's own order or
        stream gives each rank a position of its own, all ranks must call this, and the state is for as many
        ranks.

        Raises:
            UsageError: The loader cannot say where it is.
        """
        if self._saved is not None:  # loaded, and not gone on from yet
            epoch, state = self._epoch, self._saved
        elif self._pass is None:
            epoch, state = self._epoch, self._source.initial_state()
        else:
            epoch, state = self._pass.epoch, self._source.state(self._pass.note)
        head = {"version": VERSION, "kind": self._source.kind, "epoch": epoch}
        if not self._source.per_rank:
            return {**head, **state}
        return {**head, "ranks": [state] if self._peers is None else self._peers.exchange(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on where `state_dict()` was called; further ones are whole epochs.

        Raises:
            ArgumentTypeError: Not a loader's state.
            UsageError: The state is of another kind of loader, or of another number of ranks.
        """
        state = dict(state_dict) if isinstance(state_dict, dict) else {}
        version, kind, epoch = [state.pop(key, None) for key in ("version", "kind", "epoch")]
        if version != VERSION or not isinstance(epoch, int):
            raise ArgumentTypeError(
                f"load_state_dict of a loader needs what state_dict() gave, but got {state_dict!r:.200}."
            )
        if kind != self._source.kind and not self._source.switch_kind(kind):
            raise UsageError(
                f"The position was saved in a loader of kind {kind!r}, and this one is of kind "
                f"{self._source.kind!r}: other dataset type, sampler, or arguments of setup_dataloaders. "
                "Make the loader as it was, or leave its position out of the state that is loaded."
            )
        if self._source.per_rank:
            ranks = state.get("ranks", [])
            rank, world = (0, 1) if self._peers is None else self._peers[:2]
            if len(ranks) != world:
                raise UsageError(
                    f"The position was saved on {len(ranks)} ranks, and there are {world}: this loader's "
                    "order is its own on each rank, so that it can only go on on as many. Let Fabric share "
                    f"the data out (the defaults of setup_dataloaders), or use {len(ranks)} ranks."
                )
            state = ranks[rank]
        self._epoch, self._saved, self._pass = epoch, state, None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of one epoch. The first iteration is epoch 0, the next one 1, also after a break."""
        source = self._source
        epoch = source.epoch(self._epoch)
        if epoch != self._epoch:
            self.set_epoch(epoch)
        run, saved = _Pass(epoch, self._parts), self._saved
        if torch.is_grad_enabled() and not source.per_rank:
            dealing.add(run)
        source.begin(epoch, saved)
        self._saved, self._pass = None, run
        self._epoch += 1
        begin = time.perf_counter()
        batches = self._started()
        if (
            self._peers is not None
            and not source.is_resolved
            and source.resolve_sharding(batches, self._peers)
        ):
            batches = self._started()
        pairs: Iterator[Any] = source.pairs(batches)
        together = self._together if self._together != "train" or torch.is_grad_enabled() else None
        if self._peers is not None and source.per_rank and together in ("drop", "error", "train"):
            pairs = self._peers.lockstep(pairs, source.left(), together == "error")
        # On the host nothing walks the batch.
        if self._device is not None and self._device.type != "cpu":
            from fabric.data.prefetch import Prefetch

            pairs = Prefetch(pairs, self._device, self._move, self._looks_ahead)
        if self._peers is not None and not source.per_rank and torch.is_grad_enabled():
            pairs = self._peers.compared(pairs, source.consistency_key, epoch)  # after what looks ahead
        self.wait_seconds += time.perf_counter() - begin
        return self._received(pairs, run)

    def _started(self) -> Iterator[Any]:
        if not getattr(self._dataloader, "num_workers", 0):
            return iter(self._dataloader)
        from fabric.launch.garbage import forking

        with forking():
            return iter(self._dataloader)

    def _received(self, pairs: Iterator[Any], run: _Pass) -> Iterator[Any]:
        clock = time.perf_counter
        _running.append(run)
        try:
            while True:
                begin = clock()
                found = next(pairs, None)
                self.wait_seconds += clock() - begin
                if found is None:
                    break
                batch, run.note = found
                yield batch
            if self._pass is run:
                self._pass = None
            # An iteration inside of another may be one of this rank alone.
            if _running == [run]:
                for part, begun in zip(self._parts, run.begun, strict=True):
                    part.epoch_ended(begun)
        finally:  # an error's traceback must not keep workers alive
            _running.remove(run)
            close = getattr(pairs, "close", None)
            if close is not None:
                close()

    @property
    def batches_done(self) -> int:
        """The number of batches of this epoch that the loop has received, including those before a resume.

        Equals `len(loader)` with the last one.

        Raises:
            UsageError: The loader cannot say where it is.
        """
        state = self._saved if self._pass is None else self._source.at(self._pass.note)
        done = 0 if state is None else self._source.done(state)
        if done is None:
            raise UsageError(f"{type(self._dataloader).__name__} does not say how many batches it has given.")
        return done

    def __len__(self) -> int:
        return self._source.length()

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataloader", "_given"):  # while copying or unpickling
            raise AttributeError(name)
        found = getattr(self._given if name in _OF_THE_USER else self._dataloader, name)
        if name not in ("sampler", "batch_sampler") or found is None:
            return found
        from fabric.data.proxies import SamplerProxy

        return SamplerProxy(getattr(self._given, name), found, self.set_epoch)


def _is_plain(move: Any) -> bool:
    """Whether batches are moved by the function of this package, by itself or as a method of a strategy."""
    function = getattr(move, "__func__", move)
    return str(getattr(function, "__module__", "")).startswith("fabric.")
