"""Saving sharded checkpoints: what all ranks do together."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint import state as states
from fabric.checkpoint.atomic_write import hold, is_held, is_safetensors, named, put_in_place, remove
from fabric.checkpoint.formats.sharded.directory import begin
from fabric.checkpoint.torch_io import TorchCheckpointIO
from fabric.collectives.reduce import reduce_tree
from fabric.core.errors import ConfigurationError, RankError, UsageError
from fabric.core.registry import did_you_mean
from fabric.launch.garbage import gc_disabled
from fabric.utilities.cloud_io import target_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from fabric.checkpoint.formats.sharded.dcp import ShardWriter
    from fabric.checkpoint.formats.sharded.plan import Chunk
    from fabric.core.types import Filter, PathLike

FORMATS = ("full", "sharded")


def choose_format(
    strategy: Any, path: PathLike, format: str | None, storage_options: Any
) -> tuple[str, Path | None]:
    """Return the format to write and the path on a disk.

    The format is the requested one, or else the strategy's if the storage supports it.

    Raises:
        ConfigurationError: There is no such format, or it cannot be written there.
    """
    if format not in (None, *FORMATS):
        raise ConfigurationError(
            f"fabric.save(format={format!r}): write 'full' or 'sharded'.{did_you_mean(str(format), FORMATS)}"
        )
    storage, where, why = strategy.checkpoint_io, target_path(path), ""
    if type(storage) is not TorchCheckpointIO:
        why = f"{type(storage).__name__} stores one dictionary"
    elif where is None:
        why = f"{path} is no path of a file system"
    elif is_safetensors(path):
        why = "a name that ends with .safetensors is one file"
    elif storage_options is not None:
        why = f"storage_options={storage_options!r} mean nothing to it"
    if format == "sharded" and why:
        raise ConfigurationError(
            f"fabric.save(format='sharded') writes a directory that all ranks see, but {why}. Write "
            "format='full'."
        )
    return format or ("full" if why else strategy.state_dict_type), where


@gc_disabled()  # plans are many objects
def save_sharded(
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
    mark: Path | None = None
    with _together(strategy, path), strategy.layout.gathering(keep=zero, parts=True):
        tree = states.gather(strategy, state, filter, allow_pickle)
    try:
        with _together(strategy, path):
            from fabric.checkpoint.formats.sharded.dcp import ShardWriter

            own = ShardWriter(tree, rank)
            part = begin(path) if zero else None
        directory, owners = strategy.broadcast((part, own.owners))
        with _together(strategy, path):
            chunks = own.plan(owners, strategy.root(0, None), here.job_rank)
            _check_shared(directory)
        plans = _gather_plans(strategy, chunks)
        with _together(strategy, path):
            if zero:
                own.describe(plans)
            if not wait:
                own.copy()
            mark = _mark(directory, rank)
            mark.write_text(socket.gethostname())
            hold(mark)
    except BaseException:
        for left in (mark, part):
            if left is not None:
                with suppress(OSError):  # which would hide the error of the save
                    remove(left)
        raise
    marks = [_mark(directory, other) for other in range(here.world_size)] if zero else []
    meet: Any = _together(strategy, path) if wait else nullcontext()

    def finish() -> None:
        with named(path):
            own.finish(directory, _told(marks, path), facts)
            put_in_place(directory, path)

    return partial(_write, own, path, mark, marks, meet, finish)


def _write(
    own: ShardWriter, path: Path, mark: Path, marks: list[Path], meet: Any, finish: Callable[[], None]
) -> None:
    """Write this rank's part. Ranks tell rank zero by files, which has `marks` and ends the save.

    A rank that has ended takes its mark away, for which there is room on a full disk, too. Where the loop
    waits, they `meet` then: file systems of several machines may show rank zero late that a mark is gone.
    """
    note = mark.with_suffix(".told")
    try:
        with meet, named(path):
            try:
                note.write_bytes(json.dumps(own.write(mark.parent)).encode())
            except BaseException:
                with suppress(OSError):
                    note.unlink(missing_ok=True)
                raise
            finally:
                remove(mark)
        _wait_for(marks, path)
        if marks:
            finish()
    except BaseException:
        with suppress(RankError):
            _wait_for(marks, path)  # those that still write into it
        if marks:
            remove(mark.parent)
        raise


def _wait_for(marks: list[Path], path: Path) -> None:
    """Wait until the ranks have ended."""
    pause = 0.001
    while waiting := [rank for rank, mark in enumerate(marks) if mark.exists()]:
        killed = [rank for rank in waiting if _was_killed(marks[rank])]
        if killed:
            raise RankError(f"rank {killed[0]} was killed while saving {path}")
        time.sleep(pause)
        pause = min(1.2 * pause, 0.2)


def _told(marks: list[Path], path: Path) -> list[Any]:
    """Return the notes of all ranks about their parts. A rank that has failed raises its own error."""
    notes = [mark.with_suffix(".told") for mark in marks]
    failed = [
        f"rank {rank} failed while saving {path}" for rank, note in enumerate(notes) if not note.exists()
    ]
    if failed:
        raise RankError("; ".join(failed))
    told = [json.loads(note.read_bytes()) for note in notes]
    for note in notes:
        note.unlink()
    return told


def _mark(directory: Path, rank: int) -> Path:
    """It is there while a rank writes beside its loop."""
    return directory / f"rank-{rank}.writes"


def _was_killed(mark: Path) -> bool:
    """Whether a rank of this machine has ended without a word: then nobody holds its mark. If one of another
    machine does, it is the launcher who ends the job.
    """
    with suppress(OSError):
        return mark.read_text() == socket.gethostname() and not is_held(mark) and mark.exists()
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
    """A step of a save, which all ranks make."""
    with states.together(strategy, f"saving {path}"), named(path):
        yield


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(
            f"This rank does not see {directory}, which rank zero has made. Ranks write a sharded checkpoint "
            "to a file system that all of them share; without one, write fabric.save(..., format='full')."
        )
