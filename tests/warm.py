"""Scripts in processes that are forked from a warm one, which has torch imported and nothing of fabric.

A cold `python train.py` needs one and a half seconds of a core for `import torch`, and as much again for the
first optimizer. For tests in which the start of the interpreter is not the subject.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

MODULES = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
MODULES += ["torch.distributed.checkpoint", "torch.distributed.elastic.multiprocessing.errors"]
STOP_S = 30
"""Seconds from SIGTERM to SIGKILL of ranks whose job has failed, as torchrun's."""


class WarmPython:
    """A process that runs one script after another, each in new processes that are forked from it."""

    def __init__(self) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *MODULES]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environ, start_new_session=True, **streams)

    def run(
        self, script: Path, *arguments: object, timeout: float = 180, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess:
        """The finished `python script arguments`, in `cwd` or beside the script."""
        return self._run(script, arguments, timeout, cwd, env, ranks=0, restarts=0)

    def torchrun(
        self,
        script: Path,
        *arguments: object,
        ranks: int,
        restarts: int = 0,
        timeout: float = 180,
        cwd: Path | None = None,
        **env: str,
    ) -> subprocess.CompletedProcess:
        """The finished job of ranks that have the variables of torchrun, restarted as torchrun does."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        env = env | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "warm",
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return self._run(script, arguments, timeout, cwd, env, ranks, restarts)

    def _run(self, script, arguments, timeout, cwd, env, ranks, restarts) -> subprocess.CompletedProcess:
        script = Path(script).absolute()
        cwd = Path(cwd or script.parent)
        files = [cwd / f".{script.stem}.{name}" for name in ("out", "err")]
        inherited = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
        order = {
            "argv": [str(script), *map(str, arguments)],
            "cwd": str(cwd),
            "env": {**inherited, "OMP_NUM_THREADS": "1", **env},
            "files": [str(file) for file in files],
            "ranks": ranks,
            "restarts": restarts,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        out, err = (file.read_text() if file.exists() else "" for file in files)
        for file in files:
            file.unlink(missing_ok=True)
        if not line:
            self.close()
            raise AssertionError(f"no end within {timeout} s: {order['argv']}\n{out}\n{err}")
        return subprocess.CompletedProcess(order["argv"], int(line), out, err)

    def close(self) -> None:
        """End the process and all that it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


# in the warm process, and in those that it forks


def serve() -> types.ModuleType | None:
    """Run a script for each line of standard input; return its main module in the process that runs it."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            die_with_parent()
            redirect(order)
            if order["ranks"]:
                supervise(order)
            return prepare(order)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def redirect(order: dict) -> None:
    places = [
        (os.devnull, os.O_RDONLY),
        *[(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in order["files"]],
    ]
    for number, (path, flags) in enumerate(places):
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)


def supervise(order: dict) -> None:
    """Run the ranks, all again after a failure while restarts are left; returns in the process of a rank."""
    for attempt in range(order["restarts"] + 1):
        ranks = {}
        for rank in range(order["ranks"]):
            pid = os.fork()
            if not pid:
                die_with_parent()
                number = str(rank)
                order["env"] |= {"RANK": number, "LOCAL_RANK": number, "ROLE_RANK": number}
                order["env"] |= {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
                return
            ranks[pid] = rank
        failed = first_failure(ranks)
        if not failed:
            break
        end(ranks)
    os._exit(bool(failed))


def first_failure(ranks: dict[int, int]) -> int:
    """The exit code of the first rank that fails, or zero; removes the ranks that have ended."""
    while ranks:
        pid, status = os.wait()
        ranks.pop(pid, None)
        if status:
            return os.waitstatus_to_exitcode(status)
    return 0


def end(ranks: dict[int, int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while ranks and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        ranks.pop(pid, None)
        time.sleep(0 if pid else 0.01)  # os.wait() has no limit
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def prepare(order: dict) -> types.ModuleType:
    """Give this process the arguments, variables, path and main module of a script, which is not run yet."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    script = order["argv"][0]
    sys.argv[:] = order["argv"]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(script).parent), *added, *[path for path in sys.path[1:] if path not in added]]
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = script, __builtins__
    sys.modules["__main__"] = main
    return main


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # no collection looks at the modules again
    if main := serve():  # at this place, so that the process ends as one of `python script`
        exec(compile(Path(main.__file__).read_text(), main.__file__, "exec"), vars(main))
