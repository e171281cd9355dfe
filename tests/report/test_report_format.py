"""The file of a rank: what is written is read, a torn end is dropped, other files are refused."""

from __future__ import annotations

import struct

import pytest
import torch

from fabric.core.errors import UsageError
from fabric.report.format import (
    KINDS,
    STEP,
    pack_event,
    pack_header,
    pack_step,
    read,
    read_from,
)

SECONDS = [0.5, 1.0, 2.0, 0.25, 0.125, 0.0, 4.0]


def step(number: int) -> bytes:
    return pack_step(number, 1.75e9 + number, SECONDS, 8.0, 1024)


def test_records_are_read_in_order(tmp_path):
    path = tmp_path / "rank-00000.bin"
    start, end = pack_event("start", 1.5, 0, rank=0), pack_event("end", 9.0, 3)
    path.write_bytes(pack_header() + start + step(1) + step(2) + end + step(3))
    first, steps, last, rest = read(path)
    assert (first, last) == (
        {"kind": "start", "time": 1.5, "step": 0, "rank": 0},
        {"kind": "end", "time": 9.0, "step": 3},
    )
    assert list(STEP.iter_unpack(steps)) == [
        (b"S", number, 1.75e9 + number, *SECONDS, 8.0, 1024) for number in (1, 2)
    ]
    assert rest == step(3)


def test_a_step_takes_52_bytes_with_its_columns_at_fixed_places(tmp_path):
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(pack_header() + b"".join([step(number) for number in range(10_000)]))
    (steps,) = read(path)
    rows = torch.frombuffer(bytearray(steps), dtype=torch.uint8).view(-1, 52)
    assert len(rows) == 10_000
    seconds = rows[:, 16:48].contiguous().view(torch.float32)
    assert seconds[:, : len(KINDS)].tolist() == [SECONDS] * 10_000
    assert rows[:, 4:8].contiguous().view(torch.int32).flatten().tolist() == [*range(10_000)]


def test_a_torn_end_is_dropped_wherever_it_was_cut(tmp_path):
    path = tmp_path / "rank-00000.bin"
    whole = [pack_header(), pack_event("start", 1.0, 0), step(1), step(2), pack_event("end", 2.0, 2)]
    data = b"".join(whole)
    counts = set()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        records, end = read_from(path, 0)
        complete = [one for i, one in enumerate(whole) if sum(map(len, whole[: i + 1])) <= size]
        assert end == sum(map(len, complete))
        count = sum([len(one) // 52 if isinstance(one, bytes) else 1 for one in records])
        assert count == max(0, len(complete) - 1)
        counts.add(count)
    assert counts == {0, 1, 2, 3, 4}


def test_zeros_after_a_failure_of_the_machine_are_dropped(tmp_path):
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(pack_header() + step(1) + bytes(4096))
    assert read_from(path, 0) == ([step(1)], 60)


def test_what_was_appended_is_read_alone(tmp_path):
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(pack_header() + step(1) + step(2)[:20])
    records, end = read_from(path, 0)
    assert records == [step(1)]
    path.write_bytes(pack_header() + step(1) + step(2) + pack_event("end", 2.0, 2))
    assert read_from(path, end)[0] == [step(2), {"kind": "end", "time": 2.0, "step": 2}]


def test_values_without_json_are_text(tmp_path):
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(pack_header() + pack_event("log", 1.0, 1, values={"where": tmp_path}))
    assert read(path)[0]["values"] == {"where": str(tmp_path)}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"PK\x03\x04torch", "is no file of a run report: it begins with b'PK\\x03\\x04torc'. A run writes"),
        (b"PK", "is no file of a run report: it begins with b'PK'"),
        (
            struct.pack("<6sH", b"FABREP", 2),
            "has version 2 of the run report's format. This Fabric reads version 1. Update torch-fabric.",
        ),
        (struct.pack("<6sH", b"FABREP", 0), "Read it with the Fabric that wrote it."),
        (pack_header() + step(1) + b"X" * 60, "is damaged: byte 60 begins neither a step nor an event."),
        (pack_header() + struct.pack("<c3xI", b"E", 2) + b"{]", "is damaged: byte 8 begins neither"),
    ],
)
def test_other_files_are_refused(tmp_path, data, text):
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert f"{path} {text}" in str(caught.value) or str(caught.value).endswith(text)
