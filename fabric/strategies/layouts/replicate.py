"""`Replicate`: every rank holds all parameters; gradients are averaged (torch's DistributedDataParallel).

Invariant: the reducer is armed at the start of every `fabric.backward`, and checked at its end. torch arms
it in
`DDP.forward` only, so that two forwards with two backwards, a backward outside `no_sync` of a forward inside
it, and any
method other than forward silently leave gradients unsynchronised (measured:
tests/equivalence/test_gradient_sync.py).
"""

from __future__ import annotations

import inspect
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.errors import UsageError
from fabric.core.traits import Traits
from fabric.forward import differentiable
from fabric.strategies.layouts.whole import Whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    from fabric.core.topology import Topology

_BUFFER_KEYWORDS = ("broadcast_buffers", "forward_sync_buffers")
"""DDP's switch for buffers; torch 2.13 renamed it."""


class Replicate(Whole):
    """DDP with bucket views by default (gradients live in the communication buckets: no copy, 4 bytes less a
    parameter).

    Args:
        settings: Keywords of `torch.nn.parallel.DistributedDataParallel`; they win over our defaults.
    """

    traits = Traits(
        needs_launch=True, data_parallel=True, start_methods=("popen", "spawn", "fork", "forkserver")
    )

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        self._replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._in_backward = False

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """DDP around the module. All ranks must call this; a module without trainable parameters is not
        wrapped.
        """
        if not any([p.requires_grad for p in module.parameters()]):
            _broadcast_from_zero([*module.parameters(), *module.buffers()])
            return module
        from torch.nn.parallel import DistributedDataParallel

        settings = {"gradient_as_bucket_view": True, **self.settings}
        for name in _BUFFER_KEYWORDS:
            settings.pop(name, None)
        # Buffers are kept alike by BufferSync, after training forwards only, so that evaluation makes no
        # collective.
        renamed = _BUFFER_KEYWORDS[1] in inspect.signature(DistributedDataParallel).parameters
        settings[_BUFFER_KEYWORDS[renamed]] = False
        if topology.device.type != "cpu" and "device_ids" not in settings:
            settings["device_ids"] = [topology.device.index]
        _broadcast_from_zero(list(module.buffers()))
        replica = DistributedDataParallel(module, **settings)
        self._replicas.add(replica)
        return replica

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module inside DDP."""
        return wrapped.module if wrapped in self._replicas else wrapped  # type: ignore[return-value]

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """DDP's own call; with buffers (batch norm), followed by their sync while training."""
        if wrapped in self._replicas and self._syncs_buffers(wrapped):
            return BufferSync(wrapped)
        return wrapped.__call__

    def method_plan(self, wrapped: Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with its outputs hooked so that a backward through them is synchronised."""
        return ArmedMethod(self, wrapped, method) if wrapped in self._replicas else method

    def _syncs_buffers(self, wrapped: Module) -> bool:
        wanted = all([self.settings.get(name, True) for name in _BUFFER_KEYWORDS])
        return wanted and next(wrapped.buffers(), None) is not None

    def no_sync(self, wrapped: Module) -> AbstractContextManager[Any]:
        """DDP's no_sync."""
        if wrapped not in self._replicas:
            return super().no_sync(wrapped)
        context: AbstractContextManager[Any] = wrapped.no_sync()  # type: ignore[operator]
        return context

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Arm every replica's reducer, run the backward, and check that each reduction finished.

        Raises:
            UsageError: Parameters got no gradient, so the ranks' gradients could not be averaged; names them.
        """
        syncing = []
        for replica in self._replicas:
            if replica.require_backward_grad_sync and not replica.static_graph:
                start = [tensor] if replica.find_unused_parameters else []
                replica.reducer.prepare_for_backward(start)
                syncing.append(replica)
        self._in_backward = True
        try:
            run(tensor, *args, **kwargs)
        finally:
            self._in_backward = False
        for replica in syncing:
            try:
                replica._check_reducer_finalized()
            except RuntimeError as error:
                raise _unused_parameters(replica, error) from error
            # Here, where all ranks are, and not in whichever forward comes next on each of them.
            replica._has_rebuilt_buckets |= replica.reducer._rebuild_buckets()

    def arm_from_hook(self, replica: DistributedDataParallel, grad: Tensor) -> None:
        """Arm in the middle of a plain `loss.backward()` that reached the output of a method other than
        forward.
        """
        if self._in_backward or not replica.require_backward_grad_sync:
            return
        if replica.find_unused_parameters or replica.static_graph:
            raise UsageError(
                "loss.backward() went through a method other than forward under find_unused_parameters or "
                "static_graph, "
                "where gradients would stay unsynchronised. Write fabric.backward(loss), or call "
                "model.forward."
            )
        try:
            replica.reducer.prepare_for_backward([])
        except RuntimeError as error:
            # A forward armed it for this same pass and gradients are on their way: nothing is left to do.
            if "Expected to have finished reduction" not in str(error):
                raise


class BufferSync:
    """The forward plan of a replica with buffers: rank zero's buffers on all ranks after each training
    forward.

    DDP sends them before the next forward, evaluation included; sent after it, ranks agree during evaluation
    too and an
    evaluation forward makes no collective, so ranks may run different numbers of evaluation batches.
    """

    __slots__ = ("buffers", "replica")

    def __init__(self, replica: Module) -> None:
        self.replica = replica
        self.buffers = list(replica.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replica's forward, then the sync."""
        replica = self.replica
        out = replica(*args, **kwargs)
        if replica.training and torch.is_grad_enabled() and replica.require_backward_grad_sync:
            _broadcast_from_zero(self.buffers)
        return out


class ArmedMethod:
    """A bound method of the user's module whose outputs keep the gradient sync under a plain
    `loss.backward()`.
    """

    __slots__ = ("layout", "method", "replica")

    def __init__(self, layout: Replicate, replica: Module, method: Callable[..., Any]) -> None:
        self.layout = layout
        self.replica = replica
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; one hook for each output that a backward may start from."""
        out = self.method(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in differentiable(out):
                if leaf.grad_fn is not None:
                    leaf.register_hook(lambda grad: self.layout.arm_from_hook(self.replica, grad))  # type: ignore[arg-type]
        return out

    def __getattr__(self, name: str) -> Any:
        if name in ArmedMethod.__slots__:  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.method, name)


def _broadcast_from_zero(tensors: list[Tensor]) -> None:
    """Rank zero's values in `tensors` on all ranks, one message per dtype. All ranks must call this.

    Writes through `.data`: batch norm saves its running statistics for backward, and a counted in-place
    change between
    two forwards and their backward (a GAN's discriminator) would make autograd refuse the backward.
    """
    by_dtype: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.data)
    for group in by_dtype.values():
        flat = torch.cat([b.reshape(-1) for b in group])
        dist.broadcast(flat, 0)
        parts = flat.split([b.numel() for b in group])
        torch._foreach_copy_(group, [part.view(b.shape) for part, b in zip(parts, group, strict=True)])


def _unused_parameters(replica: DistributedDataParallel, error: RuntimeError) -> Exception:
    found = re.search(r"did not receive grad for rank \d+:([ \d]*)", str(error))
    if found is None:
        return error
    names = [name for name, p in replica.module.named_parameters() if p.requires_grad]
    unused = [names[int(i)] for i in found.group(1).split() if int(i) < len(names)]
    return UsageError(
        f"Rank {dist.get_rank()}: these parameters of {type(replica.module).__name__} got no gradient in "
        f"this backward, so "
        f"the gradients of the ranks cannot be averaged: {', '.join(unused)}. If they are unused on "
        f"purpose, write "
        f'Fabric(strategy="ddp_find_unused_parameters_true"), or freeze them with requires_grad_(False).'
    )
