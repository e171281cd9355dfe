"""Gradients of parameters that belong to no model that was set up. `FreeParameters` averages those of
optimizers that were set up. `StepCheck` rejects steps whose gradients differ between ranks.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from fabric.collectives.frames import call_of
from fabric.core._torch import tensor_of
from fabric.core.backward_listeners import (
    add_backward_listener,
    add_step_listener,
    optimizer_owners,
    parameters_of,
    setups,
)
from fabric.core.errors import UsageError
from fabric.strategies.error_translation import REPLACED
from fabric.strategies.tensor_sync import (
    average_gradients,
    broadcast_from_group_root,
    differing,
    grad_version,
)
from fabric.utilities.init import name_of_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel


class FreeParameters:
    """Averages gradients at the end of each outermost backward that changed them.

    Also under `no_backward_sync`, which concerns models only: a mean of means is the mean.

    Args:
        channel: The ranks over which gradients are averaged; None, or one rank: nothing is averaged.
        layout: Its `after_sync` is called after gradients were averaged.
    """

    def __init__(self, channel: Channel | None, layout: Any) -> None:
        self._channel = channel if channel is not None and channel.world_size > 1 else None
        self._layout = weakref.ref(layout)
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._count = 0
        self._numbers: dict[int, int] = {}
        """The number of each parameter, equal on all ranks, by its id."""
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._held: list[int] = []
        """The ids of all parameters of these optimizers, at the last backward."""
        if self._channel is not None:
            add_backward_listener(self)

    def add(self, parameters: Iterable[Tensor], optimizer: Optimizer | None = None) -> None:
        """Register parameters of an optimizer, and broadcast the first rank's values. All ranks must call
        this. Parameters that later replace them in the optimizer's groups are registered at a backward.
        """
        new = [*parameters]
        if self._channel is not None:
            broadcast_from_group_root(new, self._channel)
        if optimizer is not None:
            self._optimizers[optimizer] = None  # in the order of setup, as on all ranks
        self._register(new)

    def _register(self, new: Iterable[Tensor]) -> None:
        for p in new:
            # The entry of a freed parameter with this id: its place in the order differs between ranks.
            self._refs.pop(id(p), None)
            self._refs[id(p)], self._numbers[id(p)] = weakref.ref(p), self._count
            self._count += 1

    def _register_replaced(self) -> None:
        """Register parameters that the loop has put into the groups of these optimizers."""
        held = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
        ids = [*map(id, held)]
        dead = [key for key, ref in self._refs.items() if tensor_of(ref) is None]
        layout = self._layout()
        if layout is None or (ids == self._held and not dead):
            return
        for key in dead:  # another parameter may have this id now
            del self._refs[key]
        self._held, reduced = ids, layout.reduced_parameters()
        self._register({p: None for p in held if id(p) not in reduced})

    def alive(self) -> dict[int, Tensor]:
        """Return the registered parameters that still exist, by id, in the order of registration."""
        return {key: p for key, ref in self._refs.items() if (p := tensor_of(ref)) is not None}

    def around_pass(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a backward pass and average the gradients that it changed. All ranks must call this."""
        self._register_replaced()
        before = {key: grad_version(p) for key, p in self.alive().items()}
        run(*args, **kwargs)
        changed = {key: p for key, p in self.alive().items() if grad_version(p) != before[key]}
        if changed and self._channel is not None:
            names = [_free_name(self._numbers[key], p) for key, p in changed.items()]
            self._channel.check_call(call_of("backward", f"gradients of {', '.join(names)}"))
            average_gradients([*changed.values()], self._channel, "fabric.setup_optimizers")
            layout = self._layout()
            if layout is not None and layout.after_sync is not None and layout.traits.lockstep:
                layout.after_sync(None)

    def after_nested_pass(self) -> None:
        """Do nothing: gradients are averaged at the end of the outermost pass."""


