"""The store of a large job in a process beside rank zero, as a scheduler starts the ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

from fabric.launch.stores import listen

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import fabric.launch.stores as stores
from fabric import Fabric

stores._BESIDE_FROM = {beside}
fabric = Fabric(accelerator="cpu", devices=3)
fabric.launch()
total = fabric.all_reduce(torch.ones(1000), reduce_op="sum")[0].item()
if {waits}:
    Path(sys.argv[1], str(fabric.global_rank)).touch()
    time.sleep(60)
port = f":{{int(os.environ['MASTER_PORT']):04X}}"
tables = Path("/proc/self/net/tcp").read_text() + Path("/proc/self/net/tcp6").read_text()
rows = [row.split() for row in tables.splitlines()]
inodes = {{row[9] for row in rows if row[1].endswith(port)}}
names = [f"/proc/self/fd/{{one}}" for one in os.listdir("/proc/self/fd")]
links = [os.readlink(name) for name in names if os.path.lexists(name)]
held = [one for one in links if one.removeprefix("socket:[").removesuffix("]") in inodes]
print(f"rank {{fabric.global_rank}}: {{total}}, {{len(held)}} connections to its port")
"""


@pytest.fixture
def port():
    return free_port()


def start(
    folder: Path, port: int, beside: int, waits: bool = False, address: str = "127.0.0.1"
) -> list[subprocess.Popen]:
    """Start 3 ranks as mpirun does."""
    script = folder / "train.py"
    script.write_text(TRAIN.format(beside=beside, waits=waits))
    ours = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common = {**os.environ, **ours, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**common, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


def hosts(port: int) -> list[int]:
    """The processes that host a store beside a rank, on this port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"%d" % port in words and any(b"store_process" in word for word in words):
            found.append(int(path.parent.name))
    return found


def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("beside", [2, 100])
def test_rank_zero_holds_no_connection_of_the_others(tmp_path, port, beside):
    ranks = start(tmp_path, port, beside)
    outs = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outs
    assert all("3.0" in out for out, _ in outs)
    held = int(re.search(r"rank 0: 3\.0, (\d+)", outs[0][0])[1])  # gloo of torch 2.9 writes lines, too
    assert held == 0 if beside == 2 else held >= 3
    until(lambda: not hosts(port))


def test_an_address_of_ipv6(tmp_path, port):
    """The process listened on addresses of IPv4 only, and no rank found it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    ranks = start(tmp_path, port, 2, address="::1")
    outs = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outs


def test_it_ends_with_rank_zero_and_the_others_are_told(tmp_path, port):
    ranks = start(tmp_path, port, 2, waits=True)
    try:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 90)
        (host,) = hosts(port)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # as a scheduler may send to all
            os.kill(host, number)
        assert hosts(port) == [host]
        ranks[0].kill()
        until(lambda: not hosts(port))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


ALONE = """
import time
from fabric.launch.store_process import start_store_process
from fabric.launch.stores import listen

listener = listen("127.0.0.1", {port})
start_store_process(listener, "127.0.0.2", {port}, 2)
time.sleep(60)
"""


def test_it_ends_while_it_connects_to_itself(port):
    """Nothing listens at its address, where it tried to connect for minutes after rank zero had ended."""
    with subprocess.Popen([sys.executable, "-c", ALONE.format(port=port)]) as rank:
        until(lambda: hosts(port), 60)
        (host,) = hosts(port)
        until(lambda: len([*Path(f"/proc/{host}/task").iterdir()]) > 2, 60)  # the exit and TCPStore
        rank.kill()
    until(lambda: not hosts(port))


def test_a_taken_port_is_named(tmp_path):
    with listen("127.0.0.1", 0) as taken:
        ranks = start(tmp_path, taken.getsockname()[1], 2)
        _, error = ranks[0].communicate(timeout=90)
        for rank in ranks[1:]:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1
    assert "another process on this machine uses the port" in error
