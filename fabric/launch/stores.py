"""The stores through which ranks meet: each address is opened once, for as long as this process lives.

Rank zero may make a second group while the others still use the first, and its port would be taken.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError, LaunchError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

_LOOPBACK = "127.0.0.1"

# By process, address and port: of what a forked child inherits nothing is its own, and it must not destroy a
# store, which would join a thread that only the parent has.
_listening: dict[tuple[int, str, int], socket.socket] = {}
_stores: dict[tuple[int, str, int], tuple[Store, itertools.count[int]]] = {}


def part_of_store(
    address: str, port: int, host: bool, timeout: timedelta, listen_fd: int | None = None
) -> Store:
    """A part of the TCPStore at this address in which nobody has written; the first call opens the store.

    Args:
        address: Of the host.
        port: Of the host.
        host: Whether this process hosts it; where it listens already (`take_port`), it does.
        timeout: How long to try to reach the host; also the default of each later wait.
        listen_fd: A socket that listens already and was handed to this process (host only).

    Raises:
        LaunchError: The port is taken (host), or nobody answers there within `timeout` (client).
    """
    from torch.distributed import PrefixStore

    key = os.getpid(), address, port
    if key not in _stores:
        if key in _listening:  # the store takes it over: the port is ours before anyone hears of it
            host, listen_fd = True, _listening.pop(key).detach()
        _stores[key] = open_store(address, port, host, timeout, listen_fd), itertools.count()
    store, openings = _stores[key]
    store.set_timeout(timeout)
    # Ranks open stores in the same order: equal numbers meet, stale keys of earlier groups do not.
    return PrefixStore(f"fabric{next(openings)}", store)


def open_store(address: str, port: int, host: bool, timeout: timedelta, listen_fd: int | None) -> Store:
    """The whole TCPStore at this address, which a host keeps as long as the object lives (see above)."""
    from torch.distributed import DistError, TCPStore

    try:
        return TCPStore(
            address,
            port,
            is_master=host,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except DistError as error:
        if host and "EADDRINUSE" in str(error):
            raise _port_taken(address, port) from error
        who = "could not listen on" if host else f"found no rank zero within {timeout.total_seconds():g} s at"
        raise LaunchError(
            f"This process {who} {address}:{port} (MASTER_ADDR and MASTER_PORT, or the scheduler, said "
            f"so): {error} Check that rank zero was started, that the name resolves here, and that no "
            "firewall is between; a slow start gets more time with "
            "startup_timeout=timedelta(minutes=...)."
        ) from error


def take_port(address: str, port: int, everywhere: bool) -> int:
    """Listen for the store to come and return the port (raises as `listen`): who connects waits for it."""
    listener = listen(address, port, everywhere)
    port = int(listener.getsockname()[1])
    _listening[os.getpid(), address, port] = listener
    return port


def keep_listening(listener: socket.socket, address: str, port: int) -> None:
    """Have the store of this process take over a socket that listens there."""
    _listening[os.getpid(), address, port] = listener


def listen(address: str, port: int, everywhere: bool = False) -> socket.socket:
    """A socket that listens on `port` (0: the kernel chooses) of `address`.

    Args:
        address: By which ranks reach this machine.
        port: To listen on.
        everywhere: Whether ranks of other machines connect. If none of this machine's interfaces has the
            address (a container behind its host's), the socket listens on all of them.

    Raises:
        ConfigurationError: It is no port number.
        LaunchError: The port is taken.
    """
    where = _interface(address) if everywhere or address in (_LOOPBACK, "localhost") else ""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port {port} is not in 0..65535. Write 0 for a free one.")
    try:
        return socket.create_server((where, port), backlog=4096)
    except OSError as error:
        if port:
            raise _port_taken(address, port) from error
        raise LaunchError(f"This machine gives no port to listen on: {error}.") from error


def _interface(address: str) -> str:
    """Return the IPv4 address of this machine that `address` names; "": none, or several."""
    with suppress(OSError):
        found = {info[4][0] for info in socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)}
        one = str(found.pop())
        # Many systems resolve their own name to 127.0.1.1, which is another machine for the others.
        local = not one.startswith("127.") or address in (one, "localhost")
        if not found and local:
            with socket.socket(socket.AF_INET) as trial:
                trial.bind((one, 0))
            return one
    return ""


def _port_taken(address: str, port: int) -> LaunchError:
    return LaunchError(
        f"Rank zero cannot listen on {address}:{port}: another process on this machine holds the port. "
        "Set MASTER_PORT (--main-port) to another number, the same for all ranks; on one machine `fabric "
        "run` and `python train.py` take a free one where it is left out."
    )
