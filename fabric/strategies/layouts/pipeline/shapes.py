"""`Valueless`: tensors that have a shape and no values here. What asks for values, and computing without.

The base of `Ghost` (parameters of other stages) and `Placeholder` (outputs of the last stage).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

READERS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "__reduce_ex__",
        "is_nonzero",
        "equal",
        "allclose",
    }
)
"""Names of operations that need values whatever they are given."""


class Valueless(torch.Tensor):
    """A tensor on the meta device that stands for values of another rank."""


def changes_first(name: str) -> bool:
    """Whether an operation changes its first argument; `a += b`, which names its result, is another."""
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))


def compute(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    made: Callable[[torch.Tensor], torch.Tensor],
    refusal: Callable[[], UsageError],
) -> Any:
    """What an operation gives on shapes.

    Args:
        func: The operation.
        args: Its arguments, all without values.
        kwargs: As `args`.
        made: Turns a plain result on the meta device into one that knows what it is.
        refusal: The error where torch finds that it needs values.
    """
    try:
        return as_valueless(func(*args, **kwargs), made)
    except NotImplementedError as error:
        raise refusal() from error
    except RuntimeError as error:
        if "meta" not in str(error) or isinstance(error, UsageError):
            raise
        raise refusal() from error


def as_valueless(result: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A result, or each tensor of a tuple or list of them, turned by `made` if it has no values."""
    if isinstance(result, torch.Tensor):
        return _turned(result, made)
    if not isinstance(result, tuple | list):
        return result
    leaves, spec = flatten(result)
    return unflatten([_turned(leaf, made) for leaf in leaves], spec, result)


def _turned(leaf: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    plain = isinstance(leaf, torch.Tensor) and leaf.is_meta and not isinstance(leaf, Valueless)
    return made(leaf) if plain else leaf
