"""`MultiprocessLauncher`: runs a function in N new processes of this machine by spawn, fork or forkserver.

This process starts the ranks, hosts their store, waits for them and returns rank zero's result; it is no
rank itself.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from functools import partial
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import default_pg_timeout

from fabric.core.errors import LaunchError, UsageError
from fabric.core.pickles import pickling_error
from fabric.core.source import library_frames
from fabric.launch.functions.child import Task, run_rank
from fabric.launch.functions.openmp import pause_openmp
from fabric.launch.garbage import forking
from fabric.launch.launcher import Launcher
from fabric.launch.rank_env import RankEnv, first_rank_env_of
from fabric.launch.rank_exit import CALLED_IN_IMPORT, IMPORT_EXIT
from fabric.launch.rank_logs import RankLogs
from fabric.launch.signals import die_by, flush_output
from fabric.launch.stores import open_store
from fabric.launch.supervisor import Supervisor
from fabric.launch.system import require_posix

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from fabric.plugins.environments.local import LocalEnvironment

_RANK = "fabric-rank"
"""Name of the process of a rank."""
_PRELOAD = ["torch", "fabric.fabric"]
"""Modules that the fork server imports once; a second launch forks from it in about 0.1 s."""


class MultiprocessLauncher(Launcher):
    """Starts all ranks of this machine as child processes that run a function.

    Args:
        environment: The environment of this process, which hosts the store; each rank has another one.
        num_processes: Ranks on this machine.
        start_method: "spawn", "fork" or "forkserver".
        num_nodes: Machines; each runs the same program with MASTER_ADDR, MASTER_PORT and NODE_RANK set.
    """

    def __init__(
        self,
        environment: LocalEnvironment,
        num_processes: int,
        start_method: str = "spawn",
        num_nodes: int = 1,
    ) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self.start_method = start_method

    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` in every rank; return rank zero's result, copied by pickle.

        Raises:
            LaunchError: There is no function; it or an argument cannot be pickled; CUDA is initialised, so
                fork is impossible; or a rank failed. Then the message names that rank and its exception,
                and `__cause__` is its traceback.
        """
        if function is None:
            raise LaunchError(
                f'start_method="{self.start_method}" runs a function in each rank, but launch() got none. '
                "Move the loop into a function, `def main(fabric): ...`, and call `fabric.launch(main)`."
            )
        process = multiprocessing.current_process()
        if getattr(process, "_inheriting", False):  # torch calls it so, too
            if process.name == _RANK:  # its exit code is its only report yet: it has no pipe
                flush_output()
                os._exit(IMPORT_EXIT)
            raise LaunchError(f"{CALLED_IN_IMPORT}.")
        if process.daemon:
            raise LaunchError(
                f"{process.name} is daemonic, as workers of multiprocessing.Pool are. Python lets it start "
                "no ranks. Use concurrent.futures.ProcessPoolExecutor."
            )
        require_posix()
        if self.start_method == "fork":
            _check_cuda_unused()
        call = self._pickle_call(function, args, kwargs)
        first, listener = first_rank_env_of(self.environment, self.num_processes, self.num_nodes)
        return self._run(first, listener, call)

    def _run(self, first: RankEnv, listener: socket.socket | None, call: bytes | tuple[Any, ...]) -> Any:
        if self.start_method == "fork":
            _prepare_fork(first.threads())
        context, multi_node = multiprocessing.get_context(self.start_method), self.num_nodes > 1
        if self.start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        rank_envs = [first.with_local_rank(local) for local in range(self.num_processes)]
        ranks = {rank_env.rank: partial(_start_rank, context, rank_env, call) for rank_env in rank_envs}
        plain_streams = all(
            [isinstance(stream, io.TextIOWrapper | None) for stream in (sys.stdout, sys.stderr)]
        )
        # A notebook kernel's streams use one connection per forked process, so that lines would mix.
        logs = None if plain_streams or self.start_method != "fork" else RankLogs()
        supervisor = Supervisor(ranks, logs=logs, multi_node=multi_node, functions=True)
        failure = store = None
        try:
            with supervisor.run(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) as handlers:
                if listener is not None:
                    # After the forks: a rank forked while the store's thread has a lock would deadlock on it.
                    address = first.main_address, first.main_port
                    store = open_store(*address, True, default_pg_timeout, listener.detach())
                failure = supervisor.wait(wake=lambda: len(supervisor.exit_reports) == len(ranks))
                failure = failure or supervisor.wait_with_notice(
                    "rank {} has returned; waiting for the end of its process"
                )
                if failure is not None:
                    trace = supervisor.exit_reports.get(failure.rank, failure).trace
                    raise _launch_error(supervisor.summary(failure), trace, failure.code)
                result = supervisor.exit_reports[first.rank].result
                return None if result is None else _unpickle_result(result)
        finally:
            del store  # else an exception's traceback keeps its thread alive during forks of the next launch
            signalled = None if failure is None else supervisor.signalled
            if signalled is not None and not callable(handlers.previous(signalled)):
                die_by(signalled)

    def _pickle_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes | tuple[Any, ...]:
        call = (function, args, kwargs)
        if self.start_method == "fork":
            return call
        for part in (function, *args, *kwargs.values()):
            _check_importable(part, self.start_method)
        try:
            # Plain pickle: torch's ForkingPickler would share CPU parameters between the ranks.
            return pickle.dumps(call)
        except Exception as error:
            raise LaunchError(
                f'start_method="{self.start_method}" sends the function and its arguments to the ranks by '
                f"pickle, and this cannot be pickled: {_unpicklable_part(function, args, kwargs)}. Define it "
                "at the top level of a module, create it inside the launched function, or use "
                'start_method="fork" (strategy="ddp_fork").'
            ) from error


