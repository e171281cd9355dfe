"""Steps of any optimizer of this process, those that nobody set up among them: layouts check before each."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class StepWatcher(Protocol):
    """Who wants to know."""

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step begins, with these arguments (the optimizer is the first one); raise to refuse it."""


def watch_steps(watcher: StepWatcher) -> Callable[[], None]:
    """From now on call `watcher.before_step` before each step; it is held weakly. Gives what ends this."""
    method = weakref.WeakMethod(watcher.before_step)

    def tell(optimizer: Any, args: Any, kwargs: Any) -> None:
        call = method()
        if call is not None:
            call(optimizer, args, kwargs)

    handle = register_optimizer_step_pre_hook(tell)
    weakref.finalize(watcher, handle.remove)
    return handle.remove


def _parameters(optimizer: Any) -> set[Any]:
    return {p for group in optimizer.param_groups for p in group["params"]}


class OnlySetUp:
    """Refuses steps of optimizers that hold parameters of set-up modules but those that setup gave back."""

    def __init__(self) -> None:
        self.modules: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.end = watch_steps(self)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer in this process.

        Raises:
            UsageError: It would step with the gradients of this rank alone.
        """
        if optimizer in self.optimizers:
            return
        held = _parameters(optimizer)
        if any([held <= _parameters(outside) for outside in self.optimizers]):
            return  # a step that another one, around it, takes by it
        if any([not held.isdisjoint(module.parameters()) for module in self.modules]):
            raise UsageError(
                f"{type(optimizer).__name__}.step() came from an optimizer that setup did not give back: it "
                "knows of no other rank. Write model, optimizer = fabric.setup(model, optimizer), or "
                "optimizer = fabric.setup_optimizers(optimizer)."
            )
