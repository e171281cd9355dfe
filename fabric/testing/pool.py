"""`RankPool`: run a function on N warm ranks. This module runs in the parent, which enforces timeouts.

Process groups use a file store: no ports, no environment variables. Ranks run `fabric.testing.worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError, LaunchError, UsageError
from fabric.testing.failures import call_name, exit_result, failure, timeout_failure
from fabric.testing.worker import FINISH, STACKS_SIGNAL, RankCall, RankInfo, RankResult, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from typing_extensions import Self

_START_LIMIT = 120.0  # seconds; the first start imports torch, slowly on a busy machine
_FINISH_LIMIT = 30.0  # seconds to destroy the process group
_SETTLE = 0.5  # seconds after the first failure for the other ranks to fail without intervention
_RELEASE = 5.0  # seconds for ranks to fail after the exit of other ranks
_QUIET = 0.3  # seconds without output after which a dump of stacks is complete
_PRELOAD = ("torch.distributed", "fabric.testing.worker", "fabric.fabric")


@dataclass(eq=False, slots=True)
class _Worker:
    """One warm process and the parent's ends of its pipes."""

    process: ForkServerProcess
    calls: Connection
    stacks: Connection

    def send(self, message: bytes) -> None:
        """Send a message; a dead worker is ignored."""
        with contextlib.suppress(OSError):  # `receive` reports a dead worker
            self.calls.send_bytes(message)

    def is_ready(self) -> bool:
        """Wait for the worker's first message; return whether it was received."""
        with contextlib.suppress(EOFError, OSError):
            return self.calls.poll(_START_LIMIT) and bool(self.calls.recv_bytes())
        return False

    def receive(self) -> RankResult:
        """Return the next result; for a dead process one with its exit code."""
        try:
            result: RankResult = pickle.loads(self.calls.recv_bytes())
        except (EOFError, OSError):
            when = time.monotonic()
            self.process.join(_RELEASE)
            return exit_result(self.process.pid, self.process.exitcode, when)
        return result

    def read_stacks(self) -> str:
        """Return the current stacks of all threads of this process and its forks (a loader's workers).

        Works while they wait in native code.
        """
        pid = self.process.pid or 0
        children: list[int] = []
        with contextlib.suppress(OSError):  # the process may end meanwhile
            for listing in Path("/proc", str(pid), "task").glob("*/children"):  # Linux only
                children += map(int, listing.read_text().split())
        parts = [f"Its child process {child}:\n{self._dump(child)}" for child in children]
        return "\n\n".join([self._dump(pid), *parts])

    def _dump(self, pid: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
        dump = b""
        while wait([self.stacks], _QUIET if dump else _RELEASE):
            read = os.read(self.stacks.fileno(), 65536)
            if not read:
                break
            dump += read
        return (
            dump.decode(errors="replace").rstrip() or "(no stacks: the process is stopped or in the kernel)"
        )

    def kill(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """Wait for the end of a killed process and free its pipes."""
        self.process.join()
        self.process.close()
        self.calls.close()
        self.stacks.close()


class RankPool:
    """Runs functions on warm processes, each call in a fresh group of up to `world_size` ranks.

    Processes start at the first call that needs them, from a fork server that has torch loaded. They run one
    call after another, with one torch thread each. Every call starts with the caller's environment variables,
    working directory and `sys.path`, and with random generators seeded equally on all ranks. A call fails if
    it leaves traces in a process: environment, default dtype, threads, signal handlers, children, a group.
    After any failure the processes are replaced.

    Args:
        world_size: Largest number of ranks, and the default of `run`.
        timeout: Default seconds of a call.
        warnings_as_errors: Whether a warning inside a call fails it.
        ignored_warnings: Regular expressions for the beginning of ignored warnings.
        preload: Further modules that the fork server imports once. Works for the first pool of a program.
        accelerator: As in `Fabric`: rank r uses device r; groups communicate tensors of it and of the host.

    Raises:
        ConfigurationError: `world_size` is less than 1.
    """

    def __init__(
        self,
        world_size: int = 2,
        timeout: float = 60.0,
        *,
        warnings_as_errors: bool = False,
        ignored_warnings: Sequence[str] = (),
        preload: Sequence[str] = (),
        accelerator: str = "cpu",
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigurationError(
                f"RankPool(world_size={world_size!r}) must be a whole number, 1 or more."
            )
        self.world_size = world_size
        self.timeout = timeout
        self.accelerator = accelerator
        self._warnings = warnings_as_errors, tuple(ignored_warnings)
        self._preload = [*_PRELOAD, *preload]
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0
        self._closed = False
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now, in rank order."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank; return the list of results in rank order.

        The function is sent by name, arguments and results by value. `torch.distributed.get_rank()` returns
        its rank, or without a group `fabric.testing.rank_info()`.

        Args:
            function: A function at the top level of an importable module.
            *args: Plain data or tensors.
            world_size: Number of ranks; None for the pool's.
            timeout: Seconds for this call; None for the pool's.
            group: Whether a process group of these ranks is the default group during the call.
            **kwargs: Plain data or tensors.

        Raises:
            RankFailure: Some ranks raised, died, or left traces behind.
            RankTimeout: Some ranks returned no result in time.
        """
        limit = self.timeout if timeout is None else timeout
        results = self._run(function, args, kwargs, world_size, limit, group)
        if any(result.failed for result in results):
            raise failure(call_name(function), dict(enumerate(results)))
        return [pickle.loads(result.value) for result in results]

    def run_expecting_errors(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run as `run` does, but return the exception of a rank as its result. Arguments as for `run`.

        The result of a rank that died is a RankError. Processes are replaced if any rank failed.

        Raises:
            RankFailure: Some ranks hang (RankTimeout), or left traces behind.
        """
        limit = self.timeout if timeout is None else timeout
        results = self._run(function, args, kwargs, world_size, limit, group)
        return [result.error if result.failed else pickle.loads(result.value) for result in results]

    def close(self) -> None:
        """End all processes. The pool cannot be used afterwards."""
        if os.getpid() != self._owner:
            return  # a forked copy: the processes belong to the original
        self._closed = True
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self.close)

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world_size: int | None,
        timeout: float,
        group: bool,
    ) -> list[RankResult]:
        workers = self._ensure_workers(self.world_size if world_size is None else world_size)
        pickled = _pickled_call(function, args, kwargs)
        try:
            calls = self._rank_calls(pickled, len(workers), timeout, group)
            for worker, call in zip(workers, calls, strict=True):
                worker.send(pickle.dumps(call))
            results = _gather(workers, timeout, function)
            if not any(result.failed for result in results):
                results = _finish(workers, results, function)
        except BaseException:  # Ctrl-C, too: no rank continues after its call
            self._stop()
            raise
        if any(result.failed for result in results):
            self._stop()
        return results

    def _rank_calls(self, call: bytes, world_size: int, timeout: float, group: bool) -> list[RankCall]:
        self._calls += 1
        store = Path(self._directory(), f"store-{self._calls}")
        # No watchdogs, unless the caller turns them on: the pool has a timeout, and reports stacks.
        environ = {"FABRIC_HANG_REPORT_AFTER": "off", **os.environ}
        path, cwd = _importable_path(), str(Path.cwd())
        as_errors, ignored = self._warnings
        return [
            RankCall(
                info=RankInfo(rank, world_size, str(store)),
                call=call,
                group=group,
                accelerator=self.accelerator,
                group_timeout=2 * timeout + _RELEASE,  # the parent's timeout must be the first
                warnings_as_errors=as_errors,
                ignored_warnings=ignored,
                environ=environ,
                path=path,
                cwd=cwd,
            )
            for rank in range(world_size)
        ]

    def _directory(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        return self._folder.name

    def _ensure_workers(self, count: int) -> list[_Worker]:
        if self._closed:
            raise UsageError(
                "This RankPool is closed. Make a new one, or call run() inside its `with` block."
            )
        if not 1 <= count <= self.world_size:
            raise ConfigurationError(
                f"world_size={count} does not fit into this pool. Write 1 to {self.world_size}, "
                f"or make RankPool(world_size={count})."
            )
        if any(not worker.process.is_alive() for worker in self._workers):
            self._stop()  # a worker died between two calls
        missing = count - len(self._workers)
        if missing > 0:
            self._start(missing)
        return self._workers[:count]

    def _start(self, count: int) -> None:
        # The last registered runs first: multiprocessing's own exit handler would wait for the workers.
        atexit.unregister(self.close)
        atexit.register(self.close)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        self._workers += [_start_worker(context) for _ in range(count)]
        for worker in self._workers[-count:]:
            if not worker.is_ready():
                self._stop()
                raise LaunchError(
                    f"A rank did not start within {_START_LIMIT:.0f} s, or died while starting. See its "
                    f"output; without any, try python -c 'import {', '.join(self._preload)}'."
                )

    def _stop(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()


def _start_worker(context: ForkServerContext) -> _Worker:
    calls, rank_calls = context.Pipe()
    stacks, rank_stacks = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(rank_calls, rank_stacks), name="rank-pool-worker")
    process.start()
    rank_calls.close()
    rank_stacks.close()
    return _Worker(process, calls, stacks)


def _importable_path() -> list[str]:
    """Return `sys.path` with "" replaced by the working directory, which a rank may change before imports."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def _pickled_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except Exception as error:
        raise ArgumentTypeError(
            f"{call_name(function)} and its arguments cannot be sent to the ranks ({error}). Define the "
            f"function with `def` at the top level of a module, and pass plain data or tensors."
        ) from error


def _gather(workers: list[_Worker], timeout: float, function: Callable[..., Any]) -> list[RankResult]:
    """Return the result of every rank. After the first failure the others have a bounded time to finish."""
    results: dict[int, RankResult] = {}
    deadline = time.monotonic() + timeout
    _receive_results(workers, results, deadline, until_failure=True)
    if any(result.failed for result in results.values()):
        _receive_results(workers, results, time.monotonic() + _SETTLE)
        _kill_failed(workers, results, time.monotonic() + _RELEASE)
    _raise_if_missing(workers, results, function, f"no result within {timeout:g} s")
    return [results[rank] for rank in range(len(workers))]


def _kill_failed(workers: list[_Worker], results: dict[int, RankResult], deadline: float) -> None:
    """Kill each failed rank. This closes its sockets, so that ranks that wait for it fail in turn."""
    killed: set[int] = set()
    while new := {rank for rank, result in results.items() if result.failed} - killed:
        killed |= new
        for rank in new:
            workers[rank].kill()
        _receive_results(workers, results, deadline, until_failure=True)


def _finish(
    workers: list[_Worker], results: list[RankResult], function: Callable[..., Any]
) -> list[RankResult]:
    """Destroy the group on all ranks, and replace the results of ranks that left traces."""
    for worker in workers:
        worker.send(FINISH)
    finals: dict[int, RankResult] = {}
    _receive_results(workers, finals, time.monotonic() + _FINISH_LIMIT)
    _raise_if_missing(workers, finals, function, f"process group not destroyed after {_FINISH_LIMIT:g} s")
    return [finals[rank] if finals[rank].failed else result for rank, result in enumerate(results)]


def _receive_results(
    workers: list[_Worker], results: dict[int, RankResult], deadline: float, until_failure: bool = False
) -> None:
    """Add to `results` until all ranks have one, the deadline has passed, or one has failed."""
    pending = {worker.calls: rank for rank, worker in enumerate(workers) if rank not in results}
    while pending:
        readable = wait(list(pending), max(0.0, deadline - time.monotonic()))
        for pipe in readable:
            rank = pending.pop(pipe)  # type: ignore[call-overload]
            results[rank] = workers[rank].receive()
        if not readable or (until_failure and any(result.failed for result in results.values())):
            return


def _raise_if_missing(
    workers: list[_Worker], results: dict[int, RankResult], function: Callable[..., Any], limit: str
) -> None:
    missing = [rank for rank in range(len(workers)) if rank not in results]
    if missing:
        stacks = {rank: workers[rank].read_stacks() for rank in missing}
        raise timeout_failure(call_name(function), results, stacks, limit)
