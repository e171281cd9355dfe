"""Worker process of `RankPool`: runs one call after another, and reports the side effects of each.

Runs only in processes that `fabric.testing.pool` started. The parent enforces timeouts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, connection, parent_process, set_start_method
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.errors import RankError, UsageError
from fabric.core.torch_versions import collectives_recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

STACKS_SIGNAL = (
    signal.SIGUSR2
)  # SIGUSR1 and SIGTERM are for the code under test: schedulers send them for preemption
FINISH = b"finish"
_SEED = 1234
_WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RankInfo(NamedTuple):
    """Rank of this process in the running call, and the path of a file store for its ranks."""

    rank: int
    world_size: int
    store: str
    """For `init_method=f"file://{store}"`; unused in a call with `group=False`."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """One call on one rank, with the parent's environment, so that the worker behaves like a new child."""

    info: RankInfo
    call: bytes
    """Pickled (function, args, kwargs)."""
    group: bool
    accelerator: str
    group_timeout: float
    warnings_as_errors: bool
    ignored_warnings: tuple[str, ...]
    environ: dict[str, str]
    path: list[str]
    cwd: str


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of a call on one rank: a pickled value, or an error."""

    value: bytes = b""
    error: BaseException | None = None
    text: str = ""
    """The error's text with its traceback."""
    when: float = 0.0
    """`time.monotonic()` of the failure, comparable between the processes of one machine."""
    died: bool = False
    """Whether the process ended without a result."""

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.error is not None


_info: RankInfo | None = None


def rank_info() -> RankInfo:
    """Return rank, world size and store path of the call that this process is running.

    Raises:
        UsageError: This process is not a rank of a `RankPool`, or runs no call now.
    """
    if _info is None:
        raise UsageError("rank_info() works inside a function that RankPool.run is running on a rank.")
    return _info


def serve(calls: connection.Connection, stacks: connection.Connection) -> None:
    """Run calls until the parent closes `calls`. On STACKS_SIGNAL stacks are written to `stacks`."""
    os.setpgid(0, 0)  # a separate process group: the parent can kill this rank with all its children
    threading.Thread(target=_die_with_parent, daemon=True, name="rank-pool-parent").start()
    faulthandler.register(STACKS_SIGNAL, file=stacks.fileno(), all_threads=True)
    torch.set_num_threads(1)
    # DataLoader workers must not use this rank's start method, with which they would import torch again.
    set_start_method(None, force=True)
    gc.freeze()  # garbage collection skips the modules that the fork server loaded
    calls.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            _serve_call(calls, pickle.loads(calls.recv_bytes()))


def child_processes() -> dict[int, str]:
    """Return live children, except multiprocessing's helpers: pid to command line. Linux only."""
    active_children()  # reaps children that ended
    children = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in _read(listing).split():
            process = Path("/proc", pid)
            alive = _read(process / "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])
            command = _command_line(process) if alive else ""
            if alive and "multiprocessing.forkserver" not in command and "resource_tracker" not in command:
                children[int(pid)] = command
    return children


def _command_line(process: Path) -> str:
    """Return the command line of a live process. It is empty for a moment while a process starts."""
    for _ in range(100):
        if command := _read(process / "cmdline").replace("\0", " ").strip():
            break
        time.sleep(0.01)
    return command


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process or thread ended meanwhile
        return ""


def _die_with_parent() -> None:
    # Works on SIGKILL of the parent, and during a call: the kernel closes the other end of the sentinel.
    # PR_SET_PDEATHSIG does not: the kernel's parent of this process is the fork server.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _serve_call(calls: connection.Connection, call: RankCall) -> None:
    global _info
    _apply_environment(call)
    _info = call.info
    before, hook = _snapshot(), sys.excepthook
    calls.send_bytes(pickle.dumps(_run(call)))
    # The group exists until every rank has a result: closed sockets would fail a peer's last collective.
    if calls.recv_bytes() == FINISH:
        leaks = _destroy_group(call) + _leaks_since(before)
        calls.send_bytes(pickle.dumps(_leak_result(leaks)))
    sys.excepthook = (
        hook  # each process group wraps the hook: after some hundreds the recursion limit fails it
    )
    _info = None


def _apply_environment(job: RankCall) -> None:
    sys.path[:] = job.path
    if os.environ != job.environ:
        os.environ.clear()
        os.environ.update(job.environ)
    os.chdir(job.cwd)
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(_SEED)


def _run(job: RankCall) -> RankResult:
    try:
        if job.group:
            _init_group(job)
        function, args, kwargs = pickle.loads(job.call)
        with _warnings(job):
            value = function(*args, **kwargs)
        return RankResult(value=_pickled(value))
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the parent waits for a result
        return _failure(error)


def _init_group(job: RankCall) -> None:
    info = job.info
    with collectives_recorded():
        dist.init_process_group(
            _backend_on(job.accelerator, info),
            init_method=f"file://{info.store}",
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=job.group_timeout),
        )


