"""`ControlConnections`: sockets between a group's ranks, in a tree; all ranks receive what each one sends.

By sockets of its own: a message is there and back in some 40 us, where gloo's all_gather takes 300 (measured:
benchmarks/results/2026-11-25-frames.md). A small group is a star around its first rank. In a larger one inner
ranks join what the ranks below them send (`join`), and pass the answer on. A rank that ends closes its
connections: its neighbours see it once they wait, and pass it on.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fabric.guard import handshake
from fabric.guard.handshake import Admission
from fabric.guard.messages import grouped, joined, ungrouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_CONNECT_S = 60.0
_BACKLOG = 4096
"""Connections that the system holds until this process accepts them, those of strangers among them."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
"""Networks forget connections on which nothing moves for long; and a machine that is gone says nothing."""
_HEAD = struct.Struct("<qq")
"""Before a message: its length, and the size of each of its rows, or one of these in its place."""
_GROUPS, _GAVE_UP, _LOST = 0, -1, -2
"""Rows in groups; the sender gives up, and has not gone; the rank of place `_LOST - size` has gone."""
_UNSENT_S = 0.001
PATIENCE = 1.0
"""Seconds that a call waits before its rank looks where the others are."""
FAN_OUT = 32
"""Most ranks directly below one in the tree; a group of no more than these and one is a star."""
_WHY = "not all ranks are here"

_stars: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


def neighbours(place: int, count: int, fan_out: int) -> tuple[int | None, list[range]]:
    """Return the place of the rank above `place` (None: it is the first), and the places below it.

    These lie in one range for each rank directly below, which begins with that rank. So rows that are joined
    in this order are in the order of ranks.

    Args:
        place: Of a rank in the group.
        count: Ranks of the group.
        fan_out: Most ranks directly below one.
    """
    above, here = None, range(count)
    while True:
        below, depth, reached = here[1:], 1, fan_out
        while reached < len(below):
            depth, reached = depth + 1, fan_out * (reached + 1)
        width = min(fan_out, math.ceil(len(below) ** (1 / depth)))
        size = math.ceil(len(below) / max(1, width))
        blocks = [below[at : at + size] for at in range(0, len(below), size or 1)]
        if place == here.start:
            return above, blocks
        above, here = here.start, blocks[(place - below.start) // size]


class ControlRound:
    """One message of each rank, to all.

    Args:
        star: The connections.
        own: This rank's message.
        key: Bytes of it by which rows are grouped, where they differ, in a group that is no star.
        combine: Makes one row of rows that are alike up to `key`; None: they stay as they are.
    """

    def __init__(
        self,
        star: ControlConnections,
        own: bytes,
        key: int | None = None,
        combine: Callable[[list[bytes]], bytes] | None = None,
    ) -> None:
        self._star, self.own, self.key, self.combine = star, own, key, combine
        self.why = _WHY
        self.done = False
        self.size = 0
        """Bytes of each of `rows`; 0: these are groups."""
        self.rows: bytes | bytearray = b""
        """Of all ranks, shorter ones filled up with zeros; one that stands for all if they are equal."""

    def is_done(self, seconds: float = PATIENCE) -> bool:
        """Wait for the others up to `seconds`; raises ConnectionError: one of them has gone."""
        return self._star.advance(self, seconds)

    def is_alike(self, length: int) -> bool:
        """Whether the rows of all ranks begin with the same `length` bytes as this one's."""
        # One comparison for each rank: the rest is looked at only where they differ.
        rows, size, key = self.rows, self.size, self.own[:length]
        if size:
            return all([rows[at : at + length] == key for at in range(0, len(rows), size)])
        return len({row[:length] for row, _ in ungrouped(rows)}) == 1

    def by_place(self, count: int) -> list[bytes]:
        """Return the row of each of the `count` ranks."""
        if not self.size:
            found = [b""] * count
            for row, spans in ungrouped(self.rows):
                for start, end in spans:
                    found[start:end] = [row] * (end - start)
            return found
        starts = range(0, len(self.rows), self.size)
        each = [bytes(self.rows[at : at + self.size]).rstrip(b"\0") for at in starts]
        return each if len(each) > 1 else each * count


class Listener:
    """The listening socket of a rank for those below it. A context: no rank can connect after it.

    Args:
        places: Of the ranks that are to connect.
        host: The address of this machine on which to listen; "": all of them.
    """

    def __init__(self, places: Iterable[int], host: str = "") -> None:
        wide = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if wide or ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=wide)
        self._places, self.port = places, int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, key: bytes) -> list[_Connection]:
        """The connections of the ranks below, by their places; raises TimeoutError if they do not come.

        `key`: of the group, see `handshake`.
        """
        found = Admission(self._socket, self._places, key).wait(time.monotonic() + _CONNECT_S)
        return [_Connection(found[place], place) for place in sorted(found)]


