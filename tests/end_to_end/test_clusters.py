"""Real engines: OpenMPI's mpirun, and a SLURM of two nodes on this machine that the tests start themselves.

Debian packages: openmpi-bin; slurm-wlm slurmctld slurmd munge. Tests whose engine is absent are skipped.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import PYTHON, SCRIPTS, check_facts, check_resumed, environ, facts, until
from ports import free_ports

SCRIPT = SCRIPTS / "train.py"
TRAIN = [PYTHON, str(SCRIPT)]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "scancel", "sinfo")
SECONDS = 120
pytestmark = pytest.mark.slow


def run(command, env=None, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        env=env or environ(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        **settings,
    )


def check_numbers(done: subprocess.CompletedProcess, alone: dict) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    check_facts(facts(done.stdout), alone)


@pytest.fixture(scope="module")
def alone() -> dict:
    return facts(run(TRAIN).stdout)[0]


# mpirun


@pytest.fixture(scope="module")
def openmpi() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    if "Open MPI" not in run(["mpirun", "--version"]).stdout:
        pytest.skip("mpirun is not OpenMPI's")


@pytest.mark.usefixtures("openmpi")
@pytest.mark.smoke
def test_mpirun(alone):
    done = run([*MPIRUN, "-np", "2", *TRAIN])
    check_numbers(done, alone)
    assert done.stderr == ""


@pytest.mark.usefixtures("openmpi")
def test_two_mpiruns_at_once(alone):
    command = [*MPIRUN, "-np", "2", *TRAIN, "--style=script"]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ())
        for _ in range(2)
    ]
    for job in jobs:
        out, err = job.communicate(timeout=SECONDS)
        check_numbers(subprocess.CompletedProcess(command, job.returncode, out, err), alone)


@pytest.mark.usefixtures("openmpi")
def test_mpirun_of_another_number_of_ranks():
    done = run([*MPIRUN, "-np", "2", *TRAIN, "--devices=4"])
    assert done.returncode != 0
    assert (
        "asks for 4 processes, 4 on each machine, but mpirun started 2 (OMPI_COMM_WORLD_SIZE=2" in done.stderr
    )


@pytest.mark.usefixtures("openmpi")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_mpirun_whose_variables_are_lost_asks_mpi4py(alone, tmp_path):
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('for name in ${!OMPI_COMM_WORLD_*}; do unset "$name"; done\nexec "$@"\n')
    check_numbers(run([*MPIRUN, "-np", "2", "bash", str(wrapper), *TRAIN]), alone)


# SLURM

CONFIGURATION = """
ClusterName=fabric
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge.sock
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldPidFile={base}/ctld.pid
SlurmdPidFile={base}/d-%n.pid
SlurmdSpoolDir={base}/d-%n
StateSaveLocation={base}/ctld
SlurmctldPort={ports[0]}
KillWait=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=500
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=500
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The variables with which SLURM's commands find a cluster of two nodes, which lives for this module."""
    missing = [name for name in SLURM_PROGRAMS if find(name) is None]
    if missing:
        names = ", ".join(missing)
        pytest.skip(f"not installed: {names} (Debian: slurm-wlm slurmctld slurmd munge)")
    base = tmp_path_factory.mktemp("slurm")
    for name in ("ctld", "d-n1", "d-n2"):
        (base / name).mkdir()
    (base / "key").write_bytes(os.urandom(1024))
    (base / "key").chmod(0o400)
    conf = base / "slurm.conf"
    host, cores = socket.gethostname().partition(".")[0], os.cpu_count()
    conf.write_text(
        CONFIGURATION.format(host=host, user=getpass.getuser(), base=base, ports=free_ports(3), cores=cores)
    )
    munge = [
        find("munged"),
        "--foreground",
        "--force",
        f"--key-file={base}/key",
        f"--socket={base}/munge.sock",
    ]
    munge += [f"--{name}-file={base}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = [munge, [find("slurmctld"), "-D", "-f", str(conf)]]
    daemons += [[find("slurmd"), "-D", "-N", node, "-f", str(conf)] for node in ("n1", "n2")]
    env = environ(SLURM_CONF=str(conf), MASTER_ADDR="127.0.0.1")  # n1 and n2 are no names of this machine
    with ExitStack() as stack, (base / "log").open("w") as log:
        for daemon in daemons:
            process = subprocess.Popen(daemon, stdout=log, stderr=log, env=env, start_new_session=True)
            stack.callback(stop, process)
        if not until(lambda: run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env).stdout.strip() == "2"):
            pytest.skip(f"SLURM does not start here: {(base / 'log').read_text()[-500:]}")
        yield env
        run(["scancel", "-u", getpass.getuser(), "-s", "KILL", "--full"], env)
        run(["scancel", "-u", getpass.getuser()], env)


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def batch(slurm, tmp_path, body: str, *options: str) -> tuple[str, Path]:
    """Submit a batch script; its job's id and the file of its output."""
    script, out = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text("#!/bin/bash\n" + textwrap.dedent(body))
    done = run(["sbatch", "--parsable", "-o", str(out), *options, str(script)], slurm)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), out


