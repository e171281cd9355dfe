"""`_FabricDataLoader`: a user's loader that moves batches to a device, and whose position can be saved."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.arguments import attribute_of
from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader

    from fabric.data.adapters import LoaderAdapter
    from fabric.data.epochs import BegunEpochs
    from fabric.data.rank_consistency import RankGroup

    Loader = DataLoader[Any]  # type checkers accept a set-up loader wherever a DataLoader is accepted
else:
    Loader = object

sharded_iterations: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterations with gradients enabled over data that Fabric shards."""
_active: list[_Iteration] = []
"""Iterations that have begun and not ended."""
VERSION = 2
"""Version of the format of `state_dict()`."""
_ITERATED_AGAIN = (
    "inside of the loop over it, the loader was iterated again, as by next(iter(loader)). Make a second "
    "loader of the same data for that."
)
_USER_ATTRIBUTES = ("dataset", "collate_fn", "worker_init_fn", "generator")
"""Attributes that are read from the user's loader, since Fabric replaces them on the iterated copy."""


class _Iteration:
    """One iteration: its epoch, and the position after the last batch that the loop received."""

    def __init__(self, epoch: int, parts: Sequence[Any], batch_size: int = 0) -> None:
        self.epoch, self.batch_size = epoch, batch_size
        self.states_at_begin = [part.epoch_begun() for part in parts]
        """The values that `epoch_begun` of these parts returned."""
        self.position: Any = None
        self.number = 0
        """Its number among those of its loader, from 1."""

    def is_even(self, ranks: int) -> bool:
        """Whether all ranks surely got equal numbers of samples in the last batch."""
        size = self.batch_size * ranks  # a position of a batch that is not complete is no multiple
        return bool(size) and isinstance(self.position, int) and not self.position % size


