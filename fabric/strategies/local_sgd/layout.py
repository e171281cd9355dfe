"""`LocalSteps`: every rank holds all parameters and steps by its own gradients; now and then all go on from
their mean (local SGD), or from where an outer optimizer takes it (DiLoCo).

A round is `sync_every` steps of an optimizer; its end sends that optimizer's parameters, once. Source: Stich,
arXiv 1805.09767; Douillard et al., arXiv 2311.08105.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fabric.checkpoint.portable import read_stored
from fabric.collectives.objects import gather_objects
from fabric.collectives.reduce import reduce_tree
from fabric.core.backward_listeners import add_step_listener, parameters_of
from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.traits import Traits
from fabric.core.tree import map_tree
from fabric.strategies.buffers import SyncedBuffers, shared_buffers
from fabric.strategies.layout import Layout
from fabric.strategies.tensor_sync import broadcast_from_zero
from fabric.utilities.state_keys import OUTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.topology import Topology


_SCHEDULES = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers keep of a parameter as one number, whatever its shape."""


class _Mean(NamedTuple):
    """A tensor of which all ranks get the mean."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _has_mean(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _told(key: str, value: Any, parameter: Tensor) -> Any:
    # Of one number are steps, schedules, and the moments of a parameter of one number.
    moment = _has_mean(value) and (value.dim() > 0 or (parameter.dim() == 0 and key not in _SCHEDULES))
    return _Mean(tuple(value.shape), value.dtype) if moment else value


class Round:
    """One optimizer's steps since the ranks were last alike.

    Args:
        optimizer: The user's.
        outer: Makes the outer optimizer of the values that all ranks had last; None: there is none.
    """

    def __init__(self, optimizer: Optimizer, outer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.steps = 0
        self.alike: list[Tensor] = []
        self.outer: Optimizer | None = None
        if outer is not None:
            held = parameters_of(optimizer)
            self.alike = [torch.nn.Parameter(p.detach().clone(), _has_mean(p)) for p in held]
            self.outer = outer(self.alike)
            if not isinstance(self.outer, torch.optim.Optimizer):
                raise ArgumentTypeError(
                    f"outer_optimizer gave a {type(self.outer).__name__} for a list of parameters. Write "
                    "outer_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, "
                    "nesterov=True)."
                )

    @torch.no_grad()
    def go_on(self, parameters: list[Tensor]) -> None:
        """From the mean of all ranks, which the parameters hold now."""
        self.steps = 0
        if self.outer is None:
            return
        for before, parameter in zip(self.alike, parameters, strict=True):
            before.grad = before - parameter if _has_mean(parameter) else None
        self.outer.step()
        for before, parameter in zip(self.alike, parameters, strict=True):
            before.grad = None
            parameter.copy_(before)


def _entries(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer state of each parameter, with a `_Mean` in place of averaged tensors."""
    known = [(p, optimizer.state.get(p, {})) for p in parameters_of(optimizer)]
    return [{key: _told(key, value, p) for key, value in entry.items()} for p, entry in known]


def _take(optimizer: Any, ranks: list[list[dict[str, Any]]]) -> list[tuple[Tensor, float]]:
    """Take in the entries of all ranks: what is averaged stands in all then, zeros where it was missing; all
    else is the first rank's that has it. Gives what is averaged, and the part of ranks that had it.
    """
    averaged = []
    for parameter, entries in zip(parameters_of(optimizer), zip(*ranks, strict=True), strict=True):
        for key, value in {key: v for entry in reversed(entries) for key, v in entry.items()}.items():
            own = optimizer.state[parameter]
            if not isinstance(value, _Mean):
                own[key] = value
                continue
            if key not in own:
                own[key] = torch.zeros(value.shape, dtype=value.dtype, device=parameter.device)
            averaged.append((own[key], sum([key in entry for entry in entries]) / len(ranks)))
    return averaged


