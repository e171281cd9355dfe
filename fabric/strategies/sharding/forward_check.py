"""`ForwardCheck`: forwards of split models, compared between ranks before they gather. Made by layouts."""

from __future__ import annotations

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
    """The call check of one model's calls without gradients, which no step compares.

    Calls with gradients are compared in a step. If ranks call models or layers of different sizes in another
    order, gloo may abort the process before that. So outermost calls 1, 2, 4, 8, ... are checked, and all
    calls in them.

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
        self._compares = False
        """Whether calls inside of the current one are compared, too."""

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
        inner = self._within is not None
        if inner and not (name and self._compares):
            return False
        trains, mesh = inner or torch.is_grad_enabled(), self._layout.mesh
        if not inner:
            self._compares = False
        if trains and not inner:
            self._calls += 1
            all_ranks = self._in_lockstep or (mesh is not None and mesh.size(-1) == mesh.size())
            first = self._calls == 1 and mesh is not None  # replicas may differ in later calls
            if self._calls & (self._calls - 1) or not (all_ranks or first) or backward_pass() != -1:
                return True
            self._compares = all_ranks
        if self._layout.channel is not None:
            mode = ("in training" if self._root.training else "in evaluation") if self._in_lockstep else ""
            if not trains:
                self._layout.copies.check()
                # Else an additional call on one rank would gather shards from before and after a change.
                changes = sum([0 if p.is_inference() else p._version for p in self._root.parameters()])
                mode += f"{', ' * bool(mode)}weights after {changes} changes in place"
            verb = f"{'forward' if trains else ALONE} of {name_of(self._root)}{', its ' * bool(name)}{name}"
            self._layout.channel.check_barrier(verb, mode)
        return not inner

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
