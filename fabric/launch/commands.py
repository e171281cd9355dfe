"""Ranks that are command lines: of `fabric run`, and of scripts that run themselves. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fabric.launch.parent_death import PARENT_PID, REPORT_FD, die_with_parent
from fabric.launch.supervisor import PASSED_ON, Creator, Supervisor
from fabric.plugins.environments.local import STORE_FD

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from fabric.launch.rank_env import RankEnv
    from fabric.launch.rank_logs import RankLogs

PASS_ON_GRACE_S = 30.0
"""Seconds that ranks get to end after one has, badly, and all were sent a signal before."""


@dataclass(frozen=True, slots=True)
class Command:
    """One rank to start: its command line, its whole environment, the descriptor it inherits.

    It gets its own session, so that the terminal's Ctrl-C reaches only the supervisor.
    """

    rank: int
    argv: list[str]
    env: dict[str, str]
    listens: int | None = None
    cwd: str | None = None

    def start(self, link: Connection, streams: tuple[int, int] | None) -> subprocess.Popen[bytes]:
        """Start it; only rank zero reads our standard input."""
        parent, report = os.getpid(), link.fileno()
        env = {**self.env, PARENT_PID: str(parent), REPORT_FD: str(report)}
        # Tied before its first instruction; beside threads, which torch has, when it joins the job.
        early = sys.platform == "linux" and "torch" not in sys.modules
        out, err = streams or (None, None)
        return subprocess.Popen(
            self.argv,
            env=env,
            cwd=self.cwd,
            stdin=None if self.rank == 0 else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[report] if self.listens is None else [report, self.listens],
            start_new_session=True,
            preexec_fn=(lambda: die_with_parent(parent)) if early else None,  # noqa: PLW1509  one thread
        )


def run_commands(
    argv: list[str],
    first: RankEnv,
    listener: socket.socket | None,
    variables: Mapping[str, str],
    launched: str,
    cwd: str | None = None,
    logs: RankLogs | None = None,
    creator: Creator | None = None,
) -> int:
    """Run a command as each rank of this machine, to the end; gives the exit code of the job.

    Args:
        argv: The command line.
        first: The place of the first rank.
        listener: For rank zero's store; closed here.
        variables: To set for the ranks, beside their places.
        launched: What FABRIC_LAUNCHED is to be.
        cwd: Where they start; None: here.
        logs: Takes what they print; None: it goes where this process prints.
        creator: Runs as the first rank already, and passes its signals on; None: this process is no rank.
    """
    commands = {}
    for local_rank in range(creator is not None, first.local_world_size):
        place = first.at(local_rank)
        # When rank zero dies with the store, torch's C++ warns of it on every other rank, by the page.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        env = {**quiet, **os.environ, **variables, **place.variables(os.environ, launched)}
        listens = listener.fileno() if listener is not None and place.rank == 0 else None
        if listens is not None:
            env[STORE_FD] = str(listens)
        commands[place.rank] = Command(place.rank, argv, env, listens, cwd).start
    elsewhere = first.world_size > first.local_world_size
    supervisor = Supervisor(commands, logs, elsewhere, creator=creator)

    def act(number: int) -> None:
        if number != signal.SIGTSTP:
            supervisor.pass_on(number)
            return
        # Ctrl-Z: ranks are in sessions of their own, where the terminal does not reach.
        supervisor.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell lets it go on
        supervisor.send(signal.SIGCONT)

    with supervisor.run(*((*PASSED_ON, signal.SIGTSTP) if creator is None else ()), act=act):
        if creator is not None:
            creator.pass_signals(supervisor)
        if listener is not None:
            listener.close()  # rank zero has it now: nobody else may take connections
        return _wait(supervisor)


def _wait(supervisor: Supervisor) -> int:
    failure = supervisor.wait(wake=lambda: supervisor.signalled is not None)
    if supervisor.signalled:  # ranks that save take the time they need; who sent the signal can send another
        if supervisor.wait() is not None:
            supervisor.wait_all(PASS_ON_GRACE_S)
        failure = supervisor.first_failure()
        supervisor.stop()
        return 0 if failure is None else 128 + supervisor.signalled
    return 0 if failure is None else supervisor.conclude(failure)


def watch_beside(link: int, control: int, signals: int) -> None:
    """The process that rank zero of a script starts (`rank_zero.py`): start and watch the ranks that it asks
    for, and send it the exit code of the job.
    """
    for number in PASSED_ON:  # a scheduler may send them to all processes; ranks decide
        signal.signal(number, lambda *_: None)
    connection = Connection(control)
    argv, cwd, first = connection.recv()
    creator = Creator(first.rank, Connection(link, writable=False), connection, signals)
    code = run_commands(argv, first, None, {}, "script", cwd, creator=creator)
    with contextlib.suppress(OSError):
        connection.send(("over", code))
