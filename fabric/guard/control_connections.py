"""`ControlConnections`: sockets between a group's ranks, in a tree; all ranks receive the message of each.

A round on these sockets takes some 40 us, gloo's all_gather 300 (benchmarks/results/2026-11-25-frames.md). A
small group is a star around its first rank. In a larger one inner ranks merge the messages of their subtree
(`_merge`), and forward the result to it. A rank that exits closes its connections. Its neighbours detect
this when they wait, and forward the number of the lost rank.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric.guard import handshake
from fabric.guard.handshake import Admission
from fabric.guard.messages import decode_groups, encode_groups, group_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabric.guard.messages import Combine

_CONNECT_S = 60.0
_BACKLOG = 4096
"""Connections that the system queues until this process accepts them, including those of strangers."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
"""Firewalls drop idle connections, and a machine that is down closes none."""
_HEAD = struct.Struct("<qq")
"""Before a message: its length; the size of each of its rows, or one of the next three codes."""
_GROUPS, _ABORT, _LOST = 0, -1, -2
"""Rows are grouped; the sender aborts but is alive; the rank with group rank `_LOST - code` exited."""
_UNSENT_S = 0.001
PATIENCE = 1.0
"""Seconds that a call waits before its rank publishes its status."""
FAN_OUT = 32
"""Most children of a rank in the tree. A group of at most `FAN_OUT` + 1 ranks is a star."""
_INCOMPLETE = "not all ranks made the call"

_open: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


