"""A private name of torch's autograd graph, which `core/test_torch_internals.py` tests."""

from __future__ import annotations

from typing import Any


def saved(node: Any, name: str) -> Any:
    """Return the value that a node of a loss's graph saved for its backward as `name`; None: it has none."""
    return getattr(node, f"_saved_{name}", None)
