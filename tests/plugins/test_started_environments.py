"""What environments of schedulers do: SLURM's lists of machines, the store, requeue, mpi4py's part."""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
from datetime import timedelta

import pytest
from environment_rows import HYDRA, OPENMPI, SRUN, clear, env
from ports import free_port

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.plugins.environments import LSFEnvironment, MPIEnvironment, SLURMEnvironment
from fabric.plugins.environments.started import derive_port
from fabric.utilities.rank_zero import rank_zero_only

SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    clear(monkeypatch)


def put(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu5", "gpu5"),
        ("gpu5,node[01-03]", "gpu5"),
        ("node[01-03,07],gpu5", "node01"),
        ("node[7,09-12]", "node7"),
        ("node[001-128]", "node001"),
        ("rack[0-3]node[01-16],gpu5", "rack0node01"),
        ("node[01-03]-ib", "node01-ib"),
        ("a-b[2-4].cluster.org", "a-b2.cluster.org"),
        ("host0 host1", "host0"),
        (" host0, host1 ", "host0"),
    ],
)
def test_the_first_machine_of_a_list(nodes, first):
    assert SLURMEnvironment.resolve_root_node_address(nodes) == first
    assert SLURMEnvironment().resolve_root_node_address(nodes) == first


def test_outside_of_a_job_there_is_an_address_and_a_port():
    outside = SLURMEnvironment()
    assert (outside.main_address, outside.main_port) == ("127.0.0.1", derive_port(0, 0))
    with pytest.raises(ConfigurationError, match="SLURMEnvironment needs SLURM_PROCID"):
        outside.global_rank()


def test_a_list_without_machines():
    with pytest.raises(ConfigurationError, match=r"list of machines ' ' is empty\. Write it as SLURM does"):
        SLURMEnvironment.resolve_root_node_address(" ")


def test_a_step_without_a_list_of_machines(monkeypatch):
    put(monkeypatch, {name: value for name, value in SRUN.items() if "NODELIST" not in name})
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set"):
        _ = SLURMEnvironment().main_address


def test_name_and_id_of_a_job(monkeypatch):
    assert (SLURMEnvironment.job_name(), SLURMEnvironment.job_id()) == (None, None)
    put(monkeypatch, SRUN)
    assert (SLURMEnvironment().job_name(), SLURMEnvironment().job_id()) == ("train", 42)


def test_the_signal_is_one():
    assert SLURMEnvironment(requeue_signal=signal.SIGUSR2).requeue_signal is signal.SIGUSR2
    assert SLURMEnvironment().auto_requeue


def test_ports_of_jobs_and_steps_at_the_same_time():
    ports = [derive_port(job, step) for job in range(100_000, 100_100) for step in range(100)]
    assert len(set(ports)) == len(ports)
    assert all(12000 <= port < 32000 for port in ports)


def test_ports_of_two_mpi_jobs_differ_and_are_the_same_in_every_process(monkeypatch):
    put(monkeypatch, OPENMPI)
    first = MPIEnvironment().main_port
    monkeypatch.setenv("PMIX_NAMESPACE", "1115684866")
    assert (first, MPIEnvironment().main_port != first) == (31624, True)


# the store


@pytest.fixture
def one_task(monkeypatch):
    """A step of one task, with a port that nobody holds."""
    port = free_port()
    put(monkeypatch, {**SRUN, **env("SLURM_STEP_NUM_NODES=1 SLURM_PROCID=0"), "MASTER_PORT": str(port)})
    return port


@pytest.mark.usefixtures("one_task")
def test_groups_of_one_job_share_a_store_but_no_keys():
    first = SLURMEnvironment().make_store(0, 2, SECOND)
    first.set("a", "1")
    second = SLURMEnvironment().make_store(0, 2, SECOND)
    assert not second.check(["a"])
    second.set("b", "2")
    assert first.get("a") == b"1"


def test_a_port_that_is_taken(one_task):
    with socket.create_server(("127.0.0.1", one_task)):
        with pytest.raises(LaunchError) as caught:
            SLURMEnvironment().make_store(0, 2, SECOND)
        assert str(caught.value) == (
            f"Rank zero cannot listen on 127.0.0.1:{one_task}: another process on this machine uses the "
            "port. Set MASTER_PORT (--main-port) to another number, the same for all ranks; on one machine, "
            "leave it out, so that `fabric run` and `python train.py` choose a free one."
        )


