"""Collectives that gradients flow through. A gradient is the sum over all ranks' losses, as on the joined
batch.

The backward pass makes a collective of its own: all ranks must run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from fabric.core.errors import ConfigurationError, FabricError
from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.channel import to_tensors
from fabric.plugins.collectives.gather import gather_tree, gather_uneven
from fabric.plugins.collectives.reduce import op_name, reduce_tree, reducible
from fabric.plugins.collectives.route import all_to_all_tree, reduce_scatter_tree
from fabric.plugins.collectives.torch_collective import torch_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel

    Verb = Callable[[Any], Any]


class _Across(torch.autograd.Function):
    """A verb on a list of tensors, and the verb that its gradients take."""

    @staticmethod
    def forward(ctx: Any, verb: Verb, back: Verb, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(verb([tensor.detach() for tensor in tensors]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # Copies: autograd may have lent a gradient to others, too.
        return None, None, *ctx.back([grad.clone(memory_format=torch.contiguous_format) for grad in grads])


def across(verb: Verb, back: Verb, tensors: list[Tensor]) -> list[Tensor]:
    """`verb(tensors)`, differentiable: its gradients are `back(gradients of the results)`."""
    return list(_Across.apply(verb, back, *tensors))  # type: ignore[no-untyped-call]


def all_gather_with_grads(data: Any, channel: Channel) -> Any:
    """`gather_tree` through which gradients flow back to the rank that a part came from."""
    tensors, spec = _tensors(data, channel, "all_gather")

    def gather(parts: list[Tensor]) -> list[Tensor]:
        return flatten(gather_tree(unflatten(parts, spec), channel, verb="all_gather(sync_grads=True)"))[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        summed = reduce_scatter_tree(grads, "sum", channel, label="backward of all_gather")
        return [part[0] for part in summed]

    return unflatten(across(gather, back, tensors), spec, data)


def all_reduce_with_grads(data: Any, op: Any, channel: Channel) -> Any:
    """A new tree, as `reduce_tree` gives it, through which gradients flow back to every rank's part."""
    leaves, spec = flatten(data)
    try:
        op = torch_op("sum" if op is None else op)
        tensors = reducible(leaves, op, channel, "all_reduce")
        name = op_name(op)
        if name not in _ALONG_RANKS and name not in ("sum", "mean"):
            raise ConfigurationError(f"all_reduce({name}, sync_grads=True): {name} has no gradient.")
    except FabricError as error:
        channel.refuse("all_reduce", error)
        raise
    if name in _ALONG_RANKS:  # as one process would compute it from everybody's data, ties included
        gathered = flatten(all_gather_with_grads(unflatten(tensors, spec), channel))[0]
        return unflatten([_ALONG_RANKS[name](table) for table in gathered], spec, data)
    label = f"all_reduce({name}, sync_grads=True)"

    def reduce(parts: list[Tensor]) -> list[Tensor]:
        copies = unflatten([part.clone() for part in parts], spec)
        return flatten(reduce_tree(copies, op, channel, label=label))[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        reduced: list[Tensor] = reduce_tree(grads, op, channel, label="backward of all_reduce")
        return reduced

    return unflatten(across(reduce, back, tensors), spec, data)


def reduce_scatter_with_grads(data: Any, op: Any, channel: Channel) -> Any:
    """`reduce_scatter_tree` through which gradients flow back to every rank's part."""
    leaves, spec = flatten(data)
    try:
        op = torch_op("sum" if op is None else op)
        tensors = reducible(leaves, op, channel, "reduce_scatter")
        name = op_name(op)
        if name not in _ALONG_RANKS and name not in ("sum", "mean"):
            raise ConfigurationError(f"reduce_scatter({name}, sync_grads=True): {name} has no gradient.")
    except FabricError as error:
        channel.refuse("reduce_scatter", error)
        raise
    world = channel.world_size
    if name in _ALONG_RANKS:
        tree = unflatten(tensors, spec)
        rows = flatten(all_to_all_with_grads(tree, channel))[0]
        reduced = [_ALONG_RANKS[name](row.unflatten(0, (world, row.shape[0] // world))) for row in rows]
        return unflatten(reduced, spec, data)
    label = f"reduce_scatter({name}, sync_grads=True)"

    def scatter(parts: list[Tensor]) -> list[Tensor]:
        return flatten(reduce_scatter_tree(unflatten(parts, spec), op, channel, label=label))[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        tables = gather_tree(grads, channel, verb="backward of reduce_scatter")
        whole = [table.flatten(0, 1) for table in tables]
        return whole if name == "sum" else [grad / world for grad in whole]

    return unflatten(across(scatter, back, tensors), spec, data)


def all_to_all_with_grads(data: Any, channel: Channel) -> Any:
    """`all_to_all_tree` through which gradients flow back the way the parts came."""
    tensors, spec = _tensors(data, channel, "all_to_all")

    def route(parts: list[Tensor]) -> list[Tensor]:
        return flatten(all_to_all_tree(unflatten(parts, spec), channel))[0]

    def back(grads: list[Tensor]) -> list[Tensor]:
        routed: list[Tensor] = all_to_all_tree(grads, channel, verb="backward of all_to_all")
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
    me = channel.collective.rank_in_group
    count = len(tensors)

    def gather(parts: list[Tensor]) -> list[Tensor]:
        return [part for leaf in gather_uneven(parts, spec, how, channel) for part in leaf]

    def back(grads: list[Tensor]) -> list[Tensor]:
        summed = reduce_tree(grads, "sum", channel, label="backward of all_gather")
        world = len(grads) // count
        return [summed[leaf * world + me] for leaf in range(count)]

    flat = across(gather, back, tensors) if sync_grads and count else gather(tensors)
    world = channel.world_size
    leaves: list[Any] = [flat[i : i + world] for i in range(0, len(flat), world)]
    return unflatten([torch.cat(leaf) for leaf in leaves] if how == "cat" else leaves, spec, data)


_ALONG_RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda table: table.amin(0),
    "max": lambda table: table.amax(0),
    "product": lambda table: table.prod(0),
}


def _tensors(data: Any, channel: Channel, verb: str) -> tuple[list[Tensor], Any]:
    channel.world_size  # noqa: B018 - raises for ranks outside the group, before anything is sent
    leaves, spec = flatten(data)
    try:
        return to_tensors(leaves, channel.wire.device, verb), spec
    except FabricError as error:
        channel.refuse(verb, error)
        raise
