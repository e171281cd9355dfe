"""Tensors that are split over ranks (DTensor): their full values, their own part of full values, their norm.

For layouts that shard or split. All ranks of the mesh must make each call that says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fabric.core.errors import UsageError
from fabric.core.tree import map_tree
from fabric.plugins.io.portable import kept_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer


def full_tree(tree: Any, keep: bool) -> Any:
    """The tree with every DTensor as a full tensor in host memory. All ranks must call this.

    Args:
        tree: A state dict, or part of one. Tensors that are the same stay the same (tied weights).
        keep: Whether this rank keeps the values; others take part, and hold meta tensors of the same shape.
    """
    made: dict[int, Tensor] = {}

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _full(leaf, keep)
        return made[id(leaf)]

    return map_tree(full, tree)


def own_part(full: Tensor, like: DTensor, name: str) -> DTensor:
    """This rank's part of a full tensor, laid out as `like`. No message is sent.

    Raises:
        UsageError: The shapes differ.
    """
    if full.shape != like.shape:
        raise UsageError(
            f"{name} has shape {list(full.shape)} in the checkpoint and {list(like.shape)} in the model. "
            f"Load it into the model that it was saved from."
        )
    local = like.to_local()
    here = full if local.is_meta else full.to(local.device)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


def part_of(value: Any, target: Any, name: str) -> Any:
    """What to load in the place of `target`: this rank's part of a full tensor, or the value itself."""
    whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return own_part(value, target, name) if whole and isinstance(target, DTensor) else value


def place_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's full state, cut to this rank's part where it is split like its parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    placed = {
        index: {key: part_like(value, parameters[index]) for key, value in entry.items()}
        if isinstance(index, int) and index < len(parameters)
        else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": placed}


def part_like(value: Any, parameter: Tensor) -> Any:
    """The part of `value` that belongs to this rank's part of `parameter`; other values as they are."""
    fits = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
    return part_of(value, parameter, "optimizer state") if fits else value


def refuse_partial_numbers() -> None:
    """Let `p.norm().item()` of a split tensor raise, where torch gives this rank's part without a word.

    torch means to allow whole values only (its rule for `_local_scalar_dense`), and does not check (2.13).
    """
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _number)


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if all([placement.is_replicate() for placement in tensor.placements]):
        return op(tensor.to_local())
    where = ", ".join([str(placement) for placement in tensor.placements])
    raise UsageError(
        f"A number was asked of a tensor that is split over ranks ({where}): this rank holds a part of it. "
        "Write tensor.full_tensor().item(), on all ranks; the norm of all gradients is what "
        "fabric.clip_gradients gives."
    )


def clip_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale gradients to a total norm of at most `max_norm`; the norm before, alike on all ranks. All ranks.

    One reduction per kind of layout (mesh and placements), whatever the number of parameters.
    """
    grads = _local_grads(parameters)
    wide = (
        torch.float64 if any([g.dtype == torch.float64 for group in grads.values() for g in group]) else None
    )
    totals = [
        _group_power(group, layout, norm_type, wide or torch.float32) for layout, group in grads.items()
    ]
    everything = [g for group in grads.values() for g in group]
    if not everything:
        return torch.tensor(0.0)
    stacked = torch.stack([t.to(everything[0].device) for t in totals])
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1.0 / norm_type)
    norm = norm.to(everything[0].dtype)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them by it anyway."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in everything:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


def clip_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]."""
    for group in _local_grads(parameters).values():
        torch._foreach_clamp_min_(group, -clip_value)
        torch._foreach_clamp_max_(group, clip_value)


def _full(tensor: DTensor, keep: bool) -> Tensor:
    device = tensor.device_mesh.device_type
    if tensor.to_local().device.type != device:  # offloaded: messages travel on the mesh's device
        tensor = tensor.to(device)  # type: ignore[assignment]
    value: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    if not keep:
        return kept_elsewhere(value)
    return value.cpu() if value.device.type != "cpu" else value.clone() if _is_view(value, tensor) else value


def _is_view(value: Tensor, of: DTensor) -> bool:
    return value.data_ptr() == of.to_local().data_ptr() and value.numel() > 0


def _local_grads(parameters: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """This rank's part of each gradient, in place, by mesh and placements."""
    grads: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            grads.setdefault(None, []).append(grad.detach())
            continue
        if any([p.is_partial() for p in grad.placements]):  # a sum that has not been made yet
            whole = [Replicate() if p.is_partial() else p for p in grad.placements]
            parameter.grad = grad = grad.redistribute(placements=whole)
        grads.setdefault((grad.device_mesh, grad.placements), []).append(grad.to_local().detach())
    return grads


def _group_power(grads: list[Tensor], layout: Any, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm to the power of its order (for infinity: the norm) of one group, summed over its ranks."""
    infinite = math.isinf(norm_type)
    held = [g for g in grads if g.numel()]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in held]
    local = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=grads[0].device)
    power = local.max() if infinite else local.pow(norm_type).sum()
    if layout is None:
        return power
    mesh, placements = layout
    power = power.to(mesh.device_type)
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(power, op, group=mesh.get_group(dim))
    return power
