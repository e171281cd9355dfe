"""Runs the user's own command once more for every further rank: `python train.py` becomes all ranks.

This process is local rank 0 and goes on; a thread watches the others until the end.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fabric.core.errors import LaunchError
from fabric.plugins.environments.local import LAUNCHED, LocalEnvironment
from fabric.processes.signals import TOGETHER_S, Listener, die_by, flush_output
from fabric.processes.system import require_posix
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.place import Place
from fabric.strategies.launchers.supervisor import EXIT_NOTE_S, Command, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from fabric.strategies.launchers.failure import Failure


MAIN_GRACE_S = 1.0
"""Seconds that this process gets to fail by itself, usually in a collective, after another rank failed."""
UNWIND_GRACE_S = 60.0
"""Seconds that this process gets to leave its `finally` and `except` blocks, after another rank failed."""
AGAIN_S = 5.0
"""A second Ctrl-C within so many seconds ends all ranks at once."""


class ScriptLauncher(Launcher):
    """Starts the other ranks of this machine by running the original command again.

    Args:
        environment: Learns this process's place; hosts the store.
        num_processes: Ranks on this machine, this process included.
        num_nodes: Machines; with more than one the same command is run by hand on each, with MASTER_ADDR,
            MASTER_PORT and NODE_RANK set.
    """

    start_method = "popen"

    def __init__(self, environment: LocalEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes

    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks unless that has been done, then call `function` in this process.

        Raises:
            LaunchError: There is no command to run again (notebook, prompt, script on standard input), or
                this process has started another number of ranks before.
        """
        if not self.environment.creates_processes_externally:
            self._start()
        return function(*args, **kwargs) if function is not None else None

    def _start(self) -> None:
        global _job
        if _job is not None:
            _job.check(self.num_processes, self.num_nodes)
            self.environment.follow(_job.host)
        elif self.num_processes * self.num_nodes > 1:
            require_posix()
            argv, directory = original_command()
            _job = _Job(self.environment, self.num_processes, self.num_nodes, argv, directory)


_STORE_TIMEOUT = timedelta(minutes=5)  # replaced by the strategy's own when it opens the store


