"""The supervisor of a script's ranks. Rank zero has started it (`rank_zero.py`). Imports no torch."""

from __future__ import annotations

import contextlib
import signal
from multiprocessing.connection import Connection

from fabric.launch.commands import run_commands
from fabric.launch.creator import PASSED_ON, Creator


def main(link: int, control: int, signals: int) -> None:
    """Start and watch the ranks that rank zero asks for, and send it the exit code of the job."""
    for number in PASSED_ON:  # a scheduler may send them to all processes; ranks decide
        signal.signal(number, lambda *_: None)
    connection = Connection(control)
    creator = Creator(Connection(link, writable=False), connection, signals)
    argv, cwd, first = connection.recv()
    code = run_commands(argv, first, None, {}, "script", cwd, creator=creator)
    with contextlib.suppress(OSError):
        connection.send(("over", code))
