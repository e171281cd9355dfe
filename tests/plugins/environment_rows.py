"""The variables that launchers set, as the tests of environments use them, and the places they mean."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fabric.plugins.environments.mpi import _gather_hosts

OURS = (
    "SLURM_",
    "OMPI_",
    "MV2_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "LSB_",
    "JSM_",
    "PET_",
    "TORCHELASTIC_",
    "FABRIC_",
)
PLAIN = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "KUBERNETES_PORT"),
)


def env(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split())


TORCHRUN = env(
    "TORCHELASTIC_RUN_ID=none RANK=1 LOCAL_RANK=1 GROUP_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
    "GROUP_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500"
)
OURSELVES = env(
    "FABRIC_LAUNCHED=cli RANK=1 LOCAL_RANK=1 NODE_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=4711"
)
# As SLURM 22.05 sets them: in the shell of `salloc -N2 -n4`, ...
SALLOC = env(
    "SLURM_JOB_ID=42 SLURM_JOBID=42 SLURM_JOB_NAME=interactive SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NNODES=2 "
    "SLURM_JOB_NUM_NODES=2 SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=node[07-08] "
    "SLURM_NODELIST=node[07-08]"
)
# ... in the batch script of the same job, ...
BATCH = SALLOC | env("SLURM_JOB_NAME=train SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
# ... and in the last of its four tasks.
SRUN = BATCH | env(
    "SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=4 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=node[07-08] SLURM_STEP_TASKS_PER_NODE=2(x2)"
)
ONE_NODE = env(
    "SLURM_STEP_NUM_NODES=1 SLURM_NNODES=1 SLURM_STEP_TASKS_PER_NODE=4 SLURM_STEP_NODELIST=node07 "
    "SLURM_LOCALID=3 SLURM_NODEID=0"
)
FIRST = env("SLURM_PROCID=0 SLURM_LOCALID=0")
ALONE = ONE_NODE | env("SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1 SLURM_STEP_TASKS_PER_NODE=1")
PTY = SRUN | ONE_NODE | FIRST | env("SLURM_PTY_PORT=40000")
OPENMPI = env(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=1115684865"
)
TWO_HOSTS = OPENMPI | env("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 MASTER_ADDR=head")
HYDRA = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_JOBID=a")
PALS = env("PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PBS_JOBID=7.head")
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items() if "OMPI" in name}
JSRUN = env(
    "LSB_JOBID=1234 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 "
    "JSM_NAMESPACE_LOCAL_SIZE=2"
) | {"LSB_HOSTS": "batch5 c1 c1 c2 c2"}
POD = env(
    "KUBERNETES_PORT=tcp://10.0.0.1:443 MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 "
    "PET_NPROC_PER_NODE=auto PET_NODE_RANK=2"
)
PORT_42_0 = 12000 + 42 * 101


class Place(NamedTuple):
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    local_world_size: int | None = None
    num_nodes: int | None = None
    address: str = "127.0.0.1"
    port: int | None = None  # None: not looked at, it is the kernel's


def force(name: str) -> dict[str, str]:
    return {"FABRIC_ENVIRONMENT": name}


HERE = Place()
ELASTIC = Place(1, 2, 1, 0, 2, 1, "localhost", 29500)
LAUNCHED = Place(1, 2, 1, 0, 2, 1, "127.0.0.1", 4711)
TASK = Place(3, 4, 1, 1, 2, 2, "node07", PORT_42_0)
TASK_4 = Place(3, 4, 3, 0, 4, 1, "127.0.0.1", PORT_42_0)
TASK_1 = Place(0, 1, 0, 0, 1, 1, "127.0.0.1", PORT_42_0)
MPI_2 = Place(1, 2, 1, 0, 2, 1)
MPI_4 = Place(3, 4, 1, 1, 2, 2, "head")
LSF_4 = Place(3, 4, 1, 1, 2, 2, "c1", 12000 + 1234 * 101 % 20000)
POD_3 = Place(2, 3, 0, 2, 1, 3, "job-master-0", 23456)
INTERACTIVE, BASH = env("SLURM_JOB_NAME=interactive"), env("SLURM_JOB_NAME=bash")
# Words of a real process. The last is no tmux: it only is called so, and waits like the others.
SHELL, WRAPPER, TMUX = ("bash",), ("bash", "-c", "read line; :"), ("tmux", "/dev/stdin")


def clear(monkeypatch):
    """Take every variable of a launcher out of this process, and mpi4py, whatever this machine has."""
    for name in list(os.environ):
        if name.startswith(OURS) or name in PLAIN:
            monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    _gather_hosts.cache_clear()


@contextmanager
def variables(monkeypatch, given, task):
    """The variables set, and SLURM_TASK_PID that of a real process that runs `task`."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if task == "self":
        monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))
    if not isinstance(task, tuple):
        yield
        return
    program = None if task[0] == "bash" else "/bin/cat"
    with subprocess.Popen(task, executable=program, stdin=subprocess.PIPE) as process:
        monkeypatch.setenv("SLURM_TASK_PID", str(process.pid))
        while not Path(f"/proc/{process.pid}/cmdline").read_text():
            pass  # it has no words yet
        try:
            yield
        finally:
            process.kill()
