"""HorovodStrategy with the real package, on two ranks that horovodrun has started, or mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.integrations.horovod import HorovodStrategy, scale_learning_rate

JOBS = Path(__file__).with_name("jobs.py")
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2", "-H", "localhost:2"]
MPIRUN = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "-mca", "btl", "self,tcp"]


def has_mpi():
    import horovod.torch as hvd

    return hvd.mpi_built() and shutil.which("mpirun") is not None


def job(names, folder, launcher=HOROVODRUN, code=0):
    """What the ranks of one launch tell of each of these; with another exit code, what they said."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOBS.parents[3])}
    command = [*launcher, sys.executable, str(JOBS), names, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=folder)
    assert (done.returncode == 0) == (code == 0), done.stdout[-4000:] + done.stderr[-4000:]
    if code:
        return done.stdout + done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names.split(",")}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Of what needs no ranks of its own, in one launch."""
    return job("fp16,collected,mixed,joins,ddp,loops,refused", tmp_path_factory.mktemp("jobs"))


NO_MPI = pytest.mark.skipif("not has_mpi()", reason="this Horovod was built without MPI")
LAUNCHERS = [HOROVODRUN, pytest.param(MPIRUN, marks=NO_MPI)]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["horovodrun", "mpirun"])
def test_it_is_plain_torch_on_the_joined_batch(tmp_path, launcher):
    told = job("equal", tmp_path, launcher)["equal"]
    assert told["kind"] is True
    for name in ("steps", "clipped", "accumulated", "sgd", "closure"):
        assert told[name] < 1e-5, name
    assert told["loaded"] == told["whole"] == 0
    assert told["rates"] == pytest.approx([0.02, 0.025, 0.03, 0.035, 0.04, 0.04])


def test_every_promise_of_a_strategy_is_kept(tmp_path):
    assert job("promises", tmp_path)["promises"] == [{}, {}]


def test_gradients_in_half_precision(told):
    assert 0 < told["fp16"] < 1e-2


def test_garbage_that_one_rank_collects_first_is_no_hang(told):
    assert told["collected"] < 1e-5


def test_mixed_precision(told):
    assert 0 < told["mixed"] < 5e-2


def test_uneven_inputs_are_joined(told):
    assert told["joins"]["last"] == 0
    assert told["joins"]["error"] < 1e-5


def test_ddp_under_horovodrun(told):
    world, error = told["ddp"]
    assert world == 2
    assert error < 1e-5


def test_loops_are_those_of_ddp(told):
    loops = dict(told["loops"])
    drift = loops.pop("state_of_rank_zero under DDPStrategy")
    assert drift.startswith(("state 'momentum_buffer' of 0.weight", "0.weight")), drift
    assert set(loops) >= {"by_closure", "state_of_rank_zero", "ranks of state_of_rank_zero"}
    for name, apart in loops.items():
        assert apart < 1e-6, name


def test_what_is_refused(told):
    told = told["refused"]
    assert told["bf16"].startswith(
        "ConfigurationError: HorovodStrategy does not run with precision='bf16-true': Horovod does not"
    )
    assert "start it with `horovodrun -np 3 python train.py`" in told["devices"]
    assert told["buffers"] == (
        "UsageError: join() cannot keep the buffers of a model alike (batch norm), which ranks send after "
        "each backward. Write HorovodStrategy(broadcast_buffers=False)."
    )
    assert told["no batch"] == (
        "UsageError: join() came before the first backward of this rank, in which ranks agree on the order "
        "of gradients. Give each rank one batch or more."
    )
    assert "these parameters of Sequential got no gradient in this backward" in told["frozen"]
    assert told["thawed"].startswith("UsageError: Parameter 0.weight was frozen at fabric.setup and requires")
    assert "A gradient is sparse (nn.Embedding(sparse=True)), which Horovod cannot average" in told["sparse"]


ENDED = {
    "uneven": "averaged gradients",
    "sends_late": "averaged gradients",
    "joins_alone": "waited in join()",
}


@pytest.mark.parametrize("how", ENDED)
def test_a_rank_that_ends_first_is_an_error_that_names_join(tmp_path, how):
    told = job(how, tmp_path, code=1)
    assert f"RankError: Horovod stopped while this rank {ENDED[how]}" in told
    assert "let each rank call fabric.strategy.join() after its last one" in " ".join(told.split())


def test_a_rank_that_dies_ends_the_job(tmp_path):
    job("dies", tmp_path, code=1)


def test_without_a_launcher():
    with pytest.raises(ConfigurationError, match="`horovodrun -np 2 python"):
        Fabric(accelerator="cpu", devices=2, strategy="horovod")


def test_bad_input():
    with pytest.raises(ConfigurationError, match=r"compression='fp8'\): write 'none' or 'fp16'"):
        HorovodStrategy(compression="fp8")
    with pytest.raises(ConfigurationError, match="give the number of processes, 1 or more, and of steps"):
        scale_learning_rate(None, 0)
