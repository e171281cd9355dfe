"""`check_first_forward`: rejects a forward that writes parameters of a group, which would be lost.

FSDP2 gathers a copy of the parameters for a forward. Values that the forward writes are dropped with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import backward_pass, is_fsdp
from fabric.core.errors import UsageError
from fabric.strategies.sharding._torch import no_dispatch_modes
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_first_forward(root: Any) -> None:
    """Compare parameters before and after the first training forward of each group of a model.

    Later forwards are not compared: they would wait for the device.
    """
    shards = {*root.parameters()}
    for path, module in root.named_modules():
        if is_fsdp(module):
            _FirstForward(module, path, shards)


class _FirstForward:
    """The hooks of one module, which are removed after its first training forward."""

    def __init__(self, module: Module, path: str, shards: set[Tensor]) -> None:
        self._path, self._shards = path, shards
        self._before: list[tuple[str, Tensor, Tensor]] | None = None
        """(name, gathered parameter, its sums before the forward); None: the forward is not compared."""
        self._handles = [
            module.register_forward_pre_hook(self._begin),  # after FSDP2's, which gathers
            module.register_forward_hook(self._end, prepend=True),  # before FSDP2's, which frees
        ]

    def _begin(self, module: Module, args: Any) -> None:
        self._before = None  # of a forward that failed
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if backward_pass() == -1:
            gathered = [pair for pair in module.named_parameters(self._path) if pair[1] not in self._shards]
            sums = [(name, p, _sums(p)) for name, p in gathered]
            self._before = [(name, p, before) for name, p, before in sums if before is not None]

    def _end(self, module: Module, args: Any, out: Any) -> None:
        before, self._before = self._before, None
        if torch.compiler.is_compiling() or before is None:
            return
        for handle in self._handles:
            handle.remove()
        for name, parameter, sums in before:
            now = _sums(parameter)
            if now is not None and now.tolist() != sums.tolist():
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
