"""`agreed`: check that a value is equal on all ranks, or raise a table of the values on all of them."""

from __future__ import annotations

import pickle
import secrets
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import call_of, to_bytes
from fabric.collectives.objects import PickledObject, gather_objects
from fabric.core.errors import CollectiveMismatch
from fabric.core.source import user_line
from fabric.core.tree import flatten, is_node

if TYPE_CHECKING:
    from fabric.collectives.channel import Channel


def agreed(value: Any, channel: Channel) -> Any:
    """Return `value` if it is equal on all ranks of the group (NaN equals NaN, tensors compare by value).

    Raises:
        CollectiveMismatch: The values differ.
        ArgumentTypeError: The value cannot be pickled.
    """
    if _is_one_message(value, channel):
        return value
    # Each rank compares the same received values, its own included, so all ranks raise or none does.
    values = gather_objects(value, channel, "agree")
    if all([same(values[0], other) for other in values[1:]]):
        return value
    guard = channel.guard
    ranks = guard.members if guard is not None else range(len(values))
    lines = gather_objects(user_line(), channel, "agree")
    table = zip(ranks, values, lines, strict=True)
    rows = [f"  rank {rank}: {of_rank!r:.80}  at {line}".replace("\n", " ") for rank, of_rank, line in table]
    raise CollectiveMismatch(
        "\n".join(["fabric.agree: ranks hold different values.", *rows])
        + "\nDecide on one rank and send the value with fabric.broadcast, or combine the values with "
        "fabric.all_reduce, fabric.any or fabric.all."
    )


def _is_one_message(value: Any, channel: Channel) -> bool:
    """Whether the values of all ranks of a large group have the same bytes, by the frames of one call."""
    guard = channel.guard
    if guard is None or not guard.reduces_data:
        return False
    with channel.validating("agree"):
        pickled = PickledObject(value, "agree")
    message = pickled.message()
    digest = (
        blake2b(to_bytes(message), digest_size=16).digest() if pickled.inline else secrets.token_bytes(16)
    )
    bits = torch.tensor([*digest, *[255 - byte for byte in digest]], dtype=torch.uint8, device="cpu")
    call = call_of("agree", "whether the values are equal")
    frames = channel.check_call(call, [bits], torch.distributed.ReduceOp.BAND)
    # A bit that all ranks set remains in the first half, a bit that no rank sets in the second half.
    return frames is not None and torch.equal(frames.columns([bits])[0][0], bits)


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same type, structure and content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, other)
    if isinstance(one, float | complex):
        return one == other or (one != one and other != other)
    if isinstance(one, dict) and not isinstance(one, OrderedDict):  # equal in any order, as in Python
        return one.keys() == other.keys() and all([same(value, other[key]) for key, value in one.items()])
    if is_node(one):
        (leaves, spec), (other_leaves, other_spec) = flatten(one), flatten(other)
        return spec == other_spec and all([same(a, b) for a, b in zip(leaves, other_leaves, strict=True)])
    if not hasattr(one, "dtype"):
        return bool(one == other) or _same_content(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:  # numpy would broadcast
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _same_content(one: Any, other: Any) -> bool:
    """Whether two unpickled objects without an `__eq__` have the same content."""
    if getattr(one, "__dict__", None):
        return same(vars(one), vars(other))
    by_identity: Any = object.__eq__
    return type(one).__eq__ is by_identity and pickle.dumps(one) == pickle.dumps(other)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    plain = one.is_floating_point() or one.is_complex()
    if plain and one.itemsize > 1:
        return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    return torch.equal(one.view(torch.uint8) if plain else one, other.view(torch.uint8) if plain else other)
