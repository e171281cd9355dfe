"""Steps of any optimizer of this process, those that nobody set up among them: layouts check before each."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

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
