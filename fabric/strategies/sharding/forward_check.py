"""`ForwardCheck`: forwards of split models, compared between ranks before they gather. Made by layouts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from fabric.collectives.frames import ALONE
from fabric.core._torch import backward_pass
from fabric.core.compile import eager
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch.nn import Module


class ForwardCheck:
    """Calls of one model without gradients: nothing else would tell a rank that it is alone in one.

    Calls with gradients are compared in a step. Models or parts of other sizes, called in another order, may
    not come so far (gloo ends the process): of each of them the 1st, 2nd, 4th, 8th, ... is compared, too.

    Args:
        root: The model.
        layout: Its layout, which all ranks have.
        in_lockstep: Whether ranks compute parts of one call, so that another mode is another call.
    """

    def __init__(self, root: Module, layout: Any, in_lockstep: bool = False) -> None:
        self._root, self._layout, self._in_lockstep = root, layout, in_lockstep
        self._within: Any = None
        self._calls: Counter[str] = Counter()
        """How many had gradients, or were made by another call, by the name of the part."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        return self

    def watch(self, parts: list[Module]) -> None:
        """Compare calls of these modules between ranks, those that a method makes by itself, too."""
        names = {module: name for name, module in self._root.named_modules()}
        for part in parts:
            part.register_forward_pre_hook(partial(self._enter, names[part]))
            part.register_forward_hook(self._leave, always_call=True)

    @eager
    def check_forward(self, name: str = "") -> bool:
        """Compare before a call of the part of this name; returns whether no call is around it."""
        inner = self._within is not None
        if inner and not name:
            return False
        trains, mesh = inner or torch.is_grad_enabled(), self._layout.mesh
        if trains:
            self._calls[name] += 1
            count = self._calls[name]
            if count & (count - 1):
                return not inner
            gathers = self._in_lockstep or (mesh is not None and mesh.size(-1) == mesh.size())  # of all ranks
            # Rows of a mesh may differ in later ones.
            first = self._calls.total() == 1 and mesh is not None
            if not (gathers or first) or backward_pass() != -1:
                return not inner
        if self._layout.channel is not None:
            mode = ("in training" if self._root.training else "in evaluation") if self._in_lockstep else ""
            if not trains:
                # Else a rank that calls the model once more would gather parts of before and after a change.
                changes = sum([0 if p.is_inference() else p._version for p in self._root.parameters()])
                mode += f"{', ' * bool(mode)}weights after {changes} changes in place"
            verb = f"{'forward' if trains else ALONE} of {name_of(self._root)}{', its ' * bool(name)}{name}"
            try:
                self._layout.channel.check_barrier(verb, mode)
            except BaseException:
                self._calls[name] -= trains  # other ranks have not counted it
                raise
        return not inner

    def note(self, what: str) -> None:
        """Take into what a step compares that this rank does this with the model."""
        self._layout.passed = crc32(f"{name_of(self._root)} {what}".encode(), self._layout.passed)

    def enter(self, call: Any, name: str = "") -> bool:
        """A call begins: as `check_forward`, for all inside of it."""
        outermost = self.check_forward(name)
        if outermost:
            self._within = call
        return outermost

    def leave(self, call: Any) -> None:
        """It has ended."""
        if self._within is call:
            self._within = None

    def _enter(self, name: str, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter(module, name)

    def _leave(self, module: Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling():
            self.leave(module)
