"""`JobStore`: the store of the job, for what ranks tell each other beside their collectives."""

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
_SETTLE_S = 0.3
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network card."""
_CALLS = {"check", "get", "multi_get", "set", "add", "compare_set", "delete_key"}


class StoreTimeout(RankError):
    """Rank zero's store does not answer: its machine is gone, or the network to it is cut."""


class JobStore:
    """A part of the job's store: `check`, `get`, `set`, ... as of torch's. After its host's end each call
    raises RuntimeError, without a word.

    If the host's machine is gone, the network to it is cut, or its process stands still, calls raise
    StoreSilent: nobody tells TCP of that, and a call of torch's client would wait for its answer for ever.

    torch's own client writes pages of warnings then, which bury what the host's end was about. So a second
    connection, on which nothing is ever sent, shows whether the host still lives; to look costs about 2 us.

    Args:
        prefix: The part.
        store: Of the default process group.
        host: What is known of its host, by another part.
    """

    def __init__(self, prefix: str, store: Any, host: _Host | None = None) -> None:
        self._host, self._base, self._prefix = host or _Host(store), store, prefix
        self._stuck: Future[Any] | None = None  # of a call without an answer, which holds the connection
        self._raw = dist.PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)
        return partial(self._call, name)

    def clone(self) -> JobStore:
        """This part, through a connection of its own: for another thread."""
        return JobStore(self._prefix, self._base.clone(), self._host)

    @property
    def address(self) -> str:
        """This machine's, by which other ranks `reach` it."""
        return self._host.here

    @property
    def interface(self) -> str:
        """The address of this machine on which to listen for other ranks; "": all of them."""
        return LOOPBACK if self._host.is_loopback else self._host.interface

    def reach(self, address: str) -> str:
        """Return the host name or address by which a rank connects to the machine with this address."""
        if self._host.is_loopback:
            return LOOPBACK
        if not address:
            return self._host.name
        return "127.0.0.1" if address == socket.gethostname() else address

    def settle(self) -> None:
        """After a connection to some rank has broken: a dying host may close this one a moment later."""
        self._host.has_gone(within=_SETTLE_S)

    def get_all(self, keys: list[str]) -> dict[str, bytes]:
        """The values of those keys that are there; two questions, if all are and the store can."""
        if self._base.has_extended_api() and self.check(keys):
            return dict(zip(keys, self.multi_get(keys), strict=True))
        return {key: self.get(key) for key in keys if self.check([key])}

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._host.has_gone():
            raise RuntimeError("lost rank zero's store: the process that hosted it has ended")
        if not self._host.at:  # a file, or this process's memory
            return getattr(self._raw, name)(*arguments)
        answer: Future[Any] = Future()

        def make() -> None:
            try:
                answer.set_result(getattr(self._raw, name)(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        if self._stuck is None or self._stuck.done():
            self._stuck = answer
            # A thread for each call: they are rare, and one that is stuck leaves nothing to tidy up.
            try:
                Thread(target=make, daemon=True, name="fabric-store").start()
            except RuntimeError:  # at the interpreter's end
                make()
            wait([answer], _ANSWER_S)
        if not answer.done():
            raise StoreTimeout(
                f"lost rank zero's store{self._host.at}: no answer for {_ANSWER_S:g} s, its process or "
                "machine stands still or is gone, or the network to it is cut"
            )
        return answer.result()


class _Host:
    """Whether the process that hosts a TCPStore lives; of other stores nothing is known."""

    def __init__(self, store: Any) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.at, self._line, self.is_loopback = "", -1, False
        self.here = self.interface = card = _card_address()
        """This machine, as others see it; "": the host's own, of which each rank has a name, `name`."""
        if not isinstance(store, dist.TCPStore):
            self.here = card or socket.gethostname()
            return
        self.at, self.name = f" at {store.host}:{store.port}", store.host
        self.is_loopback = store.host in (LOOPBACK, "localhost", "::1")
        """Whether all ranks are on this machine, since they have this address of the store, too."""
        with suppress(OSError):
            line = socket.create_connection((store.host, store.port), _CONNECT_S)
            own = line.getsockname()[0]
            self.here = self.interface = card or ("" if own == "::1" or own.startswith("127.") else own)
            self._line = line.detach()
            weakref.finalize(self, os.close, self._line)

    def has_gone(self, within: float = 0.0) -> bool:
        if self._line < 0:
            return False
        poll = select.poll()  # one for each call: several threads may look
        poll.register(self._line, select.POLLIN)
        return bool(poll.poll(1000 * within))


def _card_address() -> str:
    """Return the address of the network interface in GLOO_SOCKET_IFNAME; "" if it names none."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if card:
        with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            import fcntl

            told = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", card.encode()))
            return socket.inet_ntoa(told[20:24])
    return ""
