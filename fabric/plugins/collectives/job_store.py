"""`JobStore`: the store of the job, for what ranks tell each other beside their collectives."""

from __future__ import annotations

import os
import select
import socket
import weakref
from threading import Thread
from typing import Any

import torch.distributed as dist

from fabric.core.errors import RankError

_CONNECT_S = 5.0
_ANSWER_S = 5.0
_SETTLE_S = 0.3


class StoreSilent(RankError):
    """Rank zero's store does not answer: its machine is gone, or the network to it is cut."""


class JobStore:
    """A part of the job's store. After its host's end each call raises RuntimeError, without a word.

    If the host's machine is gone, the network to it is cut, or its process stands still, calls raise
    StoreSilent: nobody tells TCP of that, and a call of torch's client would wait for its answer for ever.

    torch's own client writes pages of warnings then, which bury what the host's end was about. So a second
    connection, on which nothing is ever sent, shows whether the host still lives; to look costs about 2 us.

    Args:
        prefix: The part.
        store: Of the default process group.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self._host, self._base, self.prefix = _Host(store), store, prefix
        self._stuck: Thread | None = None  # in a call without an answer; it holds the connection
        self.raw = dist.PrefixStore(prefix, store)
        """torch's own object."""

    def clone(self, prefix: str | None = None) -> JobStore:
        """This part, or another, through a connection of its own: for another thread."""
        return self._other(prefix or self.prefix, self._base.clone())

    def part(self, prefix: str) -> JobStore:
        """Another part, through this connection: for the same thread."""
        return self._other(prefix, self._base)

    def _other(self, prefix: str, base: Any) -> JobStore:
        other = object.__new__(JobStore)
        other._host, other._base, other.prefix, other._stuck = self._host, base, prefix, None
        other.raw = dist.PrefixStore(prefix, base)
        return other

    def settle(self) -> None:
        """After a connection to some rank has broken: a dying host may close this one a moment later."""
        self._host.has_gone(within=_SETTLE_S)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        found: bool = self._call("check", keys)
        return found

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        value: bytes = self._call("get", key)
        return value

    def get_all(self, keys: list[str]) -> dict[str, bytes]:
        """The values of those keys that are there; two questions, if all are and the store can."""
        if self._base.has_extended_api() and self.check(keys):
            return dict(zip(keys, self._call("multi_get", keys), strict=True))
        return {key: self.get(key) for key in keys if self.check([key])}

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._call("set", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its value then."""
        value: int = self._call("add", key, amount)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key if its value is `expected` ("": none); its value then."""
        value: bytes = self._call("compare_set", key, expected, desired)
        return value

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._call("delete_key", key)

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._host.has_gone():
            raise RuntimeError("lost rank zero's store: the process that hosted it has ended")
        if not self._host.at:  # a file, or this process's memory
            return getattr(self.raw, name)(*arguments)
        outcome: list[tuple[Any, BaseException | None]] = []

        def make() -> None:
            try:
                outcome.append((getattr(self.raw, name)(*arguments), None))
            except BaseException as error:
                outcome.append((None, error))

        if self._stuck is None or not self._stuck.is_alive():
            # A thread for each call: they are rare, and one that is stuck leaves nothing to tidy up.
            thread = Thread(target=make, daemon=True, name="fabric-store")
            try:
                thread.start()
            except RuntimeError:  # at the interpreter's end
                make()
            else:
                thread.join(_ANSWER_S)
            self._stuck = None if outcome else thread
        if not outcome:
            raise StoreSilent(
                f"lost rank zero's store{self._host.at}: no answer for {_ANSWER_S:g} s, its process or "
                "machine stands still or is gone, or the network to it is cut"
            )
        result, error = outcome[0]
        if error is not None:
            raise error
        return result


class _Host:
    """Whether the process that hosts a TCPStore lives; of other stores nothing is known."""

    def __init__(self, store: Any) -> None:
        inner = store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        self.at = f" at {inner.host}:{inner.port}" if isinstance(inner, dist.TCPStore) else ""
        self._line = -1
        self._watched = isinstance(inner, dist.TCPStore)
        if not self._watched:
            return
        try:
            line = socket.create_connection((inner.host, inner.port), _CONNECT_S)
        except OSError:
            self._watched = False
            return
        descriptor = line.detach()
        weakref.finalize(self, os.close, descriptor)
        self._line = descriptor

    def has_gone(self, within: float = 0.0) -> bool:
        if not self._watched:
            return False
        poll = select.poll()  # one for each call: several threads may look
        poll.register(self._line, select.POLLIN)
        return bool(poll.poll(1000 * within))
