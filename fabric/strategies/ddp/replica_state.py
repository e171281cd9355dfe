"""`ReplicaState`: the record of one replica in the layout of DDP."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from fabric.core._torch import tensor_of
from fabric.strategies.buffers import SyncedBuffers, shared_buffers
from fabric.strategies.tensor_sync import grad_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel


class ReplicaState:
    """Parameters, buffers and hooks of a replica, as of the creation of its reducer."""

    def __init__(self, replica: DistributedDataParallel, syncs_buffers: bool) -> None:
        named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
        self.names, self.trained = [name for name, _ in named], [p for _, p in named]
        """Parameters of the reducer: trainable at that time, and not shared with another model."""
        self.reduced_elsewhere: set[Tensor] = set()
        """Parameters that replicas in `shared` reduce."""
        self.shared: list[DistributedDataParallel] = []
        self.hooks: list[Any] = []
        self.at_setup = {id(p) for p in replica.module.parameters()}
        synced = syncs_buffers and shared_buffers(replica.module)
        self.buffers = SyncedBuffers(replica.module) if synced else None
        """Buffers to broadcast, or None."""
        self.nodes: dict[int, Any] = {}
        """Graph nodes that write the gradients of parameters with our hook, by id of the parameter."""
        self.local = False
        """Whether its gradients may be unsynchronised."""
        self.manual: list[weakref.ref[Tensor]] | None = None
        """Results of the last `torch.autograd.grad`; None: something else is unsynchronised, or nothing."""
        self.without_grad: list[Parameter] = []
        """Parameters of `trained` that had no gradient at that time."""
        self.passes = 0
        """Number of synchronising backwards that reached it."""
        self.received_grad = False
        """Whether the last synchronising pass reached it."""
        self.versions_at_reduction: list[Any] | None = None
        """Versions of the gradients after a reduction inside of that pass; None: there was none."""
        self.has_bucket_views = replica.gradient_as_bucket_view
        """Whether gradients are views of the reducer's buckets."""
        self.views: dict[Tensor, Tensor] = {}
        """{gradient: alias of its bucket memory}."""
        self.pointers: list[int] = []
        self.averaged: dict[int, int] = {}
        """{id of a parameter: id of the gradient that the reducer averages}."""

    def record_views(self) -> None:
        """Record the memory of the gradients."""
        grads = [p.grad for p in self.trained if p.grad is not None and not p.grad.is_sparse]
        self.views = {grad: grad.detach() for grad in grads}
        self.pointers = [grad.data_ptr() for grad in grads]
        self.averaged = {id(p): id(p.grad) for p in self.trained if p.grad in self.views}

    def forget_views(self) -> None:
        """Forget the memory of the gradients, which the reducer will replace."""
        self.views, self.pointers, self.averaged = {}, [], {}

    def restore_views(self) -> None:
        """Undo `p.grad.data = values`, which detaches a gradient from its bucket; keep the values."""
        for view, memory in self.views.items():
            memory.copy_(view)
            view.data = memory

    def named(self) -> list[tuple[str, Parameter]]:
        """Return (name, parameter) of the reducer's parameters."""
        return [*zip(self.names, self.trained, strict=True)]

    def grad_versions(self) -> list[Any]:
        """Return the version of each gradient."""
        return [grad_version(p) for p in self.trained]

    def is_unsynced(self) -> bool:
        """Whether gradients may differ between ranks."""
        if self.manual is None or not self.local:
            return self.local
        # Only if the loop uses them as gradients, changed or not: one rank alone may compute some for a log.
        manual = {id(grad) for ref in self.manual if (grad := tensor_of(ref)) is not None}
        # Gradients of a backward, which the loop may replace on all ranks, do not count.
        made = [p.grad is not None for p in self.without_grad]
        return any(made) or any([id(p.grad) in manual for p in self.trained])

    def mark_manual(self, grads: Iterable[Tensor | None]) -> None:
        """Record results of `torch.autograd.grad`."""
        self.manual = [weakref.ref(grad) for grad in grads if grad is not None]
        self.without_grad = [p for p in self.trained if p.grad is None]
