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


def check_first_forward(root: Any, gate: Any) -> None:
    """Compare parameters before and after the first calls of each group of a model.

    Of each group the first forward in training and the first without gradients; of the root group also those
    of each method and layer for which `gate` unshards it. Later calls would wait for the device.
    """
    shards = {*root.parameters()}
    for path, module in root.named_modules():
        if is_fsdp(module):
            _FirstForward(module, path, shards)
    gate.first_calls = RootCalls(root, shards)


class _Comparison:
    """The gathered parameters of a module before a call, to be compared after it."""

    def __init__(self, module: Module, path: str, shards: set[Tensor]) -> None:
        self._module, self._path = module, path
        gathered = [pair for pair in module.named_parameters(path) if pair[1] not in shards]
        sums = [(name, p, _sums(p)) for name, p in gathered]
        self._before = [(name, p, before) for name, p, before in sums if before is not None]

    def check(self, what: str) -> None:
        """Raise if a parameter has changed."""
        for name, parameter, before in self._before:
            now = _sums(parameter)
            if now is not None and now.tolist() != before.tolist():
                raise UsageError(
                    f"{what} of {name_of(self._module)} wrote into {name}. In the forward this is a "
                    "gathered copy, which is freed afterwards, so the change would be lost. Write the same "
                    "operation outside of the forward, before fabric.setup or after optimizer.step(), or "
                    'use strategy="ddp" or "zero1".'
                )


class _FirstForward:
    """The hooks of one module, which are removed once it was compared with and without gradients."""

    def __init__(self, module: Module, path: str, shards: set[Tensor]) -> None:
        self._path, self._shards = path, shards
        self._left = {True, False}
        """Whether gradients are enabled, in the forwards that are still to be compared."""
        self._running: tuple[bool, _Comparison] | None = None
        self._handles = [
            module.register_forward_pre_hook(self._begin),  # after FSDP2's, which gathers
            module.register_forward_hook(self._end, prepend=True),  # before FSDP2's, which frees
        ]

    def _begin(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._running = None  # of a forward that failed
        mode = torch.is_grad_enabled()
        if mode in self._left and (module.training or not mode) and backward_pass() == -1:
            self._running = mode, _Comparison(module, self._path, self._shards)

    def _end(self, module: Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling() or self._running is None:
            return
        (mode, comparison), self._running = self._running, None
        self._left.discard(mode)
        if not self._left:
            for handle in self._handles:
                handle.remove()
        comparison.check("The forward")


class RootCalls:
    """Comparisons of the root group in calls other than the forward of the model."""

    def __init__(self, root: Module, shards: set[Tensor]) -> None:
        self._root, self._shards = root, shards
        self._seen: set[tuple[Any, bool]] = set()
        self._running: _Comparison | None = None

    def begin(self, call: Any) -> None:
        """Begin a call of the layer or the method of this name, whose group is gathered now."""
        self._running = None
        if torch.compiler.is_compiling():
            return
        key = call, torch.is_grad_enabled()
        if key not in self._seen:
            self._seen.add(key)
            self._running = _Comparison(self._root, "", self._shards)

    def end(self, what: str) -> None:
        """Compare at the end of a call."""
        running, self._running = self._running, None
        if running is not None:
            running.check(what)


def _sums(tensor: Any) -> Tensor | None:
    """Return two sums that change with the values; NaN counts as zero. None: it is not compared."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.dtype not in _COMPARED:
        return None
    if local.untyped_storage().nbytes() < local.numel() * local.element_size():
        return None  # freed by a forward inside of the call, which was compared itself
    with torch.no_grad(), no_dispatch_modes():  # selective checkpointing records operations
        double = torch.float32 if local.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(local, 1, dtype=torch.promote_types(local.dtype, torch.float32))
        return torch.stack([local.sum(dtype=double), norm.to(double)]).nan_to_num()
