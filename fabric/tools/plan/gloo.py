"""Real ranks of a job on this machine: a gloo group that counts the bytes that this rank sends.

Used by `fabric plan` for pipelines, whose ranks do different work and send each other shapes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fabric.tools.plan.mirror import MirrorGroup

LIMIT = timedelta(seconds=120)
"""Time limit for all ranks to start a collective, so that no rank outlives the others."""
_METHODS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "broadcast": "broadcast",
    "allgather": "all_gather", "_allgather_base": "all_gather", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "reduce": "broadcast", "send": "send", "recv": "", "recv_anysource": "", "barrier": "",
}  # fmt: skip
"""Methods of process groups, and the kinds of collective under which their bytes count."""
_SINCE_TORCH_2_13 = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Other names of methods."""


class GlooGroup(MirrorGroup):
    """A process group of ranks that exist."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, LIMIT)

    def _run(self, method: str, *args: Any) -> Any:
        kind = _METHODS[method]
        if kind:
            sides = [sum([tensor.nbytes for tensor in _tensors(arg)]) for arg in args]
            self._send(kind, max(sides))
        return getattr(self._gloo, method)(*args)


def _method(name: str) -> Any:
    return lambda self, *args: self._run(name, *args)


for _name in (*_METHODS, *_SINCE_TORCH_2_13):
    setattr(GlooGroup, _name, _method(_SINCE_TORCH_2_13.get(_name, _name)))


def _tensors(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    return [tensor for part in arg for tensor in _tensors(part)] if isinstance(arg, list) else []
