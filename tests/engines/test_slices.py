"""Each engine of others is a slice: it can be deleted, and knows of no other one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fabric

PACKAGE = Path(fabric.__file__).parent
SLICES = sorted(
    path.name for path in (PACKAGE / "integrations").iterdir() if (path / "__init__.py").is_file()
)

REST = """
import importlib, pathlib, torch, fabric
root = pathlib.Path(fabric.__file__).parent
assert not [path for path in (root / "integrations").iterdir() if (path / "__init__.py").is_file()], root
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
    if not name.endswith("__main__"):
        importlib.import_module(name.removesuffix(".__init__"))
f = fabric.Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(2, 1)
model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
f.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
from fabric.strategies import STRATEGY_REGISTRY
print("fine", len(STRATEGY_REGISTRY.names()))
"""


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_knows_of_no_other_one(name):
    others = [other for other in SLICES if other != name]
    sources = {path: path.read_text() for path in (PACKAGE / "integrations" / name).rglob("*.py")}
    found = [
        (path.name, other)
        for path, text in sources.items()
        for other in others
        if f"integrations.{other}" in text
    ]
    assert found == []


def test_the_rest_works_when_all_slices_are_deleted(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fabric", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SLICES:
        shutil.rmtree(tmp_path / "fabric" / "integrations" / name)
    command = [sys.executable, "-c", REST]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("fine"), done.stderr
