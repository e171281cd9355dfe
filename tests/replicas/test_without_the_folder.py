"""The package works when the folder of the replica check is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOP = """
import sys

# An editable install would find the folder where it was copied from.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
import torch
from torch import nn
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
fabric.launch()
assert fabric.strategy.find_part("replica check") is None
torch.manual_seed(0)
model = nn.Linear(2, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(2, 2)).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.check_replicas()
fabric.save(sys.argv[2], {"model": model, "optimizer": optimizer})
fabric.load(sys.argv[2], {"model": model, "optimizer": optimizer})
print("done", float(fabric.all_reduce(1.0)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_runs_without_the_folder(tmp_path, strategy):
    shutil.copytree(
        ROOT / "fabric", tmp_path / "fabric", ignore=shutil.ignore_patterns("replicas", "__pycache__")
    )
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    done = subprocess.run(
        [sys.executable, str(script), strategy, str(tmp_path / "checkpoint")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("done 1.0") == 2