def _start_rank(
    context: BaseContext,
    rank_env: RankEnv,
    call: bytes | tuple[Any, ...],
    pipe: Connection,
    streams: tuple[int, int] | None,
) -> BaseProcess:
    is_direct_child = context.get_start_method() != "forkserver"
    default_method = multiprocessing.get_start_method(allow_none=True)
    variables = {**os.environ, **rank_env.variables(os.environ, "function")}
    task = Task(variables, call, os.getpid() if is_direct_child else None, default_method, streams)
    process = context.Process(target=run_rank, args=(task, pipe), name=_RANK)  # type: ignore[attr-defined]
    with warnings.catch_warnings(), forking():
        # Python 3.12 warns of any fork in a process with threads; `forking` and `pause_openmp` handle these.
        message = ".*multi-threaded, use of fork"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
        process.start()
    return process  # type: ignore[no-any-return]


def _prepare_fork(threads: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else every rank would print the buffered text again
    if not pause_openmp() and threads > 1:
        warnings.warn(
            f"The OpenMP runtime of this torch cannot be paused, so forked ranks with {threads} threads may "
            "hang once this process has computed anything. If they do, set OMP_NUM_THREADS=1 or use "
            "forkserver.",
            stacklevel=library_frames() + 1,
        )


_previous_hook: Any = None


def _unpickle_result(result: bytes) -> Any:
    """Return rank zero's result of the function.

    Raises:
        LaunchError: It is usable in a process of the job only.
    """
    try:
        return pickle.loads(result)
    except (ValueError, UsageError) as error:
        if "process group" not in str(error):
            raise
        raise LaunchError(
            "The launched function returned a model of its job, whose process group ended with it. Return "
            "model.module or its state_dict(), or write fabric.save(path, {'model': model}) in the function."
        ) from error


def _launch_error(line: str, trace: str, code: int) -> LaunchError:
    """Return the error of a function launch: the last line of a failed job, caused by the rank's traceback.

    If it is not caught, the process exits with `code`.
    """
    global _previous_hook
    error = LaunchError(line)
    error.exit_code = code
    error.__cause__ = RemoteTraceback(f"\n{trace}") if trace else None
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _exit_with_code
    return error


def _exit_with_code(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    _previous_hook(kind, error, tb)
    if isinstance(error, LaunchError) and error.exit_code != 1:
        raise SystemExit(error.exit_code)


def _check_cuda_unused() -> None:
    if torch.cuda.is_initialized():
        raise LaunchError(
            "CUDA is initialised in this process, and a forked rank cannot use it again. Move the first "
            ".cuda(), .to('cuda') or torch.cuda call into the launched function (in a notebook: restart the "
            'kernel first), or use strategy="ddp_spawn".'
        )


def _check_importable(part: Any, method: str) -> None:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    importable = getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
    if not importable and getattr(part, "__module__", None) == "__main__":
        raise LaunchError(
            f'start_method="{method}" imports functions and classes by name in each rank, but '
            f"{_name(part)!r} is defined in a notebook, prompt or piped script, which cannot be imported. "
            'Use strategy="ddp_notebook" (or "ddp_fork"), or define it in a file.'
        )


def _unpicklable_part(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the first argument that cannot be pickled, with the reason."""
    owner = getattr(function, "__self__", function)  # the `Fabric` whose method this is
    for name, value in [*[(_name(value), value) for value in (owner, *args)], *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:  # from pickle, or from a user's __getstate__ or __reduce__
            return f"{name} ({pickling_error(error, value, name)})"
    return "the call"


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)
