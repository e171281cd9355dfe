"""Ranks that are command lines: of `fabric run`, and of scripts that run themselves. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric.launch.parent_death import PARENT_PID, REPORT_FD, die_with_parent
from fabric.launch.supervisor import ENDS, Supervisor
from fabric.plugins.environments.local import STORE_FD

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from types import FrameType

    from fabric.launch.creator import Creator
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

    def start(self, link: Connection, logs: RankLogs | None) -> subprocess.Popen[bytes]:
        """Start it; only rank zero reads our standard input."""
        parent, report = os.getpid(), link.fileno()
        env = {**self.env, PARENT_PID: str(parent), REPORT_FD: str(report)}
        # Tied before its first instruction; beside threads, which torch has, when it joins the job.
        early = sys.platform == "linux" and "torch" not in sys.modules
        streams = (None, None) if logs is None else logs.streams(self.rank)
        try:
            return subprocess.Popen(
                self.argv,
                env=env,
                cwd=self.cwd,
                stdin=None if self.rank == 0 else subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=[report] if self.listens is None else [report, self.listens],
                start_new_session=True,
                preexec_fn=(lambda: die_with_parent(parent)) if early else None,  # noqa: PLW1509  one thread
            )
        finally:
            for descriptor in streams:
                if descriptor is not None:
                    os.close(descriptor)


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
    supervisor = Supervisor(
        commands,
        logs,
        elsewhere=first.world_size > first.local_world_size,
        creator=None if creator is None else (first.rank, creator),
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        supervisor.pass_on(number)

    def halt(
        *_: object,
    ) -> None:  # Ctrl-Z: ranks are in sessions of their own, where the terminal does not reach
        supervisor.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell lets it go on
        supervisor.send(signal.SIGCONT)

    # By the last two schedulers announce an end; the ranks know what they mean.
    numbers = (*ENDS, signal.SIGUSR1, signal.SIGUSR2)
    takes = threading.current_thread() is threading.main_thread() and creator is None
    heard = [n for n in numbers if takes and signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}
    if takes and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, halt)
    try:
        supervisor.start()
        if creator is not None:
            creator.pass_signals(supervisor)
        if listener is not None:
            listener.close()  # rank zero has it now: nobody else may take connections
        return _wait(supervisor)
    finally:
        supervisor.stop()
        supervisor.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(supervisor: Supervisor) -> int:
    failure = supervisor.wait(wake=lambda: supervisor.signalled is not None)
    if supervisor.signalled:  # ranks that save take the time they need; who sent the signal can send another
        if supervisor.wait() is not None:
            supervisor.wait_all(PASS_ON_GRACE_S)
        failure = supervisor.first_failure()
        supervisor.stop()
        return 0 if failure is None else 128 + supervisor.signalled
    return 0 if failure is None else supervisor.conclude(failure)
