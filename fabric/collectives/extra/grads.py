"""Differentiable collectives. A gradient is that of the sum of all ranks' losses, as for the joined batch.

The backward pass runs a collective, too: all ranks must run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from fabric.collectives.channel import check_parts, op_name, reducible, to_tensors, torch_op
from fabric.collectives.extra.route import all_to_all_tree, reduce_scatter_tree
from fabric.collectives.frames import call_of, fold, format_tree
from fabric.collectives.gather import gather_tree
from fabric.collectives.objects import PickledObject, gather_pickled
from fabric.collectives.reduce import reduce_tree, wire_dtype
from fabric.core.errors import ConfigurationError
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel

    Verb = Callable[[Any], Any]


class _DifferentiableVerb(torch.autograd.Function):
    """Apply `verb` to a list of tensors, and `backward_verb` to the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, verb: Verb, backward_verb: Verb, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(verb([tensor.detach() for tensor in tensors]))
        ctx.backward_verb = backward_verb
        ctx.differentiable = (
            [_is_differentiable(tensor) for tensor in tensors],
            [_is_differentiable(result) for result in results],
        )
        ctx.mark_non_differentiable(*[result for result in results if not _is_differentiable(result)])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs, outputs = ctx.differentiable
        # Copies, because autograd may use the same gradient tensor elsewhere.
        copies = [
            grad.clone(memory_format=torch.contiguous_format)
            for grad, differentiable in zip(grads, outputs, strict=True)
            if differentiable
        ]
        of_inputs = iter(ctx.backward_verb(copies) if copies else [])
        return None, None, *[next(of_inputs) if differentiable else None for differentiable in inputs]


def _is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients flow through a tensor: not for integers, nor for float8, which has no sum."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def apply_verb(verb: Verb, backward_verb: Verb, tensors: list[Tensor]) -> list[Tensor]:
    """Return `verb(tensors)`, differentiable: gradients are `backward_verb(gradients of the results)`."""
    return list(_DifferentiableVerb.apply(verb, backward_verb, *tensors))  # type: ignore[no-untyped-call]


def all_gather_with_grads(data: Any, channel: Channel, *, verb: str = "all_gather(sync_grads=True)") -> Any:
    """Return the result of `gather_tree`; gradients flow back to the rank that sent each part."""
    tensors, spec = _tensors(data, channel, "all_gather")

    def gather(parts: list[Tensor]) -> list[Tensor]:
        return flatten(gather_tree(unflatten(parts, spec), channel, verb=verb), CONSTANTS)[0]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        summed = reduce_scatter_tree(grads, "sum", channel, label="backward of all_gather")
        return [part[0] for part in summed]

    return unflatten(apply_verb(gather, backward, tensors), spec, data)


def all_reduce_with_grads(data: Any, op: Any, channel: Channel, *, verb: str = "all_reduce") -> Any:
    """Return the result of `reduce_tree` as a new tree; gradients flow back to every rank's part."""
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating(verb):
        op = torch_op("sum" if op is None else op)
        name, tensors = op_name(op), reducible(leaves, op, channel.transport.device, verb)
        if name not in _ALONG_RANKS:
            raise ConfigurationError(
                f"{verb}({name}, sync_grads=True): {name} has no gradient. Write one of "
                f"{', '.join(_ALONG_RANKS)}."
            )
    label = f"{verb}({name}, sync_grads=True)"
    # Computed from the data of all ranks as in one process, so that ties share the gradient equally.
    tables = flatten(all_gather_with_grads(unflatten(tensors, spec), channel, verb=label), CONSTANTS)[0]
    return unflatten([_along_ranks(table, op) for table in tables], spec, data)


