"""Ranks that SLURM's srun started. Reads its variables; `requeue` puts the job back into the queue."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.plugins.environments.cluster_environment import whole_number
from fabric.plugins.environments.started import ExternalEnvironment, first_set, port_of
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
_FIRST_SPECIAL_STEP = 0xFFFFFFFA  # from here on: the steps of the batch script, of salloc's shell, ...


class SLURMEnvironment(ExternalEnvironment):
    """Processes started by `srun`, in a batch script or from an allocation.

    Args:
        auto_requeue: Whether `requeue` does anything.
        requeue_signal: The signal that SLURM was asked to send before the end (`sbatch --signal=USR1@90`);
            None: the usual ones. Kept for who listens to signals: nothing here does.
    """

    launcher = "srun"
    variables = {
        "rank": ("SLURM_PROCID",),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        # Those of the step come first: the job's tell what sbatch was asked for, srun may have started less.
        "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", 1),
        "local_size": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    }

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @classmethod
    def sign(cls) -> tuple[bool, str]:
        """Whether srun started this process as one of its tasks: a shell inside SLURM is not that."""
        environ = os.environ
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if not job:
            return False, ""
        step, task = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_TASK_PID", "")
        if "SLURM_PROCID" not in environ or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
            return False, f"SLURM job {job} is here, but srun did not start this process"
        # An srun inside the shell inherits its variables: the task decides.
        if "SLURM_PTY_PORT" in environ and task != str(os.getpid()) and _is_shell(task):
            return False, f"a shell in SLURM step {job}.{step} started this process (SLURM_PTY_PORT)"
        return True, f"srun started this process (SLURM_PROCID={environ['SLURM_PROCID']}, step {job}.{step})"

    @staticmethod
    def job_name() -> str | None:
        """SLURM_JOB_NAME; None outside SLURM."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """SLURM_JOB_ID; None outside SLURM. Each task of a job array has its own."""
        text = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID") or ""
        return int(text) if text.isdecimal() else None

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first machine of `nodes`, SLURM's list: "node[01-03,07],gpu5" gives "node01".

        Raises:
            ConfigurationError: The list names none.
        """
        first = re.match(r"(?:[^\[\],\s]|\[[^\]]*\])+", nodes.strip())
        if first is None:
            raise ConfigurationError(
                f'The list of machines {nodes!r} names none. Write it as SLURM does: "node[01-03,07],gpu5".'
            )
        return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group())

    def local_world_size(self) -> int | None:
        """Tasks of the step on this machine."""
        text = os.environ.get(first_set(*self.variables["local_size"]) or "", "")
        pairs, node = re.findall(r"(\d+)(?:\(x(\d+)\))?", text), self.node_rank()
        counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
        return counts[node] if node < len(counts) else self.world_size() // (self.num_nodes() or 1)

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The store of the job, hosted by rank zero (raises as the base does).

        Raises:
            LaunchError: The name of rank zero's machine does not resolve here; at once, not after `timeout`.
        """
        address = self.main_address
        source = "MASTER_ADDR" if os.environ.get("MASTER_ADDR") else f"first of {self._node_list()}"
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise LaunchError(
                f"The name {address!r} of rank zero's machine ({source}) does not resolve here: {error}. Set "
                "MASTER_ADDR to a name or address that does, in the batch script before srun."
            ) from error
        return super().make_store(rank, world_size, timeout)

    def requeue(self) -> bool:
        """Have SLURM put this job into its queue again; True on rank zero if it was asked to, else False.

        Call it on all ranks after saving, when `fabric.should_stop()` said so, and return: SLURM ends the job
        at once and starts the batch script again later. Works under torchrun inside sbatch as well. Does
        nothing with auto_requeue=False, nor for a job that was cancelled (scancel) or is preempted.

        Raises:
            ConfigurationError: This is no job of SLURM.
            LaunchError: There is no scontrol, or it refused (only batch jobs can be requeued).
        """
        if not self.auto_requeue or rank_zero_only.rank != 0:
            return False
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else str(self._whole("SLURM_JOB_ID"))
        state = _scontrol("show", "job", "-o", job)
        # A job that SLURM is ending already was cancelled (scontrol would revive it), or SLURM itself
        # preempts and requeues it; only after the time limit is it ours to continue.
        ending = "JobState=COMPLETING" in state and "Reason=TimeLimit" not in state
        if ending or "JobState=CANCELLED" in state:
            _log.info("SLURM job %s was cancelled or preempted: requeue() leaves it alone.", job)
            return False
        _scontrol("requeue", job)
        _log.info("SLURM job %s is requeued.", job)
        return True

    def _main_host(self) -> str:
        name = self._node_list()
        if not name:
            raise self._no_address("SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set")
        return self.resolve_root_node_address(os.environ[name])

    def _node_list(self) -> str:
        return first_set(*_NODE_LIST) or ""

    def _derived_port(self) -> int:
        job = self._whole("SLURM_JOB_ID", "SLURM_JOBID", 0)  # 0: outside of a job
        return port_of(job, self._whole("SLURM_STEP_ID", 0))

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        # Forced for each of several tasks, it would make as many jobs that know nothing of each other.
        forced = " or set FABRIC_ENVIRONMENT=local" if self.world_size() == 1 else ""
        return (
            f"start it with `srun --nodes {num_nodes} --ntasks-per-node {num_devices}` (the same options for "
            f"sbatch). To start the processes of one machine from the script, leave srun out{forced}"
        )


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise LaunchError(
            f"`scontrol {' '.join(arguments)}` failed: {str(said).strip()} Only jobs of sbatch can be "
            "requeued, where the cluster allows it (sbatch --requeue). Requeue this one by hand, or write "
            "SLURMEnvironment(auto_requeue=False)."
        ) from error
    return done.stdout


def _is_slurm_interactive_mode() -> bool:
    """Whether the job is one of a shell. Programs import it from Lightning Fabric."""
    return SLURMEnvironment.job_name() in ("bash", "interactive")


def check_allocation(num_devices: int, num_nodes: int) -> None:
    """Say so where a job of SLURM has more than the one process that it started here will use."""
    environ = os.environ
    how = (
        "Write `srun python train.py` (one process for each task), or `srun --ntasks-per-node 1 torchrun "
        "...` (see fabric/plugins/environments/README.md)"
    )
    if num_nodes > 1 and not {"MASTER_ADDR", "NODE_RANK"} <= set(environ):
        raise ConfigurationError(
            f"num_nodes={num_nodes} asks for processes on other machines, but this one was started once, in "
            f"SLURM job {environ['SLURM_JOB_ID']} without srun, and nothing starts the others. {how}, or "
            "num_nodes=1 to run on this machine alone."
        )
    tasks, nodes = whole_number("SLURM_NTASKS") or 1, whole_number("SLURM_NNODES") or 1
    # SLURM runs a batch script once for all tasks, outside any srun.
    batch = "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ
    if batch and num_nodes == 1 and (nodes > 1 or tasks > num_devices):
        rank_zero_warn(
            f"SLURM job {environ['SLURM_JOB_ID']} has SLURM_NTASKS={tasks} on SLURM_NNODES={nodes}, but its "
            f"batch script started this process itself, without srun: devices={num_devices} x num_nodes=1 "
            f"run on this machine alone. {how}, or ask sbatch for less.",
            category=PossibleUserWarning,
        )


def _is_shell(task: str) -> bool:
    """Whether process `task` is an interactive shell; True where it cannot be seen (in a container)."""
    try:
        words = Path(f"/proc/{int(task)}/cmdline").read_text().split("\0")[:-1]
    except (OSError, ValueError):
        return True
    if not words:
        return True
    name, options = Path(words[0]).name.lstrip("-").partition(":")[0], words[1:]
    commands = [word for word in options if not word.startswith("-") or re.match(r"-\w*c", word)]
    return name in _TERMINALS or (name in _SHELLS and ("-i" in options or not commands))
