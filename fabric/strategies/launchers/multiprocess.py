"""Runs a function in N new processes of this machine: spawn, fork or forkserver. Where notebooks and
functions go.

This process starts the ranks, hosts their store, waits for them and returns rank zero's result; it is no
rank itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.strategies.launchers.child import Ending, Task, run_rank
from fabric.strategies.launchers.cuda_touched import cuda_line, watch_cuda
from fabric.strategies.launchers.failure import (
    Failure,
    from_returncode,
    launch_error,
    root_cause,
    settle_seconds,
)
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.openmp import rest_openmp
from fabric.strategies.launchers.output import relayed_output
from fabric.strategies.launchers.pickling import can_pickle, explain_unpicklable, interactive_name
from fabric.strategies.launchers.place import Place
from fabric.strategies.launchers.supervisor import (
    EXIT_NOTE_S,
    KILL_GRACE_S,
    STOP_GRACE_S,
    process_descriptors,
)
from fabric.utilities.garbage import forking
from fabric.utilities.messages import say
from fabric.utilities.signals import TOGETHER_S, Handlers, die_by
from fabric.utilities.system import require_posix

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from fabric.plugins.environments.local import LocalEnvironment

_PRELOAD = ["torch", "fabric.fabric"]
"""What the fork server imports once; a second launch forks from it in about 0.1 s."""


class MultiprocessLauncher(Launcher):
    """Starts all ranks of this machine as child processes that run a function.

    Args:
        environment: Hosts the store here; a copy takes its place in each rank.
        num_processes: Ranks on this machine.
        start_method: "spawn", "fork" or "forkserver".
        num_nodes: Machines; each runs the same program with MASTER_ADDR, MASTER_PORT and NODE_RANK set.

    Raises:
        ConfigurationError: This system does not have the start method.
    """

    def __init__(
        self,
        environment: LocalEnvironment,
        num_processes: int,
        start_method: str = "spawn",
        num_nodes: int = 1,
    ) -> None:
        available = multiprocessing.get_all_start_methods()
        if start_method not in available:
            raise ConfigurationError(
                f"start_method={start_method!r} is not available here. Write one of "
                f"{', '.join(map(repr, available))}."
            )
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self.start_method = start_method
        if start_method == "fork":
            watch_cuda()

    @property
    def is_interactive_compatible(self) -> bool:
        """Only fork: the others must import the function by name, and a notebook cannot be imported."""
        return self.start_method == "fork"

    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` in every rank; returns rank zero's result, copied by pickle.

        Raises:
            LaunchError: There is no function, it or an argument cannot be pickled, fork is not possible any
            more, or a rank failed: the message starts with that rank and its exception, which is also
                `__cause__`.
        """
        if function is None:
            raise LaunchError(
                f'start_method="{self.start_method}" runs a function in each rank, but launch() got none. '
                "Move the loop into a function, `def main(fabric): ...`, and call `fabric.launch(main)`."
            )
        require_posix()
        self._refuse_nested_start()
        call = self._pack(function, args, kwargs)
        self.environment.check_meeting_point(self.num_nodes)
        node_rank = self.environment.node_rank()
        hosts = node_rank == 0
        port = self.environment.take_port(self.num_nodes) if hosts else self.environment.main_port
        first = Place(
            0,
            self.num_processes * self.num_nodes,
            self.num_processes,
            self.environment.main_address,
            port,
            node_rank,
        )
        try:
            with relayed_output(self.start_method) as begin:

                def started() -> None:
                    begin()
                    if hosts:
                        self._host_store()

                return _Ranks(self._context(), first, call, started).run()
        finally:
            self.environment.teardown()  # the next launch gets a store of its own

    def _host_store(self) -> None:
        self.environment.host_store(timedelta(minutes=5))

    def _context(self) -> BaseContext:
        context = multiprocessing.get_context(self.start_method)
        if self.start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        return context

    def _refuse_nested_start(self) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                "launch() was reached while a new rank imported this script. Ranks that are spawned import "
                'the script first: put its start under `if __name__ == "__main__":`.'
            )
        if self.start_method == "fork":
            _refuse_fork_after_cuda()

    def _pack(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes | tuple[Any, ...]:
        call = (self.environment, function, args, kwargs)
        if self.start_method == "fork":
            return call
        for part in (function, *args, *kwargs.values()):
            _refuse_interactive_function(part, self.start_method)
        try:
            # By value and once: torch's own reducers would share CPU parameters between the ranks.
            return pickle.dumps(call)
        except Exception as error:
            raise LaunchError(
                f'start_method="{self.start_method}" sends the function and its arguments to the ranks by '
                f"pickle, and this cannot be pickled: {_culprit(function, args, kwargs)}. Define it at the "
                'top level of a module, make it inside the launched function, or use start_method="fork" '
                '(strategy="ddp_fork").'
            ) from error


class _Ranks:
    """The processes of one launch, from start to end.

    Args:
        context: Of Python's multiprocessing, with the start method.
        first: The place of the first rank.
        call: What they run.
        started: Called once all are started; threads begin there. That of the store takes locks of the C
            library for each rank that connects, and a rank forked at that moment would find them taken for
            ever.
    """

    def __init__(
        self,
        context: BaseContext,
        first: Place,
        call: bytes | tuple[Any, ...],
        started: Callable[[], None],
    ) -> None:
        self.context, self.first, self.call, self.started = context, first, call, started
        self.method = context.get_start_method()
        self.processes: dict[int, BaseProcess] = {}
        self.links: dict[int, Connection] = {}
        self.endings: dict[int, Ending] = {}
        self.failures: dict[int, Failure] = {}
        self.signalled: float | None = None
        self.elsewhere = first.world_size > first.local_world_size

    def run(self) -> Any:
        numbers = (signal.SIGTERM, signal.SIGUSR1)
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        handlers = Handlers(heard, self._pass_on)
        try:
            self._start()
            self.started()
            while self.processes.keys() - self._over() and not self.failures:
                self._collect(1.0)  # a signal that comes just before the wait does not end it
            self._join()
            if not self.failures:
                result = self.endings[self.first.rank].result
                return pickle.loads(result) if result is not None else None
            self._settle()
            raise self._error()
        finally:
            self._stop()
            deadly = self.failures and not callable(handlers.before(signal.SIGTERM))
            handlers.restore()
            if self.signalled is not None and deadly:
                die_by(signal.SIGTERM)

    def _pass_on(self, number: int, _: Any) -> None:
        """A signal to this process: the ranks get SIGTERM once; if they know what to do, this one goes on."""
        if number != signal.SIGTERM:
            for process in self.processes.values():
                if process.pid is not None and process.exitcode is None:
                    os.kill(process.pid, number)
            return
        now = time.monotonic()
        if self.signalled is None:
            for process in self.processes.values():
                process.terminate()
        elif now - self.signalled > TOGETHER_S:
            for process in self.processes.values():
                process.kill()
        self.signalled = now

    def _start(self) -> None:
        direct, usual = self.method != "forkserver", multiprocessing.get_start_method(allow_none=True)
        variables = None if direct else dict(os.environ)
        if self.method == "fork":
            self._prepare_fork()
        for local_rank in range(self.first.local_world_size):
            place = self.first.at(local_rank)
            reader, writer = self.context.Pipe(duplex=False)
            task = Task(place, self.call, variables, os.getpid(), direct, usual)
            process = self.context.Process(target=run_rank, args=(task, writer))  # type: ignore[attr-defined]
            self.links[place.rank] = reader
            with warnings.catch_warnings(), forking():
                # Python 3.12 warns of any fork beside threads; what those threads hold here is taken care of.
                warnings.filterwarnings(
                    "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
                )
                process.start()
            self.processes[place.rank] = process
            writer.close()  # ours; the rank's own end closes with the rank, and later ranks do not inherit it

    def _prepare_fork(self) -> None:
        sys.stdout.flush()  # what is buffered would be printed once more by every rank
        sys.stderr.flush()
        if not rest_openmp() and self.first.threads() > 1:
            _warn_threads(self.first.threads())

    def _collect(self, timeout: float) -> None:
        """Wait so many seconds until a rank says or shows that it has ended, and take note."""
        waiting = sorted(self.processes.keys() - self._over())
        ranks: dict[Any, int] = {self.links[rank]: rank for rank in waiting}
        # A sentinel is a pipe, which processes that the rank has forked keep open after its end.
        ends = process_descriptors([self.processes[rank].pid or 0 for rank in waiting])
        own = ends or [self.processes[rank].sentinel for rank in waiting]
        ranks.update(zip(own, waiting, strict=True))
        ready = connection.wait(list(ranks), timeout)
        for descriptor in ends or ():
            os.close(descriptor)
        for item in ready:
            self._note(ranks[item])

    def _over(self) -> set[int]:
        return self.endings.keys() | self.failures.keys()

    def _note(self, rank: int) -> None:
        """One rank has sent its ending, or has ended without."""
        if rank in self._over():
            return
        link = self.links[rank]
        try:
            ending = Ending(*pickle.loads(link.recv_bytes())) if link.poll() else None
        except (EOFError, OSError):
            ending = None
        if ending is None:  # it died before it could say anything
            when = time.monotonic()
            self.processes[rank].join(STOP_GRACE_S)
            code = self.processes[rank].exitcode
            self.failures[rank] = from_returncode(rank, code if code is not None else 1, when)
            return
        self.endings[rank] = ending
        if ending.reason is not None:
            self.failures[rank] = Failure(rank, ending.when, ending.reason, ending.code)

    def _join(self) -> None:
        """After all said they are done: their processes end (after uploads), and must not crash then."""
        if self.failures:
            return
        note = time.monotonic() + EXIT_NOTE_S
        for rank, process in self.processes.items():
            process.join(max(0.0, note - time.monotonic()))
            if process.is_alive():
                say(f"rank {rank} has returned; waiting for the end of its process")
                process.join()
            if process.exitcode:
                self.failures[rank] = from_returncode(rank, process.exitcode, time.monotonic())

    def _settle(self) -> None:
        """If all that failed reads like a consequence, give the cause a moment to show."""
        deadline = time.monotonic() + settle_seconds(self.elsewhere)
        while root_cause(self.failures.values()).is_consequence and self.processes.keys() - self._over():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._collect(remaining)

    def _error(self) -> LaunchError:
        cause = root_cause(self.failures.values(), self.endings.keys() - self.failures.keys())
        alive = self.processes.keys() - self._over()
        text = cause.summary(alive, self.failures.values(), self.elsewhere)
        ending = self.endings.get(cause.rank)
        error = launch_error(text, ending.trace if ending is not None else "", cause.code)
        error.__cause__ = _revive(ending)
        return error

    def _stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        try:
            for process in self.processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # at once, if Ctrl-C comes again
            for process in self.processes.values():
                process.kill()
            for rank, process in self.processes.items():
                process.join(KILL_GRACE_S)
                if not process.is_alive():  # else in the kernel's hands (a dead disk)
                    process.close()
                self.links[rank].close()


def _revive(ending: Ending | None) -> BaseException | None:
    """The rank's exception object, where its class can be imported here."""
    if ending is None or ending.error is None:
        return None
    try:
        error = pickle.loads(ending.error)
    except Exception:  # an exception class with a constructor of its own: its text is in the message already
        return None
    return error if isinstance(error, BaseException) else None


def _refuse_fork_after_cuda() -> None:
    if torch.cuda.is_initialized():
        line = cuda_line()
        what = "that line" if line else "the first .cuda(), .to('cuda') or torch.cuda call"
        raise LaunchError(
            f"CUDA is initialised in this process{', ' * bool(line)}{line}, and a forked rank cannot use it "
            f"again. Move {what} into the launched function (in a notebook: restart the kernel first), or "
            'use strategy="ddp_spawn".'
        )


def _refuse_interactive_function(function: Any, method: str) -> None:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    importable = getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
    name = None if importable else interactive_name(function)
    if name is not None:
        raise LaunchError(
            f'start_method="{method}" imports functions and classes by name in each rank, but {name!r} is '
            "defined in a notebook, prompt or piped script, which cannot be imported. Use "
            'strategy="ddp_notebook" (or "ddp_fork"), or define it in a file.'
        )


def _culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    owner = getattr(function, "__self__", function)  # `Fabric`, of which this is a method
    # With an owner the first argument is the user's function, and what follows are its arguments.
    start = 0 if owner is function else -1
    named = [(_own_name(value, index), value) for index, value in enumerate((owner, *args), start)]
    named += list(kwargs.items())
    return next(
        (explain_unpicklable(value, name) for name, value in named if not can_pickle(value)),
        "the environment plugin",
    )


def _own_name(value: Any, position: int) -> str:
    """What people call it, when all we have is its position: `model` for a module, a function's own name."""
    if isinstance(value, torch.nn.Module):
        return "model"
    if isinstance(value, FunctionType | MethodType):
        return value.__qualname__
    return f"argument {position}" if position > 0 else type(value).__name__.lower()


def _warn_threads(threads: int) -> None:
    warnings.warn(
        f"The OpenMP runtime of this torch cannot be paused, so forked ranks with {threads} threads could "
        "hang once this process has computed anything. If they do, set OMP_NUM_THREADS=1 or use forkserver.",
        stacklevel=6,
    )
