"""`CallChecker`: the ranks of a group meet on connections of their own before each collective.

They exchange one frame each (frames.py, star.py). If the frames differ, all ranks raise the same error and
the group stays usable. On the host small data ride in the frame, and need no collective of their own. Ranks
that never meet (waits.py) raise the same error, too, and from then on at every call of the job.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import nullcontext, suppress
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
    PATIENCE,
    ControlConnections,
    ControlRound,
    Listener,
    connect,
)
from fabric.guard.deadlocks import LEFT, SILENT, DeadlockDetector, RankStatus, as_table
from fabric.guard.job_store import StoreTimeout
from fabric.guard.messages import CALL_BYTES, NO_FACTS, Meeting, RankReport, is_alike, message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.collectives.frames import CallSignature

MODES = ("full", "light", "off")
FULL_UP_TO = 16
"""Ranks up to which data ride in frames, 2 MiB through the first one; larger groups do as `light` does."""

_guards: weakref.WeakKeyDictionary[Any, CallChecker | None] = weakref.WeakKeyDictionary()
_waits: weakref.WeakKeyDictionary[Any, DeadlockDetector] = weakref.WeakKeyDictionary()


def guard_of(group: Any) -> CallChecker | None:
    """The guard of a torch process group; None for a group of one, or once all said FABRIC_GUARD=off."""
    try:
        return _guards[group]
    except KeyError:
        pass
    guard = (
        None
        if dist.get_world_size(group) == 1
        else CallChecker(group, os.environ.get("FABRIC_GUARD", "full"))
    )
    _guards[group] = guard
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
        members: The ranks that come.
    """

    why = "it was the first call of the group"
    """What to say if they do not come."""

    def __init__(self, waits: DeadlockDetector, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, members
        self.turn = waits.counts.get(name, 0) + 1
        self._store, self._secret, self._prefix = waits.store, waits.secret, f"{name}/{self.turn}"
        self._keys = [f"{self._prefix}/{rank}" for rank in members]
        self._pause = 0.0005

    def tell(self, rank: int, text: str = "") -> None:
        """Say that this rank is here."""
        key = f"{self._prefix}/{rank}"
        self._store.set(key, self._secret.sign(key, text))
        self._store.add(self._prefix, 1)  # all look at this one: N keys at each look would be N times N

    def missing(self) -> set[int]:
        """The members that are not here."""
        return {*self.members} - {int(key.rpartition("/")[2]) for key in self._store.get_all(self._keys)}

    def told(self) -> list[str | None]:
        """Return the texts of all members, in the order of `members`; None: not signed with the secret."""
        texts = self._store.get_all(self._keys)
        return [self._secret.verified(key, texts.get(key, b"")) for key in self._keys]

    def key(self, port: int) -> bytes:
        """Return the key of the connections that are opened here, through this port of the first rank."""
        return self._secret.proof(b"connections", self._prefix.encode(), b"%d" % port)

    def take_back(self, rank: int) -> None:
        """This rank has left, and may come again."""
        self._store.add(self._prefix, -1)
        self._store.delete_key(f"{self._prefix}/{rank}")

    def is_done(self, seconds: float) -> bool:
        """Wait until all members are here, up to `seconds`."""
        end = time.monotonic() + seconds
        while True:
            with suppress(StoreTimeout):  # the time for the call runs out
                if self._store.add(self._prefix, 0) >= len(self._keys):
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(self._pause)
            self._pause = min(1.5 * self._pause, 0.05)


class CallChecker:
    """The check of calls before each collective of one process group (`Channel.check_call`).

    If a rank is missing, or the calls differ, all ranks raise. Made by `guard_of`.
    """

    def __init__(self, group: Any, mode: str) -> None:
        self.name: str = group.group_name
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.mode = mode
        self._group = weakref.ref(group)
        self.waits = waits_of_world()
        self.waits.counts.setdefault(self.name, 0)
        self.timeout = timeout_of(group)
        self.star: ControlConnections | None = None
        self.whole = mode == "full" and len(self.members) <= FULL_UP_TO
        """Whether data ride in the frames."""

    @property
    def count(self) -> int:
        """The number of calls of the group that this rank has begun."""
        return self.waits.counts[self.name]

    def compare(self, call: CallSignature, payload: Sequence[Tensor], channel: Channel) -> Meeting | None:
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
        own = message(counts[self.name] + 1, call, payload, self.whole, facts)
        counts[self.name] += 1  # last: nothing can fail between it and the frame
        turn = star.start(own)
        try:
            done = turn.is_done()
        except ConnectionError:  # `wait` raises it again
            done = False
        if not done:
            self.wait(turn, call, 0.0)
        if not is_alike(own, turn.rows, turn.size):
            if compared is None or not is_alike(own, turn.rows, turn.size, CALL_BYTES):
                self.disagree(star, call)
            compared.differ(channel)
        return Meeting(turn.rows, turn.size, len(self.members)) if self.whole else None

    def disagree(self, star: ControlConnections, call: CallSignature) -> NoReturn:
        """All ranks see that their calls differ: say what each was about to do, and raise on all."""
        from fabric.guard import mismatch

        turn = star.start(mismatch.to_text(self._row(call)))
        self.wait(turn, call)
        starts = range(0, len(turn.rows), turn.size)
        rows = [bytes(turn.rows[at : at + turn.size]).rstrip(b"\0") for at in starts]
        rows = rows if len(rows) > 1 else rows * len(self.members)
        said = [mismatch.from_text(rank, row) for rank, row in zip(self.members, rows, strict=True)]
        text = mismatch.mismatch_text(said)
        if len({row.verb.partition(IN_THREAD)[2] for row in said}) > 1:
            self.waits.broken = text  # the other threads of each rank go on, in another order
        raise CollectiveMismatch(text)

    def open(self, call: CallSignature) -> ControlConnections | None:
        """The connections, made by the first call of the group, when all its ranks are there; None: off."""
        waits, place = self.waits, self.members.index(self.waits.rank)
        arrival = StoreBarrier(waits, f"open {self.name}", self.members)
        with nullcontext() if place else Listener(len(self.members) - 1, waits.store.interface) as listener:
            way = [waits.store.address, str(listener.port)] if listener else []
            arrival.tell(waits.rank, " ".join([self.mode, *way]))
            try:
                self.wait(arrival, call)
            except KeyboardInterrupt:  # the call may be made again
                arrival.take_back(waits.rank)
                waits.counts[arrival.name] -= 1
                raise
            told = [text.split(" ") for text in self._signed(arrival.told())]
            self._check_modes([mode for mode, *_ in told])
            if self.mode == "off":
                _guards[self._group()] = None
                return None
            _, address, text = told[0]
            host, port = waits.store.reach(address), int(text)
            key = arrival.key(port)
            try:
                lines = listener.accept(key) if listener else connect(place, host, port, key)
            except OSError as error:
                raise RankError(self._unreached(f"{host}:{port}", error)) from error
        self.star = ControlConnections(lines, self.members, place)
        return self.star

    def _signed(self, texts: list[str | None]) -> list[str]:
        """Return the texts of all ranks; raises ConfigurationError if they do not have one secret."""
        wrong = [str(rank) for rank, text in zip(self.members, texts, strict=True) if text is None]
        if wrong:
            raise ConfigurationError(
                f"{VARIABLE} of rank {self.waits.rank} is not that of rank {', '.join(wrong)}. Ranks with "
                "different secrets do not connect. Export one value of it on all machines, or none."
            )
        return [text for text in texts if text is not None]

    def _unreached(self, at: str, error: OSError) -> str:
        first, rank = self.members[0], self.waits.rank
        who = "the others" if rank == first else f"rank {rank}"
        return (
            f"Ranks of a group exchange what they are about to do through its first one, and {who} did not "
            f"reach rank {first} at {at} ({reason_of(error)}). Did it end, or was its call interrupted? Else "
            "open the ports between the machines, or name the network card that leads to the others "
            "(GLOO_SOCKET_IFNAME=eth0). FABRIC_GUARD=off does without, but calls that differ hang then."
        )

    def _check_modes(self, modes: list[str]) -> None:
        """Raise on all ranks if FABRIC_GUARD is none of its values, or differs between ranks."""
        if len({*modes}) > 1 or self.mode not in MODES:
            each = [f"{mode} on rank {rank}" for rank, mode in zip(self.members, modes, strict=True)]
            raise ConfigurationError(
                f"FABRIC_GUARD must be one of {', '.join(MODES)} and the same on all ranks, but is "
                f"{', '.join(each)}."
            )

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
        longest = max(1.0, waits.world_size / 64)  # between two looks, for the store's sake
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
        where = {"group": name, "turn": self.waits.counts[name], "members": self.members, "begun": begun}
        return self.waits.stand(self._row(call), since, **where)

    def _heard(self, point: StoreBarrier | ControlRound, call: CallSignature, heard: float) -> float:
        """Return the time of the last sign of life of missing ranks; raises RuntimeError if it is too old."""
        limit, now = self.timeout.total_seconds() - PATIENCE, time.monotonic()
        with suppress(StoreTimeout):
            if isinstance(point, StoreBarrier):
                told = self.waits.read(ranks=point.missing())
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


def reason_of(error: Exception) -> str:
    """Return the message of a backend's error, without the place in its source and its advice."""
    lines = str(error).rpartition("cc:")[2].rpartition("] ")[2].splitlines() or [""]
    return lines[0].partition(". This is typically")[0] or type(error).__name__


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the group's collectives."""
    found = [given for kind in ("cpu", "cuda") if (given := group_timeout(group, kind)) is not None]
    return found[0] if found else timedelta(minutes=30)
