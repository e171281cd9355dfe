"""`JobStore`: keys of the job in torch's store, for messages that are no collectives."""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import torch.distributed as dist

from fabric.core.errors import RankError

_CONNECT_S = 5.0
_ANSWER_S = 5.0
_EXIT_GRACE_S = 0.3
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network card."""
_CALLS = {"check", "get", "multi_get", "set", "add", "compare_set", "delete_key"}


class StoreTimeout(RankError):
    """Rank zero's store does not answer: its machine is down, or the network to it is cut."""


class JobStore:
    """The keys of the job's store with a prefix: `check`, `get`, `set`, ... as in torch.

    Once the process that hosts the store has exited, each call raises RuntimeError and logs nothing. torch's
    client would print pages of warnings, which hide the root cause. So a second, idle connection shows
    whether the host is alive; a check takes about 2 us.

    If the host's machine is down, the network to it is cut, or its process is suspended, calls raise
    StoreTimeout. TCP does not report that, and a call of torch's client would block forever.

    Args:
        prefix: The prefix of the keys.
        store: The store of the default process group.
        host: The host of the store, if another `JobStore` of this process has it.
    """

    def __init__(self, prefix: str, store: Any, host: _Host | None = None) -> None:
        self._host, self._base, self._prefix = host or _Host(store), store, prefix
        self._unanswered: Future[Any] | None = None  # a call without an answer, which blocks the connection
        self._raw = dist.PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)
        return partial(self._call, name)

    def clone(self) -> JobStore:
        """Return the same keys through a new connection, for another thread."""
        return JobStore(self._prefix, self._base.clone(), self._host)

    @property
    def address(self) -> str:
        """The address of this machine that other ranks pass to `reach`; may be empty."""
        return self._host.address

    @property
    def interface(self) -> str:
        """The address of this machine on which to listen for other ranks; "": all addresses."""
        return LOOPBACK if self._host.is_loopback else self._host.interface

    def reach(self, address: str) -> str:
        """Return the host name or address by which a rank connects to the machine with this address."""
        if self._host.is_loopback:
            return LOOPBACK
        if not address:
            return self._host.name
        return "127.0.0.1" if address == socket.gethostname() else address

    def await_host_exit(self) -> None:
        """Wait a moment after a broken connection: a host that exits may close its own one later."""
        self._host.has_exited(within=_EXIT_GRACE_S)

    def get_all(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of existing keys; two requests if all exist and the store supports it."""
        if self._base.has_extended_api() and self.check(keys):
            return dict(zip(keys, self.multi_get(keys), strict=True))
        return {key: self.get(key) for key in keys if self.check([key])}

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._host.has_exited():
            raise RuntimeError("lost rank zero's store: the process that hosted it has ended")
        if not self._host.location:  # a file, or memory of this process
            return getattr(self._raw, name)(*arguments)
        answer: Future[Any] = Future()

        def make() -> None:
            try:
                answer.set_result(getattr(self._raw, name)(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        if self._unanswered is None or self._unanswered.done():
            self._unanswered = answer
            # A thread per call: calls are rare, and a blocked one needs no cleanup.
            try:
                Thread(target=make, daemon=True, name="fabric-store").start()
            except RuntimeError:  # at interpreter shutdown
                make()
            wait([answer], _ANSWER_S)
        if not answer.done():
            raise StoreTimeout(
                f"lost rank zero's store{self._host.location}: no answer for {_ANSWER_S:g} s, because its "
                "process is suspended, its machine is down, or the network to it is cut"
            )
        return answer.result()


class _Host:
    """The process that hosts a TCPStore, and whether it exited. Other stores have no host."""

    def __init__(self, store: Any) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.location, self._descriptor, self.is_loopback = "", -1, False
        self.address = self.interface = card = _interface_address()
        """The address of this machine for other ranks; "": it hosts the store, and each rank has `name`."""
        if not isinstance(store, dist.TCPStore):
            self.address = card or socket.gethostname()
            return
        self.location, self.name = f" at {store.host}:{store.port}", store.host
        self.is_loopback = store.host in (LOOPBACK, "localhost", "::1")
        """Whether all ranks are on this machine: they have the same address of the store."""
        with suppress(OSError):
            line = socket.create_connection((store.host, store.port), _CONNECT_S)
            own = line.getsockname()[0]
            self.address = self.interface = card or ("" if own == "::1" or own.startswith("127.") else own)
            self._descriptor = line.detach()
            weakref.finalize(self, os.close, self._descriptor)

    def has_exited(self, within: float = 0.0) -> bool:
        if self._descriptor < 0:
            return False
        poll = select.poll()  # one per call: several threads may call this
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * within))


def _interface_address() -> str:
    """Return the address of the network interface in GLOO_SOCKET_IFNAME; "" if it names none."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if card:
        with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            import fcntl

            reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", card.encode()))
            return socket.inet_ntoa(reply[20:24])
    return ""
