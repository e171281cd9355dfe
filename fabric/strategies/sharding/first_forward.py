"""`check_first_forward`: rejects a forward that writes parameters of a group, which would be lost.

FSDP2 gathers a copy of the parameters for a forward. Values that the forward writes are dropped with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import backward_pass
from fabric.core.errors import UsageError
from fabric.strategies.sharding._torch import (
    fsdp_groups,
    fsdp_states,
    modules_of,
    no_dispatch_modes,
    owner_of,
    unsharded_of,
)
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        """(FSDP2's record of a parameter, its sums before the forward)."""
        self._handles = [
            module.register_forward_pre_hook(self._begin),  # after FSDP2's, which gathers
            module.register_forward_hook(self._end, prepend=True),  # before FSDP2's, which frees
        ]

    def _begin(self, module: Module, args: Any) -> None:
        self._before = []  # of a forward that failed
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if backward_pass() == -1:
            parts = [part for group in self._groups for part in group.fsdp_params]
            pairs = [(part, _sums(unsharded_of(part))) for part in parts]
            self._before = [(part, sums) for part, sums in pairs if sums is not None]

    def _end(self, module: Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling() or not self._before:
            return
        before, self._before = self._before, []
        for handle in self._handles:
            handle.remove()
        for part, sums in before:
            now = _sums(unsharded_of(part))
            if now is not None and now.tolist() != sums.tolist():
                owner = owner_of(part)
                name = ".".join(filter(None, [self._names.get(owner.module, ""), owner.param_name]))
                raise UsageError(
                    f"The forward of {name_of(module)} wrote into {name}. In the forward this is a "
                    "gathered copy, which is freed afterwards, so the change would be lost. Write the same "
                    "operation after optimizer.step(), outside of the forward, or use "
                    'strategy="ddp" or "zero1".'
                )


def _sums(tensor: Any) -> Tensor | None:
    """Return two sums that change with the values; NaN counts as zero. None: it is not compared."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.dtype not in _COMPARED:
        return None
    with torch.no_grad(), no_dispatch_modes():  # selective checkpointing records operations
        double = torch.float32 if local.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(local, 1, dtype=torch.promote_types(local.dtype, torch.float32))
        return torch.stack([local.sum(dtype=double), norm.to(double)]).nan_to_num()
