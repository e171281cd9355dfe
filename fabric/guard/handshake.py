"""The mutual challenge that opens a connection between two ranks.

The parent rank sends 32 random bytes to each process that connects. The answer has a fixed size: a group
rank, 32 random bytes, and their HMAC-SHA256 by a key that only ranks of the job can compute. Only then does
the parent rank prove that it has the key, too. Before that, nothing else is read from a connection.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NONCE = 32
_ANSWER = struct.Struct("<q32s32s")
"""Group rank, nonce and proof of a rank that connects."""
_PROOF = 32
_BURST = 64
"""Most connections accepted in a row, before pending ones are read again."""
MAX_PENDING = 256
"""Most unauthenticated connections above the number of expected ranks. The oldest is closed for a new one."""
_RETRY_S = 0.02


class Admission:
    """Connections to a parent rank, served concurrently until all its children are authenticated.

    Args:
        listening: The listening socket.
        group_ranks: Ranks that may connect.
        key: The key of the group's connections.
    """

    def __init__(self, listening: socket.socket, group_ranks: Iterable[int], key: bytes) -> None:
        self._listening, self._missing, self._key = listening, {*group_ranks}, key
        self._most = MAX_PENDING + len(self._missing)
        self._pending: dict[socket.socket, tuple[bytes, bytearray]] = {}
        """Unauthenticated connections, oldest first: the nonce sent, and the bytes of the answer so far."""
        self.admitted: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def wait(self, end: float) -> dict[int, socket.socket]:
        """Return the connections by group rank; raises TimeoutError if a rank is missing at `end`."""
        try:
            while self._missing:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                for ready, _ in self._selector.select(left):
                    connection: socket.socket = ready.fileobj  # type: ignore[assignment]
                    if connection is self._listening:
                        self._accept()
                    elif connection in self._pending:
                        self._read_answer(connection)
            return self.admitted
        except BaseException:
            for connection in self.admitted.values():
                connection.close()
            raise
        finally:
            for connection in [*self._pending]:
                self._close(connection)
            self._selector.close()

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                    self._close(next(iter(self._pending)))
                    continue
                if isinstance(error, ConnectionError):  # closed by the other end before accept
                    continue
                raise
            connection.setblocking(False)
            nonce = secrets.token_bytes(_NONCE)
            self._pending[connection] = nonce, bytearray()
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                connection.send(nonce)
            except OSError:
                self._close(connection)
            if len(self._pending) > self._most:
                self._close(next(iter(self._pending)))

    def _read_answer(self, connection: socket.socket) -> None:
        nonce, answer = self._pending[connection]
        try:
            data = connection.recv(_ANSWER.size - len(answer))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        answer += data
        if data and len(answer) < _ANSWER.size:
            return
        if data:
            group_rank, other_nonce, proof = _ANSWER.unpack(answer)
            expected = _proof(self._key, b"connects", group_rank, nonce, other_nonce)
            if hmac.compare_digest(proof, expected) and group_rank in self._missing:
                with suppress(OSError):
                    connection.send(_proof(self._key, b"accepts", group_rank, nonce, other_nonce))
                    self._missing.remove(group_rank)
                    self.admitted[group_rank] = connection
                    self._unregister(connection)
                    return
        self._close(connection)

    def _unregister(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)

    def _close(self, connection: socket.socket) -> None:
        self._unregister(connection)
        connection.close()


def connect(group_rank: int, host: str, port: int, key: bytes, end: float) -> socket.socket:
    """Return a connection whose other end has proved that it has the key.

    Raises:
        OSError: No connection was made until `end`, or the other end does not have the key.
    """
    while True:
        connection = socket.create_connection((host, port), max(0.001, end - time.monotonic()))
        try:
            _prove(connection, group_rank, key, end)
            return connection
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:  # closed for a newer connection
            connection.close()
            if time.monotonic() > end:
                raise TimeoutError("timed out") from error
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise


def _prove(connection: socket.socket, group_rank: int, key: bytes, end: float) -> None:
    nonce, own = _receive_exactly(connection, _NONCE, end), secrets.token_bytes(_NONCE)
    connection.sendall(_ANSWER.pack(group_rank, own, _proof(key, b"connects", group_rank, nonce, own)))
    expected = _proof(key, b"accepts", group_rank, nonce, own)
    if not hmac.compare_digest(_receive_exactly(connection, _PROOF, end), expected):
        raise ConnectionRefusedError("the process that listens there does not have the secret of the job")


def _receive_exactly(connection: socket.socket, size: int, end: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, end - time.monotonic()))
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data


def _proof(key: bytes, purpose: bytes, group_rank: int, nonce: bytes, own_nonce: bytes) -> bytes:
    return hmac.digest(key, b"%b %d %b%b" % (purpose, group_rank, nonce, own_nonce), "sha256")
