"""`TPUAccelerator`: the generic accelerator for `torch_tpu`, and explanations if there is no TPU.

`import torch` loads torch_tpu if it finds TPUs, and then has their device type and process group backend.
This file does not import it: without libtpu the import ends the process.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from fabric.accelerators.generic import TorchAccelerator

_INSTALL = 'run `pip install "torch-fabric[tpu]"` on a machine with TPUs'
_DEVICES = ("vfio/[0-9]*", "accel[0-9]*")


class TPUAccelerator(TorchAccelerator):
    """Google's TPUs, through the package `torch_tpu` (0.2 or newer)."""

    device_files = Path("/dev")

    @classmethod
    def name(cls) -> str:
        """Return torch's device type."""
        return "tpu"

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Return two clauses for an error: why no TPU is available, and the fix."""
        if find_spec("torch_tpu") is None:
            return "the package torch_tpu is not installed", _INSTALL
        if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
            return "torch_tpu is installed without libtpu", _INSTALL
        if not any([any(cls.device_files.glob(pattern)) for pattern in _DEVICES]):
            return (
                "this process sees no TPU (neither /dev/vfio/N nor /dev/accelN)",
                "start it on a TPU VM, with its devices passed into the container",
            )
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            return (
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_tpu",
                "leave the variable out",
            )
        return "torch_tpu supports no TPU of this machine", "compare its list of TPUs with yours"
