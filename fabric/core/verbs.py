"""Decorators of the methods of `Fabric`: wrong arguments raise an error with the right ones.

Called by the classes that `Fabric` derives from. They never change arguments or results.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from fabric.core.arguments import CHECKS, check_arguments
from fabric.core.errors import ArgumentTypeError

if TYPE_CHECKING:
    from fabric.core.compile import Verb

K = TypeVar("K", bound=type)


def explains_arguments(cls: K) -> K:
    """Decorate a class: its public methods, and `__init__`, explain arguments that they do not take."""
    for name, method in list(vars(cls).items()):
        is_public = name[0] != "_" or name == "__init__"
        if is_public and isinstance(method, FunctionType) and not hasattr(method, "explains_arguments"):
            setattr(cls, name, _explained(method, cls.__name__ if name == "__init__" else f"fabric.{name}"))
    return cls


def collective(method: Verb) -> Verb:
    """Decorate a method that needs `launch`. It also runs as plain Python in compiled functions, like
    `eager_verb`.
    """
    wrapped: Verb = _explained(method, f"fabric.{method.__name__}", needs_launch=True, is_eager=True)
    return wrapped


def eager_verb(method: Verb) -> Verb:
    """Decorate a method that runs as plain Python also in compiled functions."""
    wrapped: Verb = _explained(method, f"fabric.{method.__name__}", is_eager=True)
    return wrapped


def explain_arguments(verb: str, method: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise ArgumentTypeError if `method`, after a TypeError, does not take these arguments (with `self`)."""
    from fabric.core.advice import argument_text

    if (text := argument_text(verb, method, args, given)) is not None:
        raise ArgumentTypeError(text) from None


def _explained(method: Any, verb: str, *, needs_launch: bool = False, is_eager: bool = False) -> Any:
    """Return `method` with checks of the kinds of its arguments, and with errors for unknown ones.

    One frame for all of it: these methods are called in each step.
    """
    inner = inspect.unwrap(method)
    names = inner.__code__.co_varnames[1 : inner.__code__.co_argcount]
    checks = {
        name: CHECKS[key]
        for name, kind in inner.__annotations__.items()
        for key in (kind, name, f"{name}: {kind}")
        if key in CHECKS
    }
    # Without keywords, and with no more positional arguments than this, nothing is checked.
    unchecked = next((i for i, name in enumerate(names) if name in checks), sys.maxsize)
    plain: Any = None

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        if needs_launch and not self._launched:
            self._require_launch(f"{method.__name__}()")
        try:
            if kwargs or len(args) > unchecked:
                check_arguments(verb, checks, (*zip(names, args, strict=False), *kwargs.items()))
            if not is_eager or "torch._dynamo" not in sys.modules:
                return method(self, *args, **kwargs)
            if plain is None:
                import torch

                plain = torch.compiler.disable(method)
            return plain(self, *args, **kwargs)
        except TypeError:
            explain_arguments(verb, method, (self, *args), kwargs)
            raise

    call.explains_arguments = True  # type: ignore[attr-defined]
    return call
