"""Private names of torch for deferred initialisation; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any

import torch

from fabric.core.tree import flatten

no_subclass_dispatch = torch._C._DisableTorchDispatch
"""Context in which ATen operations do not call `__torch_dispatch__` of their tensors."""


def written_by(operation: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an ATen operation changes in place."""
    found: list[Any] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in flatten(found)[0] if isinstance(leaf, torch.Tensor)]


RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""Methods by which torch's modules initialise their own parameters."""

PARAMETER_MARK = "_is_param"
"""Attribute that makes a tensor of another class an `nn.Parameter` to `isinstance`."""
