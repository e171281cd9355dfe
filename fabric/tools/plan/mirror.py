"""One rank of N that do not exist: a process group in which every other rank has this rank's tensors.

Used by `fabric plan`, so that strategies run unchanged. No message is sent; only shapes and sizes of results
are correct.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fabric.core import slices
from fabric.tools.plan._torch import finished, group_names

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "mirror"
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
"""Times that a rank in a ring of n sends (n - 1) / n of a tensor (broadcast: the mean over ranks)."""
TRAFFIC: Counter[str] = Counter()
"""Bytes that this rank has sent, by kind of collective."""
_LEFT_OUT = ("call check", "watchdog")
"""Slices that would wait for other ranks."""


_ProcessGroup: Any = dist.ProcessGroup  # its overloads differ between versions


def _bytes(tensors: list[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


class MirrorGroup(_ProcessGroup):
    """A process group whose other ranks have the tensors of this rank. Sums keep the values, like means."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._count = store, size

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        return group_names()[self]  # type: ignore[no-any-return]

    pg_name = group_name

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def getBackendName(self) -> str:
        """The name of the backend."""
        return BACKEND

    def _send(self, kind: str, whole: int) -> None:
        """Count a collective on tensors of `whole` bytes."""
        part = RING[kind] * whole * (self._count - 1) // self._count if kind in RING else whole
        TRAFFIC[kind] += part

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Keep the values, also in a sum."""
        self._send("all_reduce", _bytes(tensors))
        if options is not None and options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._count)
        return finished(tensors)

    def keep(self, tensors: Any = None, *_: Any) -> Any:
        """Keep the values."""
        return finished(tensors)

    allreduce_coalesced = allreduce
    barrier = keep

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Any:
        """Keep the values."""
        self._send("broadcast", _bytes(tensors))
        return finished(tensors)

    reduce = broadcast

    def send(self, tensors: list[Tensor], *_: Any) -> Any:
        """Count the bytes: no rank receives."""
        self._send("send", _bytes(tensors))
        return finished(tensors)

    def recv(self, tensors: list[Tensor], *_: Any) -> Any:
        """Write zeros: another stage's values are unknown."""
        for tensor in tensors:
            tensor.zero_()
        return finished(tensors)

    recv_anysource = recv

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Any:
        """Write this rank's tensor as that of each rank."""
        for parts, given in zip(outputs, inputs, strict=True):
            self._send("all_gather", _bytes(parts))
            for part in parts:
                part.copy_(given)
        return finished(outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, *_: Any) -> Any:
        """Write this rank's tensor in each rank's part of one tensor."""
        self._send("all_gather", _bytes([output]))
        for part in output.view(self._count, -1):
            same = part.untyped_storage()._cdata == given.untyped_storage()._cdata
            if not same or part.storage_offset() != given.storage_offset():
                part.copy_(given.reshape(-1))
        return finished([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        """Write this rank's tensor in each rank's part, for several tensors."""
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return finished(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any) -> Any:
        """Write this rank's part."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._send("reduce_scatter", _bytes(parts))
            output.copy_(parts[self.rank()])
        return finished(outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, *_: Any) -> Any:
        """Write this rank's part of one tensor."""
        self._send("reduce_scatter", _bytes([given]))
        output.copy_(given.view(self._count, -1)[self.rank()].view_as(output))
        return finished([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        """Write this rank's parts of several tensors."""
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given)
        return finished(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Any:
        """Write this rank's parts; of other shapes the elements that fit."""
        self._send("all_to_all", _bytes(inputs))
        for output, given in zip(outputs, inputs, strict=True):
            if output.shape == given.shape:
                output.copy_(given)
        return finished(outputs)

    def alltoall_base(self, output: Tensor, given: Tensor, *_: Any) -> Any:
        """Write this rank's part of one tensor."""
        return self.alltoall([output], [given])

    # names of torch >= 2.13
    all_gather_single, reduce_scatter_single, all_to_all_single = (
        _allgather_base,
        _reduce_scatter_base,
        alltoall_base,
    )
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def join(group: type[MirrorGroup], store: Any, rank: int, ranks: int, nodes: int, fake: bool) -> None:
    """Make the default group, with this process as `rank` of so many ranks on each node.

    Args:
        group: The class of all process groups of this process.
        store: The store of the default group.
        rank: The rank of this process.
        ranks: Number of ranks of each node.
        nodes: Number of nodes.
        fake: Whether tensors have no values, so that none are compared.
    """
    # Its functions have the default group as a default argument: see ParallelStrategy.
    import torch.distributed.nn.functional  # noqa: F401

    for name in (*_LEFT_OUT, *["replicas", "loss check"] * fake):
        slices.SLICES[name] = "fabric.left_out"
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, _: group(store, rank, size), devices=["cpu"]
    )
    dist.init_process_group(f"cpu:{BACKEND}", store=store, rank=rank, world_size=ranks * nodes)
    os.environ.update(FABRIC_ENVIRONMENT="process_group", LOCAL_WORLD_SIZE=str(ranks))
    os.environ["LOCAL_RANK"] = str(rank % ranks)
