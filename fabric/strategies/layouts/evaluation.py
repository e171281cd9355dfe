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


class Evaluation:
    """The evaluation forwards of one model, and the help of ranks that have finished.

    Invariant: every group is split again after an evaluation, so that a rank that evaluated and one that did
    not gather alike in the next forward.

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
        if self._trace is not None:
            self._order, self._trace = self._trace, None
            self._split_all()
            for state, ahead in zip(self._states, self._ahead, strict=True):
                state._states_to_forward_prefetch = ahead

    def entering(self, index: int, module: Module | None = None, args: Any = None) -> None:
        """The forward comes to a group: the first one of an evaluation meets the other ranks."""
        if not self._possible or torch.compiler.is_compiling():
            return
        if self._trace is None:
            self._split_all()
            self.channel.meet(call_of(self.verb, " ".join(map(str, self._order))))
            self._trace = []
            for state in self._states:  # a group is gathered when it is called, and not before
                state._states_to_forward_prefetch = []
        if any([not group.is_unsharded for group in self._states[index]._fsdp_param_groups]):
            self._trace.append(index)

    def assist(self, order: str) -> None:
        """Gather along with a forward of other ranks."""
        with torch.inference_mode(False), torch.no_grad():
            self._split_all()
            for index in order.split():
                module = self._states[int(index)]._modules[0]
                module.unshard()
                module.reshard()

    def _split_all(self) -> None:
        for state in self._states:
            state._modules[0].reshard()


def _assist(evaluation: weakref.ref[Evaluation], order: str) -> None:
    model = evaluation()
    if model is None:
        raise UsageError("Other ranks evaluate a model that this rank has let go of. Keep it on all ranks.")
    model.assist(order)
