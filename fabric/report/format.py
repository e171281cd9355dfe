"""The format of a rank's file of the run report: steps of a fixed size, and events in JSON. Imports no torch.

    MAGIC     8 bytes: b"FABREP", version u16
    records, each of them a
      step    b"S", 3 bytes of padding, u32 number, f64 begin (seconds since 1970), 7 x f32 seconds of KINDS,
              f32 seconds of the whole step, u32 KiB of peak memory: 52 bytes
      event   b"E", 3 bytes of padding, u32 length, JSON of that many bytes:
              {"kind": ..., "time": seconds since 1970, "step": number, ...}

All numbers are little-endian. A record that a killed process did not finish is the last one; `read` drops it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabric.core.types import PathLike

KINDS = ("data", "forward", "backward", "communication", "optimizer", "verbs", "checkpoint")
"""The kinds of a step's seconds, in the order of the file."""
VERSION = 1
STEP = struct.Struct(f"<c3xId{len(KINDS)}ffI")
"""`STEP.iter_unpack(steps)` yields (b"S", number, begin, *seconds of KINDS, whole, KiB) of each step."""
FILE_NAME = "rank-{:05d}.bin"

_HEADER = struct.Struct("<6sH")
_EVENT = struct.Struct("<c3xI")
_CHUNK = 4096 * STEP.size


def pack_header() -> bytes:
    """Return the first bytes of a file."""
    return _HEADER.pack(b"FABREP", VERSION)


def pack_step(number: int, begin: float, seconds: Sequence[float], whole: float, kibibytes: int) -> bytes:
    """Return the record of a step; `seconds` are those of KINDS."""
    return STEP.pack(b"S", number, begin, *seconds, whole, min(kibibytes, 2**32 - 1))


def pack_event(kind: str, time: float, step: int, **values: Any) -> bytes:
    """Return the record of an event.

    Values that JSON does not have are written as text.
    """
    text = json.dumps({"kind": kind, "time": time, "step": step, **values}, default=str).encode()
    return _EVENT.pack(b"E", len(text)) + text


def read(path: PathLike) -> list[bytes | dict[str, Any]]:
    """Return the records of a file in order: steps that follow each other as one `bytes`, events as dicts.

    `for _, number, begin, *seconds, whole, memory in STEP.iter_unpack(steps)` yields the steps of a `bytes`.

    Raises:
        UsageError: The file is not of a run report, is of a newer version, or is damaged.
    """
    return read_from(path, 0)[0]


def read_from(path: PathLike, start: int) -> tuple[list[bytes | dict[str, Any]], int]:
    """Return the records after byte `start`, and the byte after the last complete one.

    A later call with that byte returns the records that were appended in between. 0 is the begin of the file.

    Raises:
        UsageError: As for `read`.
    """
    with Path(path).open("rb") as file:
        header = file.read(_HEADER.size)
        file.seek(start)
        data = file.read()
    _check_header(path, header)
    found: list[bytes | dict[str, Any]] = []
    steps_in_row: list[bytes] = []
    at = max(_HEADER.size - start, 0)
    while at < len(data):
        if data[at] == ord("S"):
            # The first byte of each record is its kind; equal kinds in a row are steps.
            kinds = data[at : at + _CHUNK : STEP.size]
            steps = min(len(kinds) - len(kinds.lstrip(b"S")), (len(data) - at) // STEP.size)
            if not steps:
                break
            end = at + steps * STEP.size
            steps_in_row.append(data[at:end])
        elif data[at] == ord("E"):
            if len(data) < at + _EVENT.size:
                break
            begin = at + _EVENT.size
            end = begin + _EVENT.unpack_from(data, at)[1]
            if end > len(data):
                break
            found += [b"".join(steps_in_row)] if steps_in_row else []
            steps_in_row = []
            found.append(_event(path, start + at, data[begin:end]))
        elif data[at] == 0:
            break  # space that the file system gave the file before the machine failed
        else:
            raise _damaged(path, start + at)
        at = end
    found += [b"".join(steps_in_row)] if steps_in_row else []
    return found, start + at if len(header) == _HEADER.size else 0


def _check_header(path: PathLike, header: bytes) -> None:
    ours = pack_header()
    if header == ours[: len(header)]:  # a shorter one was not finished
        return
    if len(header) < _HEADER.size or header[:6] != ours[:6]:
        raise UsageError(
            f"{path} is no file of a run report: it begins with {header!r}. "
            f"A run writes {FILE_NAME.format(0)} and its like by Fabric(report=DIRECTORY). "
            "Name the directory of such a run, or a new one."
        )
    version = _HEADER.unpack(header)[1]
    raise UsageError(
        f"{path} has version {version} of the run report's format. This Fabric reads version {VERSION}. "
        f"{'Update torch-fabric' if version > VERSION else 'Read it with the Fabric that wrote it'}."
    )


def _event(path: PathLike, at: int, text: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(text)
    except ValueError:
        raise _damaged(path, at) from None
    return event


def _damaged(path: PathLike, at: int) -> UsageError:
    return UsageError(
        f"{path} is damaged: byte {at} begins neither a step nor an event. A disk or a copy changed it. "
        "Copy the file anew, or remove it to see the other ranks."
    )
