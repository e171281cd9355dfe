"""`LocalSteps`: ranks train independently and average their parameters periodically (local SGD), or update
them by an outer optimizer (DiLoCo).

A round is `sync_every` steps of an optimizer; at its end the optimizer's parameters are averaged once.
Source: Stich, arXiv 1805.09767; Douillard et al., arXiv 2311.08105.
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
"""State entries of torch's optimizers that are scalars for parameters of any shape."""


class _Mean(NamedTuple):
    """Shape and dtype of a state tensor that is averaged over ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _has_mean(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _as_mean(key: str, value: Any, parameter: Tensor) -> Any:
    # 0-dim tensors are step counts and schedules; and the moments of 0-dim parameters.
    moment = _has_mean(value) and (value.dim() > 0 or (parameter.dim() == 0 and key not in _SCHEDULES))
    return _Mean(tuple(value.shape), value.dtype) if moment else value


class Round:
    """One optimizer's steps since the last synchronisation.

    Args:
        optimizer: The user's optimizer.
        outer: Creates the outer optimizer of copies of the parameters; None: there is none.
    """

    def __init__(self, optimizer: Optimizer, outer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.steps = 0
        self.synced: list[Tensor] = []
        self.outer: Optimizer | None = None
        if outer is not None:
            held = parameters_of(optimizer)
            self.synced = [torch.nn.Parameter(p.detach().clone(), _has_mean(p)) for p in held]
            self.outer = outer(self.synced)
            if not isinstance(self.outer, torch.optim.Optimizer):
                raise ArgumentTypeError(
                    f"outer_optimizer returned a {type(self.outer).__name__} for a list of parameters, not "
                    "an optimizer. Write outer_optimizer=lambda parameters: torch.optim.SGD(parameters, "
                    "lr=0.7, momentum=0.9, nesterov=True)."
                )

    @torch.no_grad()
    def begin_next(self, parameters: list[Tensor]) -> None:
        """Begin a new round: step the outer optimizer from the mean of all ranks, which `parameters` hold."""
        self.steps = 0
        if self.outer is None:
            return
        for before, parameter in zip(self.synced, parameters, strict=True):
            before.grad = before - parameter if _has_mean(parameter) else None
        self.outer.step()
        for before, parameter in zip(self.synced, parameters, strict=True):
            before.grad = None
            parameter.copy_(before)


def _entries(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer state of each parameter, with a `_Mean` in place of tensors to average."""
    states = [(p, optimizer.state.get(p, {})) for p in parameters_of(optimizer)]
    return [{key: _as_mean(key, value, p) for key, value in entry.items()} for p, entry in states]


