"""`Evaluation`: ranks may evaluate a sharded model on different numbers of batches, or on one rank only.

A forward of a sharded model gathers parameters, which all ranks must take part in. In evaluation
(`model.eval()` under no_grad) a forward first meets the other ranks. Those that have finished are in another
call of Fabric by then: they see who is still evaluating, gather along without computing, and try their own
call again.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.plugins.collectives.frames import call_of

if TYPE_CHECKING:
    from torch.nn import Module

    from fabric.plugins.collectives.channel import Channel


_AT_ONCE = "all groups at once"


class Evaluation:
    """The evaluation forwards of one model, and the help of ranks that have finished.

    Invariants: every group is split again after an evaluation, so that a rank that evaluated and one that did
    not gather alike in the next forward. The first evaluation of a rank gathers all groups at once, since
    others could not know in which order it will come to them; the next ones go group by group, as it did.

    Args:
        root: The outermost module that `fully_shard` was called on.
        number: Of the model among those set up, the same on all ranks.
        channel: Of all ranks.
    """

    def __init__(self, root: Any, number: int, channel: Channel) -> None:
        self.root = root
        self.channel = channel
        self.verb = f"evaluation of model {number} ({type(root).__name__.removeprefix('FSDP')})"
        self.turned = False  # between training and evaluation since the last forward that was no evaluation
        self._order: list[int] = []  # groups as the last evaluation gathered them
        self._trace: list[int] | None = None  # as this one has, so far
        self._at_once = False  # whether it gathers all groups first: a rank does not know the order yet
        self._kept: list[list[Any]] = []
        self._possible = False
        self._states: list[Any] = root._get_fsdp_state()._state_ctx.all_states
        self._ahead = [state._states_to_forward_prefetch for state in self._states]
        for index, state in enumerate(self._states):
            for module in state._modules:
                module.register_forward_pre_hook(partial(self.entering, index), prepend=True)
        if channel.collective.guard is not None:
            channel.collective.guard.assistants[self.verb] = partial(_assist, weakref.ref(self))

    def enter(self) -> None:
        """A forward or method of the model begins."""
        self._possible = not (torch.is_grad_enabled() or self.root.training)
        if self.turned and not self._possible:
            self.turned = False
            self.channel.meet(call_of(f"forward after {self.verb}"))

    def leave(self) -> None:
        """It has ended, or failed."""
        self._possible = False
        if self._trace is None:
            return
        self._order, self._trace = self._trace, None
        for state, ahead, kept in zip(self._states, self._ahead, self._kept, strict=True):
            state._states_to_forward_prefetch = ahead
            for group, mesh_info in zip(state._fsdp_param_groups, kept, strict=True):
                group.post_forward_mesh_info = mesh_info
        self._split_all()

    def entering(self, index: int, module: Module | None = None, args: Any = None) -> None:
        """The forward comes to a group: the first one of an evaluation meets the other ranks."""
        if not self._possible or torch.compiler.is_compiling():
            return
        if self._states[index]._training_state.name == "PRE_BACKWARD":  # it has stand-ins
            return
        if self._trace is None:
            self._begin()
        if index not in self._trace or any([kept is not None for kept in self._kept[index]]):  # type: ignore[operator]
            self._trace.append(index)  # type: ignore[union-attr]

    def _begin(self) -> None:
        self._split_all()
        self._at_once = not self._order
        self.channel.meet(call_of(self.verb, " ".join(map(str, self._order)) or _AT_ONCE))
        self._trace = []
        self._kept = [[g.post_forward_mesh_info for g in state._fsdp_param_groups] for state in self._states]
        for state in self._states:  # a group is gathered when it is called, and not before
            state._states_to_forward_prefetch = []
            if self._at_once:
                for group in state._fsdp_param_groups:
                    group.post_forward_mesh_info = None
        if self._at_once:
            self._gather_all()

    def assist(self, orders: list[str], helps: bool) -> None:
        """Ranks said in which order they gather: agree on one, and with `helps` gather along with them."""
        at_once = _AT_ONCE in orders
        if not helps:
            self._at_once = at_once
            return
        with torch.inference_mode(False), torch.no_grad():
            self._split_all()
            if at_once:
                self._gather_all()
                self._split_all()
                return
            for index in orders[0].split():
                module = self._states[int(index)]._modules[0]
                module.unshard()
                module.reshard()

    def _gather_all(self) -> None:
        for state in self._states:
            state._modules[0].unshard()

    def _split_all(self) -> None:
        for state in self._states:
            state._modules[0].reshard()


def _assist(evaluation: weakref.ref[Evaluation], orders: list[str], helps: bool) -> None:
    model = evaluation()
    if model is None:
        raise UsageError("Other ranks evaluate a model that this rank has let go of. Keep it on all ranks.")
    model.assist(orders, helps)
