"""`Guard`: the ranks of a group meet on a control group of their own before each collective.

They exchange one frame each (frames.py). If the frames differ, all ranks raise the same error and the group
stays usable. On the host small data ride in the frame, and need no collective of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError
from fabric.plugins.collectives import frames
from fabric.plugins.collectives.arrival import Arrival
from fabric.plugins.collectives.frames import FRAME_BYTES, HEADER, KEY_BYTES, ROOM, Said, starts_of
from fabric.plugins.collectives.job_store import StoreSilent
from fabric.plugins.collectives.waits import PATIENCE, Here, Waits, Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.plugins.collectives.frames import Call

MODES = ("full", "light", "off")
FULL_UP_TO = 64
"""Ranks up to which `full` exchanges whole frames; larger groups compare digests, as `light` does."""
_PATIENCE = timedelta(seconds=PATIENCE)
_POISON = b"\xff" * 16

_guards: weakref.WeakKeyDictionary[Any, Guard | None] = weakref.WeakKeyDictionary()
_waits: weakref.WeakKeyDictionary[Any, Waits] = weakref.WeakKeyDictionary()


def guard_of(group: Any) -> Guard | None:
    """The guard of a torch process group; None for a group of one, or once all said FABRIC_GUARD=off."""
    try:
        return _guards[group]
    except KeyError:
        pass
    if not _guards:
        atexit.register(_guards.clear)  # threads of a group must end before the interpreter does
    guard = None if dist.get_world_size(group) == 1 else Guard(group, os.environ.get("FABRIC_GUARD", "full"))
    _guards[group] = guard
    return guard


def waits_of_world() -> Waits:
    """This rank's view of the job, in the store of torch's default group."""
    world = dist.group.WORLD
    if world not in _waits:
        store = dist.distributed_c10d._get_default_store()
        _waits[world] = Waits(store, dist.get_rank(), dist.get_world_size(), timeout_of(world))
    return _waits[world]


class Meeting(NamedTuple):
    """What the frames of all ranks brought. The tensors are overwritten by the next call: copy them."""

    size: int
    """Bytes of data that this rank announced."""
    rows: Tensor
    """(world_size, FRAME_BYTES): every rank's frame."""
    views: dict[torch.dtype, list[Tensor]]
    """Each rank's frame in other dtypes, made when first asked for."""

    @property
    def rides(self) -> bool:
        """Whether this rank's data are in the frames; on all ranks alike, if all have as many bytes."""
        return self.size <= ROOM

    def sizes(self) -> list[int]:
        """Bytes of data that each rank announced, for calls in which they may differ."""
        head = self.rows[:, KEY_BYTES : KEY_BYTES + 8].contiguous().view(torch.int64)
        sizes: list[int] = head.flatten().tolist()
        return sizes

    def each(self, start: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """What each rank sent from byte `start` of its data on. No copies."""
        rows = self.views.get(dtype)
        if rows is None:
            rows = self.views[dtype] = list(self.rows.view(dtype))
        at = (HEADER.size + start) // dtype.itemsize
        return [row[at : at + numel] for row in rows]

    def column(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """(world_size, numel): the same, in one tensor. A copy."""
        at = HEADER.size + start
        bytes_ = self.rows[:, at : at + numel * dtype.itemsize]
        return bytes_.clone(memory_format=torch.contiguous_format).view(dtype)

    def data(self, place: int, size: int) -> Tensor:
        """The first `size` bytes of the member at `place`. A copy."""
        return self.rows[place, HEADER.size : HEADER.size + size].clone()


class Guard:
    """Meets the other ranks of one process group before each collective. Made by `guard_of`."""

    def __init__(self, group: Any, mode: str) -> None:
        self.name: str = group.group_name
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.mode = mode
        self._group = weakref.ref(group)
        self._waits = waits_of_world()
        self._waits.guards[self.name] = self
        self._counts = self._waits.counts
        self.timeout = timeout_of(group)
        self._control: Any = None
        self.whole = mode == "full" and len(self.members) <= FULL_UP_TO
        """Whether whole frames are exchanged, in which data ride."""
        self.assistants: dict[str, Callable[[list[str], bool], None]] = {}
        """By verb: called with what ranks in it said, and whether this one is in another call and helps."""
        self._left: list[Any] = []  # operations that a verdict ended, and their memory
        self._make_buffers()

    def __del__(self) -> None:
        # Its destructor would wait for calls that a verdict ended and whose other ranks may never come.
        left_over = getattr(self, "_left", [])  # none, if __init__ failed
        for left in [left for left in left_over if not left[0].is_completed()]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._control))

    @property
    def count(self) -> int:
        """How many calls of the group this rank has come to."""
        return self._counts.get(self.name, 0)

    def meet(self, call: Call, payload: list[Tensor] | None = None) -> Meeting | None:
        """Wait until all ranks make this call; see `Channel.meet`."""
        if self._waits.broken is not None:
            raise self._ended([self._waits.broken])
        control = self._control or self._open(call)
        if control is None:
            return None
        starts, size = starts_of(payload) if payload else ([], 0)
        if payload and size <= ROOM and self.whole:
            for start, data in zip(starts, payload, strict=True):
                slots = self._slots.get(data.dtype)
                if slots is None:
                    with torch.inference_mode(False):  # else nobody could write to it outside of that mode
                        slots = self._slots[data.dtype] = self._own.view(data.dtype)
                at = (HEADER.size + start) // data.itemsize
                slots[at : at + data.numel()].copy_(data)
        counts, name = self._counts, self.name
        while True:
            count = counts[name] = counts.get(name, 0) + 1  # last: nothing can fail between it and the frame
            HEADER.pack_into(self._sent, 0, count, call.digest, size, 0)
            if not self.whole:
                if self._compare(control, call):
                    return None
                continue
            work = dist.all_gather(self._each, self._own, group=control, async_op=True)
            self._finish(work, call, name)
            # One comparison for each rank: the rest is looked at only where they differ.
            key, got = self._sent[:KEY_BYTES], self._got
            done = True
            for at in range(0, len(got), FRAME_BYTES):
                if got[at : at + KEY_BYTES] != key:
                    verdicts = [HEADER.unpack_from(got, i)[3] for i in range(0, len(got), FRAME_BYTES)]
                    done = self._disagree(control, call, verdicts)
                    break
            if done:
                return Meeting(size, self._rows, self._views)

    def _compare(self, control: Any, call: Call) -> bool:
        """Light: the greatest and the least of all keys, by one reduction; whether the call goes on."""
        words = torch.frombuffer(self._sent, dtype=torch.int64, count=5)
        both = torch.cat([words[:3], ~words[:3], words[-1:]])
        self._finish(dist.all_reduce(both, dist.ReduceOp.MAX, group=control, async_op=True), call, self.name)
        return torch.equal(both[:3], ~both[3:6]) or self._disagree(control, call, [int(both[-1])])

    def _disagree(self, control: Any, call: Call, verdicts: list[int]) -> bool:
        """All ranks see that the keys differ: say what each was about to do, and assist, or raise on all.

        Gives whether this rank's call goes on; else it is made again.
        """
        if any(verdicts):  # a poisoned frame came before this rank looked at the verdict
            raise self._ended([verdict - 1 for verdict in verdicts if verdict])
        text = frames.to_text(self._row(call))
        sizes = [int(size) for size in self._all_gather(control, torch.tensor([len(text)]), call)]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._all_gather(control, own, call)
        said = [
            frames.from_text(rank, bytes(row[:size].tolist()))
            for rank, row, size in zip(self.members, rows, sizes, strict=True)
        ]
        goes_on = self._help(said, call)
        if goes_on is None:
            raise CollectiveMismatch(frames.mismatch_text(said))
        return goes_on

    def _help(self, said: list[Said], call: Call) -> bool | None:
        """Take part in what other ranks need for their call; None: nobody can help, on any rank."""
        verbs = [row.verb.rpartition(" #")[0] for row in said]
        asked = min([verb for verb in verbs if verb in self.assistants], default=None)
        if asked is None:
            return None
        hints = [row.what for row, verb in zip(said, verbs, strict=True) if verb == asked]
        self.assistants[asked](hints, call.verb != asked)
        return call.verb == asked

    def _all_gather(self, control: Any, own: Tensor, call: Call) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in self.members]
        # Not in one step: torch cannot report a failure of a group that is not in its table.
        self._finish(dist.all_gather(rows, own, group=control, async_op=True), call, self.name)
        return rows

    def _ended(self, numbers: list[int]) -> CollectiveMismatch:
        """The error for a call that verdicts ended, after this rank has come to all that they ended."""
        if self._waits.broken is None:
            self._excuse_all(sorted(set(numbers)))
        error = CollectiveMismatch(self._waits.text_of(max(numbers)))
        error.late = not self._waits.is_judged(max(numbers))
        return error

    def _open(self, call: Call) -> Any:
        """The control group, made by the first call of the group, when all its ranks are there; None: off.

        Raises:
            ConfigurationError: FABRIC_GUARD is none of its values, or differs between ranks; on all of them.
        """
        name = f"open {self.name}"
        attempt = self._counts[name] = self._counts.get(name, 0) + 1
        arrival = Arrival(self._waits.store, name, attempt, self.members)
        arrival.tell(self._waits.rank, self.mode)
        self._finish(arrival, call, name)
        modes = arrival.told()
        ended = [int(mode[1:]) for mode in modes if mode.startswith("!")]
        if ended:
            raise self._ended(ended)
        if len(set(modes)) > 1 or self.mode not in MODES:
            table = ", ".join([f"{mode} on rank {r}" for r, mode in zip(self.members, modes, strict=True)])
            raise ConfigurationError(
                f"FABRIC_GUARD must be one of {', '.join(MODES)} and the same on all ranks, but is {table}."
            )
        if self.mode == "off":
            _guards[self._group()] = None
            return None
        # Not dist.new_group: all ranks of the job would have to call it; and its name for a group that only
        # the members make depends on how many groups a rank has made before: it may differ between them.
        store = dist.PrefixStore(f"control/{name}/{attempt}", self._waits.store.raw)
        place = self.members.index(self._waits.rank)
        self._control = dist.ProcessGroupGloo(store, place, len(self.members), self.timeout)
        return self._control

    def _finish(self, work: Any, call: Call, name: str) -> None:
        """Wait for the others; after a while, look where they are."""
        try:
            if not _is_done(work, PATIENCE):
                self._wait_long(work, call, name)
        except CollectiveMismatch:
            raise
        except RuntimeError as error:
            with suppress(RuntimeError):  # the store's host may be who has ended
                self._waits.hear()
            if self._waits.broken is not None:
                raise self._ended([self._waits.broken]) from error
            if self._waits.here is None:
                self._waits.here = Here(self._row(call).verb, frames.user_place(), time.monotonic())
            raise RankError(self._failure(call, error, work)) from error
        except BaseException:  # Ctrl+C: the operation goes on, and its memory must not be used again
            if not isinstance(work, Arrival):
                self._leave(work)
            raise
        finally:
            self._waits.here = None

    def _leave(self, work: Any) -> None:
        """Give up waiting for an operation that is still on its way."""
        self._left.append((work, self._sent, self._got))
        self._make_buffers()

    def _wait_long(self, work: Any, call: Call, name: str) -> None:
        waits, start = self._waits, time.monotonic()
        longest = max(1.0, waits.world_size / 64)  # between two looks, for the store's sake
        seconds = 0.2 * longest
        limit = self.timeout.total_seconds() - PATIENCE
        row, stamp = self._row(call), None
        waits.here = Here(row.verb, row.where, start - PATIENCE)
        try:
            while not _is_done(work, seconds):
                number = None
                with suppress(StoreSilent):  # what the ranks wait for may come, all the same
                    stamp = stamp or waits.post(name, self._counts[name], self.members, row)
                    number = waits.verdict_on(stamp)
                    if number is None:
                        waits.judge()
                if number is not None:
                    if not isinstance(work, Arrival):
                        self._leave(work)
                    raise self._ended([number])  # or what the store raises: the call is over in any case
                with suppress(StoreSilent):
                    if isinstance(work, Arrival) and waits.have_left(set(self.members) - work.came()):
                        limit = 0.0
                if isinstance(work, Arrival) and time.monotonic() - start > limit:  # others have their own
                    raise RuntimeError("it was the first call of the group")
                seconds = min(1.5 * seconds, longest)
        finally:
            if stamp is not None:
                with suppress(StoreSilent):
                    waits.withdraw(stamp)

    def _excuse_all(self, numbers: list[int]) -> None:
        """Come to the calls of verdicts that this rank never makes, whichever way it learnt of them."""
        for number in numbers:
            for wait in self._waits.missed(number):
                self._excuse(wait.group, wait.turn, number)

    def _excuse(self, name: str, count: int, number: int) -> None:
        """Come to a call that this rank never makes, with a poisoned frame: its group stays usable."""
        waits = self._waits
        # One for each turn: a rank that was late for an earlier verdict, too, owes several.
        for turn in range(waits.counts.get(name, 0) + 1, count + 1):
            waits.counts[name] = turn
            if name.startswith("open "):
                Arrival(waits.store, name, turn, []).tell(waits.rank, f"!{number}")
            else:
                waits.guards[name]._poison(turn, number)

    def _poison(self, count: int, number: int) -> None:
        control = self._control
        HEADER.pack_into(self._sent, 0, count, _POISON, 0, number + 1)
        if self.whole:
            work = dist.all_gather(self._each, self._own, group=control, async_op=True)
            self._leave(work)
        else:
            words = torch.frombuffer(self._sent, dtype=torch.int64, count=5)
            both = torch.cat([words[:3], ~words[:3], words[-1:]])
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group=control, async_op=True)
            self._left.append((work, both))
            self._make_buffers()

    @torch.inference_mode(False)
    def _make_buffers(self) -> None:
        """Memory for frames; made in evaluation it must serve outside of it, too."""
        self._left = [left for left in self._left if not left[0].is_completed()]
        self._sent = bytearray(FRAME_BYTES)
        self._own = torch.frombuffer(self._sent, dtype=torch.uint8)
        self._slots: dict[torch.dtype, Tensor] = {}
        self._views: dict[torch.dtype, list[Tensor]] = {}
        size = FRAME_BYTES if self.whole else 0
        self._got = bytearray(size * len(self.members))
        if size:
            self._rows = torch.frombuffer(self._got, dtype=torch.uint8).view(-1, FRAME_BYTES)
            self._each = list(self._rows)

    def _row(self, call: Call) -> Said:
        return Said(self._waits.rank, f"{call.verb} #{max(self.count, 1)}", call.what, frames.user_place())

    def _failure(self, call: Call, error: Exception, work: Any = None) -> str:
        """The error for ranks that ended or did not come: who is missing, and where the others wait."""
        self._waits.store.settle()
        reason, explain = reason_of(error), self._waits.explain
        text = f"{call.verb} at {frames.user_place()} failed on rank {self._waits.rank}: "
        left, quiet, found = explain() if explain else Whereabouts([], [], "")
        ended = [str(rank) for rank in self.members if rank in (*left, *quiet)]
        try:
            missing, rows = self._missing(work) if not ended else ([], [])
        except StoreSilent as silent:
            missing, rows, reason = [], [], f"{reason}; {silent}"
        except Exception:  # the store went with the rank that kept it
            missing, rows = [], []
        if ended:
            how = "ended, or does not answer" if {*quiet} & {*self.members} else "ended"
            text += f"rank {', '.join(ended)} {how} ({reason})."
        else:
            who = f"rank {', '.join(missing)}" if missing else "a rank of the group"
            text += f"{who} ended, or did not come within {self.timeout.total_seconds():.0f} s ({reason})."
        if found:
            return f"{text}\nWhere the ranks are:\n{found}"
        return f"{text}\nWaiting at that time:\n{frames.table(rows)}" if rows else text

    def _missing(self, work: Any) -> tuple[list[str], list[Said]]:
        """Who has not come to this call, and the rows of the others that wait."""
        waits = self._waits.read()
        came = {wait.rank for wait in waits.values() if wait.counts.get(self.name, 0) >= self.count}
        if isinstance(work, Arrival):
            came = work.came()
        missing = [str(rank) for rank in self.members if rank not in {*came, self._waits.rank}]
        return missing, [wait.row() for wait in waits.values() if wait.rank != self._waits.rank]


def _is_done(work: Any, seconds: float) -> bool:
    """Whether the operation ended within `seconds`; raises what it raised."""
    patience = _PATIENCE if seconds == PATIENCE else timedelta(seconds=seconds)
    with suppress(RuntimeError):
        work.wait(patience)
        return True
    if not work.is_completed():
        return False
    work.wait(patience)
    return True


def reason_of(error: Exception) -> str:
    """What a backend's error says, without the place in its source and its advice."""
    lines = str(error).rpartition("cc:")[2].rpartition("] ")[2].splitlines() or [""]
    return lines[0].partition(". This is typically")[0] or type(error).__name__


def timeout_of(group: Any) -> timedelta:
    """How long the group's collectives wait for a rank."""
    for kind in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):  # no such backend in this group
            continue
    return timedelta(minutes=30)
