"""Scripts whose ranks go different ways, as users write them: they end with the table, and never hang."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GUARDED_SAVE = """
from datetime import timedelta
from fabric import Fabric
from fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=8)))
fabric.launch()
if fabric.is_global_zero:
    fabric.save("model.pt", {"step": 1})
loss = fabric.all_reduce(1.0)
"""

BUSY_RANK = """
import time
import torch.distributed as dist
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=3, strategy="ddp")
fabric.launch()
pair = dist.new_group([0, 1])
fabric.barrier()
if fabric.global_rank == 2:
    time.sleep(600)
if fabric.global_rank == 0:
    fabric.all_reduce(1.0, group=pair)
fabric.barrier("end")
"""

FORGOTTEN_HANDLE = """
import torch
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
data = torch.ones(10_000)
fabric.all_reduce(data, async_op=True)
"""

STUCK = """
import os
import signal
import threading
from datetime import timedelta
import torch
from fabric import Fabric
from fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=3, strategy=DDPStrategy(timeout=timedelta(seconds={limit})))
fabric.launch()
model = fabric.setup(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if fabric.global_rank == 1:
    if {kill}:
        threading.Timer(6, os.kill, (os.getpid(), signal.SIGKILL)).start()
    threading.Event().wait(600)  # stuck
{call}  # waits
"""


def run(folder: Path, script: str, timeout: float, **variables: str) -> subprocess.CompletedProcess:
    """The finished script; a hang fails by `timeout` (seconds)."""
    (folder / "train.py").write_text(script)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout
    )


def line_of(script: str, code: str) -> int:
    """The number of the line that contains `code`."""
    return next(number for number, line in enumerate(script.splitlines(), 1) if code in line)


def test_save_on_rank_zero_only(tmp_path):
    done = run(tmp_path, GUARDED_SAVE, 60)
    assert done.returncode != 0
    assert "CollectiveMismatch" in done.stderr
    for verb, code in (("save", "fabric.save"), ("all_reduce(mean)", "fabric.all_reduce")):
        rows = [row for row in done.stderr.splitlines() if f" {verb} " in row]
        assert any(row.endswith(f"train.py:{line_of(GUARDED_SAVE, code)}") for row in rows), done.stderr
    assert not (tmp_path / "model.pt").exists()


def test_ranks_that_wait_for_each_other_end_though_another_is_busy(tmp_path):
    done = run(tmp_path, BUSY_RANK, 90)
    assert done.returncode != 0
    assert "all_reduce(mean) #1 of ranks 0-1" in done.stderr
    assert "barrier('end')" in done.stderr


def test_a_handle_that_nobody_waits_for_is_reported_at_exit(tmp_path):
    done = run(tmp_path, FORGOTTEN_HANDLE, 60)
    assert done.returncode == 0, done.stderr
    place = f"train.py:{line_of(FORGOTTEN_HANDLE, 'async_op')}"
    lines = [line for line in done.stderr.splitlines() if "there was no wait()" in line]
    assert len(lines) == 2, "one for each rank"
    assert all("all_reduce(mean)" in line and place in line and ".wait()" in line for line in lines)


@pytest.mark.parametrize(
    ("call", "kill"),
    [("fabric.backward(loss)", False), ("fabric.barrier('end')", False), ("fabric.backward(loss)", True)],
)
def test_a_stuck_rank_is_shown_once_early_and_in_the_error_at_the_end(tmp_path, call, kill):
    # With a kill the limit of torch must not end the others before it, also on a busy machine.
    script = STUCK.format(call=call, kill=kill, limit=60 if kill else 8)
    done = run(tmp_path, script, 90, FABRIC_HANG_REPORT_AFTER="3")
    name = "backward" if "backward" in call else r"barrier\('end'\) #\d+"
    stuck = rf"  1 +\S+ +no call of all ranks +\S*train.py:{line_of(script, '# stuck')} in <module>"
    waiting = rf"  [02] +\S+ +{name} +\d+ s +\S*train.py:{line_of(script, '# waits')}"
    early, _, rest = done.stderr.partition("Traceback")
    # A table follows the first after twice the seconds, which a busy machine may need until the error.
    assert early.count("Where the ranks are:") in (1, 2)
    assert re.search(rf"fabric: rank [02] has waited \d+ s in {name} \(FABRIC_HANG_REPORT_AFTER=3\)\.", early)
    assert re.search(stuck, early)
    # On a busy machine the third rank may not be in its call yet.
    assert len(re.findall(waiting, early)) in (1, 2, 3, 4)
    if kill:
        assert re.match(
            r"fabric: rank 1 on \S+ failed first: killed by SIGKILL", done.stderr.splitlines()[-1]
        )
        assert done.returncode == 128 + 9
    else:
        assert done.returncode == 1
        assert re.search(stuck.replace("  1", r".*  1", 1), rest), "the error at the timeout has the table"
        assert "did not join" in rest
