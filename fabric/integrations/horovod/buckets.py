"""`average_bucket`: communication hook of DDP that averages a bucket of gradients with Horovod."""

# No `from __future__ import annotations`: DDP reads the annotations of its hook.
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from fabric.core.errors import UsageError
from fabric.integrations.horovod.package import translated_errors
from fabric.strategies._torch import call_after_backward

_pending: list[tuple[int, Any, Future[Tensor]]] = []
"""Pending all-reduces. Horovod matches tensors by name: the index here, since DDP sends in the same order."""


def average_bucket(compression: str, bucket: GradBucket) -> Future[Tensor]:
    """Return a future of the mean of a bucket over ranks, which is set at the end of the backward.

    Raises:
        UsageError: A gradient is sparse.
        RankError: Another rank exited.
    """
    import horovod.torch as hvd

    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise UsageError(
            "A gradient is sparse (nn.Embedding(sparse=True)), which Horovod cannot average here. Write "
            "sparse=False."
        )
    compressor = getattr(hvd.Compression, compression)
    compressed, context = compressor.compress(buffer)
    with translated_errors("averaged gradients"):
        handle = hvd.allreduce_async_(compressed, name=f"gradients.{len(_pending)}", op=hvd.Average)
    future: Future[Tensor] = Future(devices=None if buffer.is_cpu else [buffer.device])
    _pending.append((handle, partial(compressor.decompress, ctx=context), future))
    call_after_backward(_set_futures)  # runs before DDP's callback, which waits for the futures
    return future


def _set_futures() -> None:
    import horovod.torch as hvd

    pending = _pending.copy()
    _pending.clear()
    for handle, decompress, future in pending:
        with translated_errors("averaged gradients"):
            future.set_result(decompress(hvd.synchronize(handle)))
