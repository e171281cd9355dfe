"""Where tests run: on the CPU; by `make test-device`, those marked `device`, on the pretend accelerator."""

from __future__ import annotations

import pytest
import torch

from fabric.core.torch_versions import older_than

ACCELERATOR = (
    "sim" if hasattr(torch, "sim") else "cpu"
)  # torch has it where tests/pretend/device is on the path
"""As in `Fabric`; as a device of torch: this process's own."""


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """The mark of a test, or of one of its cases, that an older torch cannot pass."""
    return pytest.mark.skipif(older_than(version), reason=f"needs torch {version}: {why}")


LAZY_ADAGRAD = needs_torch("2.12", "an older Adagrad has no state for parameters that it was not made with")
