"""Where tests run: on the CPU; by `make test-device`, those marked `device`, on the pretend accelerator."""

from __future__ import annotations

import torch

ACCELERATOR = (
    "sim" if hasattr(torch, "sim") else "cpu"
)  # torch has it where tests/pretend/device is on the path
"""As in `Fabric`; as a device of torch: this process's own."""
