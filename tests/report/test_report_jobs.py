"""Reports of whole jobs: a rank that is killed, spawned ranks, and a job without a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fabric.report.format import STEP, read

LOOP = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from fabric import Fabric


def train(fabric):
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
    for number, (x,) in enumerate(fabric.setup_dataloaders(loader)):
        fabric.backward(model(x).sum())
        optimizer.step()
        if number == 6 and "kill" in sys.argv and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 8 and "raise" in sys.argv:
            raise ValueError("boom")
    if "modules" in sys.argv:
        print([name for name in sys.modules if name.startswith("fabric.report")], type(Fabric.save).__name__)


if __name__ == "__main__":
    strategy = "ddp_spawn" if "spawn" in sys.argv else "auto"
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train)
"""


def run(folder, *arguments, command=(), **variables):
    script = folder / "train.py"
    script.write_text(LOOP)
    return subprocess.run(
        [sys.executable, *command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def found(folder, rank):
    """(kinds of events, number of steps) of a rank."""
    records = read(folder / "report" / f"rank-0000{rank}.bin")
    events = [record["kind"] for record in records if isinstance(record, dict)]
    return events, sum([len(part) // STEP.size for part in records if isinstance(part, bytes)])


@pytest.mark.slow
def test_a_killed_rank_has_its_steps_and_the_next_attempt_appends(tmp_path):
    command = ["-m", "fabric", "run", "--devices", "2", "--report", "report"]
    killed = run(tmp_path, "kill", command=command)
    assert "rank 1 on" in killed.stderr
    assert "SIGKILL" in killed.stderr
    events, steps = found(tmp_path, 1)
    assert (steps, "end" in events, "failure" in events) == (7, False, False)
    again = run(tmp_path, command=command)
    assert again.returncode == 0, again.stderr
    events, steps = found(tmp_path, 1)
    assert (events.count("start"), events[-1], steps) == (2, "end", 7 + 10)
    assert found(tmp_path, 0)[0].count("start") == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "popen"])
def test_ranks_of_a_function_record_its_failure(tmp_path, how):
    done = run(tmp_path, how, "raise", FABRIC_REPORT="report")
    assert "ValueError: boom" in done.stderr
    ends = [found(tmp_path, rank)[0][-1] for rank in (0, 1)]
    assert "failure" in ends  # the other rank may be stopped first
    assert max([found(tmp_path, rank)[1] for rank in (0, 1)]) == 9


EXITS = """
import os, signal, sys
import torch
from fabric import Fabric

how, devices = sys.argv[1], int(sys.argv[2])
fabric = Fabric(accelerator="cpu", devices=devices, report="report")
fabric.launch()
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number in range(4):
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
if how == "caught":
    try:
        sys.exit(3)
    except SystemExit:
        pass
if how == "text" and fabric.is_global_zero:
    sys.exit("the loss is nan")
if how == "code" and fabric.is_global_zero:
    sys.exit(3)
if how == "zero":
    sys.exit()
if how == "parser" and fabric.is_global_zero:
    import argparse
    argparse.ArgumentParser().parse_args()
if how == "unreadable" and fabric.is_global_zero:
    sys.exit(type("Status", (), {"__str__": lambda self: 1 / 0})())
if how == "kill" and fabric.global_rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fabric.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_status_of_sys_exit_is_recorded(tmp_path, devices):
    (tmp_path / "train.py").write_text(EXITS)
    for how, code, last in (
        ("text", 1, {"error": "SystemExit", "text": "the loss is nan", "place": "train.py:20"}),
        ("code", 3, {"error": "SystemExit", "text": "3", "place": "train.py:22"}),
        ("parser", 2, {"error": "SystemExit", "text": "2", "place": "train.py:27"}),
        ("unreadable", 1, {"error": "SystemExit", "place": "train.py:29"}),
        ("zero", 0, {"kind": "end"}),
        ("caught", 0, {"kind": "end"}),
    ):
        done = subprocess.run([sys.executable, "train.py", how, str(devices)], cwd=tmp_path, timeout=300)
        assert done.returncode == code, how
        (*_, found) = [one for one in read(tmp_path / "report" / "rank-00000.bin") if isinstance(one, dict)]
        assert last.items() <= found.items(), how


@pytest.mark.slow
def test_the_first_process_records_the_death_of_another_rank(tmp_path):
    (tmp_path / "train.py").write_text(EXITS)
    done = subprocess.run([sys.executable, "train.py", "kill", "2"], cwd=tmp_path, timeout=300)
    assert done.returncode == 137
    (*_, found) = [one for one in read(tmp_path / "report" / "rank-00000.bin") if isinstance(one, dict)]
    assert (found["kind"], found["secondary"]) == ("failure", True)
    summary = subprocess.run(
        [sys.executable, "-m", "fabric", "report", "report", "--json"],
        cwd=tmp_path,
        capture_output=True,
        timeout=99,
    )
    assert json.loads(summary.stdout)["state"] == "failed"


@pytest.mark.slow
def test_a_job_without_a_report_loads_none_of_it(tmp_path):
    done = run(tmp_path, "modules")
    assert done.stdout == "[] function\n" * 2, done.stderr
    assert not (tmp_path / "report").exists()
