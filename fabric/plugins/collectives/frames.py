"""Frames: the fixed-size message that every rank sends before a collective, so that a mismatch becomes an
error.

Pure: what a call looks like on the wire, and the table for people when calls differ. `control.py` sends them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fabric.core.tree import Spec

FRAME_BYTES = 8192
"""Size of every frame, whatever it says: ranks that disagree still exchange equal sizes."""
HEADER = struct.Struct("<q16sq")
"""How many calls the group made, digest of this call, bytes of data (that ride if there is room).

A multiple of 16 bytes, so that data of every dtype may lie behind it.
"""
KEY_BYTES = 24
"""The part of the header in which all ranks must agree: count and digest."""
ROOM = FRAME_BYTES - HEADER.size
"""Bytes of data that ride in a frame."""
TEXT_BYTES = 1 << 20
"""Longest text in which a rank of those that disagree says what it was about to do."""

ALONE = "forward without gradients"
"""How the call begins that a split model makes in evaluation."""
REFUSED = "refused: "
"""How the description of a call begins whose arguments this rank did not accept."""

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_NOT_THE_USERS = (_PACKAGE, contextlib.__file__, str(Path("site-packages", "torch")) + os.sep)
_KEPT_CALLS = 1024
CONTENTS = ", contents "
"""In the data of a call: a checksum of the values follows, which are to be the same."""


class Call(NamedTuple):
    """What a rank is about to do, and the others must be, too."""

    verb: str
    """The verb with what its arguments decide: `all_reduce(sum)`."""
    what: str
    """Structure, shapes and dtypes of the data, for people."""
    digest: bytes
    """16 bytes that stand for both."""


class Said(NamedTuple):
    """One rank's row in the table."""

    rank: int
    verb: str
    what: str
    where: str


_known: dict[Any, Call] = {}


def call_of(verb: str, what: str = "") -> Call:
    """The call of a verb whose data is described by `what`."""
    known = _known.get((verb, what))
    return known or _keep((verb, what), verb, what)


def tree_call(verb: str, spec: Spec, tensors: list[Tensor]) -> Call:
    """The call of a verb on a tree: structure, shapes, dtypes, and whether tensors are on the host."""
    # Looked up by values that are at hand; a loop makes the same call a million times.
    shapes, kinds = tuple([t.shape for t in tensors]), tuple([(t.dtype, t.get_device()) for t in tensors])
    key = (verb, spec, shapes, kinds)
    return _known.get(key) or _keep(key, verb, describe(spec, tensors))


def _keep(key: Any, verb: str, what: str) -> Call:
    if len(_known) >= _KEPT_CALLS:
        _known.clear()
    digest = blake2b(f"{verb}\0{what}".encode(), digest_size=16).digest()
    call = _known[key] = Call(verb, what, digest)
    return call


def describe(spec: Spec, tensors: list[Tensor]) -> str:
    """A tree as a person would write it down: `{'loss': float32[], 'hits': int64[3]}`."""
    return draw(spec, [describe_tensor(t) for t in tensors])


def draw(spec: Spec, leaves: list[str]) -> str:
    """A tree with the given texts in place of its leaves."""
    return _draw(spec, iter(leaves))


def describe_tensor(tensor: Tensor) -> str:
    """`float32[3, 4]`, with the device where that is not the host."""
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"


def _draw(spec: Spec, leaves: Iterator[str]) -> str:
    if spec.kind is None:
        return next(leaves)
    inner = [_draw(child, leaves) for child in spec.children]
    if issubclass(spec.kind, dict):
        pairs = ", ".join([f"{key!r}: {child}" for key, child in zip(spec.keys, inner, strict=True)])
        return f"{{{pairs}}}" if spec.kind is dict else f"{spec.kind.__name__}({{{pairs}}})"
    if spec.kind is list:
        return f"[{', '.join(inner)}]"
    if spec.kind is tuple:
        return f"({', '.join(inner)})"
    names = spec.keys or getattr(spec.kind, "_fields", ())
    named = [f"{n}={c}" for n, c in zip(names, inner, strict=True)] if names else inner
    return f"{spec.kind.__name__}({', '.join(named)})"


