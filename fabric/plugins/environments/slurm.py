"""Ranks that SLURM's srun started. Reads its variables; `requeue` puts the job back into the queue."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

from fabric.core.errors import ArgumentTypeError, ConfigurationError, LaunchError
from fabric.plugins.environments.detect import srun
from fabric.plugins.environments.started import StartedEnvironment, port_of
from fabric.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

_log = logging.getLogger(__name__)
_SCONTROL_S = 60.0
# Those of the step come first: the job's tell what sbatch was asked for, srun may have started less.
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


class SLURMEnvironment(StartedEnvironment):
    """Processes started by `srun`, in a batch script or from an allocation.

    Args:
        auto_requeue: Whether `requeue` does anything.
        requeue_signal: The signal that SLURM was asked to send before the end (`sbatch --signal=USR1@90`);
            None: the usual ones. Kept for who listens to signals: nothing here does.

    Raises:
        ArgumentTypeError: `requeue_signal` is no signal.
    """

    launcher = "srun"

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        if requeue_signal is not None and not isinstance(requeue_signal, signal.Signals):
            raise ArgumentTypeError(
                f"requeue_signal={requeue_signal!r} must be a signal. Write signal.SIGUSR1."
            )
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @staticmethod
    def detect() -> bool:
        """Whether srun started this process as one of its tasks; a shell inside SLURM is not that."""
        return srun(os.environ).here

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
        """The first machine of SLURM's list: "node[01-03,07],gpu5" gives "node01".

        Raises:
            ConfigurationError: The list names none.
        """
        first = re.match(r"(?:[^\[\],\s]|\[[^\]]*\])+", nodes.strip())
        if first is None:
            raise ConfigurationError(
                f'The list of machines {nodes!r} names none. Write it as SLURM does: "node[01-03,07],gpu5".'
            )
        return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group())

    def world_size(self) -> int:
        """Tasks of the step."""
        return self._whole(*_TASKS)

    def global_rank(self) -> int:
        """SLURM_PROCID."""
        return self._whole("SLURM_PROCID")

    def local_rank(self) -> int:
        """SLURM_LOCALID."""
        return self._whole("SLURM_LOCALID")

    def node_rank(self) -> int:
        """SLURM_NODEID."""
        return self._whole("SLURM_NODEID")

    def local_world_size(self) -> int | None:
        """Tasks of the step on this machine."""
        text = next((os.environ[name] for name in _PER_NODE if os.environ.get(name)), "")
        counts = [
            int(count)
            for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
            for _ in range(int(times or 1))
        ]
        node = self.node_rank()
        return counts[node] if node < len(counts) else self.world_size() // self._whole(*_NODES, default=1)

    def num_nodes(self) -> int | None:
        """Machines of the step."""
        return self._whole(*_NODES, default=1)

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
            LaunchError: This is no job of SLURM, there is no scontrol, or it refused (only batch jobs can be
                requeued).
        """
        if not self.auto_requeue or rank_zero_only.rank != 0:
            return False
        job = _job_to_requeue()
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
        return next((name for name in _NODE_LIST if os.environ.get(name)), "")

    def _derived_port(self) -> int:
        job = self._whole("SLURM_JOB_ID", "SLURM_JOBID", default=0)  # 0: outside of a job
        return port_of(job, self._whole("SLURM_STEP_ID", default=0))

    def _counts(self) -> str:
        names = [
            next((name for name in known if os.environ.get(name)), known[0])
            for known in (_TASKS, _NODES, _PER_NODE)
        ]
        return ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        # Forced for each of several tasks, it would make as many jobs that know nothing of each other.
        forced = " or set FABRIC_ENVIRONMENT=local" if self.world_size() == 1 else ""
        return (
            f"start it with `srun --nodes {num_nodes} --ntasks-per-node {num_devices}` (the same options for "
            f"sbatch). To start the processes of one machine from the script, leave srun out{forced}"
        )


def _job_to_requeue() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise LaunchError(
            "requeue() found no SLURM_JOB_ID: this is no job of SLURM. Call it in a batch job, or write "
            "SLURMEnvironment(auto_requeue=False)."
        )
    return job


def _scontrol(*arguments: str) -> str:
    program = shutil.which("scontrol")
    if program is None:
        raise LaunchError(
            f"requeue() needs the program scontrol, which is not on this machine's PATH. Requeue the job by "
            f"hand: scontrol requeue {arguments[-1]}."
        )
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"scontrol {' '.join(arguments)} did not end within {_SCONTROL_S:g} s.") from error
    if done.returncode:
        raise LaunchError(
            f"scontrol {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()} Only jobs of "
            "sbatch can be requeued, and only where the cluster allows it (sbatch --requeue)."
        )
    return done.stdout
