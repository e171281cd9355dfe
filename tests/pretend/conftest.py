"""Tests that count on the pretend accelerator: bytes of a device, waits of the host (`make test-device`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FIRST = "test_the_device.py"  # which says what is missing, where it cannot be built

# Only where tests/pretend/device is on the path does `import torch` give the device, here and in all ranks;
# and accelerator="auto" means it then, so that no other test may run beside these.
if not hasattr(torch, "sim"):
    known = {FIRST} if find_spec("sim_build") else set()
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name not in known]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.device)
