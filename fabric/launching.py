"""The function of `fabric.launch`: its checks, and a subclass's `run` in its place."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable


def do_nothing(*_: Any) -> None:
    """The function of `fabric.launch()` where none is given."""


def launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass's `run` that launches if `launch()` was not called, inside the strategy's module context."""

    @functools.wraps(run)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._launched:
            return self.launch(_call_run, *args, **kwargs)
        if type(self).run is not wrapper:  # called by super().run(), inside the outermost one
            return run(self, *args, **kwargs)
        with self.strategy.module_sharded_context():
            return run(self, *args, **kwargs)

    return wrapper


def _call_run(fabric: Any, *args: Any, **kwargs: Any) -> Any:
    return fabric.run(*args, **kwargs)


def check_function(function: Any) -> None:
    """Raise unless `function` can be called with a Fabric.

    Raises:
        ArgumentTypeError: Not callable, or without a parameter for it.
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"fabric.launch(function) needs a function, but got {function!r}. Write fabric.launch(train), "
            "not fabric.launch(train()): launch calls it, on every rank."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return
    if not [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]:
        name = getattr(function, "__name__", repr(function))
        raise ArgumentTypeError(
            f"fabric.launch calls {name}(fabric, ...), but {name} takes no argument. Write def "
            f"{name}(fabric)."
        )
