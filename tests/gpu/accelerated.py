"""What tests of devices share: CUDA where there is one, else the pretend one of `make test-device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

KIND = "sim" if hasattr(torch, "sim") else "cuda"
DEVICE = torch.device(KIND, 0)
MODULE: Any = getattr(torch, KIND)

NEEDS_TWO = pytest.mark.skipif(MODULE.device_count() < 2, reason="needs two devices")
ASYNCHRONOUS = pytest.mark.skipif(
    KIND == "sim", reason="work of the pretend accelerator is done when it is asked for"
)


def keep_busy(cycles: int) -> None:
    """Let the device's current stream wait; where its work is always done, nothing."""
    if KIND == "cuda":
        torch.cuda._sleep(cycles)
