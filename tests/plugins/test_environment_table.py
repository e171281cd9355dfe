"""Variables in, environment and place out: one row for each way in which processes come to be."""

from __future__ import annotations

from typing import Any

import pytest
from environment_rows import (
    ALONE,
    BASH,
    BATCH,
    ELASTIC,
    FIRST,
    HERE,
    HYDRA,
    INTERACTIVE,
    JSRUN,
    LAUNCHED,
    LSF_4,
    MPI_2,
    MPI_4,
    MVAPICH,
    ONE_NODE,
    OPENMPI,
    OURSELVES,
    PALS,
    POD,
    POD_3,
    PORT_42_0,
    PTY,
    SALLOC,
    SHELL,
    SRUN,
    TASK,
    TASK_1,
    TASK_4,
    TMUX,
    TORCHRUN,
    TWO_HOSTS,
    WRAPPER,
    Place,
    clear,
    env,
    force,
    variables,
)

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.plugins.environments import (
    KubeflowEnvironment,
    LocalEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from fabric.plugins.environments.detect import find_environment
from fabric.resolve import Machine, Request, resolve

ROWS: dict[str, tuple[dict[str, str], type, Place, Any]] = {
    # variables, environment, place, the process with SLURM_TASK_PID ("self": this one; None: not set)
    "nothing": ({}, LocalEnvironment, HERE, None),
    "torchrun": (TORCHRUN, TorchElasticEnvironment, ELASTIC, None),
    "fabric run": (OURSELVES, LocalEnvironment, LAUNCHED, None),
    # SLURM, started by srun
    "srun": (SRUN, SLURMEnvironment, TASK, "self"),
    "srun, a wrapper script between": (SRUN, SLURMEnvironment, TASK, WRAPPER),
    "srun, no task pid": (SRUN, SLURMEnvironment, TASK, None),
    "srun on one machine": (SRUN | ONE_NODE, SLURMEnvironment, TASK_4, "self"),
    "srun of one task": (SRUN | ALONE | FIRST, SLURMEnvironment, TASK_1, "self"),
    "srun of fewer tasks than the job": (
        SRUN | env("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0"),
        SLURMEnvironment,
        Place(1, 2, 0, 1, 1, 2, "node07", PORT_42_0),
        "self",
    ),
    "second step": (
        SRUN | env("SLURM_STEP_ID=5"),
        SLURMEnvironment,
        TASK._replace(port=PORT_42_0 + 5),
        "self",
    ),
    "next job": (
        SRUN | env("SLURM_JOB_ID=43"),
        SLURMEnvironment,
        TASK._replace(port=PORT_42_0 + 101),
        "self",
    ),
    "srun, address and port by the user": (
        SRUN | env("MASTER_ADDR=10.0.0.7 MASTER_PORT=1234"),
        SLURMEnvironment,
        TASK._replace(address="10.0.0.7", port=1234),
        "self",
    ),
    "srun in salloc": (SRUN | INTERACTIVE, SLURMEnvironment, TASK, "self"),
    "srun of a wrapper in salloc": (SRUN | INTERACTIVE, SLURMEnvironment, TASK, WRAPPER),
    "srun in a job named bash": (SRUN | BASH, SLURMEnvironment, TASK, "self"),
    "srun --pty python": (SRUN | env("SLURM_PTY_PORT=1"), SLURMEnvironment, TASK, "self"),
    "srun in srun --pty bash": (SRUN | BASH | env("SLURM_PTY_PORT=1"), SLURMEnvironment, TASK, "self"),
    "srun --mpi=pmi2": (SRUN | env("PMI_RANK=3 PMI_SIZE=4"), SLURMEnvironment, TASK, "self"),
    "srun --mpi=pmix": (SRUN | env("PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix"), SLURMEnvironment, TASK, "self"),
    "srun in a container of its own": (SRUN | env("SLURM_TASK_PID=0"), SLURMEnvironment, TASK, None),
    # in SLURM, but not started by srun
    "salloc": (SALLOC, LocalEnvironment, HERE, None),
    "salloc, its own step": (
        *(PTY | INTERACTIVE | env("SLURM_STEP_ID=4294967290"), LocalEnvironment, HERE, SHELL),
    ),
    "srun --pty bash": (PTY | BASH, LocalEnvironment, HERE, SHELL),
    "srun --pty bash, job named train": (PTY, LocalEnvironment, HERE, SHELL),
    "srun --pty bash -i": (PTY, LocalEnvironment, HERE, ("bash", "-i")),
    "srun --pty bash --norc": (PTY, LocalEnvironment, HERE, ("bash", "--norc")),
    "srun --pty tmux new": (PTY, LocalEnvironment, HERE, TMUX),
    "srun --pty bash, task out of sight": (PTY | env("SLURM_TASK_PID=0"), LocalEnvironment, HERE, None),
    "srun bash": (SRUN | FIRST | BASH, SLURMEnvironment, TASK._replace(rank=0, local_rank=0), SHELL),
    "srun --mpi=pmi2 --pty bash": (
        *(PTY | env("PMI_RANK=0 PMI_SIZE=1 PMIX_RANK=0"), LocalEnvironment, HERE, SHELL),
    ),
    "sbatch without srun": (BATCH, LocalEnvironment, HERE, None),
    # two at once
    "torchrun in sbatch": (BATCH | TORCHRUN, TorchElasticEnvironment, ELASTIC, None),
    "torchrun in srun": (SRUN | TORCHRUN, TorchElasticEnvironment, ELASTIC, WRAPPER),
    "torchrun in a pod": (POD | TORCHRUN, TorchElasticEnvironment, ELASTIC, None),
    "fabric run in srun": (SRUN | OURSELVES, LocalEnvironment, LAUNCHED, WRAPPER),
    "fabric run in torchrun": (TORCHRUN | OURSELVES, LocalEnvironment, LAUNCHED, None),
    "mpirun in sbatch": (BATCH | OPENMPI, MPIEnvironment, MPI_2, None),
    "mpirun in sbatch, by srun on the other machine": (SRUN | TWO_HOSTS, MPIEnvironment, MPI_4, WRAPPER),
    "mpiexec (Hydra) in srun": (SRUN | HYDRA, MPIEnvironment, MPI_2, WRAPPER),
    "mpirun in a pod": (POD | OPENMPI, MPIEnvironment, MPI_2._replace(address="job-master-0"), None),
    "jsrun and its MPI": (OPENMPI | JSRUN, LSFEnvironment, LSF_4, None),
    # MPI
    "mpirun": (OPENMPI, MPIEnvironment, MPI_2, None),
    "mpirun, two machines one after the other": (TWO_HOSTS, MPIEnvironment, MPI_4, None),
    "mpirun --map-by node": (
        TWO_HOSTS | env("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0"),
        MPIEnvironment,
        Place(1, 4, 0, 1, 2, 2, "head"),
        None,
    ),
    "mpiexec (Hydra)": (HYDRA, MPIEnvironment, MPI_2, None),
    "mpiexec (PALS)": (PALS, MPIEnvironment, MPI_2, None),
    "mpirun_rsh (MVAPICH2)": (MVAPICH, MPIEnvironment, MPI_2, None),
    "mpirun -x MASTER_PORT": (OPENMPI | env("MASTER_PORT=9"), MPIEnvironment, MPI_2._replace(port=9), None),
    # LSF and Kubeflow
    "jsrun": (JSRUN, LSFEnvironment, LSF_4, None),
    "jsrun where no machine is for the script": (
        *(JSRUN | {"LSB_HOSTS": "c1 c1 c2 c2"}, LSFEnvironment, LSF_4, None),
    ),
    "bsub without jsrun": (env("LSB_JOBID=1234 LSB_HOSTS=c1"), LocalEnvironment, HERE, None),
    "pod": (POD, KubeflowEnvironment, POD_3, None),
    "pod without a job": (env("KUBERNETES_PORT=tcp://10.0.0.1:443"), LocalEnvironment, HERE, None),
    # forced
    "forced: local in srun": (SRUN | force("local"), LocalEnvironment, HERE, "self"),
    "forced: slurm under torchrun": (
        SRUN | TORCHRUN | force("slurm"),
        SLURMEnvironment,
        TASK._replace(address="localhost", port=29500),
        WRAPPER,
    ),
    "forced: slurm in a shell": (PTY | force("slurm"), SLURMEnvironment, Place(0, 4, 0, 0, 4, 1), SHELL),
    "forced: kubeflow": (POD | env("LOCAL_RANK=0") | force("kubeflow"), KubeflowEnvironment, POD_3, None),
    "forced: mpi in jsrun": (JSRUN | OPENMPI | force("mpi"), MPIEnvironment, MPI_2, None),
    "forced: lsf": (JSRUN | env("FABRIC_LAUNCHED=cli") | force("lsf"), LSFEnvironment, LSF_4, None),
    "forced: torchrun": (TORCHRUN | SRUN | force("torchrun"), TorchElasticEnvironment, ELASTIC, None),
}


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    clear(monkeypatch)


@pytest.mark.parametrize("row", ROWS)
def test_place(monkeypatch, row):
    given, kind, place, task = ROWS[row]
    with variables(monkeypatch, given, task):
        environment = find_environment().environment
        assert type(environment) is kind
        seen = Place(
            environment.global_rank(),
            environment.world_size(),
            environment.local_rank(),
            environment.node_rank(),
            environment.local_world_size(),
            environment.num_nodes(),
            environment.main_address,
            environment.main_port if place.port is not None else None,
        )
        assert seen == place
        assert environment.creates_processes_externally == (place is not HERE)
        environment.set_world_size(99)
        environment.set_global_rank(98)
        if kind is not LocalEnvironment:
            assert (environment.world_size(), environment.global_rank()) == (place.world_size, place.rank)
        if "FABRIC_ENVIRONMENT" not in given and kind is not LocalEnvironment:
            assert kind.detect(), "the class itself must say the same"


@pytest.mark.parametrize("row", ["srun", "mpirun", "jsrun", "pod", "torchrun"])
def test_devices_follow_what_was_started(monkeypatch, row):
    given, _, place, task = ROWS[row]
    with variables(monkeypatch, given, task):
        plan = resolve(Request(accelerator="cpu"), Machine.detect())
        assert (len(plan.devices), plan.num_nodes) == (place.local_world_size, place.num_nodes)
        numbers = {"devices": place.local_world_size, "num_nodes": place.num_nodes}
        assert resolve(Request(accelerator="cpu", **numbers), Machine.detect()).environment.detect()


ERRORS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "srun: devices": (
        SRUN,
        {"devices": 4, "num_nodes": 2},
        "devices=4 x num_nodes=2 asks for 8 processes, 4 on each machine, but srun started 4 "
        "(SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NUM_NODES=2, SLURM_STEP_TASKS_PER_NODE=2(x2)). Write "
        'devices="auto" and num_nodes=2 in the script, or start it with `srun --nodes 2 --ntasks-per-node '
        "4` (the same options for sbatch). To start the processes of one machine from the script, leave srun "
        "out.",
    ),
    "srun: the same number on other machines": (
        *(SRUN, {"devices": 4}),
        "devices=4 x num_nodes=1 asks for 4 processes, 4 on each machine, but srun started 4 (",
    ),
    "srun: nodes": (SRUN, {"num_nodes": 3}, "asks for 6 processes, 2 on each machine, but srun started 4 ("),
    "srun: one task, several devices": (
        *(SRUN | ALONE | FIRST, {"devices": 4}),
        "started 1 (SLURM_STEP_NUM_TASKS=1, SLURM_STEP_NUM_NODES=1, SLURM_STEP_TASKS_PER_NODE=1). Write "
        'devices="auto" and num_nodes=1 in the script, or start it with `srun --nodes 1 --ntasks-per-node '
        "4` (the same options for sbatch). To start the processes of one machine from the script, leave srun "
        "out or set FABRIC_ENVIRONMENT=local.",
    ),
    "srun: several tasks, one device": (
        *(SRUN | ONE_NODE, {"devices": 1}),
        "devices=1 x num_nodes=1 asks for 1 processes, 1 on each machine, but srun started 4 (",
    ),
    "srun: unequal machines": (
        *({**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}),
        "asks for 2 processes, 1 on each machine, but srun started 3 (SLURM_STEP_NUM_TASKS=3,",
    ),
    "sbatch without srun: several machines": (
        *(BATCH, {"devices": 2, "num_nodes": 2}),
        "num_nodes=2 needs processes on other machines, but SLURM job 42 started only this one, without "
        "srun, and nothing starts the others. Write `srun python train.py` (one process for each task), or "
        "`srun --ntasks $SLURM_NNODES torchrun ...`",
    ),
    "salloc: several machines": (SALLOC, {"num_nodes": 2}, "SLURM job 42 started only this one"),
    "mpirun: devices": (
        *(OPENMPI, {"devices": 4}),
        "devices=4 x num_nodes=1 asks for 4 processes, 4 on each machine, but mpirun started 2 "
        '(OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_SIZE=2). Write devices="auto" and num_nodes=1 in the '
        "script, or start it with `mpirun -np 4`, 4 on each machine.",
    ),
    "mpirun: several machines, no address": (
        *(TWO_HOSTS | {"MASTER_ADDR": ""}, {}),
        "MPIEnvironment has no address of rank zero: there are 2 machines, and neither MASTER_ADDR",
    ),
    "PMIx only": (
        *({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, {}),
        "sets no variable for the number of ranks on this machine: of the known ones only PMIX_RANK are set. "
        "Install mpi4py, or set OMPI_COMM_WORLD_RANK",
    ),
    "jsrun: devices": (
        *(JSRUN, {"devices": 3}),
        "but jsrun started 4 (JSM_NAMESPACE_SIZE=4, JSM_NAMESPACE_LOCAL_SIZE=2)",
    ),
    "pod: devices": (POD, {"devices": 2}, 'set nprocPerNode: "2", the replicas (master and workers) to 1'),
    "pod: nodes": (
        *(POD, {"num_nodes": 4}),
        "devices=1 x num_nodes=4 asks for 4 processes, 1 on each machine, but the PyTorchJob started 3 (",
    ),
    "torchrun: devices": (
        TORCHRUN,
        {"devices": 4},
        "but torchrun started 2 (WORLD_SIZE=2, GROUP_WORLD_SIZE=1, LOCAL_WORLD_SIZE=2). Write",
    ),
    "forced: slurm without SLURM": (
        *({"FABRIC_ENVIRONMENT": "slurm"}, {}),
        "SLURMEnvironment needs SLURM_NODEID, which srun sets, but it is not set. Start the script with srun",
    ),
    "forced: mpi without MPI": (
        {"FABRIC_ENVIRONMENT": "mpi"},
        {},
        "MPIEnvironment needs OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "forced: lsf without LSF": ({"FABRIC_ENVIRONMENT": "lsf"}, {}, "LSFEnvironment needs JSM_NAMESPACE_SIZE"),
    "forced: kubeflow without a pod": ({"FABRIC_ENVIRONMENT": "kubeflow"}, {}, "needs WORLD_SIZE, which"),
    "forced: misspelt": (
        *({"FABRIC_ENVIRONMENT": "slrum"}, {}),
        "FABRIC_ENVIRONMENT='slrum' is not known. Did you mean 'slurm'? Known: horovod, kubeflow, local,",
    ),
    "forced: capitals": ({"FABRIC_ENVIRONMENT": "SLURM"}, {}, "Did you mean 'slurm'?"),
    "forced: and another in the code": (
        *({**OPENMPI, "FABRIC_ENVIRONMENT": "mpi"}, {"plugins": SLURMEnvironment()}),
        "The cluster environment is given twice: by plugins=SLURMEnvironment and by FABRIC_ENVIRONMENT=mpi.",
    ),
    "a number that is none": (
        {**SRUN, "SLURM_NODEID": "x"},
        {},
        "The environment variable SLURM_NODEID='x' must be a whole number",
    ),
}


@pytest.mark.parametrize("row", ERRORS)
def test_error(monkeypatch, row):
    given, request, text = ERRORS[row]
    with variables(monkeypatch, given, None), pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", **request)
    assert text in str(caught.value)
