"""Ports for servers that a test starts afterwards, in other processes."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

LOWEST = 10_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return free ports below those that the kernel gives to sockets that ask for any.

    Beside other tests a port of the kernel's choice may be taken before its server binds it.
    """
    end, found = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768, []
    with ExitStack() as taken:
        while len(found) < count:
            port = LOWEST + secrets.randbelow(end - LOWEST)  # tests seed Python's generator
            with suppress(OSError):
                taken.enter_context(socket.create_server(("", port)))
                found.append(port)
    return found


def free_port() -> int:
    """Return one of `free_ports`."""
    return free_ports(1)[0]
