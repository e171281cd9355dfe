"""DTensors: conversion from and to full tensors, and operations that torch does not support.

All ranks of the mesh must make the calls that communicate.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from fabric.checkpoint.portable import LazyTensor, placeholder_of, read_stored
from fabric.core._torch import memory_of
from fabric.core.backward_listeners import parameters_of
from fabric.core.errors import UsageError
from fabric.core.torch_versions import older_than
from fabric.core.tree import map_tree
from fabric.strategies._torch import value_of
from fabric.strategies.sharding._torch import dtensor_handlers
from fabric.strategies.sharding.writes import WRITES, copied_base, is_plain_tensor, writer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def full_tree(tree: Any, keep: bool) -> Any:
    """Return the tree with every DTensor as a full tensor on the CPU. All ranks must call this.

    Args:
        tree: A state dict, or part of one. Tied tensors stay tied, also if `state_dict` detached each.
        keep: Whether this rank keeps the values; other ranks get meta tensors of the same shape.
    """
    gathered: dict[Any, Tensor] = {}

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        local = leaf.to_local()
        memory = memory_of(leaf), local.storage_offset(), local.stride()
        key = (*memory, leaf.dtype, leaf.shape, leaf.placements)
        if key not in gathered:
            gathered[key] = _full(leaf, keep)
        return gathered[key]

    return map_tree(full, tree)


def local_shard(full: Tensor, like: DTensor, name: str) -> DTensor:
    """Return this rank's shard of a full tensor, sharded like `like`. No communication.

    Of a `LazyTensor` only the shard is read.

    Raises:
        UsageError: The shapes differ.
    """
    _same_shape(full, like, name)
    local = like.to_local()
    if isinstance(full, LazyTensor):
        local = torch.empty_like(local, dtype=full.dtype)
        _read_part(full, like, local)
        layout = like.device_mesh, like.placements
        return DTensor.from_local(local, *layout, run_check=False, shape=like.shape, stride=like.stride())
    moved = full if local.is_meta else full.to(local.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def local_shards(state: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's shards of a full state, as an argument of `load_state_dict` of the targets' module.

    The shard of a `LazyTensor` is read into its target, to avoid a second copy in memory.

    Raises:
        UsageError: Shapes differ; nothing was read.
    """
    split = {
        key: target
        for key, value in state.items()
        if is_plain_tensor(value) and isinstance(target := targets.get(key), DTensor)
    }
    for key, target in split.items():
        _same_shape(state[key], target, key)
    parts = dict(state)
    for key, target in split.items():
        if isinstance(state[key], LazyTensor):
            _read_part(state[key], target, target.to_local())
            parts[key] = target
        else:
            parts[key] = local_shard(state[key], target, key)
    return parts


def _same_shape(full: Tensor, like: DTensor, name: str) -> None:
    if full.shape != like.shape:
        raise UsageError(
            f"{name} has shape {list(full.shape)} in the checkpoint and {list(like.shape)} in the model. "
            f"Load it into the model that it was saved from."
        )


def _read_part(full: LazyTensor, like: DTensor, local: Tensor) -> None:
    if like.device_mesh.get_coordinate() is not None:
        full.fill(local, like.__create_chunk_list__()[0].offsets)


def shard_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's full state with this rank's shards of values that are sharded as their
    parameter, and with DTensors of others that were computed from it.
    """
    parameters = parameters_of(optimizer)
    placed = dict(state["state"])
    for index, entry in state["state"].items():
        if isinstance(index, int) and index < len(parameters):
            held = optimizer.state.get(parameters[index], {})
            placed[index] = {key: _placed(v, parameters[index], held.get(key)) for key, v in entry.items()}
    return {**state, "state": placed}


def _placed(value: Any, parameter: Tensor, held: Any) -> Any:
    """Return a value of a parameter's state; `held` is that of the optimizer now, or None.

    A factor of a state (Adafactor, Shampoo) has sizes of the parameter only. torch computes it as a DTensor,
    which no operation joins with a plain tensor.
    """
    value = shard_like(value, parameter)
    if not is_plain_tensor(value) or not isinstance(parameter, DTensor) or is_plain_tensor(held):
        return value
    if value.numel() > 1 and {*value.shape} <= {1, *parameter.shape}:
        mesh = parameter.device_mesh
        full = read_stored(value).to(parameter.to_local().device)
        return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Return the shard of a `value` of the shape of `parameter`; other values unchanged."""
    fits = is_plain_tensor(value) and value.dim() > 0 and value.shape == parameter.shape
    return (
        local_shard(value, parameter, "optimizer state") if fits and isinstance(parameter, DTensor) else value
    )


