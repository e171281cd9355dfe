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
    """A subclass's `run` that launches when it is called before `launch()`."""

    @functools.wraps(run)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._launched:
            return run(self, *args, **kwargs)
        return self.launch(_RunInContext(run), *args, **kwargs)

    return wrapper


class _RunInContext:
    """A subclass's `run` as the function of `launch`. Pickles by the name of the method."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.name = run.__name__

    def __call__(self, fabric: Any, *args: Any, **kwargs: Any) -> Any:
        with fabric.strategy.module_sharded_context():
            return getattr(fabric, self.name)(*args, **kwargs)


def check_function(function: Any) -> None:
    if not callable(function):
        raise ArgumentTypeError(
            f"fabric.launch(function) needs a function, but got {function!r}. "
            f"Write fabric.launch(train), not fabric.launch(train()): launch calls it, on every rank."
        )
    if function is do_nothing or isinstance(function, _RunInContext):
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # builtins without a signature
        return
    if not [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]:
        name = getattr(function, "__name__", repr(function))
        raise ArgumentTypeError(
            f"fabric.launch calls {name}(fabric, ...), but {name} takes no argument. Write def {name}(fabric)."
        )
