"""Support for torch.compile, without importing it: compiled modules, and verbs that stay plain Python."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable

Verb = TypeVar("Verb", bound="Callable[..., Any]")


def eager(verb: Verb) -> Verb:
    """Wrap `verb` so that it runs as plain Python also inside compiled functions.

    `torch.compiler.disable` does the same, but imports torch's compiler at once, which takes seconds.
    """
    disabled: Any = None

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # so nothing is being compiled
            return verb(*args, **kwargs)
        if disabled is None:
            import torch

            disabled = torch.compiler.disable(verb)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_compiled(obj: object) -> bool:
    """Whether `obj` is a result of `torch.compile(module)`."""
    # By name: importing the class would load all of dynamo.
    return isinstance(obj, Module) and type(obj).__name__ == "OptimizedModule" and hasattr(obj, "_orig_mod")


def uncompiled(module: Any) -> Any:
    """Return the module without any `torch.compile` around it."""
    while is_compiled(module):
        module = module._orig_mod
    return module


def recompile(module: Module, like: Any) -> Module:
    """Compile `module` with the settings of `like`, a result of `torch.compile`."""
    compiled: Module = like.dynamo_ctx(module)
    return compiled
