"""`mean_of_bucket`: what DDP calls to average a bucket of gradients."""

# No annotations as strings here: DDP reads those of its hook.
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from fabric.core.errors import UsageError
from fabric.integrations.horovod.package import others_may_end
from fabric.strategies._torch import call_after_backward

_sent: list[tuple[int, Any, Future[Tensor]]] = []
"""What is on its way. Ranks meet by name, and send in one order, as DDP does: a name is a place here."""


def mean_of_bucket(compression: str, bucket: GradBucket) -> Future[Tensor]:
    """The mean of a bucket over ranks, for DDP: it is there at the end of the backward.

    Raises:
        UsageError: A gradient is sparse.
        RankError: Another rank has ended.
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
    with others_may_end("averaged gradients"):
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
        with others_may_end("averaged gradients"):
            future.set_result(decompress(hvd.synchronize(handle)))
