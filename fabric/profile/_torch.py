"""Private names of torch.compile; `core/test_torch_internals.py` tests each."""

from __future__ import annotations


def compiled_module() -> type:
    """Return the class of compiled modules. Importing it takes seconds."""
    from torch._dynamo import OptimizedModule

    return OptimizedModule
