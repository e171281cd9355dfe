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
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.errors import UsageError
from fabric.core.traits import Traits
from fabric.forward import differentiable
from fabric.strategies.layouts.whole import Whole
from fabric.wrappers import is_compiled

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
        self._buffered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._synced_in: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
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
        # Buffers are kept alike by us, after training backwards, so that evaluation makes no collective.
        renamed = _BUFFER_KEYWORDS[1] in inspect.signature(DistributedDataParallel).parameters
        settings[_BUFFER_KEYWORDS[renamed]] = False
        if topology.device.type != "cpu" and "device_ids" not in settings:
            settings["device_ids"] = [topology.device.index]
        _broadcast_from_zero(list(module.buffers()))
        replica = DistributedDataParallel(module, **settings)
        self.adopt(replica)
        return replica

    def adopt(self, wrapped: Module) -> None:
        """Take in a replica that came to be by copying or unpickling a model."""
        self._replica_of(wrapped)

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module inside DDP."""
        replica = self._replica_of(wrapped)
        return wrapped if replica is None else replica.module

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """DDP's own call; with buffers (batch norm), hooked so that a plain `loss.backward()` syncs them."""
        replica = self._replica_of(wrapped)
        if replica is not None and replica in self._buffered:
            return HookedCall(wrapped.__call__, self, replica, arms=False)
        return wrapped.__call__

    def method_plan(self, wrapped: Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, hooked so that a plain `loss.backward()` through its outputs is synchronised."""
        replica = self._replica_of(wrapped)
        return method if replica is None else HookedCall(method, self, replica, arms=True)

    def no_sync(self, wrapped: Module) -> AbstractContextManager[Any]:
        """DDP's no_sync."""
        replica = self._replica_of(wrapped)
        return nullcontext() if replica is None else replica.no_sync()

    def _replica_of(self, wrapped: Module) -> DistributedDataParallel | None:
        while is_compiled(wrapped):
            wrapped = wrapped._orig_mod  # type: ignore[assignment]
        if wrapped not in self._replicas and type(wrapped).__name__ != "DistributedDataParallel":
            return None
        if wrapped not in self._replicas:
            self._replicas.add(wrapped)  # type: ignore[arg-type]
            wanted = all([self.settings.get(name, True) for name in _BUFFER_KEYWORDS])
            if wanted and next(wrapped.buffers(), None) is not None:
                self._buffered.add(wrapped)  # type: ignore[arg-type]
        return wrapped  # type: ignore[return-value]

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
        for replica in self._buffered:
            if replica.training and replica.require_backward_grad_sync:
                _broadcast_from_zero(list(replica.buffers()))

    def on_plain_backward(self, replica: DistributedDataParallel, arms: bool) -> None:
        """A plain `loss.backward()` has reached an output: arm the reducer, and sync buffers at its end.

        Raises:
            UsageError: The gradients would stay unsynchronised.
        """
        if self._in_backward or not replica.require_backward_grad_sync:
            return
        if arms and (replica.find_unused_parameters or replica.static_graph):
            raise UsageError(
                "loss.backward() went through a method other than forward under find_unused_parameters or "
                "static_graph, where gradients would stay unsynchronised. Write fabric.backward(loss), or "
                "call "
                "model.forward."
            )
        if arms:
            self._arm(replica)
        running = torch._C._current_graph_task_id()
        if replica.training and replica in self._buffered and self._synced_in.get(replica) != running:
            self._synced_in[replica] = running
            sync = partial(_broadcast_from_zero, list(replica.buffers()))
            torch.autograd.Variable._execution_engine.queue_callback(sync)

    def _arm(self, replica: DistributedDataParallel) -> None:
        try:
            replica.reducer.prepare_for_backward([])
        except RuntimeError as error:
            # A forward armed it for this same pass and gradients are on their way: nothing is left to do.
            if "Expected to have finished reduction" not in str(error):
                raise


class HookedCall:
    """A forward or bound method whose outputs tell the layout when a plain `loss.backward()` reaches them.

    Buffers are sent at the end of a backward pass, where all ranks are. DDP sends them before each forward,
    evaluation included; like this an evaluation forward makes no collective and ranks agree during it.
    """

    __slots__ = ("arms", "call", "layout", "replica")

    def __init__(
        self, call: Callable[..., Any], layout: Replicate, replica: DistributedDataParallel, arms: bool
    ) -> None:
        self.call = call
        self.layout = layout
        self.replica = replica
        self.arms = arms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; one hook for each output that a backward may start from."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            one = out.__class__ is torch.Tensor and out.grad_fn is not None
            for leaf in (out,) if one else differentiable(out):
                if leaf.grad_fn is not None:
                    leaf.register_hook(self._reached)
        return out

    def _reached(self, grad: Tensor) -> None:
        self.layout.on_plain_backward(self.replica, self.arms)

    def __getattr__(self, name: str) -> Any:
        if name in HookedCall.__slots__:  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)


def _broadcast_from_zero(tensors: list[Tensor]) -> None:
    """Rank zero's values in `tensors` on all ranks, one message per dtype. All ranks must call this.

    Writes through `.data`: batch norm saves its running statistics for backward, and a counted in-place
    change between a forward and a later backward would make autograd refuse that.
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
        f"this "
        f"backward, so the gradients of the ranks cannot be averaged: {', '.join(unused)}. If they are "
        f"unused on "
        f'purpose, write Fabric(strategy="ddp_find_unused_parameters_true"), or freeze them with '
        f"requires_grad_(False)."
    )
