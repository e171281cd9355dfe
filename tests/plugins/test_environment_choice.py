"""What is said about the choice of an environment, and what it imports and leaves unused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from environment_rows import (
    ALONE,
    BATCH,
    OPENMPI,
    PLAIN,
    PTY,
    SALLOC,
    SRUN,
    TORCHRUN,
    clear,
    env,
    variables,
)

from fabric import Fabric
from fabric.plugins.environments import LocalEnvironment, SLURMEnvironment
from fabric.plugins.environments.detect import PRECEDENCE
from fabric.resolve import Machine, Request, resolve
from fabric.utilities.warnings import PossibleUserWarning


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    clear(monkeypatch)


def test_a_batch_script_without_srun_runs_here_and_says_what_it_leaves_unused(monkeypatch):
    with variables(monkeypatch, BATCH, None):
        with pytest.warns(PossibleUserWarning) as caught:
            plan = resolve(Request(accelerator="cpu", devices=2), Machine.detect())
        assert not plan.environment.creates_processes_externally, "both ranks are started from here"
        assert "SLURM_NTASKS=4 on SLURM_NNODES=2" in str(caught[0].message)
        assert "devices=2 x num_nodes=1 run on this machine alone" in str(caught[0].message)
    with variables(monkeypatch, {**BATCH, "SLURM_NNODES": "1"}, None):
        resolve(Request(accelerator="cpu", devices=4), Machine.detect())  # all of it used: no warning
    with variables(monkeypatch, {**BATCH, "MASTER_ADDR": "a", "NODE_RANK": "1"}, None):
        resolve(Request(accelerator="cpu", num_nodes=2), Machine.detect())  # started by hand on each machine


def test_a_shell_gets_no_warning(monkeypatch):
    with variables(monkeypatch, SALLOC, None):
        resolve(Request(accelerator="cpu"), Machine.detect())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "LocalEnvironment: nothing else started this process."),
        (
            SALLOC,
            "nothing else started this process; this is SLURM job 42, but srun did not start this process.",
        ),
        (
            {**PTY, "SLURM_TASK_PID": "x"},
            "a shell in SLURM step 42.0 started this process (SLURM_PTY_PORT).",
        ),
        ({"FABRIC_ENVIRONMENT": "local"}, "LocalEnvironment: FABRIC_ENVIRONMENT=local forces it."),
        (
            SRUN
            | ALONE
            | env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0")
            | env("OMPI_COMM_WORLD_LOCAL_SIZE=1"),
            "MPIEnvironment: mpirun started this process (OMPI_COMM_WORLD_RANK=0); slurm has "
            "lower precedence (srun started this process (SLURM_PROCID=3, step 42.0)).",
        ),
    ],
    ids=["nothing", "salloc", "shell", "forced", "two"],
)
def test_the_decision_is_one_debug_line(monkeypatch, caplog, given, line):
    with variables(monkeypatch, given, None), caplog.at_level(logging.DEBUG, logger="fabric"):
        Fabric(accelerator="cpu", devices=1)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("fabric")]
    assert len(said) == 1
    assert said[0].startswith("The cluster environment is ")
    assert said[0].endswith(line)


def test_an_environment_in_the_code_is_said_so(monkeypatch, caplog):
    with variables(monkeypatch, SRUN, "self"), caplog.at_level(logging.DEBUG, logger="fabric"):
        Fabric(accelerator="cpu", devices=1, plugins=LocalEnvironment())
    assert [record.getMessage() for record in caplog.records] == [
        "The cluster environment is LocalEnvironment: plugins=LocalEnvironment."
    ]
    same = {**SRUN, "FABRIC_ENVIRONMENT": "slurm"}
    with variables(monkeypatch, same, "self"):
        own = SLURMEnvironment(auto_requeue=False)
        assert resolve(Request(accelerator="cpu", plugins=own), Machine.detect()).environment is own


def test_precedence_is_as_documented():
    documented = "process_group local torchelastic horovod lsf mpi slurm kubeflow local"
    assert " ".join(PRECEDENCE) == documented


@pytest.mark.parametrize(
    ("given", "loaded"),
    [
        ({}, {"local"}),
        (OPENMPI, {"mpi", "started"}),
        (TORCHRUN, {"torchelastic", "started", "rendezvous"}),
    ],
)
def test_only_the_chosen_environment_is_imported(given, loaded):
    code = (
        "import sys\nfrom fabric.resolve import Machine\nMachine.detect()\n"
        "here = 'fabric.plugins.environments.'\n"
        "print(*sorted(name.removeprefix(here) for name in sys.modules if name.startswith(here)))"
    )
    environ = {name: value for name, value in os.environ.items() if name not in PLAIN}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ | given, capture_output=True, text=True, timeout=120
    )
    always = {"cluster_environment", "detect", "registry"}
    assert set(done.stdout.split()) - always == loaded, done.stderr
