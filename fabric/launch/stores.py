"""TCPStores for rendezvous: this process opens the store at each address once, and never closes it.

Otherwise rank zero could not create a second group while others use the first: the port would be taken.
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
_BESIDE_FROM = 65
"""Number of ranks from which on a process beside rank zero hosts the store."""

# By process id, address and port. A forked child must not use inherited entries, nor destroy a store: that
# would join a thread that only the parent has.
_listening: dict[tuple[int, str, int], socket.socket] = {}
_stores: dict[tuple[int, str, int], tuple[Store, itertools.count[int]]] = {}


def prefix_store(
    address: str,
    port: int,
    host: bool,
    timeout: timedelta,
    listen_fd: int | None = None,
    world_size: int = 1,
) -> Store:
    """Return the TCPStore at this address with a new, empty prefix; the first call opens the store.

    Args:
        address: Address of the host.
        port: Port of the host.
        host: Whether this process hosts it; implied if it listens already (`reserve_port`).
        timeout: Limit for connecting to the host; also the default of each later wait.
        listen_fd: A listening socket that this process inherited (host only).
        world_size: Number of ranks that connect. For many a process beside this one hosts the store.

    Raises:
        LaunchError: The port is taken (host), or there is no answer within `timeout` (client).
    """
    from torch.distributed import PrefixStore

    key = os.getpid(), address, port
    if key not in _stores:
        if key in _listening:  # reserved before the address was published
            host, listen_fd = True, _listening.pop(key).detach()
        if host and world_size >= _BESIDE_FROM:
            from fabric.launch.store_process import start_store_process

            # As torch's store does: on all interfaces, since other machines may resolve the name differently.
            opened = listen(address, port) if listen_fd is None else socket.socket(fileno=listen_fd)
            start_store_process(opened, address, port, world_size)
            host, listen_fd = False, None
        _stores[key] = open_store(address, port, host, timeout, listen_fd), itertools.count()
    store, group_counter = _stores[key]
    store.set_timeout(timeout)
    # Ranks open stores in the same order, so numbers agree, and stale keys of earlier groups are not read.
    return PrefixStore(f"fabric{next(group_counter)}", store)


def open_store(address: str, port: int, host: bool, timeout: timedelta, listen_fd: int | None) -> Store:
    """Return the TCPStore at this address; a host serves it as long as the object exists."""
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
        problem = (
            "could not listen on" if host else f"found no rank zero within {timeout.total_seconds():g} s at"
        )
        raise LaunchError(
            f"This process {problem} {address}:{port} (from MASTER_ADDR and MASTER_PORT, or the scheduler): "
            f"{error} Check that rank zero was started, that the name resolves here, and that no firewall is "
            "between; for a slow start, write startup_timeout=timedelta(minutes=...)."
        ) from error


def reserve_port(address: str, port: int, one_interface: bool) -> int:
    """Listen on a port for a later store and return the port; early clients wait. Raises as `listen`."""
    listener = listen(address, port, one_interface)
    port = int(listener.getsockname()[1])
    _listening[os.getpid(), address, port] = listener
    return port


def register_listener(listener: socket.socket, address: str, port: int) -> None:
    """Make the later store of this process use a listening socket."""
    _listening[os.getpid(), address, port] = listener


def listen(address: str, port: int, one_interface: bool = False) -> socket.socket:
    """Return a socket that listens on `port` (0: the kernel chooses) of `address`.

    Args:
        address: The address by which ranks reach this machine.
        port: The port.
        one_interface: Whether to listen on the interface of `address` only; implied for a loopback address.
            If none of this machine's interfaces has the address (in a container it may be the host's), the
            socket listens on all of them.

    Raises:
        ConfigurationError: `port` is no port number.
        LaunchError: The port is taken.
    """
    own = one_interface or address in (_LOOPBACK, "localhost")
    interface = _interface(address) if own else ""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port {port} is not in 0..65535. Write 0 for a free one.")
    wide = not interface and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if wide else socket.AF_INET
    try:
        return socket.create_server((interface, port), family=family, backlog=4096, dualstack_ipv6=wide)
    except OSError as error:
        if port:
            raise _port_taken(address, port) from error
        raise LaunchError(
            f"This machine has no free port: {error}. End processes that keep ports open, or set MASTER_PORT."
        ) from error


def _interface(address: str) -> str:
    """Return the IPv4 address of this machine that `address` names; "": none, or several."""
    with suppress(OSError):
        addresses = {
            info[4][0] for info in socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
        }
        candidate = str(addresses.pop())
        # Many systems resolve their own name to 127.0.1.1, which other machines cannot reach.
        local = not candidate.startswith("127.") or address in (candidate, "localhost")
        if not addresses and local:
            with socket.socket(socket.AF_INET) as trial:
                trial.bind((candidate, 0))
            return candidate
    return ""


def _port_taken(address: str, port: int) -> LaunchError:
    return LaunchError(
        f"Rank zero cannot listen on {address}:{port}: another process on this machine uses the port. "
        "Set MASTER_PORT (--main-port) to another number, the same for all ranks; on one machine, leave it "
        "out, so that `fabric run` and `python train.py` choose a free one."
    )
