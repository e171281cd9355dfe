"""The frame that every rank sends before a collective, as bytes, and the frames of all ranks."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.collectives.frames import COMBINED_BYTES, PAYLOAD_BYTES, fold, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from fabric.collectives.frames import CallSignature

HEADER = struct.Struct("<q16s16sq")
"""How many calls the group made, digest of this call, facts, bytes of data (sent here if there is room)."""
CALL_BYTES, KEY_BYTES = 24, 40
"""The parts of the header that are equal on all ranks: count and digest; and the facts."""
NO_FACTS = bytes(16)
"""The facts of a strategy that compares none."""
GROUPED_BYTES = 4 << 20
"""Most bytes of rows that differ, together: what a rank sends does not grow with the square of the ranks."""
_EXACT = {dist.ReduceOp.MIN, dist.ReduceOp.MAX}


def message(
    count: int, call: CallSignature, payload: Sequence[Tensor], whole: bool, facts: bytes = NO_FACTS
) -> bytes:
    """The frame of a group's call number `count`; if `whole`, with the contiguous tensors of the host, as far
    as they fit. `facts`: 16 bytes that all ranks of the group must have in common beside the call.
    """
    size = sum([tensor.nbytes for tensor in payload])
    head = HEADER.pack(count, call.digest, facts, size)
    if not whole:
        return head[:KEY_BYTES]
    return b"".join([head, *map(to_bytes, payload)]) if payload and size <= PAYLOAD_BYTES else head


def combiner(payload: Sequence[Tensor], op: Any, in_any_order: bool) -> Callable[[list[bytes]], bytes] | None:
    """Return what reduces the data of frames to those of one; None: they are sent by themselves.

    Args:
        payload: Contiguous tensors of the host, in each frame of the call.
        op: How they are reduced; None: they are not. A mean is sent as a sum.
        in_any_order: Whether to reduce only what has one result in any order of ranks.
    """
    if op is None or not 0 < sum([tensor.nbytes for tensor in payload]) <= COMBINED_BYTES:
        return None
    op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    for dtype in [tensor.dtype for tensor in payload]:
        inexact = dtype.is_floating_point or dtype.is_complex
        if inexact and (dtype.itemsize < 4 or (in_any_order and op not in _EXACT)):
            return None

    def combine(rows: list[bytes]) -> bytes:
        columns = Meeting(bytearray().join(rows), len(rows[0]), len(rows)).columns(payload)
        return b"".join([rows[0][: HEADER.size], *[to_bytes(fold(column, op)) for column in columns]])

    return combine


Spans = list[list[int]]
"""Places of ranks: [first, last + 1] each."""


def joined(parts: Iterable[tuple[bytes, Spans]]) -> dict[bytes, Spans]:
    """Return the places of each row; if the rows are more than `GROUPED_BYTES`, of their beginnings."""
    groups: dict[bytes, Spans] = {}
    for row, spans in parts:
        held = groups.setdefault(row, [])
        for start, end in spans:
            if held and held[-1][1] == start:
                held[-1][1] = end
            else:
                held.append([start, end])
    most = GROUPED_BYTES // len(groups)
    if max(map(len, groups)) > most and sum(map(len, groups)) > GROUPED_BYTES:
        return joined([(row[:most], spans) for row, spans in groups.items()])
    return groups


def grouped(groups: dict[bytes, Spans]) -> bytes:
    """Return groups of equal rows as one message."""
    return json.dumps([(row.decode("latin-1"), spans) for row, spans in groups.items()]).encode()


def ungrouped(message: bytes | bytearray) -> list[tuple[bytes, Spans]]:
    """Return the rows of such a message, with their places."""
    return [(row.encode("latin-1"), spans) for row, spans in json.loads(message)]


class Meeting:
    """The frames of all ranks of a group.

    Args:
        rows: Of all ranks, one after the other; or one that stands for all if they are equal.
        size: Bytes of each.
        ranks: How many of them there are.
    """

    def __init__(self, rows: bytes | bytearray, size: int, ranks: int) -> None:
        self.ranks = ranks
        self._rows = torch.frombuffer(bytearray(rows) if isinstance(rows, bytes) else rows, dtype=torch.uint8)
        self._rows = self._rows.view(-1, size).expand(ranks, size)

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
