"""`mean_of_bucket`: what DDP calls to average a bucket of gradients."""

# No annotations as strings here: DDP reads those of its hook.
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from fabric.core.errors import RankError, UsageError
from fabric.core.torch_internals import call_after_backward

_sent: list[tuple[int, Any, Future[Tensor]]] = []
"""What is on its way. Ranks meet by name, and send in one order, as DDP does: a name is a place here."""


def mean_of_bucket(compression: str, bucket: GradBucket) -> Future[Tensor]:
    """The mean of a bucket over ranks, for DDP: it is there at the end of the backward.

    Raises:
        UsageError: A gradient is sparse.
    """
    import horovod.torch as hvd

    own = bucket.buffer()
    if own.is_sparse:
        raise UsageError(
            "A gradient is sparse (nn.Embedding(sparse=True)), which Horovod cannot average here. Write "
            "sparse=False."
        )
    compressor = getattr(hvd.Compression, compression)
    sent, context = compressor.compress(own)
    handle = hvd.allreduce_async_(sent, name=f"gradients.{len(_sent)}", op=hvd.Average)
    future: Future[Tensor] = Future(devices=None if own.is_cpu else [own.device])
    _sent.append((handle, partial(compressor.decompress, ctx=context), future))
    call_after_backward(_arrive)  # before DDP's own, which waits for the futures
    return future


def _arrive() -> None:
    import horovod.torch as hvd

    came = _sent.copy()
    _sent.clear()
    for handle, decompress, future in came:
        try:
            future.set_result(decompress(hvd.synchronize(handle)))
        except hvd.HorovodInternalError as error:
            raise RankError(
                f"Horovod stopped while this rank averaged gradients ({error}). Another rank has ended, or "
                "failed: its output says why. If it had fewer batches, let each rank call "
                "fabric.strategy.join() after its last one."
            ) from error
