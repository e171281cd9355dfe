"""Saving of sharded checkpoints, by all ranks."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint import state as states
from fabric.checkpoint.atomic_write import commit_path, is_locked, keep_locked, named, remove
from fabric.checkpoint.formats.sharded.directory import begin
from fabric.collectives.reduce import reduce_tree
from fabric.core.errors import RankError, UsageError
from fabric.launch.garbage import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from fabric.checkpoint.formats.sharded.dcp import ShardWriter
    from fabric.checkpoint.formats.sharded.plan import Chunk
    from fabric.core.types import Filter


@gc_disabled()  # plans are many objects
def save(
    strategy: Any,
    path: Any,
    state: dict[str, Any],
    filter: Filter | None,
    facts: Mapping[str, Any],
    wait: bool,
    allow_pickle: bool = False,
) -> Callable[[], None]:
    """Return a function that writes this rank's part of `state`. All ranks must call this, and that function.

    With `wait=False` it writes copies into the directory, without communication: a thread may call it during
    training.
    """
    here = strategy.topology
    zero, rank = here.is_global_zero, here.rank
    part: Path | None = None
    marker: Path | None = None
    with _together(strategy, path), strategy.layout.gathering(keep=zero, parts=True):
        tree = states.gather(strategy, state, filter, allow_pickle)
    try:
        with _together(strategy, path):
            from fabric.checkpoint.formats.sharded.dcp import ShardWriter

            writer = ShardWriter(tree, rank)
            part = begin(path) if zero else None
        directory, owners = strategy.broadcast((part, writer.owners))
        with _together(strategy, path):
            chunks = writer.plan(owners, strategy.root(0, None), here.job_rank)
            _check_shared(directory)
        plans = _gather_plans(strategy, chunks)
        with _together(strategy, path):
            if zero:
                writer.describe(plans)
            if not wait:
                writer.copy()
            marker = _marker_of(directory, rank)
            marker.write_text(socket.gethostname())
            keep_locked(marker)
    except BaseException:
        for left in (marker, part):
            if left is not None:
                with suppress(OSError):  # which would hide the error of the save
                    remove(left)
        raise
    markers = [_marker_of(directory, other) for other in range(here.world_size)] if zero else []
    step: Any = _together(strategy, path) if wait else nullcontext()

    def finish() -> None:
        with named(path), gc_disabled():
            writer.finish(directory, _read_reports(markers, path), facts)
            commit_path(directory, path)

    return partial(_write, writer, path, marker, markers, step, finish)


def _write(
    writer: ShardWriter, path: Path, marker: Path, markers: list[Path], step: Any, finish: Callable[[], None]
) -> None:
    """Write this rank's file; rank zero, which has `markers`, waits for all ranks and commits.

    A rank signals completion by deleting its marker file, which works on a full disk, too. If the loop waits,
    all ranks enter `step` then: a network file system may show a deletion to rank zero late.
    """
    report = marker.with_suffix(".report")
    try:
        with step, named(path):
            try:
                report.write_bytes(json.dumps(writer.write(marker.parent)).encode())
            except BaseException:
                with suppress(OSError):
                    report.unlink(missing_ok=True)
                raise
            finally:
                remove(marker)
        _wait_for(markers, path)
        if markers:
            finish()
    except BaseException:
        with suppress(RankError):
            _wait_for(markers, path)  # other ranks may still write into the directory
        if markers:
            remove(marker.parent)
        raise


def _wait_for(markers: list[Path], path: Path) -> None:
    """Wait until all marker files are deleted."""
    pause = 0.001
    while waiting := [rank for rank, marker in enumerate(markers) if marker.exists()]:
        killed = [rank for rank in waiting if _was_killed(markers[rank])]
        if killed:
            raise RankError(f"rank {killed[0]} was killed while saving {path}")
        time.sleep(pause)
        pause = min(1.2 * pause, 0.2)


def _read_reports(markers: list[Path], path: Path) -> list[Any]:
    """Return the reports of all ranks. A rank that failed has none, and raises its own error."""
    reports = [marker.with_suffix(".report") for marker in markers]
    failed = [
        f"rank {rank} failed while saving {path}"
        for rank, report in enumerate(reports)
        if not report.exists()
    ]
    if failed:
        raise RankError("; ".join(failed))
    contents = [json.loads(report.read_bytes()) for report in reports]
    for report in reports:
        report.unlink()
    return contents


def _marker_of(directory: Path, rank: int) -> Path:
    """Return the marker file of a rank, which exists while it writes."""
    return directory / f"rank-{rank}.writes"


def _was_killed(marker: Path) -> bool:
    """Whether a rank of this machine was killed: its marker file exists, unlocked.

    Ranks of other machines are left to the launcher, which ends the job.
    """
    with suppress(OSError):
        return marker.read_text() == socket.gethostname() and not is_locked(marker) and marker.exists()
    return False


def _gather_plans(strategy: Any, chunks: list[Chunk]) -> Iterable[list[Chunk]]:
    """Return the chunks of each rank on rank zero, and nothing on other ranks. All ranks must call this."""
    from fabric.checkpoint.formats.sharded.plan import pack_chunks, unpack_chunks

    channel = strategy.channel()
    if channel.world_size == 1:
        return [chunks]
    message = pack_chunks(chunks)
    longest = int(reduce_tree(torch.tensor(len(message)), "max", channel, label="save"))
    sent = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    sent = channel.transport.to_staging(sent)
    count = channel.world_size if strategy.topology.is_global_zero else 0
    rows = [torch.empty_like(sent) for _ in range(count)]
    channel.collective.gather(sent, rows, strategy.root(0, None))
    return (unpack_chunks(row.cpu().numpy().tobytes()) for row in rows)


@contextmanager
def _together(strategy: Any, path: Path) -> Iterator[None]:
    """Context of a step of a save: an error on one rank is raised on all. All ranks must enter it."""
    with states.together(strategy, f"saving {path}"), named(path):
        yield


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(
            f"{directory} does not exist on this rank, but rank zero has made it. A sharded checkpoint needs "
            "a file system that all ranks share. Without one, write fabric.save(..., format='full')."
        )
