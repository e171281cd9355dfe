"""The frame that every rank sends before a collective, as bytes, and the frames of all ranks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from fabric.collectives.frames import PAYLOAD_BYTES, to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabric.collectives.frames import CallSignature

HEADER = struct.Struct("<q16s16sq")
"""How many calls the group made, digest of this call, facts, bytes of data (sent here if there is room)."""
CALL_BYTES, KEY_BYTES = 24, 40
"""The parts of the header that are equal on all ranks: count and digest; and the facts."""
NO_FACTS = bytes(16)
"""The facts of a strategy that compares none."""


def message(
    count: int, call: CallSignature, payload: Sequence[Tensor], whole: bool, facts: bytes = NO_FACTS
) -> bytes:
    """The frame of a group's call number `count`; if `whole`, with the contiguous tensors of the host that
    fit. `facts`: 16 bytes that all ranks of the group must have in common beside the call.
    """
    size = sum([tensor.nbytes for tensor in payload])
    head = HEADER.pack(count, call.digest, facts, size)
    if not whole:
        return head[:KEY_BYTES]
    return b"".join([head, *map(to_bytes, payload)]) if payload and size <= PAYLOAD_BYTES else head


def is_alike(own: bytes, rows: bytearray, size: int, length: int = KEY_BYTES) -> bool:
    """Whether the frames of all ranks, of `size` bytes each, begin with the `length` bytes of this one's."""
    # One comparison for each rank: the rest is looked at only where they differ.
    key = own[:length]
    return all([rows[at : at + length] == key for at in range(0, len(rows), size)])


class Meeting:
    """The frames of all ranks of a group.

    Args:
        rows: Of all ranks, one after the other; or one that stands for all if they are equal.
        size: Bytes of each.
        ranks: How many the group has.
    """

    def __init__(self, rows: bytearray, size: int, ranks: int) -> None:
        self._rows = torch.frombuffer(rows, dtype=torch.uint8).view(-1, size).expand(ranks, size)

    def sizes(self) -> list[int]:
        """Bytes of data that each rank announced, for calls in which they may differ."""
        head = self._rows[:, KEY_BYTES : KEY_BYTES + 8].contiguous().view(torch.int64)
        sizes: list[int] = head.flatten().tolist()
        return sizes

    def columns(self, like: Sequence[Tensor]) -> list[Tensor]:
        """(world_size, numel) of all ranks for each of the tensors that rode. Copies."""
        tables, start = [], HEADER.size
        for one in like:
            column = self._rows.narrow(1, start, one.nbytes).clone(memory_format=torch.contiguous_format)
            tables.append(column.view(one.dtype))
            start += one.nbytes
        return tables

    def data(self, place: int, size: int) -> Tensor:
        """The first `size` bytes of the member at `place`. A copy."""
        return self._rows[place, HEADER.size : HEADER.size + size].clone()


class RankReport(NamedTuple):
    """One rank's call: its row in the table of a mismatch."""

    rank: int
    verb: str
    what: str
    where: str
