"""Private names of torch.compile; `core/test_torch_internals.py` tests each."""

from __future__ import annotations


def compiled_module() -> type:
    """Return the class of what `torch.compile(module)` returns. Importing it takes seconds."""
    from torch._dynamo import OptimizedModule

    return OptimizedModule
