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

    Combine = Callable[[list[bytes]], bytes]

HEADER = struct.Struct("<q16s16sq")
"""Number of the call in its group, digest of the call, facts, bytes of data (in the frame if they fit)."""
CALL_BYTES, KEY_BYTES = 24, 40
"""Bytes of the header that must be equal on all ranks: number and digest; these with the facts."""
GROUPED_BYTES = 4 << 20
"""Most bytes of different rows in one message, which bounds the messages in a large group."""
_EXACT = {dist.ReduceOp.MIN, dist.ReduceOp.MAX}


def make_frame(
    count: int, call: CallSignature, payload: Sequence[Tensor], with_data: bool, facts: bytes = b""
) -> bytes:
    """Return this rank's frame for call number `count` of a group.

    Args:
        count: Counted from 1.
        call: The call.
        payload: Contiguous tensors on the host, appended if they fit.
        with_data: Whether the frame may contain data.
        facts: Up to 16 more bytes that must be equal on all ranks of the group.
    """
    size = sum([tensor.nbytes for tensor in payload])
    head = HEADER.pack(count, call.digest, facts, size)
    if not with_data:
        return head[:KEY_BYTES]
    return b"".join([head, *map(to_bytes, payload)]) if payload and size <= PAYLOAD_BYTES else head


def combiner(payload: Sequence[Tensor], op: Any, in_any_order: bool) -> Combine | None:
    """Return a function that reduces the data of several frames into one; None: a collective must do it.

    Args:
        payload: Contiguous tensors on the host, in each frame of the call.
        op: torch's reduction, or None. A mean is reduced as a sum.
        in_any_order: Whether to accept only reductions whose result is independent of the order of ranks.
    """
    if op is None or not 0 < sum([tensor.nbytes for tensor in payload]) <= COMBINED_BYTES:
        return None
    op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    for dtype in [tensor.dtype for tensor in payload]:
        inexact = dtype.is_floating_point or dtype.is_complex
        if inexact and (dtype.itemsize < 4 or (in_any_order and op not in _EXACT)):
            return None

    def combine(rows: list[bytes]) -> bytes:
        columns = GatheredFrames(bytearray().join(rows), len(rows[0]), len(rows)).columns(payload)
        return b"".join([rows[0][: HEADER.size], *[to_bytes(fold(column, op)) for column in columns]])

    return combine


Spans = list[list[int]]
"""Ranges of group ranks: [first, last + 1] each."""


def group_rows(parts: Iterable[tuple[bytes, Spans]]) -> dict[bytes, Spans]:
    """Return the group ranks of each distinct row. Rows above `GROUPED_BYTES` in total are truncated."""
    groups: dict[bytes, Spans] = {}
    for row, spans in parts:
        merged = groups.setdefault(row, [])
        for start, end in spans:
            if merged and merged[-1][1] == start:
                merged[-1][1] = end
            else:
                merged.append([start, end])
    most = GROUPED_BYTES // len(groups)
    if max(map(len, groups)) > most and sum(map(len, groups)) > GROUPED_BYTES:
        return group_rows([(row[:most], spans) for row, spans in groups.items()])
    return groups


def encode_groups(groups: dict[bytes, Spans]) -> bytes:
    """Return groups of equal rows as one message."""
    return json.dumps([(row.decode("latin-1"), spans) for row, spans in groups.items()]).encode()


def decode_groups(message: bytes | bytearray) -> list[tuple[bytes, Spans]]:
    """Return the rows in a message of `encode_groups`, with their group ranks."""
    return [(row.encode("latin-1"), spans) for row, spans in json.loads(message)]


class GatheredFrames:
    """The frames of all ranks of a group.

    Args:
        rows: The frames in rank order, or a single one if all are equal.
        size: Bytes of each frame.
        count: Number of ranks; 1 if `rows` is one frame with the reduced data.
    """

    def __init__(self, rows: bytes | bytearray, size: int, count: int) -> None:
        self.count = count
        self._rows = torch.frombuffer(bytearray(rows) if isinstance(rows, bytes) else rows, dtype=torch.uint8)
        self._rows = self._rows.view(-1, size).expand(count, size)

    def sizes(self) -> list[int]:
        """Bytes of data that each rank announced, for calls in which they may differ."""
        head = self._rows[:, KEY_BYTES : KEY_BYTES + 8].contiguous().view(torch.int64)
        return head.flatten().tolist()

    def columns(self, like: Sequence[Tensor]) -> list[Tensor]:
        """(world_size, numel) for each tensor of the payload `like`, in rank order. Copies."""
        tables, start = [], HEADER.size
        for one in like:
            column = self._rows.narrow(1, start, one.nbytes).clone(memory_format=torch.contiguous_format)
            tables.append(column.view(one.dtype))
            start += one.nbytes
        return tables

    def data(self, group_rank: int, size: int) -> Tensor:
        """The first `size` bytes of data of a rank. A copy."""
        return self._rows[group_rank, HEADER.size : HEADER.size + size].clone()


class RankReport(NamedTuple):
    """The call of one rank: its row in the table of a mismatch."""

    rank: int
    verb: str = ""
    what: str = ""
    where: str = ""