def reduce_scatter_with_grads(data: Any, op: Any, channel: Channel) -> Any:
    """Return the result of `reduce_scatter_tree`; gradients flow back to every rank's part."""
    tensors, spec = _tensors(data, channel, "reduce_scatter")
    with channel.validating("reduce_scatter"):
        check_parts(tensors, channel.world_size, "reduce_scatter")
    reduced = all_reduce_with_grads(unflatten(tensors, spec), op, channel, verb="reduce_scatter")
    rank = channel.collective.rank_in_group
    parts = [t.tensor_split(channel.world_size)[rank].clone() for t in flatten(reduced, CONSTANTS)[0]]
    return unflatten(parts, spec, data)


def all_to_all_with_grads(data: Any, channel: Channel) -> Any:
    """Return the result of `all_to_all_tree`; gradients flow back to the rank that sent each part."""
    tensors, spec = _tensors(data, channel, "all_to_all")

    def route(parts: list[Tensor]) -> list[Tensor]:
        verb = "all_to_all(sync_grads=True)"
        return flatten(all_to_all_tree(unflatten(parts, spec), channel, verb=verb), CONSTANTS)[0]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        routed: list[Tensor] = all_to_all_tree(grads, channel, verb="backward of all_to_all")
        return routed

    return unflatten(apply_verb(route, backward, tensors), spec, data)


def all_gather_uneven(data: Any, how: str, channel: Channel, sync_grads: bool) -> Any:
    """Return every rank's leaves, whose shapes may differ: as lists of `world_size` tensors, or concatenated
    on dim 0.

    Raises:
        ConfigurationError: "cat" of numbers.
        CollectiveMismatch: Structure or dtypes differ (for "cat", shapes beyond dim 0, too); raised on all
            ranks.
    """
    tensors, spec = _tensors(data, channel, "all_gather")
    rank, world = channel.collective.rank_in_group, channel.world_size
    verb = f"all_gather(uneven={how!r}{', sync_grads=True' if sync_grads else ''})"
    with channel.validating(verb):
        call = call_of(verb, format_tree(spec, [_describe(tensor, how) for tensor in tensors]))

    def gather(parts: list[Tensor]) -> list[Tensor]:
        pickled = PickledObject([part.detach().as_subclass(torch.Tensor) for part in parts], verb)
        by_rank = gather_pickled(call, pickled, channel)
        return [of_rank[i] for i in range(len(parts)) for of_rank in by_rank]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        summed: list[Tensor] = reduce_tree(grads, "sum", channel, label="backward of all_gather")
        return summed[rank::world]

    flat = apply_verb(gather, backward, tensors) if sync_grads and tensors else gather(tensors)
    leaves: list[Any] = [flat[i : i + world] for i in range(0, len(flat), world)]
    return unflatten([torch.cat(leaf) for leaf in leaves] if how == "cat" else leaves, spec, data)


_ALONG_RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda table: table.sum(0),
    "mean": lambda table: table.mean(0),
    "min": lambda table: table.amin(0),
    "max": lambda table: table.amax(0),
    "product": lambda table: table.prod(0),
}


def _along_ranks(table: Tensor, op: Any) -> Tensor:
    """Return the reduction of (world_size, ...) data along ranks, in their dtype."""
    if table.is_floating_point() or table.is_complex():
        return _ALONG_RANKS[op_name(op)](table)
    return fold(table.to(wire_dtype(table.dtype, op), copy=True), op).to(table.dtype)


def _tensors(data: Any, channel: Channel, verb: str) -> tuple[list[Tensor], Any]:
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating(verb):
        return to_tensors(leaves, channel.transport.device, verb), spec


def _describe(tensor: Tensor, how: str) -> str:
    """Return the description of a leaf that must be equal on all ranks: dtype, device and shape."""
    dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    if how == "list":
        return f"{dtype} on {device}"
    if not tensor.dim():
        raise ConfigurationError(
            "all_gather(uneven='cat') concatenates along dim 0, but a leaf is a number or a tensor of shape "
            "[]. Write data.reshape(1), or uneven='error' or 'list'."
        )
    return f"{dtype}{['*', *tensor.shape[1:]]} on {device}".replace("'", "")
