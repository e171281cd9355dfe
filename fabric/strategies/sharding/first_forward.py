"""`check_first_forward`: rejects a forward that writes parameters of a group, which would be lost.

FSDP2 gathers a copy of the parameters for a forward. What the forward writes is dropped with the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import backward_pass
from fabric.core.errors import UsageError
from fabric.strategies.sharding._torch import fsdp_groups, fsdp_states, modules_of, owner_of, unsharded_of
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def check_first_forward(root: Any) -> None:
    """Compare parameters before and after the first training forward of each group of a model.

    Later forwards are not compared: they would wait for the device.
    """
    names = {module: name for name, module in root.named_modules()}
    for state in fsdp_states(root):
        groups = fsdp_groups([state])
        if groups:
            for module in modules_of(state):
                _FirstForward(module, groups, names)


class _FirstForward:
    """The hooks of one module, which are removed after its first training forward."""

    def __init__(self, module: Module, groups: list[Any], names: dict[Any, str]) -> None:
        self._groups, self._names = groups, names
        self._before: list[tuple[Any, Tensor]] = []
        self._handles = [
            module.register_forward_pre_hook(self._begin),  # after FSDP2's, which gathers
            module.register_forward_hook(self._end, prepend=True),  # before FSDP2's, which frees
        ]

    def _begin(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if backward_pass() == -1:
            parts = [part for group in self._groups for part in group.fsdp_params]
            self._before = [
                (part, _sums(whole)) for part in parts if (whole := unsharded_of(part)) is not None
            ]

    def _end(self, module: Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling() or not self._before:
            return
        before, self._before = self._before, []
        for handle in self._handles:
            handle.remove()
        for part, sums in before:
            if not torch.equal(_sums(unsharded_of(part)), sums):
                owner = owner_of(part)
                name = ".".join(filter(None, [self._names.get(owner.module, ""), owner.param_name]))
                raise UsageError(
                    f"The forward of {name_of(module)} wrote {name}, of which it has a gathered copy: "
                    "the change would be lost. Write it outside of the forward, for example in a function "
                    "that the loop calls after optimizer.step() (the same in-place operation is right "
                    'there), or use strategy="ddp" or "zero1".'
                )


def _sums(tensor: Any) -> Tensor:
    """Return two sums that change with the values, without a copy of the tensor; NaN counts as zero."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    return torch.stack([local.sum(), torch.linalg.vector_norm(local, 1)]).nan_to_num()
