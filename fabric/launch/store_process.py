"""The store of a large job, in a process beside rank zero: the host has several connections of each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from fabric.launch.system import allow_open_files

if TYPE_CHECKING:
    import socket

_SCRIPT = (
    "import sys; sys.path[:] = sys.argv[6:]; from fabric.launch.store_process import host_store; "
    "host_store(sys.argv[1], *map(int, sys.argv[2:6]))"
)
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DESCRIPTORS_PER_RANK = 8


def start_store_process(listener: socket.socket, address: str, port: int, world_size: int) -> None:
    """Start a process that hosts the store on a listening socket, and ends when this process does.

    Args:
        listener: The socket. It is closed here; clients that connect meanwhile wait.
        address: Its address.
        port: Its port.
        world_size: Number of ranks that will connect.
    """
    reader, _ = os.pipe()  # the other end stays open as long as this process lives
    with listener:
        descriptors = [listener.fileno(), reader]
        numbers = map(str, (port, world_size, *descriptors))
        # In a new session: rank zero handles Ctrl-C, and needs the store meanwhile.
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SCRIPT, address, *numbers, *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
    os.close(reader)
    process.returncode = 0  # never waited for: it ends after this process


def host_store(address: str, port: int, world_size: int, listen_fd: int, life_fd: int) -> None:
    """Host a store until the other end of the pipe `life_fd` is closed. Runs in the process of the store."""
    for number in _IGNORED:  # schedulers send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    allow_open_files(_DESCRIPTORS_PER_RANK * world_size + 64)
    # Also while it connects to itself, which TCPStore tries for minutes if the address is unreachable here.
    threading.Thread(target=_exit_with, args=(life_fd,), daemon=True).start()
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    threading.Event().wait()  # until the thread ends the process
    del store  # it serves as long as the object exists


def _exit_with(life_fd: int) -> None:
    os.read(life_fd, 1)
    os._exit(0)