def test_a_machine_whose_name_does_not_resolve(monkeypatch):
    put(monkeypatch, {**SRUN, **env("SLURM_STEP_NODELIST=no-such-host[1-2].invalid")})
    with pytest.raises(
        LaunchError, match=r"'no-such-host1\.invalid'.*first of SLURM_STEP_NODELIST.* MASTER_ADDR"
    ):
        SLURMEnvironment().make_store(1, 4, timedelta(hours=1))


# requeue

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  show) echo "JobId=42 {state} BatchFlag=1" ;;
  requeue) {requeue} ;;
esac
"""


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """Make a program of that name; returns what it was called with."""
    put(monkeypatch, SRUN)
    monkeypatch.setattr(rank_zero_only, "_rank", 0)
    log = tmp_path / "log"

    def make(state="JobState=RUNNING Reason=None", requeue="true"):
        program = tmp_path / "scontrol"
        program.write_text(SCONTROL.format(log=log, state=state, requeue=requeue))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return lambda: log.read_text().splitlines() if log.exists() else []

    return make


def test_requeue_asks_once(monkeypatch, scontrol):
    calls = scontrol()
    assert SLURMEnvironment().requeue()
    assert calls() == ["show job -o 42", "requeue 42"]
    monkeypatch.setattr(rank_zero_only, "_rank", 1)
    assert not SLURMEnvironment().requeue(), "only rank zero asks"
    monkeypatch.setattr(rank_zero_only, "_rank", 0)
    assert not SLURMEnvironment(auto_requeue=False).requeue()
    assert len(calls()) == 2


def test_requeue_of_one_task_of_an_array(monkeypatch, scontrol):
    calls = scontrol()
    put(monkeypatch, env("SLURM_ARRAY_JOB_ID=40 SLURM_ARRAY_TASK_ID=2"))
    assert SLURMEnvironment().requeue()
    assert calls()[-1] == "requeue 40_2"


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("JobState=COMPLETING Reason=TimeLimit", True),
        ("JobState=COMPLETING Reason=None", False),  # as of scancel and of a preemption
        ("JobState=CANCELLED Reason=None", False),
    ],
)
def test_a_cancelled_job_stays_cancelled(scontrol, state, requeued):
    calls = scontrol(state)
    assert SLURMEnvironment().requeue() is requeued
    assert (calls()[-1] == "requeue 42") is requeued


def test_what_prevents_a_requeue(monkeypatch, scontrol, tmp_path):
    scontrol(requeue="echo Requested operation is presently disabled >&2; exit 1")
    with pytest.raises(
        LaunchError, match="requeue 42` failed: Requested operation is presently disabled Only jobs"
    ):
        SLURMEnvironment().requeue()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(LaunchError, match=r"42` failed: .*'scontrol'.* Requeue this one by hand"):
        SLURMEnvironment().requeue()
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigurationError, match="SLURMEnvironment needs SLURM_JOB_ID"):
        SLURMEnvironment().requeue()


# MPI without enough variables, LSF's file


def test_what_the_variables_lack_mpi4py_tells(monkeypatch):
    """The real mpi4py runs in tests/end_to_end/test_clusters.py; here only what is asked of it."""
    world = types.SimpleNamespace(allgather=lambda host: ["a", "b", "a", "b"])
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(COMM_WORLD=world))
    put(monkeypatch, {"PMI_RANK": "3", "PMI_SIZE": "4"})
    environment = MPIEnvironment()
    assert environment.detect()
    assert (environment.local_rank(), environment.local_world_size(), environment.node_rank()) == (1, 2, 1)
    assert (environment.num_nodes(), environment.main_address) == (2, "a")


def test_mpi4py_is_not_asked_for_what_the_variables_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    put(monkeypatch, HYDRA)
    environment = MPIEnvironment()
    assert (environment.node_rank(), environment.main_address) == (0, "127.0.0.1")


def test_the_file_of_machines(monkeypatch, tmp_path):
    own = socket.gethostname().partition(".")[0]
    (tmp_path / "ranks").write_text(f"batch5\nc1\nc1\n{own}.cluster.org\n{own}.cluster.org\n")
    jsrun = env("LSB_JOBID=1 JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_SIZE=2")
    put(monkeypatch, {**jsrun, "LSB_DJOB_RANKFILE": str(tmp_path / "ranks")})
    environment = LSFEnvironment()
    assert (environment.main_address, environment.node_rank()) == ("c1", 1)
    (tmp_path / "ranks").unlink()
    with pytest.raises(ConfigurationError, match="neither LSB_DJOB_RANKFILE nor LSB_HOSTS lists them"):
        _ = environment.main_address