def neighbours(group_rank: int, size: int, fan_out: int) -> tuple[int | None, list[range]]:
    """Return the parent of a rank in the tree (None: it is the root), and the subtrees of its children.

    Each subtree is a range of group ranks that begins with the child. So rows that are merged in this order
    are in rank order.

    Args:
        group_rank: The rank in its group.
        size: Ranks of the group.
        fan_out: Most children of a rank.
    """
    parent, subtree = None, range(size)
    while True:
        below, depth, reached = subtree[1:], 1, fan_out
        while reached < len(below):
            depth, reached = depth + 1, fan_out * (reached + 1)
        width = min(fan_out, math.ceil(len(below) ** (1 / depth)))
        step = math.ceil(len(below) / max(1, width))
        subtrees = [below[at : at + step] for at in range(0, len(below), step or 1)]
        if group_rank == subtree.start:
            return parent, subtrees
        parent, subtree = subtree.start, subtrees[(group_rank - below.start) // step]


@dataclass(eq=False)
class ControlRound:
    """One exchange: each rank sends a message to all.

    Args:
        connections: The connections of this rank.
        message: The message of this rank.
        key_len: Bytes by which different rows are grouped, in a group that is no star. None: whole rows.
        combine: Reduces rows with equal keys to one row; None: rows stay as they are.
    """

    connections: ControlConnections
    message: bytes
    key_len: int | None = None
    combine: Combine | None = None
    done: bool = False
    row_bytes: int = 0
    """Bytes of each of `rows`; 0: `rows` are groups."""
    rows: bytes | bytearray = b""
    """Messages in rank order, padded with zeros to one length, or a single one if all are equal."""
    reason = _INCOMPLETE
    """Part of the error if a rank is missing."""

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Whether all ranks sent their message within `seconds`; raises ConnectionError if one exited."""
        return self.connections.advance(self, seconds)

    def starts_equal(self, length: int) -> bool:
        """Whether the messages of all ranks start with the same `length` bytes."""
        # One comparison per rank: no row is parsed while all are equal.
        rows, size, key = self.rows, self.row_bytes, self.message[:length]
        if size:
            return all([rows[at : at + length] == key for at in range(0, len(rows), size)])
        return len({row[:length] for row, _ in decode_groups(rows)}) == 1

    def rows_by_rank(self, size: int) -> list[bytes]:
        """Return the message of each of the `size` ranks of the group."""
        if not self.row_bytes:
            found = [b""] * size
            for row, spans in decode_groups(self.rows):
                for start, end in spans:
                    found[start:end] = [row] * (end - start)
            return found
        starts = range(0, len(self.rows), self.row_bytes)
        each = [bytes(self.rows[at : at + self.row_bytes]).rstrip(b"\0") for at in starts]
        return each if len(each) > 1 else each * size


class Listener:
    """The listening socket of a rank for its children. A context: later connections are refused.

    Args:
        group_ranks: The children.
        host: The address of this machine on which to listen; "": all addresses.
    """

    def __init__(self, group_ranks: Iterable[int], host: str = "") -> None:
        wide = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if wide or ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=wide)
        self._group_ranks, self.port = group_ranks, int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self, key: bytes) -> list[_Connection]:
        """Return the connections to the children in rank order; raises TimeoutError if one is missing.

        `key`: the key of the group's connections, see `handshake`.
        """
        found = Admission(self._socket, self._group_ranks, key).wait(time.monotonic() + _CONNECT_S)
        return [_Connection(found[group_rank], group_rank) for group_rank in sorted(found)]


def connect(group_rank: int, parent: int, host: str, port: int, key: bytes) -> _Connection:
    """Return the connection to the parent's `Listener` at this address; raises OSError if it has none."""
    return _Connection(handshake.connect(group_rank, host, port, key, time.monotonic() + _CONNECT_S), parent)


class _Connection:
    """A non-blocking connection to a rank of the group, with buffers for incomplete messages."""

    def __init__(self, connection: socket.socket, group_rank: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.group_rank = connection, group_rank
        self._out, self._in = bytearray(), bytearray()

    def send(self, size: int | None = None, rows: bytes | bytearray = b"") -> bool:
        """Send a message, or without `size` the rest of one, as far as the socket's buffer takes it.

        Returns:
            Whether all is sent.
        """
        if size is not None:
            self._out += _HEAD.pack(len(rows), size)
            self._out += rows
        with suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        return not self._out

    def receive(self) -> tuple[int, bytearray] | None:
        """Return size and rows of a message, or None if it is incomplete; raises ConnectionError if closed.

        Bytes after the message stay in the socket, where a selector sees them.
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
                data = self.socket.recv(end - len(self._in))
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError
            self._in += data


class ControlConnections:
    """The connections of a rank in a group. All of its ranks start their rounds in the same order.

    A round interrupted by KeyboardInterrupt is completed before the next one starts: other ranks may be
    blocked in it.

    Args:
        parent: The connection to the parent; None: this rank is the root.
        children: The connections to the children, in rank order.
        ranks: The ranks of the group, by group rank.
        group_rank: This rank.
        fan_out: As for `neighbours`.
    """

    def __init__(
        self,
        parent: _Connection | None,
        children: list[_Connection],
        ranks: Sequence[int],
        group_rank: int,
        fan_out: int = FAN_OUT,
    ) -> None:
        self._parent, self._children, self._ranks, self._group_rank = parent, children, ranks, group_rank
        self._fan_out = fan_out
        self._connections = children if parent is None else [*children, parent]
        self.is_star = len(ranks) <= fan_out + 1
        """Whether the root has a connection to each other rank."""
        self._selector = selectors.DefaultSelector()
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._rounds: deque[ControlRound] = deque()
        self._received: dict[int, tuple[int, bytearray]] = {}
        self._unsent: list[_Connection] = []
        self._is_intact = True
        """False after an interrupt in the middle of a message."""
        self._broken = ""
        """Why no further round can complete."""
        self._failure, self._failure_source = _ABORT, parent
        """The code that neighbours are sent once `_broken`, and the connection that reported the failure."""
        self.lost: int | None = None
        """The rank that exited."""
        _open.add(self)
        self._finalizer = weakref.finalize(self, _close, self._selector, self._connections)

    def start(
        self, message: bytes, key_len: int | None = None, combine: Combine | None = None
    ) -> ControlRound:
        """Send this rank's message, once earlier rounds are done. Arguments: see `ControlRound`."""
        made = ControlRound(self, message, key_len, combine)
        intact, self._is_intact = self._is_intact, False
        self._rounds.append(made)
        if len(self._rounds) == 1:
            self._send_up()
        self._is_intact = intact
        return made

    def advance(self, control_round: ControlRound, seconds: float) -> bool:
        """Send and receive until a round is done, for up to `seconds`; whether it is done."""
        end = time.monotonic() + seconds
        while not control_round.done or self._unsent:
            if self._broken or not self._is_intact:
                raise ConnectionError(self._broken or "a message was cut off by a KeyboardInterrupt")
            left = max(0.0, end - time.monotonic())
            ready = self._selector.select(min(left, _UNSENT_S) if self._unsent else left)
            if not ready and not left:
                return False
            self._is_intact = False
            for key, _ in ready:
                self._receive(key.data)
            unsent, self._unsent = self._unsent, []
            for connection in unsent:
                self._send(connection)
            if self._broken:  # after pending messages, so that neighbours complete earlier rounds
                for connection in self._connections:
                    if connection is not self._failure_source:
                        self._send(connection, self._failure)
            self._is_intact = True
        return True

    def close(self, reason: str) -> None:
        """Abort: send `_ABORT` to the neighbours, then close the connections."""
        for connection in self._connections if self._finalizer.alive else ():
            with suppress(OSError):
                connection.send(_ABORT)
        self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close the connections without a message, as the exit of the process does."""
        self._broken = self._broken or reason
        self._finalizer()

    def _receive(self, connection: _Connection) -> None:
        try:
            message = connection.receive()
        except OSError:
            self._set_lost(connection.group_rank, connection)
            return
        if message is None or self._broken:
            return
        size, rows = message
        if size <= _LOST:
            self._set_lost(_LOST - size, connection)
        elif size == _ABORT:
            self._broken, self._failure_source = _INCOMPLETE, connection
        elif connection is self._parent:
            self._complete_round(size, rows)
        else:
            self._received[connection.group_rank] = size, rows
            self._send_up()

    def _send_up(self) -> None:
        """Send the merged messages of this rank's subtree to the parent, once all were received."""
        if len(self._received) < len(self._children):
            return
        message = self._rounds[0].message
        size, rows = self._merge(self._rounds[0]) if self._children else (len(message), message)
        if self._parent is None:
            self._complete_round(size, rows)
        else:
            self._send(self._parent, size, rows)

    def _merge(self, control_round: ControlRound) -> tuple[int, bytes | bytearray]:
        own, received = control_round.message, [self._received[child.group_rank] for child in self._children]
        self._received = {}
        rows: list[Any] = [own, *[row for _, row in received]]
        key_len = control_round.key_len
        if all([size for size, _ in received]):
            if control_round.combine and all([row[:key_len] == own[:key_len] for row in rows]):
                combined = control_round.combine(rows)
                return len(combined), combined
            if all([row == own for row in rows]):
                return len(own), own
            if self.is_star:
                size = max(map(len, rows))
                return size, bytearray().join([row.ljust(size, b"\0") for row in rows])
        at, parts = self._group_rank, [(own[:key_len], [[self._group_rank, self._group_rank + 1]])]
        _, subtrees = neighbours(at, len(self._ranks), self._fan_out)
        for subtree, (size, row) in zip(subtrees, received, strict=True):
            spans = [[subtree.start, subtree.stop]]
            parts += [(bytes(row[:key_len]), spans)] if size else decode_groups(row)
        return _GROUPS, encode_groups(group_rows(parts))

    def _complete_round(self, size: int, rows: bytes | bytearray) -> None:
        """Complete the oldest round with the rows of all ranks, and send these to the children."""
        control_round = self._rounds.popleft()
        control_round.row_bytes, control_round.rows, control_round.done = size, rows, True
        for child in self._children:
            self._send(child, size, rows)
        if self._rounds:
            self._send_up()

    def _send(self, connection: _Connection, size: int | None = None, rows: bytes | bytearray = b"") -> None:
        """Send a message, or without `size` the rest of one."""
        try:
            if not connection.send(size, rows):
                self._unsent.append(connection)
        except OSError:
            self._set_lost(connection.group_rank, connection)

    def _set_lost(self, group_rank: int, source: _Connection) -> None:
        """Record the first rank that exited. No further round can complete."""
        if not self._broken:
            self.lost, self._failure, self._failure_source = (
                self._ranks[group_rank],
                _LOST - group_rank,
                source,
            )
            self._broken = f"Connection closed by rank {self.lost}"


def _close(selector: selectors.BaseSelector, connections: list[_Connection]) -> None:
    selector.close()
    for connection in connections:
        connection.socket.close()


def _close_after_fork() -> None:
    """Close the child's copies of the connections: they would stay open after the exit of its parent."""
    for connections in list(_open):
        connections.drop("this process was forked from a rank")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
