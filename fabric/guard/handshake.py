"""The mutual challenge that opens a connection between two ranks.

The first rank of a group sends 32 random bytes to whoever connects. The answer has a fixed size: a place, 32
random bytes, and their HMAC-SHA256 by a key that only ranks of the job can compute. Only then does the first
rank prove that it has the key, too. Nothing else is read from a connection before.
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
"""Place, nonce and proof of a rank that connects."""
_PROOF = 32
_BURST = 64
"""Connections that are accepted before those that wait are looked at again."""
MOST_WAITING = 256
"""Connections without a proof that are held beside those of ranks. The oldest one is closed for a new one."""
_AGAIN_S = 0.02


class Admission:
    """Connections to the first rank of a group, served side by side until all others have proved themselves.

    Args:
        listening: The socket to which ranks connect.
        places: Of the ranks that may connect.
        key: Of the group.
    """

    def __init__(self, listening: socket.socket, places: Iterable[int], key: bytes) -> None:
        self._listening, self._missing, self._key = listening, {*places}, key
        self._most = MOST_WAITING + len(self._missing)
        self._waiting: dict[socket.socket, tuple[bytes, bytearray]] = {}
        """Those without a proof, the oldest first: the nonce sent to it, and its answer so far."""
        self.admitted: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def wait(self, end: float) -> dict[int, socket.socket]:
        """Return the connections by place; raises TimeoutError if not all ranks are here by `end`."""
        try:
            while self._missing:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                for ready, _ in self._selector.select(left):
                    made: socket.socket = ready.fileobj  # type: ignore[assignment]
                    if made is self._listening:
                        self._accept()
                    elif made in self._waiting:
                        self._hear(made)
            return self.admitted
        except BaseException:
            for made in self.admitted.values():
                made.close()
            raise
        finally:
            for made in [*self._waiting]:
                self._close(made)
            self._selector.close()

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                made, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._waiting:
                    self._close(next(iter(self._waiting)))
                    continue
                if isinstance(error, ConnectionError):  # it has gone already
                    continue
                raise
            made.setblocking(False)
            nonce = secrets.token_bytes(_NONCE)
            self._waiting[made] = nonce, bytearray()
            self._selector.register(made, selectors.EVENT_READ)
            try:
                made.send(nonce)
            except OSError:
                self._close(made)
            if len(self._waiting) > self._most:
                self._close(next(iter(self._waiting)))

    def _hear(self, made: socket.socket) -> None:
        nonce, answer = self._waiting[made]
        try:
            got = made.recv(_ANSWER.size - len(answer))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        answer += got
        if got and len(answer) < _ANSWER.size:
            return
        if got:
            place, own, proof = _ANSWER.unpack(answer)
            right = _proof(self._key, b"connects", place, nonce, own)
            if hmac.compare_digest(proof, right) and place in self._missing:
                with suppress(OSError):
                    made.send(_proof(self._key, b"accepts", place, nonce, own))
                    self._missing.remove(place)
                    self.admitted[place] = made
                    self._forget(made)
                    return
        self._close(made)

    def _forget(self, made: socket.socket) -> None:
        del self._waiting[made]
        self._selector.unregister(made)

    def _close(self, made: socket.socket) -> None:
        self._forget(made)
        made.close()


def connect(place: int, host: str, port: int, key: bytes, end: float) -> socket.socket:
    """Return a connection whose other end has the key, too.

    Raises:
        OSError: There is none by `end`, or a stranger listens there.
    """
    while True:
        made = socket.create_connection((host, port), max(0.001, end - time.monotonic()))
        try:
            _prove(made, place, key, end)
            return made
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:  # closed in favour of newer ones
            made.close()
            if time.monotonic() > end:
                raise TimeoutError("timed out") from error
            time.sleep(_AGAIN_S)
        except BaseException:
            made.close()
            raise


def _prove(made: socket.socket, place: int, key: bytes, end: float) -> None:
    nonce, own = _exactly(made, _NONCE, end), secrets.token_bytes(_NONCE)
    made.sendall(_ANSWER.pack(place, own, _proof(key, b"connects", place, nonce, own)))
    if not hmac.compare_digest(_exactly(made, _PROOF, end), _proof(key, b"accepts", place, nonce, own)):
        raise ConnectionRefusedError("who listens there does not know the secret of the job")


def _exactly(made: socket.socket, size: int, end: float) -> bytes:
    data = b""
    while len(data) < size:
        made.settimeout(max(0.001, end - time.monotonic()))
        got = made.recv(size - len(data))
        if not got:
            raise EOFError
        data += got
    return data


def _proof(key: bytes, what: bytes, place: int, nonce: bytes, own: bytes) -> bytes:
    return hmac.digest(key, b"%b %d %b%b" % (what, place, nonce, own), "sha256")
