"""Collectives that gradients flow through. A gradient is the sum over all ranks' losses, as on the joined
batch.

The backward pass makes a collective of its own: all ranks must run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from fabric.collectives.channel import check_parts, op_name, reducible, to_tensors, torch_op
from fabric.collectives.frames import call_of, fold, format_tree
from fabric.collectives.gather import gather_tree
from fabric.collectives.objects import Dumped, gather_dumped
from fabric.collectives.reduce import reduce_tree, wire_dtype
from fabric.core.errors import ConfigurationError
from fabric.core.slices import use_slice
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel

    Verb = Callable[[Any], Any]


class _Across(torch.autograd.Function):
    """A verb on a list of tensors, and the verb that its gradients take."""

    @staticmethod
    def forward(ctx: Any, verb: Verb, back: Verb, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(verb([tensor.detach() for tensor in tensors]))
        ctx.back = back
        ctx.flows = [_flows(tensor) for tensor in tensors], [_flows(result) for result in results]
        ctx.mark_non_differentiable(*[result for result in results if not _flows(result)])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        into, out = ctx.flows
        # Copies: autograd may have lent a gradient to others, too.
        given = [
            grad.clone(memory_format=torch.contiguous_format)
            for grad, flows in zip(grads, out, strict=True)
            if flows
        ]
        back = iter(ctx.back(given) if given else [])
        return None, None, *[next(back) if flows else None for flows in into]


def _flows(tensor: Tensor) -> bool:
    """Whether gradients can flow through it: not so for integers, and there is no sum of float8."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def across(verb: Verb, back: Verb, tensors: list[Tensor]) -> list[Tensor]:
    """`verb(tensors)`, differentiable: its gradients are `back(gradients of the results)`."""
    return list(_Across.apply(verb, back, *tensors))  # type: ignore[no-untyped-call]


def all_gather_with_grads(data: Any, channel: Channel, *, verb: str = "all_gather(sync_grads=True)") -> Any:
    """`gather_tree` through which gradients flow back to the rank that a part came from."""
    tensors, spec = _tensors(data, channel, "all_gather")

    def gather(parts: list[Tensor]) -> list[Tensor]:
        return flatten(gather_tree(unflatten(parts, spec), channel, verb=verb), CONSTANTS)[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        summed = use_slice("extra").reduce_scatter_tree(grads, "sum", channel, label="backward of all_gather")
        return [part[0] for part in summed]

    return unflatten(across(gather, back, tensors), spec, data)


def all_reduce_with_grads(data: Any, op: Any, channel: Channel, *, verb: str = "all_reduce") -> Any:
    """A new tree, as `reduce_tree` gives it, through which gradients flow back to every rank's part."""
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating(verb):
        op = torch_op("sum" if op is None else op)
        name, tensors = op_name(op), reducible(leaves, op, channel.transport.device, verb)
        if name not in _ALONG_RANKS:
            raise ConfigurationError(f"{verb}({name}, sync_grads=True): {name} has no gradient.")
    label = f"{verb}({name}, sync_grads=True)"
    # As one process would compute it from everybody's data, ties included.
    tables = flatten(all_gather_with_grads(unflatten(tensors, spec), channel, verb=label), CONSTANTS)[0]
    return unflatten([_along_ranks(table, op) for table in tables], spec, data)


def reduce_scatter_with_grads(data: Any, op: Any, channel: Channel) -> Any:
    """`reduce_scatter_tree` through which gradients flow back to every rank's part."""
    tensors, spec = _tensors(data, channel, "reduce_scatter")
    with channel.validating("reduce_scatter"):
        check_parts(tensors, channel.world_size, "reduce_scatter")
    reduced = all_reduce_with_grads(unflatten(tensors, spec), op, channel, verb="reduce_scatter")
    me = channel.collective.rank_in_group
    own = [t.tensor_split(channel.world_size)[me].clone() for t in flatten(reduced, CONSTANTS)[0]]
    return unflatten(own, spec, data)


def all_to_all_with_grads(data: Any, channel: Channel) -> Any:
    """`all_to_all_tree` through which gradients flow back the way the parts came."""
    tensors, spec = _tensors(data, channel, "all_to_all")
    exchange = use_slice("extra").all_to_all_tree

    def route(parts: list[Tensor]) -> list[Tensor]:
        verb = "all_to_all(sync_grads=True)"
        return flatten(exchange(unflatten(parts, spec), channel, verb=verb), CONSTANTS)[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        routed: list[Tensor] = exchange(grads, channel, verb="backward of all_to_all")
        return routed

    return unflatten(across(route, back, tensors), spec, data)


def all_gather_uneven(data: Any, how: str, channel: Channel, sync_grads: bool) -> Any:
    """Every rank's leaves, whose shapes may differ: as lists of `world_size` tensors, or concatenated on dim
    0.

    Raises:
        ConfigurationError: "cat" of numbers.
        CollectiveMismatch: Structure or dtypes differ (for "cat", shapes beyond dim 0, too); raised on all
            ranks.
    """
    tensors, spec = _tensors(data, channel, "all_gather")
    me, world = channel.collective.rank_in_group, channel.world_size
    verb = f"all_gather(uneven={how!r}{', sync_grads=True' if sync_grads else ''})"
    with channel.validating(verb):
        call = call_of(verb, format_tree(spec, [_kind(tensor, how) for tensor in tensors]))

    def gather(parts: list[Tensor]) -> list[Tensor]:
        dumped = Dumped([part.detach().as_subclass(torch.Tensor) for part in parts], verb)
        came = gather_dumped(call, dumped, channel)
        return [theirs[i] for i in range(len(parts)) for theirs in came]

    def back(grads: list[Tensor]) -> list[Tensor]:
        summed: list[Tensor] = reduce_tree(grads, "sum", channel, label="backward of all_gather")
        return summed[me::world]

    flat = across(gather, back, tensors) if sync_grads and tensors else gather(tensors)
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
    """The reduction of (world_size, ...) data along ranks, in their dtype."""
    if table.is_floating_point() or table.is_complex():
        return _ALONG_RANKS[op_name(op)](table)
    return fold(table.to(wire_dtype(table.dtype, op), copy=True), op).to(table.dtype)


def _tensors(data: Any, channel: Channel, verb: str) -> tuple[list[Tensor], Any]:
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating(verb):
        return to_tensors(leaves, channel.transport.device, verb), spec


def _kind(tensor: Tensor, how: str) -> str:
    """Return the description of a leaf that must be equal on all ranks: dtype, device and shape."""
    dtype, place = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    if how == "list":
        return f"{dtype} on {place}"
    if not tensor.dim():
        raise ConfigurationError(
            "all_gather(uneven='cat') concatenates along dim 0, but a leaf is a number or a tensor of shape "
            "[]. Write data.reshape(1), or uneven='error' or 'list'."
        )
    return f"{dtype}{['*', *tensor.shape[1:]]} on {place}".replace("'", "")