def user_place() -> str:
    """file:line of the first frame outside this package (and what calls back into it)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_plumbing(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USERS[:2]) or _NOT_THE_USERS[2] in filename


def to_text(said: Said) -> bytes:
    """A row on its way to the other ranks."""
    return "\n".join((said.verb, said.where, said.what)).encode(errors="replace")[:TEXT_BYTES]


def from_text(rank: int, text: bytes) -> Said:
    """The row that `to_text` sent."""
    verb, where, what = [*text.decode(errors="replace").split("\n", 2), "", ""][:3]
    return Said(rank, verb, what, where)


def mismatch_text(rows: Sequence[Said]) -> str:
    """The error for ranks that make different calls: what went wrong, a line per rank, what to look for."""
    refusing = [row for row in rows if row.what.startswith(REFUSED)]
    if refusing:
        ranks = ", ".join([str(row.rank) for row in refusing])
        head = f"Rank {ranks} refused the arguments of {refusing[0].verb}"
        remedy = "Call it on all ranks with arguments that every rank accepts."
    elif len({row.verb for row in rows}) == 1:
        head = f"Ranks called {rows[0].verb} with different data"
        hint = " (all_gather has uneven='list' or 'cat')" * rows[0].verb.startswith("all_gather")
        remedy = f"Give every rank the same structure, shapes and dtypes{hint}."
        if all([CONTENTS in row.what for row in rows]):
            remedy = (
                "Ranks that compute one model together need the same batch: give the loader to "
                "fabric.setup_dataloaders, use no sampler per rank, and seed all ranks alike."
            )
    else:
        head = "Ranks made different calls where all must make the same"
        remedy = (
            "All ranks must make the same calls in the same order: is one inside `if rank == 0:`, does a "
            "loop end earlier on one rank?"
        )
        if any([row.verb.startswith(ALONE) for row in rows]):
            remedy += " For what one rank does alone write `with fabric.whole(model) as plain:` on all ranks."
    return f"{head}.\n{table(rows)}\n{remedy}"


def table(rows: Sequence[Said]) -> str:
    """A line per rank: rank, verb, data, file:line. Long data is shown from where it differs."""
    cells = [("rank", "call", "data", "at")]
    whats = _trimmed([row.what for row in rows])
    for row, what in zip(rows, whats, strict=True):
        cells.append((str(row.rank), row.verb, what, row.where))
    return aligned(cells)


def aligned(cells: Sequence[tuple[str, ...]]) -> str:
    """A line per tuple, all columns but the last as wide as their longest cell."""
    widths = [max([len(line[column]) for line in cells]) for column in range(len(cells[0]) - 1)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join(["", *padded, line[-1]]).rstrip())
    return "\n".join(lines)


def _trimmed(texts: list[str], limit: int = 100) -> list[str]:
    """The texts from a little before where they differ; refusals as they are, for people to read."""
    start = 0
    if max([len(text) for text in texts]) > limit and not any([text.startswith(REFUSED) for text in texts]):
        letters = enumerate(zip(*texts, strict=False))
        ends = min([len(text) for text in texts])
        start = max(0, next((i for i, each in letters if len(set(each)) > 1), ends) - limit // 3)
    shown = [("..." if start else "") + text[start:] for text in texts]
    return [
        text if len(text) <= limit or text.startswith(REFUSED) else text[: limit - 3] + "..."
        for text in shown
    ]


def starts_of(payload: list[Tensor]) -> tuple[list[int], int]:
    """Where each flat tensor begins in a frame's data, as its dtype needs it, and where the last one ends."""
    starts, at = [], 0
    for data in payload:
        at += -at % data.itemsize
        starts.append(at)
        at += data.nbytes
    return starts, at
