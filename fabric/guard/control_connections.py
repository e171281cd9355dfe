"""`ControlConnections`: sockets of a group's ranks to its first one; all ranks receive what each one sends.

By sockets of its own: a message is there and back in some 40 us, where gloo's all_gather takes 300 (measured:
benchmarks/results/2026-11-25-frames.md). A rank that ends closes its connections: whoever waits sees it, the
others once the first rank waits.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from fabric.guard import handshake
from fabric.guard.handshake import Admission

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECT_S = 60.0
_BACKLOG = 4096
"""Connections that the system holds until this process accepts them, those of strangers among them."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
"""Networks forget connections on which nothing moves for long; and a machine that is gone says nothing."""
_LENGTH = struct.Struct("<q")
"""Of a message; 0, and no message: who sends it gives up, and has not gone. And of each row, before the rows
that come back: -1 - place in its stead, and nothing, if the rank of that place has gone.
"""
_UNSENT_S = 0.001
PATIENCE = 1.0
"""Seconds that a call waits before its rank looks where the others are."""
_WHY = "not all ranks are here"

_stars: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


class ControlRound:
    """One message of each rank, to all."""

    def __init__(self, star: ControlConnections, own: bytes) -> None:
        self._star, self.own = star, own
        self.why = _WHY
        self.size = 0
        """Bytes of each of `rows`; 0: not all ranks have come."""
        self.rows = bytearray()
        """Of all ranks, shorter ones filled up with zeros; one that stands for all if they are equal."""

    def is_done(self, seconds: float = PATIENCE) -> bool:
        """Wait for the others up to `seconds`; raises ConnectionError: one of them has gone."""
        return self._star.advance(self, seconds)


class Listener:
    """The listening socket of the first rank of a group. A context: no rank can connect after it.

    Args:
        count: How many ranks are to connect.
        host: The address of this machine on which to listen; "": all of them.
    """

    def __init__(self, count: int, host: str = "") -> None:
        wide = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if wide or ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=wide)
        self._count, self.port = count, int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, key: bytes) -> list[_Connection]:
        """The connections of the others, by their places; raises TimeoutError if they do not come.

        `key`: of the group, see `handshake`.
        """
        admission = Admission(self._socket, range(1, self._count + 1), key)
        found = admission.wait(time.monotonic() + _CONNECT_S)
        return [_Connection(found[place], place) for place in sorted(found)]


def connect(place: int, host: str, port: int, key: bytes) -> list[_Connection]:
    """The connection to the `Listener` at this address; raises OSError if there is none."""
    return [_Connection(handshake.connect(place, host, port, key, time.monotonic() + _CONNECT_S), 0)]


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

    def send(self, *parts: bytes | bytearray) -> bool:
        """Send a message as far as the connection takes it; whether it is sent."""
        self._out += _LENGTH.pack(sum(map(len, parts)))
        for part in parts:
            self._out += part
        return self.flush()

    def flush(self) -> bool:
        """Send what the connection takes; whether nothing is left."""
        with suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        return not self._out

    def take(self) -> bytearray | None:
        """The next message, once all of it is here; raises ConnectionError at the connection's end.

        What comes after it stays in the connection: a selector does not see what was taken out.
        """
        while True:
            end = _LENGTH.size
            if len(self._in) >= end:
                end += _LENGTH.unpack_from(self._in)[0]
                if len(self._in) == end:
                    message, self._in = self._in[_LENGTH.size :], bytearray()
                    return message
            try:
                got = self.socket.recv(end - len(self._in))
            except BlockingIOError:
                return None
            if not got:
                raise ConnectionResetError
            self._in += got


class ControlConnections:
    """The connections of a group. All of its ranks start their turns in the same order.

    A turn that an interrupt has left is done before the next one: the others may wait in it.

    Args:
        lines: To the other ranks, in the order of the group; of these the first rank only.
        ranks: Those of the group, by place.
        place: This one.
    """

    def __init__(self, lines: list[_Connection], ranks: Sequence[int], place: int) -> None:
        self._lines, self._ranks, self._place = lines, ranks, place
        self._selector = selectors.DefaultSelector()
        for line in lines:
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        self._turns: deque[ControlRound] = deque()
        self._said: dict[int, bytearray] = {}
        self._unsent: list[_Connection] = []
        self._whole = True
        """Whether no interrupt came in the middle of a message."""
        self._broken = ""
        self._untold = b""
        """To the other ranks, since a rank has gone, or gives up."""
        self.lost: int | None = None
        """The rank that has gone."""
        _stars.add(self)
        self._end = weakref.finalize(self, _close, self._selector, lines)

    def start(self, own: bytes) -> ControlRound:
        """Send this rank's message, once the turns before it are done."""
        turn, whole, self._whole = ControlRound(self, own), self._whole, False
        self._turns.append(turn)
        if self._place and len(self._turns) == 1:
            self._tell(self._lines[0], own)
        self._whole = whole
        return turn

    def advance(self, turn: ControlRound, seconds: float) -> bool:
        """Go on until a turn is done, up to `seconds`; whether it is."""
        end = time.monotonic() + seconds
        while not turn.size or self._unsent:
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
            if self._broken and not self._place:  # after what they still get
                for line in self._lines:
                    self._tell(line, self._untold)
            self._whole = True
        return True

    def close(self, why: str) -> None:
        """Give up: the others see it, at once or when they come."""
        for line in self._lines if self._end.alive else ():
            with suppress(OSError):
                line.send()
        self.drop(why)

    def drop(self, why: str) -> None:
        """Close the connections without a word."""
        self._broken = self._broken or why
        self._end()

    def _hear(self, line: _Connection) -> None:
        try:
            message = line.take()
        except OSError:
            self._lose(line.place)
            return
        if message is None or self._broken:
            return
        if not message:
            self._broken = _WHY
        elif self._place:
            self._get(message)
        else:
            self._said[line.place] = message
            if len(self._said) == len(self._lines):
                self._answer()

    def _get(self, message: bytearray) -> None:
        (size,) = _LENGTH.unpack_from(message)
        if size < 0:
            self._lose(-size - 1)
            return
        turn = self._turns.popleft()
        turn.size, turn.rows = size, message[_LENGTH.size :]
        if self._turns:
            self._tell(self._lines[0], self._turns[0].own)

    def _answer(self) -> None:
        turn = self._turns.popleft()
        rows = [bytearray(turn.own), *[self._said[line.place] for line in self._lines]]
        self._said = {}
        if all([row == rows[0] for row in rows]):
            rows = rows[:1]
        size = max(map(len, rows))
        flat = bytearray().join([row.ljust(size, b"\0") for row in rows])
        for line in self._lines:
            self._tell(line, _LENGTH.pack(size), flat)
        turn.size, turn.rows = size, flat

    def _tell(self, line: _Connection, *parts: bytes | bytearray) -> None:
        """Send a message, or what is left of one."""
        try:
            if not (line.send(*parts) if parts else line.flush()):
                self._unsent.append(line)
        except OSError:
            self._lose(line.place)

    def _lose(self, place: int) -> None:
        """A rank has gone, and no turn can end any more."""
        if not self._broken:
            self.lost, self._untold = self._ranks[place], _LENGTH.pack(-1 - place)
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
