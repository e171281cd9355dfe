"""`CallChecker`: the ranks of a group meet on connections of their own before each collective.

They exchange one frame each (messages.py, control_connections.py). If the frames differ, all ranks raise the
same error and the group stays usable. On the host small data are sent in the frame, and need no collective of
their own. Ranks that never meet (deadlocks.py) raise the same error, too, and then at every call of the job.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from fabric.collectives.frames import IN_THREAD
from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError
from fabric.core.job_secret import VARIABLE
from fabric.core.source import user_line
from fabric.guard._torch import group_timeout
from fabric.guard.control_connections import (
    FAN_OUT,
    PATIENCE,
    ControlConnections,
    ControlRound,
    Listener,
    connect,
    neighbours,
)
from fabric.guard.deadlocks import LEFT, SILENT, DeadlockDetector, RankStatus, as_table
from fabric.guard.job_store import StoreTimeout
from fabric.guard.messages import CALL_BYTES, KEY_BYTES, NO_FACTS, Meeting, RankReport, combiner, message

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.collectives.frames import CallSignature

MODES = ("full", "light", "off")
FULL_UP_TO = 16
"""Ranks up to which each one receives the data in all frames, 2 MiB through the first one. Larger groups
reduce a few bytes in their frames (`combiner`)."""

_guards: weakref.WeakKeyDictionary[Any, CallChecker | None] = weakref.WeakKeyDictionary()
_waits: weakref.WeakKeyDictionary[Any, DeadlockDetector] = weakref.WeakKeyDictionary()


def guard_of(group: Any) -> CallChecker | None:
    """The guard of a torch process group; None for a group of one, or once all said FABRIC_GUARD=off."""
    try:
        return _guards[group]
    except KeyError:
        pass
    mode = os.environ.get("FABRIC_GUARD", "full")
    guard = _guards[group] = CallChecker(group, mode) if dist.get_world_size(group) > 1 else None
    return guard


def waits_of_world() -> DeadlockDetector:
    """This rank's view of the job, in the store of torch's default group."""
    world: Any = dist.group.WORLD
    if world not in _waits:
        _waits[world] = DeadlockDetector(world.get_group_store(), dist.get_rank(), dist.get_world_size())
    return _waits[world]


def _forked() -> None:
    for waits in _waits.values():
        waits.broken = (
            f"fabric was called in a process that rank {waits.rank} forked (a worker of a DataLoader?), and "
            "that is not a rank. Make the call in the loop."
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class StoreBarrier:
    """Ranks that come to the first call of a group, which has no connections yet, through the store.

    Args:
        waits: Of the job.
        name: Of the point; ranks come to it any number of times, all of them as often.
        members: The ranks that come. The first of them looks at what all say; the others look at its answer.
    """

    why = "it was the first call of the group"
    """What to say if they do not come."""

    def __init__(self, waits: DeadlockDetector, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, members
        self.turn = waits.counts.get(name, 0) + 1
        self._store, self._secret, self._prefix = waits.store, waits.secret, f"{name}/{self.turn}"
        self._rank, self.leads = waits.rank, waits.rank == members[0]
        self._pause = 0.0005

    def tell(self, rank: int, text: str = "") -> None:
        """Say that this rank is here."""
        self._write(f"{self._prefix}/{rank}", text)
        self._store.add(self._prefix, 1)  # the first rank looks at this one: N keys would be more to read

    def answer(self, text: str) -> None:
        """Publish the answer of the first rank to all others."""
        self._write(f"{self._prefix}/all", text)

    def missing(self) -> set[int]:
        """The members that are not here."""
        there = self._store.get_all([f"{self._prefix}/{rank}" for rank in self.members])
        return {*self.members} - {int(key.rpartition("/")[2]) for key in there}

    def told(self, names: Sequence[Any]) -> list[str]:
        """Return the texts of these ranks, or of the answer to "all"; raises ConfigurationError if they have
        another secret.
        """
        keys = [f"{self._prefix}/{name}" for name in names]
        texts = self._store.get_all(keys)
        found = [self._secret.verified(key, texts.get(key, b"")) for key in keys]
        wrong = [str(name) for name, text in zip(names, found, strict=True) if text is None]
        if wrong:
            ranks = ", ".join(wrong).replace("all", str(self.members[0]))
            raise ConfigurationError(
                f"{VARIABLE} of rank {self._rank} is not that of rank {ranks}. Ranks with different secrets "
                "do not connect. Export one value of it on all machines, or none."
            )
        return [text for text in found if text is not None]

    def key(self, port: int) -> bytes:
        """Return the key of the connections that are opened here, through this port of a rank."""
        return self._secret.proof(b"connections", self._prefix.encode(), b"%d" % port)

    def take_back(self, rank: int) -> None:
        """This rank has left, and may come again."""
        self._store.add(self._prefix, -1)
        self._store.delete_key(f"{self._prefix}/{rank}")

    def is_done(self, seconds: float) -> bool:
        """Wait until all members are here, and on others than the first for its answer, up to `seconds`."""
        end = time.monotonic() + seconds
        while True:
            with suppress(StoreTimeout):  # the time for the call runs out
                if self.leads and self._store.add(self._prefix, 0) >= len(self.members):
                    return True
                if not self.leads and self._store.check([f"{self._prefix}/all"]):
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(self._pause)
            self._pause = min(1.5 * self._pause, 0.05)

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, self._secret.sign(key, text))


class CallChecker:
    """The check of calls before each collective of one process group (`Channel.check_call`).

    If a rank is missing, or the calls differ, all ranks raise. Made by `guard_of`.
    """

    fan_out, whole_up_to = FAN_OUT, FULL_UP_TO

    def __init__(self, group: Any, mode: str) -> None:
        self.name: str = group.group_name
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.mode = mode
        self._group = weakref.ref(group)
        self.waits = waits_of_world()
        self.waits.counts.setdefault(self.name, 0)
        self.timeout = timeout_of(group)
        self.star: ControlConnections | None = None
        self.whole = mode == "full" and len(self.members) <= min(self.whole_up_to, 1 + self.fan_out)
        """Whether all ranks receive the data in the frames."""
        self.combines = mode == "full" and not self.whole
        """Whether data are reduced in the frames, if they are few (`combiner`)."""

    @property
    def count(self) -> int:
        """The number of calls of the group that this rank has begun."""
        return self.waits.counts[self.name]

    def compare(
        self, call: CallSignature, payload: Sequence[Tensor], channel: Channel, op: Any = None
    ) -> Meeting | None:
        """Exchange frames with all ranks of the group, and compare them; see `Channel.check_call`.

        Raises:
            CollectiveMismatch: Ranks make different calls; raised on all of them.
            RankError: A rank ended, or did not make the call in time.
        """
        if self.waits.broken is not None:
            raise CollectiveMismatch(self.waits.broken)
        compiling = torch.compiler.is_compiling()
        if not compiling and threading.get_ident() != self.waits.thread:
            from fabric.guard.threads import in_this_thread

            call = in_this_thread(call, self.waits)
        star = self.star or self.open(call)
        if star is None:
            return None
        compared, counts = None if compiling else channel.facts, self.waits.counts
        facts = NO_FACTS if compared is None else compared.facts()
        combine = combiner(payload, op, star.is_flat) if self.combines else None
        own = message(counts[self.name] + 1, call, payload, self.whole or combine is not None, facts)
        counts[self.name] += 1  # last: nothing can fail between it and the frame
        turn = star.start(own, KEY_BYTES, combine)
        try:
            done = turn.is_done()
        except ConnectionError:  # `wait` raises it again
            done = False
        if not done:
            self.wait(turn, call, 0.0)
        if not turn.is_alike(KEY_BYTES):
            if compared is None or not turn.is_alike(CALL_BYTES):
                self.disagree(star, call)
            compared.differ(channel)
        if self.whole:
            return Meeting(turn.rows, turn.size, len(self.members))
        return None if combine is None else Meeting(turn.rows, turn.size, 1)

    def disagree(self, star: ControlConnections, call: CallSignature) -> NoReturn:
        """All ranks see that their calls differ: say what each was about to do, and raise on all."""
        from fabric.guard import mismatch

        turn = star.start(mismatch.to_text(self._row(call)))
        self.wait(turn, call)
        rows = turn.by_place(len(self.members))
        known = {row: mismatch.from_text(0, row) for row in {*rows}}
        said = [known[row]._replace(rank=rank) for rank, row in zip(self.members, rows, strict=True)]
        text = mismatch.mismatch_text(said)
        if len({row.verb.partition(IN_THREAD)[2] for row in said}) > 1:
            self.waits.broken = text  # the other threads of each rank go on, in another order
        raise CollectiveMismatch(text)

    def open(self, call: CallSignature) -> ControlConnections | None:
        """The connections, made by the first call of the group, when all its ranks are there; None: off."""
        waits, place = self.waits, self.members.index(self.waits.rank)
        arrival = StoreBarrier(waits, f"open {self.name}", self.members)
        above, blocks = neighbours(place, len(self.members), self.fan_out)
        below = [block.start for block in blocks]
        with Listener(below, waits.store.interface) if below else nullcontext() as listener:
            port = listener.port if listener else 0
            arrival.tell(waits.rank, f"{self.mode} {waits.store.address} {port}")
            try:
                self.wait(arrival, call)
            except KeyboardInterrupt:  # the call may be made again
                arrival.take_back(waits.rank)
                waits.counts[arrival.name] -= 1
                raise
            self._agree_on_modes(arrival)
            if self.mode == "off":
                _guards[self._group()] = None
                return None
            to_above = None if above is None else self._connect(arrival, place, above)
            with _reaching("the ranks after it", waits.rank, waits.store.reach(waits.store.address), port):
                lines = listener.accept(arrival.key(port)) if listener else []
        self.star = ControlConnections(to_above, lines, self.members, place, self.fan_out)
        return self.star

    def _connect(self, arrival: StoreBarrier, place: int, above: int) -> Any:
        """Return the connection to the rank at the place `above`."""
        rank = self.members[above]
        _, address, port = arrival.told([rank])[0].split(" ")
        host = self.waits.store.reach(address)
        with _reaching(f"rank {self.waits.rank}", rank, host, int(port)):
            return connect(place, above, host, int(port), arrival.key(int(port)))

    def _agree_on_modes(self, arrival: StoreBarrier) -> None:
        """Raise on all ranks if their FABRIC_GUARD or secrets differ, as the first one sees."""
        if not arrival.leads:
            (wrong,) = arrival.told(["all"])
            if wrong:
                raise ConfigurationError(wrong)
            return
        try:
            modes = [text.partition(" ")[0] for text in arrival.told(self.members)]
            if len({*modes}) > 1 or self.mode not in MODES:
                each = [f"{mode} on rank {rank}" for rank, mode in zip(self.members, modes, strict=True)]
                raise ConfigurationError(
                    f"FABRIC_GUARD must be one of {', '.join(MODES)} and the same on all ranks, but is "
                    f"{', '.join(each)}."
                )
        except ConfigurationError as error:
            arrival.answer(str(error))
            raise
        arrival.answer("")

    def wait(
        self, point: StoreBarrier | ControlRound, call: CallSignature, patience: float = PATIENCE
    ) -> None:
        """Wait for the others; after a while, look where they are.

        Raises:
            CollectiveMismatch: They wait for this rank, elsewhere.
            RankError: One of them went away, or did not come in time.
        """
        if isinstance(point, StoreBarrier):
            self.waits.counts[point.name] = point.turn
        try:
            if not point.is_done(patience):
                self._wait_long(point, call)
        except CollectiveMismatch:
            raise
        except (RuntimeError, ConnectionError) as error:
            if isinstance(point, ControlRound) and self.star is not None:
                self.star.close(str(error))
            with suppress(RuntimeError):  # the store's host may be who has ended
                self.waits.hear()
            if self.waits.broken is not None:
                raise CollectiveMismatch(self.waits.broken) from error
            raise RankError(self._failure(call, error, point)) from error
        finally:
            if self.waits.here is not None:
                self.waits.here = None
                with suppress(RuntimeError):
                    self.waits.tell(self.waits.stand(RankReport(self.waits.rank, "", "", ""), None))

    def _wait_long(self, point: StoreBarrier | ControlRound, call: CallSignature) -> None:
        waits, heard = self.waits, time.monotonic()
        longest = min(3.0, max(1.0, waits.world_size / 256))  # between two looks, for the store's sake
        seconds = 0.2 * longest
        waits.here = self._here(point, call, heard - PATIENCE)
        while not point.is_done(seconds):
            with suppress(StoreTimeout):  # what the ranks wait for may come, all the same
                waits.tell(waits.here)
                waits.judge()
            if waits.broken is not None:
                raise CollectiveMismatch(waits.broken)
            heard = self._heard(point, call, heard)
            seconds = min(1.5 * seconds, longest)

    def _here(self, point: StoreBarrier | ControlRound, call: CallSignature, since: float) -> RankStatus:
        name = point.name if isinstance(point, StoreBarrier) else self.name
        begun, _ = self.waits.begun(threading.get_ident())
        self.waits.members[name] = self.members
        return self.waits.stand(self._row(call), since, group=name, turn=self.waits.counts[name], begun=begun)

    def _heard(self, point: StoreBarrier | ControlRound, call: CallSignature, heard: float) -> float:
        """Return the time of the last sign of life of missing ranks; raises RuntimeError if it is too old."""
        limit, now = self.timeout.total_seconds() - PATIENCE, time.monotonic()
        with suppress(StoreTimeout):
            if isinstance(point, StoreBarrier):
                told = self.waits.read(ranks=point.missing() if point.leads else self.members[:1])
                limit = 0.0 if any([one.verb == LEFT for one in told.values()]) else limit
            elif call.patient and now - heard > limit / 2 and self.waits.explain:
                rows = self.waits.explain()
                if not any([rows[rank].verb in (LEFT, SILENT) for rank in self.members]):
                    return time.monotonic()
        if now - heard > limit:
            raise RuntimeError(point.why)
        return heard

    def _row(self, call: CallSignature) -> RankReport:
        return RankReport(self.waits.rank, f"{call.verb} #{max(self.count, 1)}", call.what, user_line())

    def _failure(self, call: CallSignature, error: Exception, point: StoreBarrier | ControlRound) -> str:
        """The error for ranks that ended or did not come: who is missing, and where the others wait."""
        waits, reason = self.waits, reason_of(error)
        waits.store.settle()
        waits.here = waits.here or self._here(point, call, time.monotonic())
        lost = self.star.lost if self.star is not None and isinstance(point, ControlRound) else None
        rows: Mapping[int, RankStatus] = {}
        away = set[int]()
        try:
            rows = waits.explain() if waits.explain else waits.read()
            came = {rank for rank, one in rows.items() if one.counts.get(self.name, 0) >= self.count}
            away = point.missing() if isinstance(point, StoreBarrier) else {*self.members} - came
        except StoreTimeout as silent:
            reason = f"{reason}; {silent}"
        except Exception:  # the store went with the rank that kept it
            pass
        gone = {rank for rank, one in rows.items() if one.verb in (LEFT, SILENT)}
        ended = [str(rank) for rank in self.members if rank in gone or rank == lost]
        missing = [str(rank) for rank in sorted(away - {waits.rank})]
        text = f"{call.verb} at {user_line()} failed on rank {waits.rank}: "
        if ended:
            text += f"rank {', '.join(ended)} ended, or does not answer ({reason})."
        else:
            who = f"rank {', '.join(missing)}" if missing else "a rank of the group"
            text += f"{who} ended, or did not come within {self.timeout.total_seconds():.0f} s ({reason})."
        shown = [one for one in rows.values() if one.verb or waits.explain]
        return f"{text}\nWhere the ranks are:\n{as_table(shown)}" if shown else text


@contextmanager
def _reaching(who: str, rank: int, host: str, port: int) -> Iterator[None]:
    """In the block ranks connect; raises RankError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise RankError(
            "Ranks of a group exchange what they are about to do through connections of their own, and "
            f"{who} did not reach rank {rank} at {host}:{port} ({reason_of(error)}). Did it end, or was its "
            "call interrupted? Else open the ports between the machines, or name the network card that leads "
            "to the others (GLOO_SOCKET_IFNAME=eth0). FABRIC_GUARD=off does without, but calls that differ "
            "hang then."
        ) from error


def reason_of(error: Exception) -> str:
    """Return the message of a backend's error, without the place in its source and its advice."""
    lines = str(error).rpartition("cc:")[2].rpartition("] ")[2].splitlines() or [""]
    return lines[0].partition(". This is typically")[0] or type(error).__name__


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the group's collectives."""
    found = [given for kind in ("cpu", "cuda") if (given := group_timeout(group, kind)) is not None]
    return found[0] if found else timedelta(minutes=30)