class _Job:
    """The other ranks that this process has started, tied to its life from both sides."""

    def __init__(
        self,
        environment: LocalEnvironment,
        processes: int,
        nodes: int,
        argv: list[str],
        directory: str | None,
    ) -> None:
        self.processes, self.nodes = processes, nodes
        place = Place.first(environment, processes, nodes)
        if place.node_rank == 0:
            environment.host_store(_STORE_TIMEOUT)
        environment.become(**asdict(place), child=place.node_rank > 0)
        self.rank = place.rank
        # The store lives as long as this process, whatever a strategy tears down in between.
        self.host = LocalEnvironment()
        self.host.follow(environment)
        self.supervisor = Supervisor(_commands(place, argv, directory), elsewhere=nodes > 1)
        self.supervisor.start()
        self._heard: dict[int, float] = {}
        Listener(self._on_signal)
        self._main_over = threading.Event()
        self._concluding, self._stderr = threading.Lock(), sys.stderr
        self._cause: Failure | None = None
        self._seen: Failure | None = None  # while this process's end took its time (a save that goes on)
        self._previous_hook, self._python_exit = sys.excepthook, sys.exit
        self._exited: Failure | None = None
        self._pid = os.getpid()  # a fork of this process inherits the hooks
        sys.excepthook, sys.exit = self._on_exception, self._on_sys_exit
        atexit.register(self._on_exit)
        threading.Thread(target=self._watch, daemon=True, name="fabric-supervisor").start()

    def check(self, processes: int, nodes: int) -> None:
        if (processes, nodes) != (self.processes, self.nodes):
            raise LaunchError(
                f"devices={processes}, num_nodes={nodes} was asked for, but this script runs on "
                f"devices={self.processes}, num_nodes={self.nodes} since its first launch, and a script has "
                f'one set of ranks. Use the same numbers, or strategy="ddp_spawn" with a function for each.'
            )

    def _watch(self) -> None:
        failure = self.supervisor.wait()
        if failure is None or self.supervisor.stopping or self._main_over.wait(MAIN_GRACE_S):
            return
        self._seen = failure
        self.supervisor.tell(spare=failure.rank)
        deadline = time.monotonic() + UNWIND_GRACE_S
        while _is_unwinding() and time.monotonic() < deadline:
            if self._main_over.wait(0.1):
                return
        # This process is busy elsewhere, perhaps for ever: nothing but its end makes it notice. If that is
        # torch's excepthook, it holds back what is printed meanwhile.
        with contextlib.redirect_stderr(self._stderr):
            self._exit(self._finish(failure))

    def _on_signal(self, number: int) -> None:
        """Pass SIGTERM on to the ranks, once; a second one, or a second Ctrl-C, ends them and this process.

        In a thread, while the main one may be deep in a collective; only of signals that have a handler in
        Python. Without one SIGTERM ends this process, and the ranks die with it.
        """
        now, last = time.monotonic(), self._heard.get(number, float("-inf"))
        if now - last < TOGETHER_S:
            return
        self._heard[number] = now
        interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if number == signal.SIGTERM and last == float("-inf"):
            self.supervisor.send(number)
        elif number == signal.SIGTERM or (number == signal.SIGINT and interrupts and now - last < AGAIN_S):
            self.supervisor.stopping = True
            self.supervisor.send(signal.SIGKILL)
            die_by(number)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            self._previous_hook(kind, error, tb)
            return
        when = time.monotonic()
        self._main_over.set()
        sys.excepthook = self._previous_hook
        if issubclass(kind, KeyboardInterrupt):  # the terminal has interrupted the other ranks as well
            self._previous_hook(kind, error, tb)
            self.supervisor.stop()
            return
        from fabric.processes.endings import describe
        from fabric.strategies.launchers.failure import Failure

        mine = Failure(self.rank, when, describe(error, tb))
        self._cause = cause = self.supervisor.first_failure(mine) or mine
        if cause is mine or cause.rank in self.supervisor.finished() or not mine.is_consequence:
            self._previous_hook(kind, error, tb)
        self.supervisor.tell(spare=cause.rank)
        # The rest waits for `_on_exit`: torch's own hook, around this one, holds back what is printed here.

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        """In place of `sys.exit`: Python tells nobody with which code it ends."""
        from fabric.strategies.launchers.failure import Failure, exit_reason

        code, reason = exit_reason(status)
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            self._exited = Failure(self.rank, time.monotonic(), reason, code) if code else None
        self._python_exit(status)

    def _on_exit(self) -> None:
        """At this process's end: the other ranks end, too; they have time if this one ended well."""
        if os.getpid() != self._pid:
            return
        self._main_over.set()
        mine = 1  # what an exception ends this process with
        if self._cause is None and self._exited is not None:
            now, mine = time.monotonic(), self._exited.code
            if now - self._exited.when < EXIT_NOTE_S:  # else somebody has caught it
                self.supervisor.wait(MAIN_GRACE_S)
                self._cause = self.supervisor.first_failure(self._exited)
        if self._cause is not None:
            code = self._finish(self._cause)
            if code != mine:
                self._exit(code)
        elif self._seen is not None:
            self._exit(self._finish(self._seen))
        elif not self.supervisor.stopping:
            self._await_others()

    def _await_others(self) -> None:
        failure = self.supervisor.wait_noting(f"rank {self.rank} has finished; waiting for rank {{}}")
        if failure is not None:
            from fabric.strategies.launchers.failure import root_cause

            self._exit(self._finish(root_cause([failure], [self.rank])))

    def _finish(self, failure: Failure) -> int:
        """Stop the ranks and print the cause last; returns the exit code."""
        self._concluding.acquire()  # for good: another thread that comes here waits for the end
        flush_output()
        return self.supervisor.conclude(failure, also=[self.rank])

    def _exit(self, code: int) -> None:
        flush_output()
        os._exit(code)  # the main thread may be deep in a collective: no exception reaches it


_job: _Job | None = None


def original_command() -> tuple[list[str], str | None]:
    """The command line of this process with the interpreter's own path, and the directory it was started in.

    Raises:
        LaunchError: There is none that can be run again.
    """
    main, original = sys.modules["__main__"], list(sys.orig_argv)
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
    if interactive or sys.argv[:1] in ([""], ["-"]):
        where = "a notebook or prompt" if interactive else "a script on standard input"
        raise LaunchError(
            f"This is {where}: there is no command that the other ranks could run. Put the loop into a "
            f'function and use strategy="ddp_notebook" (or "ddp_fork") with fabric.launch(function), or save '
            f"it as a file."
        )
    argv, directory = [sys.executable, *original[1:]], None
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:  # python -m: found from the directory of the start
        directory = sys.path[0] if sys.path and Path(sys.path[0]).is_dir() else None
    elif file and sys.argv[0] in argv:
        # The script may have left its directory; the other ranks start where this one did.
        given, absolute = sys.argv[0], str(Path(file).absolute())
        argv[argv.index(given)] = absolute
        if not Path(given).is_absolute() and absolute.endswith(given.removeprefix("./")):
            directory = absolute[: -len(given.removeprefix("./"))] or None
    return argv, directory


def _commands(first: Place, argv: list[str], directory: str | None) -> list[Command]:
    commands = []
    for local_rank in range(1, first.local_world_size):
        place = first.at(local_rank)
        env = {**os.environ, **place.variables(os.environ), LAUNCHED: "script"}
        commands.append(Command(place.rank, argv, env, cwd=directory))
    return commands


def _is_unwinding() -> bool:
    """Whether the main thread handles an exception: it may save in a `finally`, and then end by itself."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return (found[0] if isinstance(found, tuple) else found) is not None  # a tuple before Python 3.12