class StepCheck:
    """Checks each optimizer of this process before its first step, and compares gradients that the layout
    does not average.

    The user may average these, so they are compared between ranks, at the 1st, 2nd, 4th, 8th, ... step with
    gradients after a backward that all ranks made: `fabric.backward`, or one through a set-up model.

    Args:
        strategy: Its layout returns which gradients it averages.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # A third-party strategy that overrides setup_module may average gradients outside the layout.
        self._is_ours = type(strategy).setup_module.__module__.startswith("fabric.")
        self._unaveraged: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[Tensor]]]
        self._unaveraged = weakref.WeakKeyDictionary()
        """The ids of an optimizer's parameters at its last step; those that the layout does not average."""
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps with gradients that ranks may compare."""
        self._number = next(setups)
        add_step_listener(self)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check the gradients before a step of any optimizer, unless a closure computes them in the step.

        Raises:
            UsageError: The gradients are of this rank alone.
        """
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        known, unaveraged = self._unaveraged.get(optimizer, (None, []))
        if held != known:  # the first step, or the loop has put other parameters into the groups
            hooked, unaveraged = bool(unaveraged), self._unaveraged_parameters(optimizer, not known)
            self._unaveraged[optimizer] = held, unaveraged
            self._steps.pop(optimizer, None)
            if unaveraged and not hooked:
                after = weakref.WeakMethod(self.after_step)  # the optimizer may outlive the strategy
                optimizer.register_step_post_hook(lambda *step: (call := after()) and call(*step))
        if unaveraged and not _has_closure(args, kwargs):
            self._compare(optimizer, unaveraged)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check the gradients after a step with a closure, which computed them.

        Raises:
            UsageError: The gradients are of this rank alone.
        """
        unaveraged = self._unaveraged.get(optimizer, ([], []))[1]
        if unaveraged and _has_closure(args, kwargs):
            self._compare(optimizer, unaveraged)

    def _unaveraged_parameters(self, optimizer: Any, is_first: bool) -> list[Tensor]:
        """Return the parameters whose gradients the layout does not average. Before the first step, raise if
        they are all parameters of a model.
        """
        reduced = self._strategy.layout.reduced_parameters() if self._is_ours else None
        owner, number = optimizer_owners.get(optimizer, (None, 0))
        if reduced is None or (owner and number > self._number and owner() not in (None, self._strategy)):
            return []  # or another strategy has set it up since
        alive = [p for p in parameters_of(optimizer) if p.requires_grad]
        unaveraged = {id(p): p for p in alive if id(p) not in reduced}
        for stepping in [] if unaveraged else self._strategy.hooks["stepping"]:
            stepping(optimizer)
        for module in self._strategy.modules if unaveraged and is_first else ():
            found = _names_of(module, unaveraged)
            if found and reduced.isdisjoint(map(id, module.parameters())):
                raise UsageError(
                    f"{type(optimizer).__name__}.step() trains {found} of {type(module).__name__}, whose "
                    "gradients are not averaged over ranks: the model that fabric.setup returned was "
                    "dropped. Write model, optimizer = fabric.setup(model, optimizer), and call that model."
                )
        return [*unaveraged.values()]

    def _compare(self, optimizer: Any, unaveraged: list[Tensor]) -> None:
        """Raise on all ranks if gradients of a backward that all ranks made differ between ranks."""
        if not self._strategy.layout.collective_backward:
            return
        steps = self._steps.get(optimizer, 0)
        if any([p.grad is not None for p in unaveraged]):
            self._steps[optimizer] = steps + 1
        if steps & (steps + 1):
            return
        kind, channel = type(optimizer).__name__, self._strategy.layout.channel
        channel.check_call(call_of(f"{kind}.step", "with gradients that fabric does not average"))
        if any(differing([p.grad for p in unaveraged], channel)):
            ids = {id(p): p for p in unaveraged}
            modules = [o for o in gc.get_objects() if issubclass(type(o), Module) and "_modules" in vars(o)]
            owners = [module for module in modules if _names_of(module, ids)]
            if any([module in owners for module in self._strategy.modules]):
                raise _replaced(kind, ids, next(m for m in self._strategy.modules if m in owners))
            what, fix = f"{len(ids)} parameters", "optimizer = fabric.setup_optimizers(optimizer)"
            if owners:
                owner = max(owners, key=lambda module: len([*module.modules()]))
                what = f"{_names_of(owner, ids)} of {type(owner).__name__}"
                fix = "loss_fn, loss_optimizer = fabric.setup(loss_fn, loss_optimizer)"
            raise UsageError(
                f"{kind}.step() trains {what}, which was not set up: its gradients are not averaged, and "
                f"differ between ranks. Write {fix}, or average them: fabric.all_reduce(p.grad). If each "
                "rank trains its own model, write loss.backward() in place of fabric.backward(loss)."
            )


def _free_name(index: int, parameter: Tensor) -> str:
    return name_of_parameter(parameter) or f"free parameter {index}"


def _replaced(kind: str, ids: dict[int, Tensor], model: Module) -> UsageError:
    return UsageError(
        f"{kind}.step() trains {_names_of(model, ids)} of {type(model).__name__}, whose gradients are not "
        f"averaged over ranks: these parameters were replaced after fabric.setup. {REPLACED}."
    )


def _has_closure(args: Any, kwargs: Any) -> bool:
    return len(args) > 1 or bool(kwargs)


def _names_of(module: Module, ids: dict[int, Tensor]) -> str:
    """Return the module's names of the parameters with these ids."""
    return ", ".join([name for name, p in module.named_parameters() if id(p) in ids])
