"""Parameters that setup replaced by shards and the loop has kept: reading their values is an error.

Called by `split.py`. Holds no parameters.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from fabric.core._torch import no_subclass_functions
from fabric.core.errors import UsageError

_METADATA = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "is_cuda", "ndim")
_QUERIES = ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex")
_SHAPE_ONLY = {
    *[getattr(Tensor, name).__get__ for name in _METADATA],
    *[getattr(Tensor, name) for name in (*_QUERIES, "element_size", "__len__", "__repr__")],
}
"""Functions that read neither values nor gradient."""
_NAMES = "_fabric_name"


class ReplacedParameter(Parameter):
    """A parameter that setup took out of its model: all but its shape and dtype raises UsageError.

    Else `clip_grad_norm_(params)` with a list from before setup would silently clip nothing, and an average
    of weights would stay at their initial values.
    """

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """Raise UsageError."""
        _refuse(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return shape and dtype; raise UsageError for all else."""
        if func not in _SHAPE_ONLY:
            _refuse(_first(cls, [*args, *(kwargs or {}).values()]))
        with no_subclass_functions():
            return func(*args, **(kwargs or {}))


def mark_replaced(parameter: Any, name: str) -> None:
    """Make `parameter`, which was the model's `name`, an instance of `ReplacedParameter`."""
    if type(parameter) is Parameter:  # others may have values in other tensors
        parameter.__dict__[_NAMES] = name
        parameter.__class__ = ReplacedParameter


def _first(kind: type, values: list[Any]) -> Any:
    for value in values:
        if isinstance(value, kind):
            return value
        if isinstance(value, list | tuple) and (inside := _first(kind, [*value])) is not None:
            return inside
    return None


def _refuse(parameter: Any) -> NoReturn:
    name = "A parameter" if parameter is None else parameter.__dict__[_NAMES]
    raise UsageError(
        f"{name} from before fabric.setup was used. setup replaced it by its shard, so nothing that is "
        "done with it changes the model. Write params = list(model.parameters()) after setup, and for an "
        "optimizer model, optimizer = fabric.setup(model, optimizer)."
    )