def state(slurm, job: str) -> str:
    shown = run(["scontrol", "show", "job", "-o", job], slurm).stdout
    return next((word.removeprefix("JobState=") for word in shown.split() if "JobState=" in word), "")


def ended(slurm, job: str, programs: int = 1) -> bool:
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "")
    return until(lambda: state(slurm, job) in over, programs * SECONDS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun(slurm, alone, nodes):
    check_numbers(run(["srun", f"-N{nodes}", "-n2", *TRAIN], slurm), alone)


def test_srun_of_another_number_of_tasks(slurm):
    done = run(["srun", "-N2", "-n2", *TRAIN, "--devices=2"], slurm)
    assert done.returncode != 0
    assert (
        "devices=2 x num_nodes=1 asks for 2 processes, 2 on each machine, but srun started 2 (" in done.stderr
    )
    assert "SLURM_STEP_NUM_NODES=2" in done.stderr


def test_srun_where_the_first_machine_has_no_address(slurm):
    env = {name: value for name, value in slurm.items() if name != "MASTER_ADDR"}
    done = run(["srun", "-N2", "-n2", *TRAIN], env)
    assert done.returncode != 0
    assert (
        "The name 'n1' of rank zero's machine (first of SLURM_STEP_NODELIST) does not resolve" in done.stderr
    )


def test_ways_inside_one_batch_script(slurm, alone, tmp_path):
    train = " ".join(TRAIN)
    body = f"""
        echo WAY srun; srun {train}
        echo WAY wrapper; srun bash -c '{train}; true'
        echo WAY torchrun; {PYTHON} -m torch.distributed.run --nproc-per-node=2 {SCRIPT}
        echo WAY fabric run; {PYTHON} -m fabric run --devices 2 --accelerator cpu {SCRIPT}
        echo WAY script; {train} --devices=2
        echo WAY alone; {train}
    """
    job, out = batch(slurm, tmp_path, body, "-N1", "-n2", "-J", "bash")
    assert ended(slurm, job, programs=6)
    ways = dict(part.split("\n", 1) for part in out.read_text().split("WAY ")[1:])
    for way in ("srun", "wrapper", "torchrun", "fabric run", "script"):
        assert len(facts(ways[way])) == 2, ways[way]
        check_facts(facts(ways[way]), alone)
    assert [line["world_size"] for line in facts(ways["alone"])] == [1]
    warned = {way for way, text in ways.items() if "PossibleUserWarning" in text}
    assert warned == {"alone"}, "one of two tasks is used, and only there"
    assert "SLURM_NTASKS=2 on SLURM_NNODES=1" in ways["alone"]


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script (Debian: bsdutils) for a terminal")
def test_a_shell_of_srun_is_no_launch(slurm, alone):
    lines = [f"{' '.join(TRAIN)} --devices=2", f"srun --overlap -n2 {' '.join(TRAIN)} </dev/null", "exit"]
    command = ["script", "-qec", "srun -N1 -n2 --pty bash --norc", "/dev/null"]
    done = run(command, slurm, input="\n".join(lines) + "\n")
    found = facts(done.stdout)
    assert len(found) == 4, done.stdout
    check_facts(found[::2], alone)  # by rank: 0, 0, 1, 1
    check_facts(found[1::2], alone)


def test_an_allocation_is_no_launch_but_srun_in_it_is(slurm, alone, tmp_path):
    shell = tmp_path / "shell.sh"
    shell.write_text(f"{' '.join(TRAIN)} --devices=2\necho NEXT\nsrun {' '.join(TRAIN)}\n")
    done = run(["salloc", "-N1", "-n2", "bash", str(shell)], slurm)
    for part in done.stdout.split("NEXT"):
        check_facts(facts(part), alone)
    assert "PossibleUserWarning" not in done.stderr


REQUEUE = """
import os, signal, sys
from fabric.plugins.environments import SLURMEnvironment
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
print("start", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    print(signal.Signals(signal.sigwait({signal.SIGUSR1, signal.SIGTERM})).name, flush=True)
    print("requeued", SLURMEnvironment().requeue(), flush=True)
"""


def waiting_job(slurm, tmp_path) -> tuple[str, Path]:
    (tmp_path / "stop.py").write_text(REQUEUE)
    body = f"trap : USR1 TERM\nexec {PYTHON} {tmp_path}/stop.py\n"
    job, out = batch(slurm, tmp_path, body, "-n1", "--requeue", "--open-mode=append")
    assert until(lambda: out.exists() and "start 0" in out.read_text(), SECONDS)
    return job, out


def test_a_signal_then_requeue_then_a_second_start(slurm, tmp_path):
    job, out = waiting_job(slurm, tmp_path)
    assert run(["scancel", "--batch", "-s", "USR1", job], slurm).returncode == 0
    assert until(lambda: state(slurm, job) == "PENDING"), out.read_text()
    assert "SIGUSR1" in out.read_text()
    run(["scontrol", "update", f"JobId={job}", "StartTime=now"], slurm)  # else it waits two minutes
    assert until(lambda: "start 1" in out.read_text(), SECONDS), out.read_text()
    assert ended(slurm, job)


def test_a_cancelled_job_is_not_requeued(slurm, tmp_path):
    job, out = waiting_job(slurm, tmp_path)
    assert run(["scancel", "--full", job], slurm).returncode == 0
    assert until(lambda: "requeued" in out.read_text()), out.read_text()
    assert "SIGTERM\nrequeued False" in out.read_text()
    assert ended(slurm, job)
    assert state(slurm, job) == "CANCELLED"


def test_a_signal_then_save_then_requeue_then_the_rest(slurm, tmp_path):
    """On two nodes; every step and the weights are those of a run that nobody stopped."""
    train = f"{PYTHON} {SCRIPTS / 'resumed.py'}"
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = run(["srun", "-N2", "-n2", *train.split(), str(tmp_path / "whole")], slurm)
    body = f"srun {train} {tmp_path}/stopped --stop-at=10\n"
    job, out = batch(slurm, tmp_path, body, "-N2", "-n2", "--requeue", "--open-mode=append")
    assert until(lambda: out.exists() and len(at_step(out, 10)) == 2, SECONDS), out.read_text()
    assert run(["scancel", "--signal=USR1", job], slurm).returncode == 0  # srun passes it on to the tasks
    assert until(lambda: state(slurm, job) == "PENDING"), out.read_text()
    stops = facts(out.read_text(), "stopped")
    assert [(stop["rank"], stop["stopped"]) for stop in stops] == [(0, 10), (1, 10)]
    assert stops[0]["asked"] == stops[1]["asked"]  # the same call of should_stop() said so on both
    run(["scontrol", "update", f"JobId={job}", "StartTime=now"], slurm)  # else it waits two minutes
    assert ended(slurm, job)
    assert state(slurm, job) == "COMPLETED", out.read_text()
    check_resumed(out.read_text(), whole.stdout, begins=10)


def at_step(out: Path, step: int) -> list[dict]:
    return [line for line in facts(out.read_text(), "step") if line["step"] == step]
