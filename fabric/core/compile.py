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
    """`verb`, run as plain Python also where a compiled function calls it.

    As torch.compiler.disable, which would import torch's compiler here and now (seconds) for everybody.
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
    """Whether `obj` is what `torch.compile(module)` gave."""
    # By name: importing the class would load all of dynamo.
    return isinstance(obj, Module) and type(obj).__name__ == "OptimizedModule" and hasattr(obj, "_orig_mod")


def uncompiled(module: Any) -> Any:
    """The module that was given to `torch.compile`, however often; `module` itself where it was not."""
    while is_compiled(module):
        module = module._orig_mod
    return module


def recompile(module: Module, like: Any) -> Module:
    """`module` compiled with the settings of `like`, a result of `torch.compile`."""
    compiled: Module = like.dynamo_ctx(module)
    return compiled
