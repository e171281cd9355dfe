"""Private names of torch that `fabric.find_batch_size` uses; tests: `core/test_torch_internals.py`."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def local_collectives() -> Iterator[None]:
    """Context in which no process group communicates: results have their shapes, and values of this rank.

    torch's own backend for this is registered in place of each real one. Its all-reduce has no result in its
    future, which DDP reads, so that all-reduces bypass it.
    """
    c10d: Any = torch._C._distributed_c10d
    groups = [*distributed_c10d._world.pg_map] if torch.distributed.is_initialized() else []
    make = getattr(
        c10d.FakeProcessGroup, "_create_internal", c10d.FakeProcessGroup
    )  # torch 2.9 has no such method
    kinds, real = c10d.ProcessGroup.BackendType.__members__, []
    library = torch.library.Library("c10d", "IMPL")
    try:
        for group in groups:
            local = make(group.rank(), group.size())
            for device in group._device_types:
                backend = group._get_backend(device)
                real.append((group, device, kinds.get(backend.name().upper(), kinds["CUSTOM"]), backend))
                group._register_backend(device, kinds["UNDEFINED"], local)
        with warnings.catch_warnings():  # about a kernel that is replaced
            warnings.simplefilter("ignore")
            for key in {torch._C._dispatch_key_for_device(device.type) for _, device, *_ in real}:
                library.impl("allreduce_", kept_values, key, allow_override=True)
        yield
    finally:
        try:  # first, so that an interrupt cannot leave training without communication
            for group, device, kind, backend in real:
                group._register_backend(device, kind, backend)
        finally:
            library._destroy()


def kept_values(tensors: list[torch.Tensor], *_: Any) -> Any:
    """Return the result of an all-reduce that keeps the values: the tensors, and a finished request."""
    future: Any = Future(devices=[t.device for t in tensors if not t.is_cpu])
    future.set_result(tensors)
    c10d: Any = torch._C._distributed_c10d
    return tensors, c10d._create_work_from_future(future).boxed()
