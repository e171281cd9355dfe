"""The rank's side of `RankPool`: serves one call after another and says what a call left behind.

Runs only in processes that `fabric.testing.pool` started; never decides about timeouts, the parent does.
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
)  # SIGUSR1 and SIGTERM belong to the code under test: schedulers announce the end with them
FINISH = b"finish"
_SEED = 1234
_WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RankInfo(NamedTuple):
    """The place of this process in the running call, and a path that is fresh and shared by its ranks."""

    rank: int
    world_size: int
    store: str
    """Where ranks may meet, `init_method=f"file://{store}"`; still unused in a call with `group=False`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call on one rank, with the parent's surroundings: a warm process behaves like a fresh child."""

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
class Answer:
    """The result of a call on one rank: a pickled value, or an error."""

    value: bytes = b""
    error: BaseException | None = None
    text: str = ""
    """The error as people read it, with its traceback."""
    when: float = 0.0
    """`time.monotonic()` of the failure, comparable between the processes of one machine."""
    died: bool = False

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.error is not None


_info: RankInfo | None = None


def rank_info() -> RankInfo:
    """Rank, world size and store path of the call that this process is serving.

    Raises:
        UsageError: This process is no rank of a `RankPool`, or serves no call now.
    """
    if _info is None:
        raise UsageError("rank_info() works inside a function that RankPool.run is running on a rank.")
    return _info


def serve(calls: connection.Connection, stacks: connection.Connection) -> None:
    """Answer calls until the parent closes `calls`. Stacks go to `stacks` whenever STACKS_SIGNAL arrives."""
    os.setpgid(0, 0)  # a group of its own: the parent can stop this rank together with whatever it started
    threading.Thread(target=_die_with_parent, daemon=True, name="rank-pool-parent").start()
    faulthandler.register(STACKS_SIGNAL, file=stacks.fileno(), all_threads=True)
    torch.set_num_threads(1)
    # How this rank was started must not be how its DataLoader workers are: those would import torch anew.
    set_start_method(None, force=True)
    gc.freeze()  # the modules that came with the fork are never garbage: collecting skips them
    calls.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            _serve_call(calls, pickle.loads(calls.recv_bytes()))


def child_processes() -> dict[int, str]:
    """Living children of this process but for multiprocessing's helpers: pid to command line. Linux only."""
    active_children()  # reaps those that have ended
    children = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in _read(listing).split():
            process = Path("/proc", pid)
            alive = _read(process / "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])
            command = _read(process / "cmdline").replace("\0", " ").strip()
            if alive and "multiprocessing.forkserver" not in command and "resource_tracker" not in command:
                children[int(pid)] = command
    return children


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process or thread ended meanwhile
        return ""


def _die_with_parent() -> None:
    # Also on SIGKILL of the parent, and in the middle of a call: the kernel closes the sentinel's other end.
    # PR_SET_PDEATHSIG would watch the wrong process, since for the kernel the parent is the fork server.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _serve_call(calls: connection.Connection, job: Job) -> None:
    global _info
    _take_surroundings(job)
    _info = job.info
    before, hook = _snapshot(), sys.excepthook
    answer = _answer(job)
    calls.send_bytes(pickle.dumps(answer))
    # The group stays up until every rank has answered: closed sockets would fail a peer's last collective.
    if calls.recv_bytes() == FINISH:
        left = _leave_group(job) + _left_behind(before)
        calls.send_bytes(pickle.dumps(_leak_answer(left)))
    sys.excepthook = hook  # each process group puts one of its own around it: after some hundreds none works
    _info = None


def _take_surroundings(job: Job) -> None:
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


def _answer(job: Job) -> Answer:
    try:
        if job.group:
            _join_group(job)
        function, args, kwargs = pickle.loads(job.call)
        with _warnings(job):
            value = function(*args, **kwargs)
        return Answer(value=_pickled(value))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: this process must answer
        return _failure(error)


def _join_group(job: Job) -> None:
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
def _warnings(job: Job) -> Iterator[None]:
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
            f"The function returned a {type(value).__qualname__}, which cannot be sent back ({error}). "
            f"Return plain data or tensors."
        ) from error


def _failure(error: BaseException) -> Answer:
    when = time.monotonic()
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `_answer`
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return Answer(error=_sendable(error), text=text, when=when)


def _sendable(error: BaseException) -> BaseException:
    """The error itself where it survives pickling, else a RankError with its text."""
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


def _left_behind(before: dict[str, Any]) -> list[str]:
    after = _snapshot()
    if after["child process"] or after["thread"].keys() != before["thread"].keys():
        gc.collect()  # an abandoned iterator in a reference cycle still holds its processes and threads
        after = _snapshot()
    return [f"{kind}{change}" for kind in after for change in changes(before[kind], after[kind])]


def user_environ() -> dict[str, str]:
    """The environment less what torch itself sets when it loads its compiler, and pytest before each test."""
    own = ("TORCHINDUCTOR_", "TRITON_", "PYTEST_CURRENT_TEST")
    return {key: value for key, value in os.environ.items() if not key.startswith(own)}


def changes(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """Return the differences between two tables, one text per key, to follow the name of the kind."""
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


def _leave_group(job: Job) -> list[str]:
    initialised = dist.is_initialized()
    if initialised:
        dist.destroy_process_group()
    if initialised and not job.group:
        return ["default process group left initialised"]
    if job.group and not initialised:
        return ["default process group destroyed by code that did not create it"]
    return []


def _leak_answer(left: list[str]) -> Answer:
    if not left:
        return Answer()
    text = "The call left traces in its process:\n" + "\n".join(f"  {trace}" for trace in left)
    return Answer(error=UsageError(text), text=text, when=time.monotonic())
