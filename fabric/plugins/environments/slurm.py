"""`SLURMEnvironment`: ranks that SLURM's srun started. Reads its variables; `requeue` requeues the job."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.plugins.environments.cluster_environment import int_variable
from fabric.plugins.environments.started import ExternalEnvironment, derive_port, first_set
from fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    import signal
    from datetime import timedelta

    from torch.distributed import Store

_log = logging.getLogger(__name__)
_SCONTROL_S = 60.0
_NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SHELLS = {"bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"}
_TERMINALS = {"screen", "tmux"}
_FIRST_SPECIAL_STEP = 0xFFFFFFFA  # lowest step id of batch scripts, salloc's shell, ...


class SLURMEnvironment(ExternalEnvironment):
    """Processes started by `srun`, in a batch script or from an allocation.

    Args:
        auto_requeue: False: `requeue` does nothing.
        requeue_signal: The signal that SLURM sends before the end (`sbatch --signal=USR1@90`); None: the
            usual ones. Only stored, for handlers of the user.
    """

    launcher = "srun"
    variables = {
        "rank": ("SLURM_PROCID",),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        # Those of the step take precedence: the job's are sbatch's options, and srun may have started less.
        "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", 1),
        "local_size": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    }

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @classmethod
    def detect_with_reason(cls) -> tuple[bool, str]:
        """Return whether srun started this process as one of its tasks; a shell in a SLURM job is none."""
        environ = os.environ
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if not job:
            return False, ""
        step, task = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_TASK_PID", "")
        if "SLURM_PROCID" not in environ or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
            return False, f"this is SLURM job {job}, but srun did not start this process"
        # An srun in the shell inherits SLURM_PTY_PORT, so the task's process is checked.
        if "SLURM_PTY_PORT" in environ and task != str(os.getpid()) and _is_shell(task):
            return False, f"a shell in SLURM step {job}.{step} started this process (SLURM_PTY_PORT)"
        return True, f"srun started this process (SLURM_PROCID={environ['SLURM_PROCID']}, step {job}.{step})"

    @staticmethod
    def job_name() -> str | None:
        """SLURM_JOB_NAME; None outside SLURM."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """SLURM_JOB_ID; None outside SLURM. Tasks of a job array have different ids."""
        text = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID") or ""
        return int(text) if text.isdecimal() else None

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first machine of SLURM's list `nodes`: "node[01-03,07],gpu5" gives "node01".

        Raises:
            ConfigurationError: The list has no machine.
        """
        first = re.match(r"(?:[^\[\],\s]|\[[^\]]*\])+", nodes.strip())
        if first is None:
            raise ConfigurationError(
                f'The list of machines {nodes!r} is empty. Write it as SLURM does: "node[01-03,07],gpu5".'
            )
        return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group())

    def local_world_size(self) -> int | None:
        """Tasks of the step on this machine."""
        text = os.environ.get(first_set(*self.variables["local_size"]) or "", "")
        pairs, node = re.findall(r"(\d+)(?:\(x(\d+)\))?", text), self.node_rank()
        counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
        return counts[node] if node < len(counts) else self.world_size() // (self.num_nodes() or 1)

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the store of the job, hosted by rank zero.

        Arguments and errors as for `ClusterEnvironment.make_store`.

        Raises:
            LaunchError: The name of rank zero's machine does not resolve. Raised at once.
        """
        address = self.main_address
        source = "MASTER_ADDR" if os.environ.get("MASTER_ADDR") else f"first of {self._node_list()}"
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise LaunchError(
                f"The name {address!r} of rank zero's machine ({source}) does not resolve here: {error}. Set "
                "MASTER_ADDR to a name or address that resolves, in the batch script before srun."
            ) from error
        return super().make_store(rank, world_size, timeout)

    def requeue(self) -> bool:
        """Requeue this job in SLURM; return True on rank zero if that was requested, else False.

        Call it on all ranks after saving, once `fabric.should_stop()` is True, and then return. SLURM ends
        the job at once and runs the batch script again later. Works under torchrun in sbatch as well. Does
        nothing with auto_requeue=False, nor for a job that was cancelled (scancel) or is preempted.

        Raises:
            ConfigurationError: This is no job of SLURM.
            LaunchError: There is no scontrol, or it failed (only batch jobs can be requeued).
        """
        if not self.auto_requeue or rank_zero_only.rank != 0:
            return False
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else str(self._first_int("SLURM_JOB_ID"))
        state = _scontrol("show", "job", "-o", job)
        # A job that is completing was cancelled (scontrol would revive it), or SLURM preempts and requeues
        # it. It is requeued here only after the time limit.
        ending = "JobState=COMPLETING" in state and "Reason=TimeLimit" not in state
        if ending or "JobState=CANCELLED" in state:
            _log.info("SLURM job %s was cancelled or preempted: requeue() does nothing.", job)
            return False
        _scontrol("requeue", job)
        _log.info("SLURM job %s is requeued.", job)
        return True

    def _main_host(self) -> str:
        name = self._node_list()
        if not name:
            raise self._missing_address("SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set")
        return self.resolve_root_node_address(os.environ[name])

    def _node_list(self) -> str:
        return first_set(*_NODE_LIST) or ""

    def _derived_port(self) -> int:
        job = self._first_int("SLURM_JOB_ID", "SLURM_JOBID", 0)  # 0: outside of a job
        return derive_port(job, self._first_int("SLURM_STEP_ID", 0))

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        # Set for each of several tasks, it would start as many separate jobs.
        forced = " or set FABRIC_ENVIRONMENT=local" if self.world_size() == 1 else ""
        return (
            f"start it with `srun --nodes {num_nodes} --ntasks-per-node {num_devices}` (the same options for "
            f"sbatch). To start the processes of one machine from the script, leave srun out{forced}"
        )


def _scontrol(*arguments: str) -> str:
    try:
        completed = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or error
        raise LaunchError(
            f"`scontrol {' '.join(arguments)}` failed: {str(output).strip()} Only jobs of sbatch can be "
            "requeued, where the cluster allows it (sbatch --requeue). Requeue this one by hand, or write "
            "SLURMEnvironment(auto_requeue=False)."
        ) from error
    return completed.stdout


def _is_slurm_interactive_mode() -> bool:
    """Whether the job is an interactive shell. Programs import this from Lightning Fabric."""
    return SLURMEnvironment.job_name() in ("bash", "interactive")


def check_allocation(num_devices: int, num_nodes: int) -> None:
    """Warn or raise if a SLURM job without srun has more tasks or machines than this process uses.

    Raises:
        ConfigurationError: `num_nodes` > 1, but no launcher starts processes on other machines.
    """
    environ = os.environ
    advice = (
        "Write `srun python train.py` (one process for each task), or `srun --ntasks $SLURM_NNODES "
        "torchrun ...` (see fabric/plugins/environments/README.md)"
    )
    if num_nodes > 1 and not {"MASTER_ADDR", "NODE_RANK"} <= set(environ):
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs processes on other machines, but SLURM job "
            f"{environ['SLURM_JOB_ID']} started only this one, without srun, and nothing starts the others. "
            f"{advice}, or num_nodes=1 to run on this machine alone."
        )
    tasks, nodes = int_variable("SLURM_NTASKS") or 1, int_variable("SLURM_NNODES") or 1
    # SLURM runs a batch script once for all tasks, outside any srun.
    batch = "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ
    if batch and num_nodes == 1 and (nodes > 1 or tasks > num_devices):
        rank_zero_warn(
            f"SLURM job {environ['SLURM_JOB_ID']} has SLURM_NTASKS={tasks} on SLURM_NNODES={nodes}, but its "
            f"batch script started this process itself, without srun: devices={num_devices} x num_nodes=1 "
            f"run on this machine alone. {advice}, or ask sbatch for less.",
            category=PossibleUserWarning,
        )


def _is_shell(task: str) -> bool:
    """Whether process `task` is an interactive shell; True if it is not visible (in a container)."""
    try:
        words = Path(f"/proc/{int(task)}/cmdline").read_text().split("\0")[:-1]
    except (OSError, ValueError):
        return True
    if not words:
        return True
    name, options = Path(words[0]).name.lstrip("-").partition(":")[0], words[1:]
    commands = [word for word in options if not word.startswith("-") or re.match(r"-\w*c", word)]
    return name in _TERMINALS or (name in _SHELLS and ("-i" in options or not commands))
