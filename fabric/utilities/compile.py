"""`eager`: verbs that torch.compile must not look into. It breaks the graph around them instead."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

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