def connect(place: int, above: int, host: str, port: int, key: bytes) -> _Connection:
    """The connection to the `Listener` of rank `above` at this address; raises OSError if there is none."""
    return _Connection(handshake.connect(place, host, port, key, time.monotonic() + _CONNECT_S), above)


class _Connection:
    """A connection, on which messages go whole."""

    def __init__(self, connection: socket.socket, place: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.place = connection, place
        self._out, self._in = bytearray(), bytearray()

    def send(self, size: int | None = None, rows: bytes | bytearray = b"") -> bool:
        """Send a message, or without `size` what is left of one, as far as the connection takes it.

        Returns:
            Whether nothing is left.
        """
        if size is not None:
            self._out += _HEAD.pack(len(rows), size)
            self._out += rows
        with suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        return not self._out

    def take(self) -> tuple[int, bytearray] | None:
        """The next message (size and rows), once it is here; raises ConnectionError at the connection's end.

        What comes after it stays in the connection: a selector does not see what was taken out.
        """
        while True:
            end = _HEAD.size
            if len(self._in) >= end:
                length, size = _HEAD.unpack_from(self._in)
                end += length
                if len(self._in) == end:
                    rows, self._in = self._in[_HEAD.size :], bytearray()
                    return size, rows
            try:
                got = self.socket.recv(end - len(self._in))
            except BlockingIOError:
                return None
            if not got:
                raise ConnectionResetError
            self._in += got


class ControlConnections:
    """The connections of a rank in a group. All of its ranks start their rounds in the same order.

    A round that an interrupt has left is done before the next one: the others may wait in it.

    Args:
        above: To the rank above this one; None: this is the first one.
        below: To the ranks directly below, by their places.
        ranks: Those of the group, by place.
        place: This one.
        fan_out: As for `neighbours`.
    """

    def __init__(
        self,
        above: _Connection | None,
        below: list[_Connection],
        ranks: Sequence[int],
        place: int,
        fan_out: int = FAN_OUT,
    ) -> None:
        self._above, self._below, self._ranks, self._place = above, below, ranks, place
        self._fan_out = fan_out
        self._lines = below if above is None else [*below, above]
        self.is_flat = len(ranks) <= fan_out + 1
        """Whether the first rank has a connection to each of the others."""
        self._selector = selectors.DefaultSelector()
        for line in self._lines:
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        self._turns: deque[ControlRound] = deque()
        self._said: dict[int, tuple[int, bytearray]] = {}
        self._unsent: list[_Connection] = []
        self._whole = True
        """Whether no interrupt came in the middle of a message."""
        self._broken = ""
        self._untold, self._teller = _GAVE_UP, above
        """What neighbours are sent since a rank has gone, or gives up; and the one that has sent it."""
        self.lost: int | None = None
        """The rank that has gone."""
        _stars.add(self)
        self._end = weakref.finalize(self, _close, self._selector, self._lines)

    def start(
        self, own: bytes, key: int | None = None, combine: Callable[[list[bytes]], bytes] | None = None
    ) -> ControlRound:
        """Send this rank's message, once the rounds before it are done. Arguments: see `ControlRound`."""
        turn, whole, self._whole = ControlRound(self, own, key, combine), self._whole, False
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._go_on()
        self._whole = whole
        return turn

    def advance(self, turn: ControlRound, seconds: float) -> bool:
        """Go on until a round is done, up to `seconds`; whether it is."""
        end = time.monotonic() + seconds
        while not turn.done or self._unsent:
            if self._broken or not self._whole:
                raise ConnectionError(self._broken or "an interrupt came in the middle of a message")
            left = max(0.0, end - time.monotonic())
            ready = self._selector.select(min(left, _UNSENT_S) if self._unsent else left)
            if not ready and not left:
                return False
            self._whole = False
            for key, _ in ready:
                self._hear(key.data)
            unsent, self._unsent = self._unsent, []
            for line in unsent:
                self._tell(line)
            if self._broken:  # after what they still get
                for line in self._lines:
                    if line is not self._teller:
                        self._tell(line, self._untold)
            self._whole = True
        return True

    def close(self, why: str) -> None:
        """Give up: the others see it, at once or when they come."""
        for line in self._lines if self._end.alive else ():
            with suppress(OSError):
                line.send(_GAVE_UP)
        self.drop(why)

    def drop(self, why: str) -> None:
        """Close the connections without a word."""
        self._broken = self._broken or why
        self._end()

    def _hear(self, line: _Connection) -> None:
        try:
            message = line.take()
        except OSError:
            self._lose(line.place, line)
            return
        if message is None or self._broken:
            return
        size, rows = message
        if size <= _LOST:
            self._lose(_LOST - size, line)
        elif size == _GAVE_UP:
            self._broken, self._teller = _WHY, line
        elif line is self._above:
            self._answer(size, rows)
        else:
            self._said[line.place] = size, rows
            self._go_on()

    def _go_on(self) -> None:
        """Send the messages of this rank and of those below it, once all are here, to the rank above."""
        if len(self._said) < len(self._below):
            return
        own = self._turns[0].own
        size, rows = self._join(self._turns[0]) if self._below else (len(own), own)
        if self._above is None:
            self._answer(size, rows)
        else:
            self._tell(self._above, size, rows)

    def _join(self, turn: ControlRound) -> tuple[int, bytes | bytearray]:
        own, said = turn.own, [self._said[line.place] for line in self._below]
        self._said = {}
        rows: list[Any] = [own, *[row for _, row in said]]
        if all([size for size, _ in said]):
            if all([row == own for row in rows]):
                return len(own), own
            if turn.combine and all([row[: turn.key] == own[: turn.key] for row in rows]):
                made = turn.combine(rows)
                return len(made), made
            if self.is_flat:
                size = max(map(len, rows))
                return size, bytearray().join([row.ljust(size, b"\0") for row in rows])
        at, parts = self._place, [(own[: turn.key], [[self._place, self._place + 1]])]
        _, blocks = neighbours(at, len(self._ranks), self._fan_out)
        for block, (size, row) in zip(blocks, said, strict=True):
            spans = [[block.start, block.stop]]
            parts += [(bytes(row[: turn.key]), spans)] if size else ungrouped(row)
        return _GROUPS, grouped(joined(parts))

    def _answer(self, size: int, rows: bytes | bytearray) -> None:
        """A round is done: these are the rows of all ranks."""
        turn = self._turns.popleft()
        turn.size, turn.rows, turn.done = size, rows, True
        for line in self._below:
            self._tell(line, size, rows)
        if self._turns:
            self._go_on()

    def _tell(self, line: _Connection, size: int | None = None, rows: bytes | bytearray = b"") -> None:
        """Send a message, or what is left of one."""
        try:
            if not line.send(size, rows):
                self._unsent.append(line)
        except OSError:
            self._lose(line.place, line)

    def _lose(self, place: int, teller: _Connection) -> None:
        """A rank has gone, and no round can end any more."""
        if not self._broken:
            self.lost, self._untold, self._teller = self._ranks[place], _LOST - place, teller
            self._broken = f"Connection closed by rank {self.lost}"


def _close(selector: selectors.BaseSelector, lines: list[_Connection]) -> None:
    selector.close()
    for line in lines:
        line.socket.close()


def _close_all() -> None:
    """In a forked process, whose copies of the connections would outlive its parent."""
    for star in list(_stars):
        star.drop("this process was forked from a rank")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
