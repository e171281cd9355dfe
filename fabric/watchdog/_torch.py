"""Private names of torch's Python frames; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

import os

DISPATCH_FILES = (f"{os.sep}torch{os.sep}_ops.py", f"{os.sep}torch{os.sep}_library{os.sep}")
"""Parts of the paths of torch's frames around a functional collective and its wait."""

BACKWARD_FUNCTION = "_engine_run_backward"
"""Name of the innermost Python function of a backward pass."""