def _backend_on(name: str, info: RankInfo) -> str:
    """Return the group backend of an accelerator, and make this rank's device the current one."""
    if name == "cpu":
        return "gloo"
    from fabric.accelerators.select import group_backend, select_accelerator, select_devices

    accelerator = select_accelerator(name)
    device = select_devices(accelerator, info.world_size)[info.rank]
    accelerator.setup_device(device)
    return group_backend(accelerator, device)


@contextlib.contextmanager
def _warnings(job: RankCall) -> Iterator[None]:
    with warnings.catch_warnings():
        if job.warnings_as_errors:
            warnings.simplefilter("error")
        for message in job.ignored_warnings:
            warnings.filterwarnings("ignore", message=message)
        yield


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"The function returned a {type(value).__qualname__}, which cannot be pickled ({error}). "
            f"Return plain data or tensors."
        ) from error


def _failure(error: BaseException) -> RankResult:
    when = time.monotonic()
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `_run`
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return RankResult(error=_picklable(error), text=text, when=when)


def _picklable(error: BaseException) -> BaseException:
    """Return the error, or a RankError with its text if it does not pickle."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
        return copy.with_traceback(None)
    except Exception:
        return RankError(f"{type(error).__qualname__}: {error}")


def _snapshot() -> dict[str, Any]:
    return {
        "environment variable": user_environ(),
        "default dtype": {"": torch.get_default_dtype()},
        "number of torch threads": {"": torch.get_num_threads()},
        "signal handler": {number.name: signal.getsignal(number) for number in _WATCHED_SIGNALS},
        "thread": {thread.name: thread for thread in threading.enumerate() if not thread.daemon},
        "child process": child_processes(),
    }


def _leaks_since(before: dict[str, Any]) -> list[str]:
    after = _snapshot()
    if after["child process"] or after["thread"].keys() != before["thread"].keys():
        gc.collect()  # an unreferenced iterator in a reference cycle keeps its processes and threads
        after = _snapshot()
    return [f"{kind}{change}" for kind in after for change in changes(before[kind], after[kind])]


def user_environ() -> dict[str, str]:
    """Return the environment without variables that torch's compiler and pytest set themselves."""
    ignored = ("TORCHINDUCTOR_", "TRITON_", "PYTEST_CURRENT_TEST")
    return {key: value for key, value in os.environ.items() if not key.startswith(ignored)}


def changes(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """Return the differences between two tables, one text per key, to be put after the name of the table."""
    absent = object()
    found = []
    for key in sorted({*before, *after}, key=str):
        old, new = before.get(key, absent), after.get(key, absent)
        name = f" {key}" if key != "" else ""
        if old is absent:
            found.append(f"{name} left: {new}")
        elif new is absent:
            found.append(f"{name} gone, was {old}")
        elif old != new:
            found.append(f"{name} changed from {old} to {new}")
    return found


def _destroy_group(job: RankCall) -> list[str]:
    initialised = dist.is_initialized()
    if initialised:
        dist.destroy_process_group()
    if initialised and not job.group:
        return ["default process group left initialised"]
    if job.group and not initialised:
        return ["default process group destroyed by code that did not create it"]
    return []


def _leak_result(leaks: list[str]) -> RankResult:
    if not leaks:
        return RankResult()
    text = "The call left traces in its process:\n" + "\n".join(f"  {leak}" for leak in leaks)
    return RankResult(error=UsageError(text), text=text, when=time.monotonic())