_layouts: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layouts whose models have DTensors as parameters."""

_get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_FACTORIES = ("new_empty", "new_full", "new_ones", "new_zeros")


def patch_dtensor(layout: Any) -> None:
    """Patch DTensor operations to return the results of one process, or to raise. torch 2.13 does neither.

    - `p.norm().item()` raises outside of an optimizer's step: torch silently returns the value of this
      rank's shard. Its rule for that operation requires replicated tensors, and is not checked.
    - `nn.init` writes the values of one process: on a CPU torch draws the same numbers for each shard, and
      `eye_` writes a diagonal into each.
    - `torch.randn_like(p)` and others draw the numbers of one process, for the same reason.
    - `p.new_zeros(2, 3)` of a parameter returns a plain tensor, as forwards use.
    - Methods that write in place write the same values as on one process: see `writes.py`.
    - `p.data = t` and `p.grad.data = t` raise: torch silently changes nothing.

    Args:
        layout: A layout, in whose models parameter names are looked up for errors.
    """
    _layouts.add(layout)
    handlers = dtensor_handlers()
    if isinstance(handlers, dict):
        aten = torch.ops.aten
        handlers.setdefault(value_of, _number)
        fills = (
            aten.normal_,
            aten.uniform_,
            aten.exponential_,
            aten.cauchy_,
            aten.log_normal_,
            aten.geometric_,
        )
        if older_than("2.11"):  # adds shards of bools, so that `all` is true if one shard is
            handlers.setdefault(aten.all.default, _all)
        for op in (*[fill.default for fill in fills], aten.bernoulli_.float, aten.eye.m_out):
            handlers.setdefault(op, _fill)
        likes = aten.randn_like.default, aten.rand_like.default, aten.bernoulli.default, aten.bernoulli.p
        for op in (*likes, aten.randint_like.default, aten.randint_like.low_dtype):
            handlers.setdefault(op, _draw)
    for name, make in {**dict.fromkeys(_FACTORIES, _plain_factory), **dict.fromkeys(WRITES, writer)}.items():
        if name not in vars(DTensor):
            setattr(DTensor, name, make(name))
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if all([placement.is_replicate() for placement in tensor.placements]):
        return op(tensor.to_local())
    # `if not mask.any()`: all ranks must take the same branch; and all ranks make the steps of an optimizer.
    if tensor.dtype is torch.bool or _in_step():
        return op(tensor.full_tensor())
    where = ", ".join([str(placement) for placement in tensor.placements])
    raise UsageError(
        f"item() was called on a tensor that is split over ranks ({where}). This rank holds only a shard. "
        "Write tensor.full_tensor().item(), on all ranks. For the norm of all gradients use the result of "
        "fabric.clip_gradients."
    )


def _in_step() -> bool:
    """Whether an optimizer's step is running in this thread."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return True
    return False


def _all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].logical_not().any().full_tensor().logical_not()


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = kwargs.get("out", args[0])
    full = _whole_like(tensor)
    if not full.is_meta:
        args, kwargs = map_tree(lambda one: full if one is tensor else one, (args, kwargs))
        op(*args, **kwargs)
        tensor.to_local().copy_(local_shard(full, tensor, "").to_local())
    return tensor


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return this rank's shard of a random tensor, which all ranks draw as one process does."""
    like = args[0]
    whole = like.full_tensor() if op is torch.ops.aten.bernoulli.default else _whole_like(like)
    whole = op(whole, *args[1:], **kwargs)
    placements = [Replicate() if one.is_partial() else one for one in like.placements]
    return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)


def _whole_like(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)


def _plain_factory(name: str) -> Any:
    factory = getattr(torch.Tensor, name)

    @functools.wraps(factory)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.nn.Parameter):
            return factory(self.to_local().detach(), *args, **kwargs)  # type: ignore[attr-defined]
        return factory(self, *args, **kwargs)

    return make


def _data(self: Any) -> Any:
    if copied_base(self) is None:
        return _get_data(self)
    with torch.no_grad():  # `p[0].data.zero_()` finds `p` by the view that `p[0]` is
        return self.view_as(self)


def _set_data(self: Any, value: Tensor) -> None:
    """Set `tensor.data = value` of a DTensor.

    Raises:
        UsageError: It is a parameter of a model that was set up, or the gradient of one.
    """
    models = [model for layout in list(_layouts) for model in layout.models()]
    for name, parameter in [pair for model in models for pair in model.named_parameters()]:
        if (self is parameter or self is parameter.grad) and memory_of(value) != memory_of(self):
            of, way = ("", ".data") if self is parameter else (".grad", ".grad")
            raise UsageError(
                f"{name}{of}.data = ... would change nothing: {name} is split over ranks, and this rank has "
                f"a part of it. Write {name}{way}.copy_(...)."
            )
    torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def local_gradients_by_group(parameters: Iterable[Tensor]) -> list[tuple[list[Tensor], list[Any]]]:
    """Return this rank's shards of gradients, with the process groups that have the other shards."""
    return [
        (grads, [layout[0].get_group(dim) for dim, one in enumerate(layout[1]) if not one.is_replicate()])
        for layout, grads in _local_grads(parameters).items()
    ]


def _full(tensor: DTensor, keep: bool) -> Tensor:
    device = tensor.device_mesh.device_type
    if tensor.to_local().device.type != device:  # offloaded: messages are sent from the mesh's device
        tensor = tensor.to(device)  # type: ignore[assignment]
    value: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    if not keep:
        return placeholder_of(value)
    return value.cpu() if value.device.type != "cpu" else value.clone() if _is_view(value, tensor) else value


def _is_view(value: Tensor, of: DTensor) -> bool:
    return value.data_ptr() == of.to_local().data_ptr() and value.numel() > 0


def _local_grads(parameters: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Return this rank's shard of each gradient, in place, by mesh and placements."""
    grads: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            grads.setdefault((None, ()), []).append(grad.detach())
            continue
        if any([p.is_partial() for p in grad.placements]):  # not reduced yet
            whole = [Replicate() if p.is_partial() else p for p in grad.placements]
            parameter.grad = grad = grad.redistribute(placements=whole)
        grads.setdefault((grad.device_mesh, grad.placements), []).append(grad.to_local().detach())
    return grads
