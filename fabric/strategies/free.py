"""Gradients of what is in no model that was set up: `FreeParameters` averages those of set-up optimizers,
and `StepCheck` refuses steps with those that nobody averages.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from fabric.collectives.frames import call_of
from fabric.core._torch import tensor_of
from fabric.core.backward_listeners import add_backward_listener, add_step_listener, parameters_of
from fabric.core.errors import UsageError
from fabric.strategies.tensor_sync import (
    average_gradients,
    broadcast_from_group_root,
    differing,
    grad_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel


class FreeParameters:
    """Averages gradients at the end of each outermost backward that changed them, also under
    `no_backward_sync`: a mean of means is the mean, and the parameters are of no model.

    Args:
        channel: The ranks that average.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        add_backward_listener(self)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Average these parameters, too, which get the first rank's values. All ranks must call this."""
        new = [*parameters]
        broadcast_from_group_root(new, self._channel)
        self._refs.update({id(p): weakref.ref(p) for p in new})

    def held(self) -> dict[int, Tensor]:
        """The parameters that are still about, by id, in the order in which they were added."""
        return {key: p for key, ref in self._refs.items() if (p := tensor_of(ref)) is not None}

    def around_pass(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and average the gradients that it changed. All ranks must call this."""
        before = {key: grad_version(p) for key, p in self.held().items()}
        run(*args, **kwargs)
        changed = {key: p for key, p in self.held().items() if grad_version(p) != before[key]}
        if changed:
            places = ", ".join([str(place) for place, key in enumerate(before) if key in changed])
            self._channel.check_call(call_of("backward", f"gradients of free parameters {places}"))
            average_gradients([*changed.values()], self._channel, "fabric.setup_optimizers")

    def after_nested_pass(self) -> None:
        """Nothing: the outermost pass averages."""


class StepCheck:
    """Looks once at each optimizer of this process, before its first step.

    The user may average gradients of parameters that no model has. So they are compared, once, after a
    backward that all ranks made: `fabric.backward`, or one through a model that is set up.

    Args:
        strategy: Its layout knows which gradients it averages.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # A strategy of others that sets modules up may average gradients that the layout does not know.
        self._is_ours = type(strategy).setup_module.__module__.startswith("fabric.")
        self._unknown: weakref.WeakKeyDictionary[Optimizer, list[Tensor]]
        self._unknown = weakref.WeakKeyDictionary()
        add_step_listener(self)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer; a closure makes gradients in the step.

        Raises:
            UsageError: It would step with the gradients of this rank alone.
        """
        unknown = self._unknown.get(optimizer)
        if unknown is None:
            unknown = self._unknown[optimizer] = self._look(optimizer)
            if unknown:
                after = weakref.WeakMethod(self.after_step)  # the optimizer may outlive the strategy
                optimizer.register_step_post_hook(lambda *step: (call := after()) and call(*step))
        if unknown and not _has_closure(args, kwargs):
            self._compare(optimizer, unknown)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After a step with a closure, which made the gradients.

        Raises:
            UsageError: They are those of this rank alone.
        """
        if (unknown := self._unknown.get(optimizer)) and _has_closure(args, kwargs):
            self._compare(optimizer, unknown)

    def _look(self, optimizer: Any) -> list[Tensor]:
        """The parameters whose gradients the layout does not average."""
        reduced = self._strategy.layout.reduced() if self._is_ours else None
        if reduced is None:
            return []
        held = [p for p in parameters_of(optimizer) if p.requires_grad]
        unknown = {id(p): p for p in held if id(p) not in reduced}
        for stepping in [] if unknown else self._strategy.hooks["stepping"]:
            stepping(optimizer)
        for module in self._strategy.modules if unknown else ():
            found = _names(module, unknown)
            if found and reduced.isdisjoint(map(id, module.parameters())):
                raise UsageError(
                    f"{type(optimizer).__name__}.step() trains {found} of {type(module).__name__}, whose "
                    "gradients are not averaged over ranks: the model that fabric.setup returned was "
                    "dropped. Write model, optimizer = fabric.setup(model, optimizer), and call that model."
                )
        return [*unknown.values()]

    def _compare(self, optimizer: Any, unknown: list[Tensor]) -> None:
        """Raise on all ranks if gradients of a backward that all of them made differ between them."""
        if not self._strategy.layout.joint:
            return
        kind, channel = type(optimizer).__name__, self._strategy.layout.channel
        channel.check_call(call_of(f"{kind}.step", "with gradients that fabric does not average"))
        if any(differing([p.grad for p in unknown], channel)):
            ids = {id(p): p for p in unknown}
            modules = [o for o in gc.get_objects() if issubclass(type(o), Module) and "_modules" in vars(o)]
            owners = [module for module in modules if _names(module, ids)]
            what, fix = f"{len(ids)} parameters", "optimizer = fabric.setup_optimizers(optimizer)"
            if owners:
                owner = max(owners, key=lambda module: len([*module.modules()]))
                what = f"{_names(owner, ids)} of {type(owner).__name__}"
                fix = "loss_fn, loss_optimizer = fabric.setup(loss_fn, loss_optimizer)"
            raise UsageError(
                f"{kind}.step() trains {what}, set up by no fabric.setup: the gradients are those of each "
                f"rank alone, and differ. Write {fix}, or average them: fabric.all_reduce(p.grad). Where "
                "each rank trains its own, write loss.backward() in the place of fabric.backward(loss)."
            )
        if any([p.grad is not None for p in unknown]):
            self._unknown[optimizer] = []


def _has_closure(args: Any, kwargs: Any) -> bool:
    return len(args) > 1 or bool(kwargs)


def _names(module: Module, ids: dict[int, Tensor]) -> str:
    """The module's names of the parameters with these ids."""
    return ", ".join([name for name, p in module.named_parameters() if id(p) in ids])