class LocalSteps(Layout):
    """Nothing is sent in a forward, a backward or a step, but at the end of a round.

    Args:
        sync_every: Steps of a round.
        outer_optimizer: As in `LocalSGDStrategy`.
    """

    traits = Traits(needs_launch=True, data_parallel=True, steps_apart=True, replicates=(), lockstep=False)

    def __init__(self, sync_every: int, outer_optimizer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.sync_every, self.outer_optimizer = sync_every, outer_optimizer
        self._modules: WeakKeyDictionary[Module, SyncedBuffers] = WeakKeyDictionary()
        self._rounds: WeakKeyDictionary[Optimizer, Round] = WeakKeyDictionary()
        self._stepping: list[Optimizer] = []
        """Those that setup gave back and that are in a step now, the innermost one last."""
        self._remove_step_listener = add_step_listener(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sync_every, self.outer_optimizer)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module, with rank zero's values on all ranks. All ranks must call this."""
        broadcast_from_zero([*module.parameters(), *shared_buffers(module).values()])
        self._register(module)
        return module

    def copied(self, model: Any) -> None:
        """Register a copied or unpickled model: its buffers are averaged, and its optimizers watched."""
        self._register(model._fabric_joined)

    def _register(self, module: Module) -> None:
        self._modules[module] = SyncedBuffers(module)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer in this process.

        Raises:
            UsageError: It holds parameters of set-up modules, was not set up, and is no part of one that was:
                it would step with the gradients of this rank alone.
        """
        held = {*parameters_of(optimizer)}
        if any([held <= {*parameters_of(outside)} for outside in self._stepping]):
            return
        if any([not held.isdisjoint(module.parameters()) for module in self._modules]):
            raise UsageError(
                f"{type(optimizer).__name__}.step() came from an optimizer that setup did not give back: it "
                "knows of no other rank. Write model, optimizer = fabric.setup(model, optimizer), or "
                "optimizer = fabric.setup_optimizers(optimizer)."
            )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, whose first round begins."""
        self._begin(optimizer)
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

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of one step, outside of which the optimizer takes none. The last one of a round ends it,
        which all ranks must do.
        """
        held = self._round_of(optimizer)
        self._stepping.append(optimizer)
        try:
            yield
        finally:
            self._stepping.pop()
        held.steps += 1
        if held.steps == self.sync_every:
            self._end({optimizer: held})

    def end_rounds(self) -> None:
        """Let all ranks go on from one state, also of their optimizers: moments become the means of the ranks
        that have them, all else is the first rank's that has it. All ranks must call this.
        """
        if len(self._rounds) > 1:
            gc.collect()  # what is garbage must be so on all ranks
        rounds = dict(self._rounds)
        mine = [(held.steps, _entries(optimizer)) for optimizer, held in rounds.items()]
        told = [mine] if self.channel is None else gather_objects(mine, self.channel, "end of a round")
        averaged = []
        for (optimizer, held), *ranks in zip(rounds.items(), *told, strict=True):
            held.steps = max([steps for steps, _ in ranks])
            averaged += _take(optimizer, [entries for _, entries in ranks])
        self._end({o: held for o, held in rounds.items() if held.steps}, [tensor for tensor, _ in averaged])
        for tensor, part in averaged:
            if part < 1:
                tensor /= part

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """End the round, and return the user's module as on one rank. All ranks must call this."""
        self.end_rounds()
        return super().plain_module(module, keep, device)

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict; new rounds begin, from its values."""
        told, loaded = super().load_module_state(module, state, strict), {*module.parameters()}
        for optimizer, held in self._rounds.items():
            parameters = parameters_of(optimizer)
            if not loaded.isdisjoint(parameters):
                held.steps = 0
            for before, parameter in zip(held.alike, parameters, strict=False):
                if parameter in loaded:
                    before.data.copy_(parameter)
        return told

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, and what the outer one knows of its parameters."""
        state, outer = super().optimizer_state(optimizer), self._round_of(optimizer).outer
        return state if outer is None else {**state, OUTER: outer.state_dict()["state"]}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state, also one of another strategy; a new round begins, of the values of the old one."""
        super().load_optimizer_state(optimizer, {key: state[key] for key in state if key != OUTER})
        held = self._round_of(optimizer)
        held.steps = 0
        if held.outer is not None:
            known = {"state": state.get(OUTER, {}), "param_groups": held.outer.state_dict()["param_groups"]}
            held.outer.load_state_dict(map_tree(read_stored, known))

    def teardown(self) -> None:
        """Remove the hooks of the layout."""
        self._remove_step_listener()

    def _round_of(self, optimizer: Optimizer) -> Round:
        return self._rounds.get(optimizer) or self._begin(optimizer)  # a copy of one that was set up

    def _begin(self, optimizer: Optimizer) -> Round:
        held = self._rounds[optimizer] = Round(optimizer, self.outer_optimizer)
        broadcast_from_zero(held.alike)  # others' steps may have moved what it takes
        return held

    def _end(self, rounds: dict[Optimizer, Round], moments: Sequence[Tensor] = ()) -> None:
        parameters = dict.fromkeys([p for optimizer in rounds for p in parameters_of(optimizer)])
        shared = [*parameters, *moments]
        for module, buffers in self._modules.items():
            if not parameters.keys().isdisjoint(module.parameters()):
                shared += buffers.tensors()
        shared = [tensor for tensor in dict.fromkeys(shared) if _has_mean(tensor)]
        if shared and self.channel is not None:
            with torch.no_grad():
                reduce_tree(shared, "mean", self.channel, label="end of a round")
        for optimizer, held in rounds.items():
            held.go_on(parameters_of(optimizer))
        if self.after_sync is not None:
            ended = [m for m in self._modules if not parameters.keys().isdisjoint(m.parameters())]
            self.after_sync(ended, [p for p in parameters if _has_mean(p)])
