"""Lightning Fabric's flags of versions, as Fabric's requirements imply them, and of installed packages."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_IS_INTERACTIVE = hasattr(sys, "ps1")
_IS_WINDOWS = sys.platform == "win32"
_PYTHON_GREATER_EQUAL_3_10_0 = True
_TORCH_GREATER_EQUAL_2_0 = _TORCH_GREATER_EQUAL_2_1 = _TORCH_GREATER_EQUAL_2_2 = True
_TORCH_GREATER_EQUAL_2_3 = _TORCH_GREATER_EQUAL_2_4 = _TORCH_GREATER_EQUAL_2_4_1 = True
_TORCH_GREATER_EQUAL_2_5 = _TORCH_GREATER_EQUAL_2_6 = True
_TORCH_EQUAL_2_4_0 = _TORCH_LESS_EQUAL_2_6 = False
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = True

_BITSANDBYTES_AVAILABLE = find_spec("bitsandbytes") is not None
_DEEPSPEED_AVAILABLE = find_spec("deepspeed") is not None
_NUMPY_AVAILABLE = find_spec("numpy") is not None
_TENSORBOARDX_AVAILABLE = find_spec("tensorboardX") is not None
_TENSORBOARD_AVAILABLE = find_spec("tensorboard") is not None
_XLA_AVAILABLE = False  # an installed torch_xla does not load with the torch that fabric needs
