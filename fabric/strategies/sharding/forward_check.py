"""`ForwardCheck`: forwards of split models, compared between ranks before they gather. Made by layouts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from fabric.collectives.frames import ALONE
from fabric.core._torch import backward_pass
from fabric.core.compile import eager
from fabric.core.errors import CollectiveMismatch
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch.nn import Module


_END = "end, after its last layer"  # no layer has this name
_MOST_PLACES = 10_000


class CallOrder:
    """The order in which this rank calls models and layers, equal on all ranks as long as none raises."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """The call that followed last, by the calls before it in the call of the model."""
        self._place = self._started = 0
        self._changes: list[tuple[int, int | None]] = []
        """Entries of `_next` that were written, and their former values."""

    def differs(self, call: int, starts: bool) -> bool:
        """Add a call. Return whether another one, or none, followed last time after the same calls.

        If ranks make different calls, this returns True on at least one of them.

        Args:
            call: A number for what the call gathers.
            starts: Whether it is an outermost call of a model.
        """
        followed = self._next.get(self._place)
        differs = followed != call
        if differs:
            if len(self._next) > _MOST_PLACES:
                self._next.clear()  # on all ranks at the same call
            if len(self._changes) > _MOST_PLACES:
                self._changes.clear()
            self._changes.append((self._place, followed))
            self._next[self._place] = call
        self._place = hash((self._started if starts else self._place, call))
        if starts:
            self._started = call
        return differs

    def mark(self) -> tuple[int, int, int]:
        """Return the state for `undo`."""
        return self._place, self._started, len(self._changes)

    def undo(self, mark: tuple[int, int, int]) -> None:
        """Remove the calls since `mark`, which the ranks did not make together."""
        self._place, self._started, count = mark
        for place, followed in reversed(self._changes[count:]):
            if followed is None:
                self._next.pop(place, None)
            else:
                self._next[place] = followed
        del self._changes[count:]


class ForwardCheck:
    """The call check of one model's calls, before they gather parameters.

    Calls with gradients are compared in a step. If ranks gather layers of different sizes, gloo may abort the
    process before that. So a call is compared if one of another size followed the calls before it last time,
    and so are outermost calls 1, 2, 4, 8, ... with all calls in them.

    Args:
        root: The model.
        layout: Its layout.
        in_lockstep: Whether ranks compute shards of one call, so that they must agree in training mode.
    """

    def __init__(self, root: Module, layout: Any, in_lockstep: bool = False) -> None:
        self._root, self._layout, self._in_lockstep = root, layout, in_lockstep
        self._within: Any = None
        self._calls = 0
        """Number of outermost calls with gradients."""
        self._mark: tuple[Any, int, int] = layout.order.mark(), 0, 0
        """The order of calls, their number and their checksum before the last outermost call."""
        self._compares = False
        """Whether calls inside of the current one are compared, too."""
        self._sizes: dict[str, int] = {_END: 0}

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        return self

    def watch(self, parts: list[Module]) -> None:
        """Register hooks that check calls of these modules, also calls from within methods."""
        names = {module: name for name, module in self._root.named_modules()}
        for part in parts:
            part.register_forward_pre_hook(partial(self._enter, names[part]))
            part.register_forward_hook(self._leave, always_call=True)

    @eager
    def check_forward(self, name: str = "") -> bool:
        """Check a call of a submodule. Return whether it is the outermost. All ranks must call this."""
        outermost = self._within is None
        if not outermost and not name:
            return False
        trains, mesh = not outermost or torch.is_grad_enabled(), self._layout.mesh
        all_ranks = self._in_lockstep or (mesh is not None and mesh.size(-1) == mesh.size())
        compares = not outermost and self._compares
        if outermost:
            self._mark = self._layout.order.mark(), self._calls, self._layout.passed
            self._compares, compares = False, not trains
        if backward_pass() == -1:  # else it is recomputed
            if all_ranks:
                compares |= self._layout.order.differs(self._size_of(name), outermost)
            if trains and outermost:
                self._calls += 1
                self._compares = all_ranks and not self._calls & (self._calls - 1)
                # Replicas may differ in later calls.
                compares |= self._compares or (self._calls == 1 and mesh is not None)
        if compares:
            self._compare(name, trains)
        return outermost

    def abort(self, call: Any, error: BaseException) -> None:
        """Add the end of an outermost call that raised to the order; remove one that ranks did not make
        together.
        """
        if self._within is call and isinstance(error, CollectiveMismatch):
            self._undo()
        elif self._within is call:
            self.finish(completed=False)

    @eager
    def finish(self, completed: bool = True) -> None:
        """Check the end of an outermost call, after which a rank that has called fewer layers would gather
        another one.

        Args:
            completed: False: the call raised. Its end is added to the order, and not compared.
        """
        mesh = self._layout.mesh
        all_ranks = mesh is not None and mesh.size(-1) == mesh.size()
        if all_ranks and backward_pass() == -1:
            differs = self._layout.order.differs(self._sizes[_END], starts=False)
            if differs and completed:
                self._compare(_END, trains=True)

    def _size_of(self, name: str) -> int:
        """Return a number for the shapes and dtypes of a submodule's parameters."""
        if name not in self._sizes:
            parts = dict(self._root.named_modules())  # the user may have moved it since
            shapes = tuple([(p.shape, p.dtype) for p in parts.get(name, self._root).parameters()])
            self._sizes[name] = hash((shapes, self._in_lockstep and name))
        return self._sizes[name]

    def _compare(self, name: str, trains: bool) -> None:
        """Compare a call with the other ranks' calls."""
        if self._layout.channel is None:
            return
        mode = ("in training" if self._root.training else "in evaluation") if self._in_lockstep else ""
        if not trains:
            self._layout.copies.check()
            # Else an additional call on one rank would gather shards from before and after a change.
            changes = sum([0 if p.is_inference() else p._version for p in self._root.parameters()])
            mode += f"{', ' * bool(mode)}weights after {changes} changes in place"
        verb = f"{'forward' if trains else ALONE} of {name_of(self._root)}{', its ' * bool(name)}{name}"
        try:
            self._layout.channel.check_barrier(verb, mode)
        except CollectiveMismatch:
            self._undo()
            raise

    def _undo(self) -> None:
        """Remove the last outermost call, of which other ranks may have made no part."""
        order, self._calls, self._layout.passed = self._mark
        self._layout.order.undo(order)

    def record(self, what: str) -> None:
        """Add a call to the checksum that a step compares."""
        self._layout.passed = crc32(f"{name_of(self._root)} {what}".encode(), self._layout.passed)

    def enter(self, call: Any, name: str = "") -> bool:
        """Check a call, which lasts until `leave`. Return whether it is the outermost."""
        outermost = self.check_forward(name)
        if outermost:
            self._within = call
        return outermost

    def leave(self, call: Any) -> None:
        """Mark the end of a call."""
        if self._within is call:
            self._within = None

    def _enter(self, name: str, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter(module, name)

    def _leave(self, module: Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling():
            self.leave(module)
