"""`LocalSteps`: every rank holds all parameters and steps by its own gradients; now and then all go on from
their mean (local SGD), or from where an outer optimizer takes it (DiLoCo).

A round is `sync_every` steps of an optimizer; its end sends that optimizer's parameters, once. Source: Stich,
arXiv 1805.09767; Douillard et al., arXiv 2311.08105.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.traits import Traits
from fabric.plugins.collectives.reduce import reduce_tree
from fabric.strategies.layouts.agree import broadcast_from_zero
from fabric.strategies.layouts.layout import Whole
from fabric.utilities.steps import OnlySetUp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.topology import Topology

_OUTER = "outer"
"""In the state of a parameter: what the outer optimizer knows of it."""


class Round:
    """One optimizer's steps since the ranks were last alike.

    Args:
        optimizer: The user's.
        outer: Makes the outer optimizer of the values that all ranks had last; None: there is none.
    """

    def __init__(self, optimizer: Optimizer, outer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.steps = 0
        self._groups = optimizer.param_groups
        self.alike: list[Tensor] = []
        self.outer: Optimizer | None = None
        if outer is not None:
            self.alike = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
            self.outer = outer(self.alike)
            if not isinstance(self.outer, torch.optim.Optimizer):
                raise ArgumentTypeError(
                    f"outer_optimizer gave a {type(self.outer).__name__} for a list of parameters. Write "
                    "outer_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, "
                    "nesterov=True)."
                )

    @property
    def parameters(self) -> list[Tensor]:
        """All that the optimizer has now."""
        return [p for group in self._groups for p in group["params"]]

    @torch.no_grad()
    def begin(self) -> None:
        """From the values that the parameters have now, on all ranks."""
        self.steps = 0
        for before, parameter in zip(self.alike, self.parameters, strict=False):
            before.copy_(parameter)

    @torch.no_grad()
    def go_on(self) -> None:
        """From the mean of all ranks, which the parameters hold now."""
        self.steps = 0
        if self.outer is None:
            return
        for before, parameter in zip(self.alike, self.parameters, strict=True):
            before.grad = before - parameter
        self.outer.step()
        for before, parameter in zip(self.alike, self.parameters, strict=True):
            before.grad = None
            parameter.copy_(before)


class LocalSteps(Whole):
    """Nothing is sent in a forward, a backward or a step, but at the end of a round.

    Args:
        sync_every: Steps of a round.
        outer_optimizer: As in `LocalSGDStrategy`.
    """

    traits = Traits(needs_launch=True, data_parallel=True, steps_apart=True)

    def __init__(self, sync_every: int, outer_optimizer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.sync_every, self.outer_optimizer = sync_every, outer_optimizer
        self._steps = OnlySetUp()
        self._rounds: WeakKeyDictionary[Optimizer, Round] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"sync_every": self.sync_every, "outer_optimizer": self.outer_optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module, with rank zero's values on all ranks. All ranks must call this."""
        if topology.world_size > 1:
            broadcast_from_zero([*module.parameters(), *module.buffers()])
        self._steps.modules[module] = None
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, whose first round begins."""
        self._steps.optimizers[optimizer] = None
        self._rounds[optimizer] = Round(optimizer, self.outer_optimizer)
        return optimizer

    def check_added(self, parameters: list[Tensor]) -> None:
        """Before an optimizer takes in more parameters.

        Raises:
            UsageError: There is an outer optimizer, which knows those of the beginning.
        """
        if self.outer_optimizer is not None:
            raise UsageError(
                "add_param_group() came after setup, and the outer optimizer has the parameters of setup. "
                "Give the optimizer all its parameters before, frozen ones, too."
            )

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step; the last one of a round ends it, which all ranks must do."""
        held = self._rounds[optimizer]
        held.steps += 1
        if held.steps == self.sync_every:
            self._end([optimizer])

    def end_rounds(self) -> None:
        """Let all ranks go on from one state: also the moments of their optimizers become means. All ranks
        must call this.
        """
        if len(self._rounds) > 1:
            gc.collect()  # what is garbage must be so on all ranks
        stepped = [o for o, held in self._rounds.items() if held.steps]
        entries = [entry for optimizer in self._rounds for entry in optimizer.state.values()]
        self._end(stepped, [value for entry in entries for value in entry.values() if _is_mean(value)])

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """See the base; the round ends. All ranks must call this."""
        self.end_rounds()
        return super().plain_module(module, keep, device)

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict; new rounds begin, from its values."""
        told = super().load_module_state(module, state, strict)
        for held in self._rounds.values():
            held.begin()
        return told

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, with what the outer one knows of each parameter in it."""
        state = super().optimizer_state(optimizer)
        outer = self._rounds[optimizer].outer
        if outer is None:
            return state
        known = outer.state_dict()["state"]
        entries = {n: {**state["state"].get(n, {}), _OUTER: entry} for n, entry in known.items()}
        return {**state, "state": {**state["state"], **entries}}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state, also one of another strategy; a new round begins."""
        super().load_optimizer_state(optimizer, state)
        known = {p: entry.pop(_OUTER) for p, entry in optimizer.state.items() if _OUTER in entry}
        for parameter in [p for p in known if not optimizer.state[p]]:
            del optimizer.state[parameter]  # an SGD without momentum has none
        held = self._rounds[optimizer] = Round(optimizer, self.outer_optimizer)
        if held.outer is not None:
            alike = dict(zip(held.parameters, held.alike, strict=True))
            held.outer.state.update({alike[p]: entry for p, entry in known.items()})

    def teardown(self) -> None:
        """See the base."""
        self._steps.end()

    def _end(self, optimizers: list[Optimizer], moments: Sequence[Tensor] = ()) -> None:
        rounds = [self._rounds[optimizer] for optimizer in optimizers]
        parameters = dict.fromkeys([p for held in rounds for p in held.parameters])
        shared = [*parameters, *moments]
        for module in self._steps.modules:
            if not parameters.keys().isdisjoint(module.parameters()):
                shared += [b for b in module.buffers() if b.is_floating_point()]
        if shared and self.channel is not None and self.channel.world_size > 1:
            with torch.no_grad():
                reduce_tree(shared, "mean", self.channel, label="end of a round")
        for held in rounds:
            held.go_on()


def _is_mean(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0