def _merge_entries(optimizer: Any, ranks: list[list[dict[str, Any]]]) -> list[tuple[Tensor, float]]:
    """Merge the state entries of all ranks: add zeros for missing tensors to average; take all other entries
    from the first rank that has them. Return (tensor to average, fraction of ranks that had it).
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
    """All parameters on every rank; communication only at the end of a round.

    Args:
        sync_every: Number of steps of a round.
        outer_optimizer: As in `LocalSGDStrategy`.
    """

    traits = Traits(needs_launch=True, data_parallel=True, steps_locally=True, replicates=(), lockstep=False)

    def __init__(self, sync_every: int, outer_optimizer: Callable[[list[Tensor]], Optimizer] | None) -> None:
        self.sync_every, self.outer_optimizer = sync_every, outer_optimizer
        self._modules: WeakKeyDictionary[Module, SyncedBuffers] = WeakKeyDictionary()
        self._rounds: WeakKeyDictionary[Optimizer, Round] = WeakKeyDictionary()
        self._stepping: list[Optimizer] = []
        """Optimizers that setup returned and that are in a step now, the innermost one last."""
        self._remove_step_listener = add_step_listener(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sync_every, self.outer_optimizer)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module, with rank zero's values broadcast. All ranks must call this."""
        broadcast_from_zero([*module.parameters(), *shared_buffers(module).values()])
        self._register(module)
        return module

    def copied(self, model: Any) -> None:
        """Register a copied or unpickled model: its buffers are averaged, and its optimizers checked."""
        self._register(model._fabric_wrapped)

    def _register(self, module: Module) -> None:
        self._modules[module] = SyncedBuffers(module)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check that the optimizer was set up, before a step of any optimizer in this process.

        Raises:
            UsageError: It has parameters of set-up modules, and is neither set up nor inside of one that is:
                its parameters would never be averaged.
        """
        held = {*parameters_of(optimizer)}
        if any([held <= {*parameters_of(outside)} for outside in self._stepping]):
            return
        if any([not held.isdisjoint(module.parameters()) for module in self._modules]):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on an optimizer that setup did not return, so "
                "its parameters would never be averaged. Write model, optimizer = fabric.setup(model, "
                "optimizer), or optimizer = fabric.setup_optimizers(optimizer)."
            )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, and begin its first round. All ranks must call this."""
        self._begin(optimizer)
        return optimizer

    def check_added(self, parameters: list[Tensor]) -> None:
        """Raise if parameters cannot be added to an optimizer.

        Raises:
            UsageError: There is an outer optimizer, whose parameters are fixed.
        """
        if self.outer_optimizer is not None:
            raise UsageError(
                "add_param_group() was called after setup. The outer optimizer has only the parameters of "
                "setup. Pass all parameters to the optimizer before setup, also frozen ones."
            )

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of one step of an optimizer. The last step of a round ends it; all ranks must do so."""
        held = self._round_of(optimizer)
        self._stepping.append(optimizer)
        try:
            yield
        finally:
            self._stepping.pop()
        held.steps += 1
        if held.steps == self.sync_every:
            self._synchronise({optimizer: held})

    def end_rounds(self) -> None:
        """Synchronise parameters and optimizer states: moments are averaged over the ranks that have them,
        other entries are those of the first rank that has them. All ranks must call this.
        """
        if len(self._rounds) > 1:
            gc.collect()  # so that the same optimizers exist on all ranks
        rounds = dict(self._rounds)
        local = [(held.steps, _entries(optimizer)) for optimizer, held in rounds.items()]
        gathered = [local] if self.channel is None else gather_objects(local, self.channel, "end of a round")
        averaged = []
        for (optimizer, held), *ranks in zip(rounds.items(), *gathered, strict=True):
            held.steps = max([steps for steps, _ in ranks])
            averaged += _merge_entries(optimizer, [entries for _, entries in ranks])
        self._synchronise(
            {o: held for o, held in rounds.items() if held.steps}, [tensor for tensor, _ in averaged]
        )
        for tensor, fraction in averaged:
            if fraction < 1:
                tensor /= fraction

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """End the round, and return the user's module as on one rank. All ranks must call this."""
        self.end_rounds()
        return super().plain_module(module, keep, device)

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict, and begin new rounds from its values."""
        result, loaded = super().load_module_state(module, state, strict), {*module.parameters()}
        for optimizer, held in self._rounds.items():
            parameters = parameters_of(optimizer)
            if not loaded.isdisjoint(parameters):
                held.steps = 0
            for before, parameter in zip(held.synced, parameters, strict=False):
                if parameter in loaded:
                    before.data.copy_(parameter)
        return result

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer and of its outer optimizer."""
        state, outer = super().optimizer_state(optimizer), self._round_of(optimizer).outer
        return state if outer is None else {**state, OUTER: outer.state_dict()["state"]}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state, also one of another strategy, and begin a new round from the last round's values."""
        super().load_optimizer_state(optimizer, {key: state[key] for key in state if key != OUTER})
        held = self._round_of(optimizer)
        held.steps = 0
        if held.outer is not None:
            outer = {"state": state.get(OUTER, {}), "param_groups": held.outer.state_dict()["param_groups"]}
            held.outer.load_state_dict(map_tree(read_stored, outer))

    def teardown(self) -> None:
        """Remove the hooks of the layout."""
        self._remove_step_listener()

    def _round_of(self, optimizer: Optimizer) -> Round:
        return self._rounds.get(optimizer) or self._begin(optimizer)  # a copy of one that was set up

    def _begin(self, optimizer: Optimizer) -> Round:
        held = self._rounds[optimizer] = Round(optimizer, self.outer_optimizer)
        broadcast_from_zero(held.synced)  # steps of other optimizers may have changed parameters
        return held

    def _synchronise(self, rounds: dict[Optimizer, Round], moments: Sequence[Tensor] = ()) -> None:
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
            held.begin_next(parameters_of(optimizer))
        if self.after_sync is not None:
            ended = [m for m in self._modules if not parameters.keys().isdisjoint(m.parameters())]
            self.after_sync(ended or None, [p for p in parameters if _has_mean(p)])