def _batch_size(loader: Any) -> int:
    """Return the rows of a batch; 0: unknown, as of a batch sampler with batches of several sizes."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(part, "batch_size", None), int):
            return size
    return 0


class _FabricDataLoader(Loader):
    """A loader that moves batches to a device. Other attributes are those of the user's loader.

    Args:
        dataloader: The (sharded copy of the) user's loader.
        device: The device for batches; None leaves them on the loader's device.
        move: Function (batch, device) that moves a batch.
        user_loader: The user's loader, if `dataloader` is a copy.
        adapter: Yields batches with positions. None: `dataloader` keeps its position itself.
        lockstep: For data that Fabric does not shard. "drop" stops all ranks when the first has no more,
            "error" raises on all ranks; "train" is "drop" while gradients are enabled. Else no rank waits.
        rank_group: The ranks that compare and exchange positions. None: one rank.
        parts: Parts of the strategy; called at the begin and at the end of each epoch.
        chose_uneven: Whether the user chose what happens when samples do not divide by ranks.
        begun: Counts the epochs of all loaders of the same data.
        epoch: The first epoch.
    """

    def __init__(
        self,
        dataloader: Any,
        device: torch.device | None = None,
        *,
        move: Callable[[Any, torch.device], Any] | None = None,
        user_loader: Any = None,
        adapter: LoaderAdapter | None = None,
        lockstep: str | None = None,
        rank_group: RankGroup | None = None,
        parts: Sequence[Any] = (),
        chose_uneven: bool = True,
        begun: BegunEpochs | None = None,
        epoch: int = 0,
    ) -> None:
        self._dataloader = dataloader
        self._device = device
        if move is None:
            from fabric.utilities.apply_func import move_data_to_device

            move = move_data_to_device
        self._move = move
        self._user_loader = dataloader if user_loader is None else user_loader
        if adapter is None:
            from fabric.data.adapters import LoaderAdapter

            adapter = LoaderAdapter(dataloader)
        self._adapter = adapter
        # Prefetch only with workers, since in this process the loop's random draws must precede the sample's.
        # And not with a user's `move`, which may reuse its memory.
        workers = getattr(dataloader, "num_workers", 0)
        self._prefetches = adapter.can_prefetch and workers > 0 and _is_fabric_move(self._move)
        self._lockstep = lockstep
        self._rank_group = rank_group
        self._parts, self._chose_uneven = parts, chose_uneven
        self._begun = begun
        self._epoch = epoch
        self._thread = threading.get_ident()  # a thread that reads ahead must send no messages
        self._warned_of_repeats = False
        self._iteration: _Iteration | None = None
        """The iteration that yielded the last batch, or began since; None: it has ended."""
        self._num_begun = 0
        """Number of iterations that have begun; the adapter has the order of the last one."""
        self._was_set = False
        """Whether `set_epoch` or `load_state_dict` was called since the last one began."""
        self._was_asked = False
        """Whether `state_dict` was called since the last one began."""
        self._saved: dict[str, Any] | None = None
        self.wait_seconds = 0.0
        """Seconds that the loop has waited for batches, since the loader was set up."""

    @property
    def device(self) -> torch.device | None:
        """The device that batches are moved to; None leaves them on the device of the loader."""
        return self._device

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration's epoch to `epoch`, from 0; by default the loader counts.

        A loaded position is kept if it is in this epoch, else discarded.
        """
        if self._saved is not None and epoch != self._epoch:
            self._saved = None
        self._epoch, self._iteration, self._was_set = epoch, None, True

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: samples that it has received, without those prefetched by workers.

        Plain data, equal on all ranks and valid for any number of ranks. If the user's sampler or stream
        shards the data, positions differ by rank: all ranks must call this, and the state is valid for the
        same number of ranks only.

        Raises:
            UsageError: The position is unknown.
        """
        if self._saved is not None:  # loaded, not iterated since
            epoch, state = self._epoch, self._saved
        elif self._iteration is None:
            epoch, state = self._epoch, self._adapter.initial_state()
        elif self._iteration.number != self._num_begun:
            raise UsageError(f"The position of this loader is unknown: {_ITERATED_AGAIN}")
        else:
            epoch, state = self._iteration.epoch, self._adapter.state(self._iteration.position)
        self._was_asked = True
        head = {"version": VERSION, "kind": self._adapter.kind, "epoch": epoch}
        if not self._adapter.per_rank:
            return {**head, **state}
        return {**head, "ranks": [state] if self._rank_group is None else self._rank_group.exchange(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the position of `state_dict()` in the next iteration; later ones are whole epochs.

        Raises:
            ArgumentTypeError: Not a loader's state.
            UsageError: The state is that of another kind of loader, or of another number of ranks.
        """
        state = dict(state_dict) if isinstance(state_dict, dict) else {}
        version, kind, epoch = [state.pop(key, None) for key in ("version", "kind", "epoch")]
        if version != VERSION or not isinstance(epoch, int):
            raise ArgumentTypeError(
                f"load_state_dict of a loader got {state_dict!r:.200}, which is not a loader's state. Pass "
                "the value of loader.state_dict()."
            )
        if kind != self._adapter.kind and not self._adapter.switch_kind(kind):
            raise UsageError(
                f"The position was saved in a loader of kind {kind!r}, but this one is of kind "
                f"{self._adapter.kind!r}: other dataset type, sampler, or arguments of setup_dataloaders. "
                "Create the loader with the same arguments, or remove it from the state passed to "
                "fabric.load()."
            )
        if self._adapter.per_rank:
            ranks = state.get("ranks", [])
            rank, world = (0, 1) if self._rank_group is None else self._rank_group[:2]
            if len(ranks) != world:
                raise UsageError(
                    f"The position was saved on {len(ranks)} ranks, and there are {world}: this loader's "
                    "order differs by rank, so it can only be resumed on the same number of ranks. Use "
                    f"{len(ranks)} ranks, or let Fabric shard the data (defaults of setup_dataloaders)."
                )
            state = ranks[rank]
        self._epoch, self._saved, self._iteration, self._was_set = epoch, state, None, True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of one epoch. Every iteration, even one left early, is the next epoch, from 0."""
        adapter = self._adapter
        epoch = adapter.epoch(self._epoch)
        if epoch != self._epoch:
            self.set_epoch(epoch)
        iteration = _Iteration(epoch, self._parts, _batch_size(self._user_loader))
        saved, iteration.number = self._saved, self._num_begun + 1
        if torch.is_grad_enabled():
            if not adapter.per_rank:
                sharded_iterations.add(iteration)
            if self._begun is not None:
                self._begun.record(self._user_loader, epoch)
        adapter.begin(epoch, saved)
        self._saved, self._iteration = None, iteration
        self._num_begun, self._was_asked, self._was_set = iteration.number, False, False
        self._epoch += 1
        begin = time.perf_counter()
        batches = self._start_iterator()
        if (
            self._rank_group is not None
            and not adapter.is_resolved
            and adapter.resolve_sharding(batches, self._rank_group)
        ):
            batches = self._start_iterator()
        pairs: Iterator[Any] = adapter.pairs(batches)
        lockstep = self._lockstep if self._lockstep != "train" or torch.is_grad_enabled() else None
        if self._rank_group is not None and adapter.per_rank and lockstep in ("drop", "error", "train"):
            pairs = self._rank_group.lockstep(pairs, adapter.remaining(), lockstep == "error")
        # On the host there is no copy, so batches are not traversed.
        if self._device is not None and self._device.type != "cpu":
            from fabric.data.prefetch import Prefetch

            pairs = Prefetch(pairs, self._device, self._move, self._prefetches)
        if self._rank_group is not None and not adapter.per_rank and torch.is_grad_enabled():
            # Outside of Prefetch, which requests one ahead.
            pairs = self._rank_group.compared(pairs, self._consistency_key, epoch)
        self.wait_seconds += time.perf_counter() - begin
        evaluates = not (self._chose_uneven or torch.is_grad_enabled())
        return self._received(pairs, iteration, evaluates)

    def _consistency_key(self) -> dict[str, Any] | None:
        return self._adapter.consistency_key() if threading.get_ident() == self._thread else None

    def _start_iterator(self) -> Iterator[Any]:
        if not getattr(self._dataloader, "num_workers", 0):
            return iter(self._dataloader)
        from fabric.launch.garbage import forking

        with forking():
            return iter(self._dataloader)

    def _received(self, pairs: Iterator[Any], iteration: _Iteration, evaluates: bool) -> Iterator[Any]:
        clock = time.perf_counter
        uneven_rows = 0 if self._chose_uneven else self._adapter.uneven_rows()
        before_last: list[Any] = []
        _active.append(iteration)
        try:
            while True:
                begin = clock()
                attribute = next(pairs, None)
                self.wait_seconds += clock() - begin
                if attribute is None:
                    break
                batch, iteration.position = attribute
                if self._iteration is not iteration:
                    self._continue(iteration)
                if uneven_rows:
                    before_last = [part.epoch_begun() for part in self._parts]
                yield batch
            if self._iteration is iteration:
                self._iteration = None
            if evaluates and not self._warned_of_repeats:
                self._warn_of_repeats()
            # A nested iteration may run on this rank alone.
            if _active == [iteration] and threading.get_ident() == self._thread:
                if uneven_rows and before_last == [part.epoch_begun() for part in self._parts]:
                    uneven_rows = 0  # no backward of the last batch
                for part, states_at_begin in zip(self._parts, iteration.states_at_begin, strict=True):
                    part.epoch_ended(states_at_begin, uneven_rows)
        finally:  # an error's traceback must not keep workers alive
            _active.remove(iteration)
            close = getattr(pairs, "close", None)
            if close is not None:
                close()

    def _continue(self, iteration: _Iteration) -> None:
        """Record that an iteration yields again after another one did, if the next position was not set."""
        if self._was_set:
            return
        self._iteration = iteration
        if self._was_asked and iteration.number != self._num_begun:
            self._was_asked = False
            rank_zero_warn(
                "loader.state_dict() or fabric.save has returned the position of another iteration than the "
                f"one that yields now: {_ITERATED_AGAIN}",
                category=PossibleUserWarning,
            )

    def _warn_of_repeats(self) -> None:
        """Warn once if an evaluation got samples twice."""
        repeats = self._adapter.repeats()
        if not repeats:
            return
        self._warned_of_repeats = True
        rank_zero_warn(
            f"The ranks got {repeats} under torch.no_grad(), so that all have equally many. A sum or a mean "
            'counts these twice. Write fabric.setup_dataloaders(loader, uneven="exact") to evaluate, or '
            'uneven="pad" if that is intended.',
            category=PossibleUserWarning,
        )

    @property
    def batches_done(self) -> int:
        """The number of batches of this epoch that the loop has received, including those before a resume.

        Equals `len(loader)` with the last one.

        Raises:
            UsageError: The number is unknown.
        """
        state = self._saved if self._iteration is None else self._adapter.at(self._iteration.position)
        done = 0 if state is None else self._adapter.done(state)
        if done is None:
            raise UsageError(
                f"loader.batches_done of {type(self._dataloader).__name__} is unknown, since it overrides "
                "__iter__. Count batches with `for index, batch in enumerate(loader):`."
            )
        return done

    def __len__(self) -> int:
        return self._adapter.length()

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataloader", "_user_loader"):  # while copying or unpickling
            raise AttributeError(name)
        holder = self._user_loader if name in _USER_ATTRIBUTES else self._dataloader
        attribute = attribute_of("loader", holder, name)
        if name not in ("sampler", "batch_sampler") or attribute is None:
            return attribute
        from fabric.data.proxies import SamplerProxy

        return SamplerProxy(getattr(self._user_loader, name), attribute, self.set_epoch)


def _is_fabric_move(move: Any) -> bool:
    """Whether `move` is a function of this package or a method of its strategies."""
    function = getattr(move, "__func__", move)
    return str(getattr(function, "__module__", "")).startswith("fabric.")
