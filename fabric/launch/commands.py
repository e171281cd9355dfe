"""Ranks started as command lines, by `fabric run` and by scripts. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fabric.launch.parent_death import PARENT_PID, REPORT_FD, die_with_parent
from fabric.launch.supervisor import FORWARDED_SIGNALS, ParentRank, Supervisor
from fabric.plugins.environments.local import STORE_FD

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from fabric.launch.rank_env import RankEnv
    from fabric.launch.rank_logs import RankLogs

FORWARD_GRACE_S = 30.0
"""Seconds for ranks to exit after all were sent a signal and one has failed."""
LAST_GRACE_S = 5.0
"""Seconds for ranks to exit after the first one has, where `limit` is given."""


@dataclass(frozen=True, slots=True)
class Command:
    """A rank to start: command line, whole environment, and the listening descriptor that it inherits.

    It runs in a new session, so that the terminal's Ctrl-C reaches only the supervisor.
    """

    rank: int
    argv: list[str]
    env: dict[str, str]
    listen_fd: int | None = None
    cwd: str | None = None

    def start(self, pipe: Connection, streams: tuple[int, int] | None) -> subprocess.Popen[bytes]:
        """Start the process; only rank zero inherits standard input."""
        parent, report = os.getpid(), pipe.fileno()
        env = {**self.env, PARENT_PID: str(parent), REPORT_FD: str(report)}
        # Attached to this process before its first instruction. If this process has threads (torch starts
        # some), preexec_fn is unsafe: the rank attaches itself when it joins the job.
        early = sys.platform == "linux" and "torch" not in sys.modules
        out, err = streams or (None, None)
        return subprocess.Popen(
            self.argv,
            env=env,
            cwd=self.cwd,
            stdin=None if self.rank == 0 else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[report] if self.listen_fd is None else [report, self.listen_fd],
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
    parent_rank: ParentRank | None = None,
    limit: float | None = None,
) -> int:
    """Run a command as each rank of this machine until all exit; return the exit code of the job.

    Args:
        argv: The command line.
        first: The environment of the first rank.
        listener: The socket of rank zero's store; closed by this function.
        variables: Further variables to set for the ranks.
        launched: The value of FABRIC_LAUNCHED.
        cwd: The ranks' working directory; None: that of this process.
        logs: Receives the ranks' output; None: they write to this process's stdout and stderr.
        parent_rank: The first rank, if it started this process; forwards its signals. None: no rank did.
        limit: Seconds for the first rank to exit. Until then failed ranks stop no others; the code is 0 or 1.
    """
    commands = {}
    for local_rank in range(parent_rank is not None, first.local_world_size):
        rank_env = first.with_local_rank(local_rank)
        # When rank zero dies with the store, torch's C++ code logs pages of warnings on every other rank.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        env = {**quiet, **os.environ, **variables, **rank_env.variables(os.environ, launched)}
        if rank_env.rank:  # it has no standard input, so that `breakpoint()` would end the job
            env.setdefault("PYTHONBREAKPOINT", "fabric.core.messages.skip_breakpoint")
        listen_fd = listener.fileno() if listener is not None and rank_env.rank == 0 else None
        if listen_fd is not None:
            env[STORE_FD] = str(listen_fd)
        commands[rank_env.rank] = Command(rank_env.rank, argv, env, listen_fd, cwd).start
    multi_node = first.world_size > first.local_world_size
    supervisor = Supervisor(commands, logs, multi_node, parent_rank=parent_rank)

    def on_signal(number: int) -> None:
        if number != signal.SIGTSTP:
            supervisor.forward(number)
            return
        # Ctrl-Z: ranks are in other sessions, which the terminal does not signal.
        supervisor.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell sends SIGCONT
        supervisor.send(signal.SIGCONT)

    with supervisor.run(
        *((*FORWARDED_SIGNALS, signal.SIGTSTP) if parent_rank is None else ()), on_signal=on_signal
    ):
        if parent_rank is not None:
            parent_rank.forward_signals(supervisor)
        if listener is not None:
            listener.close()  # rank zero has inherited it: no other process may accept connections
        if limit is not None:
            end = time.monotonic() + limit
            while first.rank in supervisor.running() and time.monotonic() < end:
                supervisor.wait_all(0.5)
            failure = supervisor.wait_all(LAST_GRACE_S)
            if failure is not None and failure.rank == first.rank and failure.code > 128:
                return supervisor.stop_and_report(failure)  # killed by a signal: it printed nothing
            return int(len(supervisor.finished()) < len(commands))
        return _wait(supervisor)


def _wait(supervisor: Supervisor) -> int:
    failure = supervisor.wait(wake=lambda: supervisor.signalled is not None)
    if supervisor.signalled:  # no time limit for ranks that save; a second signal kills them
        if supervisor.wait() is not None:
            supervisor.wait_all(FORWARD_GRACE_S)
        failure = supervisor.first_failure()
        supervisor.stop()
        return 0 if failure is None else 128 + supervisor.signalled
    return 0 if failure is None else supervisor.stop_and_report(failure)


def supervise_other_ranks(pipe: int, control: int, signals: int) -> None:
    """Start and supervise the ranks of a script other than its rank zero, which started this process.

    The exit code of the job is sent to rank zero (see `rank_zero.py`).
    """
    for number in FORWARDED_SIGNALS:  # a scheduler may signal all processes; the ranks react
        signal.signal(number, lambda *_: None)
    connection = Connection(control)
    argv, cwd, first = connection.recv()
    parent_rank = ParentRank(first.rank, Connection(pipe, writable=False), connection, signals)
    code = run_commands(argv, first, None, {}, "script", cwd, parent_rank=parent_rank)
    with contextlib.suppress(OSError):
        connection.send(("over", code))
