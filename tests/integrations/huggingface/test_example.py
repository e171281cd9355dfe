"""examples/huggingface.py as people start it: 1 and 2 processes print the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = "examples/huggingface.py"


def printed(*flags):
    command = [sys.executable, SCRIPT, "--accelerator", "cpu", "--steps", "20", "--report-every", "5", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    *losses, written, last = done.stdout.splitlines()
    assert written.startswith("the model writes: ' The value")
    assert last.startswith(f"huggingface: {flags[1]} process(es), held-out loss ")
    return [float(line.split()[-1]) for line in [*losses, last]]


def test_it_prints_the_same_losses_whatever_the_strategy():
    alone = printed("--devices", "1")
    assert len(alone) == 5
    assert alone[-2] < alone[0] - 0.3
    assert printed("--devices", "2") == pytest.approx(alone, abs=2e-4)
    assert printed("--devices", "2", "--strategy", "fsdp") == pytest.approx(alone, abs=2e-4)
    mixed = printed("--devices", "2", "--precision", "bf16-mixed")
    assert mixed == pytest.approx(alone, rel=2e-2)
