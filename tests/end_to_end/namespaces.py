"""Hosts on this machine: network namespaces, with a cable between two of them or a bridge for more.

Debian package: iproute2; and the right to make namespaces (root). Tests are skipped where either is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from jobs import Job


class Host:
    """A network namespace with one network card."""

    def __init__(self, name: str, address: str, files: Path) -> None:
        self.name, self.address, self.files = name, address, files
        self.card = f"{name}v"

    def start(self, command: list[str], **env: str) -> Job:
        inside = ["ip", "netns", "exec", self.name, *command]
        return Job(inside, self.files / self.name, GLOO_SOCKET_IFNAME=self.card, **env)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def cut(self) -> None:
        """Take the card down, as if its cable were cut. TCP is not notified."""
        ip("-n", self.name, "link", "set", self.card, "down")

    def remove(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ip("netns", "del", self.name)


@contextmanager
def connected_hosts(count: int, letter: str, network: str, files: Path) -> Iterator[list[Host]]:
    """`count` hosts with the addresses `network`.1, .2, ...; the first is rank zero's.

    Their names begin with `letter`: other tests may run at the same time.
    """
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian: iproute2)")
    hosts = [Host(f"{letter}{os.getpid()}{n}", f"{network}.{n}", files) for n in range(1, count + 1)]
    bridge = Host(f"{letter}{os.getpid()}b", "", files)
    with ExitStack() as stack:
        try:
            for host in [*hosts, bridge][: count + (count > 2)]:
                ip("netns", "add", host.name)
                stack.callback(host.remove)
            if count == 2:
                join(hosts[0], hosts[1], hosts[1].card)
            else:
                ip(*f"-n {bridge.name} link add br0 type bridge".split())
                ip(*f"-n {bridge.name} link set br0 up".split())
                for host in hosts:
                    join(host, bridge, port := f"p{host.name[1:]}")
                    ip(*f"-n {bridge.name} link set {port} master br0 up".split())
            for host in hosts:
                ip(*f"-n {host.name} addr add {host.address}/24 dev {host.card}".split())
                ip(*f"-n {host.name} link set lo up".split())
                ip(*f"-n {host.name} link set {host.card} up".split())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts


def join(host: Host, other: Host, card: str) -> None:
    """Make the card of a host and its peer, the card `card` of another one."""
    ip(*f"-n {host.name} link add {host.card} type veth peer {card} netns {other.name}".split())


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
