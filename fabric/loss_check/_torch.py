"""A private name of torch's autograd graph, which `core/test_torch_internals.py` tests."""

from __future__ import annotations

from typing import Any


def saved(node: Any, name: str) -> Any:
    """Return what a node of the graph of a loss saved for its backward; None: nothing by that name."""
    return getattr(node, f"_saved_{name}", None)
