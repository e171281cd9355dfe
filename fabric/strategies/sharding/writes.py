"""Methods of DTensors that write in place: each writes the same values as on one process.

Called by `dtensors.py`. A write by position gathers the whole tensor; all ranks must make it.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from fabric.core._torch import base_of, memory_of
from fabric.core.tree import map_tree
from fabric.strategies.sharding._torch import assign_shards, view_of

if TYPE_CHECKING:
    from torch import Tensor

_BY_POSITION = {
    *("__setitem__", "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_", "fill_diagonal_"),
    *("tril_", "triu_", "cumsum_", "cumprod_", "renorm_"),
}
"""Methods whose result for an element depends on its place, or on other elements."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_NO_VALUES = (
    *(
        "requires_grad_",
        "detach_",
        "share_memory_",
        "rename_",
        "resize_",
        "resize_as_",
        "set_",
        "as_strided_",
    ),
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "apply_", "map_", "map2_"),
    *("sparse_resize_", "sparse_resize_and_clear_"),
)
"""Methods that change other things than values, and methods that are Python functions."""
WRITES = (
    *[name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_" and name not in _NO_VALUES],
    *[f"__i{name}__" for name in _OPERATORS],
    "__setitem__",
)


_MOVES = "in-place operations that require placement changes"
"""Part of torch's error for a write that needs elements of other shards."""


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor and no DTensor."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def copied_base(tensor: Any) -> Any:
    """Return the DTensor that `tensor` is a view of by torch's rules, but a copy in memory; else None.

    `p[0]` of a sharded `p` is one: torch gathers the row, and writes into it are lost.
    """
    base = base_of(tensor)
    if base is None or not isinstance(base, DTensor) or memory_of(base) == memory_of(tensor):
        return None
    return base


def writer(name: str) -> Any:
    """Return the method `name` of DTensors."""
    write = getattr(torch.Tensor, name)
    by_position = name in _BY_POSITION

    @functools.wraps(write)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any([one.is_partial() for one in self.placements]) and _may_write(self):
            # A norm or a mean that the ranks have not reduced yet: torch refuses to write into it.
            assign_shards(self, self.redistribute(placements=[_reduced(one) for one in self.placements]))
        base = copied_base(self)
        moves = by_position and not _is_local(self, name, args)
        if (moves or base is not None) and _may_write(self):
            return _write_whole(self, self if base is None else base, write, args, kwargs)
        plain = [one for one in (*args, *kwargs.values()) if is_plain_tensor(one) and one.dim()]
        # A tensor that requires a gradient is an activation of this rank's data.
        mixes = plain and not (torch.is_grad_enabled() and any([one.requires_grad for one in plain]))
        try:
            with implicit_replication() if mixes else nullcontext():
                return write(self, *args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not (isinstance(error, NotImplementedError) or _MOVES in str(error)) or not _may_write(self):
                raise
        return _write_whole(self, self, write, args, kwargs)

    return call


def _is_local(tensor: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Whether a write selects all of each sharded dimension, so that each rank writes into its shard."""
    if name.startswith("index_") and len(args) > 1 and isinstance(args[0], int):
        written = args[0] % tensor.dim()
        moves = any([getattr(placement, "dim", None) == written for placement in tensor.placements])
        return not (moves or any([is_plain_tensor(value) and value.dim() for value in args[2:]]))
    if name != "__setitem__":
        return False
    parts = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all([isinstance(part, int | slice) for part in parts]):
        return False  # masks, lists, ...
    whole = [at for at in range(tensor.dim()) if at >= len(parts) or parts[at] == slice(None)]
    return all([one.is_replicate() or getattr(one, "dim", None) in whole for one in tensor.placements])


def _reduced(placement: Any) -> Any:
    return Replicate() if placement.is_partial() else placement


def _may_write(tensor: Any) -> bool:
    """Whether a tensor has values, and autograd neither refuses nor records a write into it."""
    return not (tensor.is_meta or (torch.is_grad_enabled() and tensor.requires_grad))


@torch.no_grad()
def _write_whole(self: Any, base: Any, write: Any, args: Any, kwargs: Any) -> Any:
    """Make the write on the gathered `base`, and keep this rank's shard. All ranks must call this."""
    whole = _gathered(base)
    place = whole if self is base else view_of(self, whole)
    args, kwargs = map_tree(lambda one: _gathered(one) if isinstance(one, DTensor) else one, (args, kwargs))
    result = write(place, *args, **kwargs)
    for tensor, value in {id(base): (base, whole), id(self): (self, place)}.values():
        torch.Tensor.copy_(tensor, _shard(value, tensor))
    return None if result is None else self


def _gathered(tensor: Any) -> Tensor:
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:  # offloaded
        return tensor.detach().to(tensor.device_mesh.device_type).full_tensor().to(local.device)  # type: ignore[no-any-return]
    return tensor.detach().full_tensor()  # type: ignore[no-any-return]


def _shard(whole: Tensor, like: Any) -> Any:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
