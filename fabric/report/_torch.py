"""Private names of dispatch modes; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any

from torch.utils import _python_dispatch

TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Context manager whose `__torch_dispatch__` receives each operation of torch."""
