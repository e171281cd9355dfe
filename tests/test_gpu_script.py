"""`tests/gpu/run.sh` on a machine without a GPU, without packages, and what it imports."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
FILES = [
    *sorted((ROOT / "tests" / "gpu").glob("*.py")),
    *[ROOT / "tests" / name for name in ("conftest.py", "machine.py", "warm.py")],
    *[ROOT / "benchmarks" / name for name in ("gpu.py", "harness.py")],
]
ALLOWED = {"torch", "pytest", "fabric", "accelerated", "machine", "harness", "warm"}
OPTIONAL = {"sim", "torchao"}  # behind a check that they are there


def run(python: str, **environ: str) -> subprocess.CompletedProcess:
    command, env = ["bash", str(SCRIPT)], {**os.environ, "PYTHON": python, **environ}
    env.pop("FABRIC_PRETEND", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd="/")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_succeeds():
    done = run(sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU: nothing was tested")


def test_each_missing_package_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E -S "$@"\n')
    bare.chmod(0o755)
    done = run(str(bare))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"missing package: {name} (pip install {name})"
        for name in ("torch", "pytest", "torchmetrics", "lightning-utilities")
    ]


def test_a_python_that_is_not_there_is_named():
    done = run("no-such-python")
    assert done.returncode == 1
    assert done.stderr.startswith("no no-such-python:")


def test_an_unknown_argument_is_refused():
    done = subprocess.run(["bash", str(SCRIPT), "--fast"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr.strip()) == (2, "usage: bash tests/gpu/run.sh [--pretend]")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_imports_nothing_but_the_packages_named(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found - set(sys.stdlib_module_names) - ALLOWED - OPTIONAL == set()
