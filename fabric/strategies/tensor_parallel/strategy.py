"""`ModelParallelStrategy`: tensor parallelism and FSDP2 by a user's function."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fabric.core.errors import ArgumentTypeError
from fabric.strategies.parallel import ParallelStrategy, check_keywords
from fabric.strategies.tensor_parallel.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from fabric.strategies.parallel import Processes


class ModelParallelStrategy(ParallelStrategy):
    """Tensor parallelism, sequence parallelism and FSDP2 on a 2-D mesh, by a user's function.

    `fabric.setup` calls parallelize_fn(model, mesh) on all ranks. The function calls `parallelize_module`
    with mesh["tensor_parallel"] and optionally `fully_shard` with mesh["data_parallel"], and returns the
    model. Loaders are sharded by the data parallel rank: ranks of one tensor parallel group read the same
    batches, so `batch_size` is that of such a group. Seed all ranks alike. Every forward is a collective.

    Args:
        parallelize_fn: (model, device_mesh) -> model, in place.
        data_parallel_size: Number of groups that read different data; "auto": the number of nodes.
        tensor_parallel_size: Ranks that share one replica; "auto": the number of devices of a node.
        save_distributed_checkpoint: True: `fabric.save` without `format=` writes "sharded"; False: "full".
        process_group_backend: torch's backend ("gloo", "nccl"); None: the one for the devices.
        timeout: How long a collective waits for the other ranks.
        kwargs: Other arguments of `ParallelStrategy`.

    Raises:
        ArgumentTypeError: `parallelize_fn` is no function.
        ConfigurationError: In `Fabric(...)`: the sizes do not multiply to the number of ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        **kwargs: Unpack[Processes],
    ) -> None:
        check_keywords(self, ModelParallelStrategy, kwargs)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **kwargs)
        if not callable(parallelize_fn):
            raise ArgumentTypeError(
                f"parallelize_fn must be a function (model, device_mesh) -> model, but is {parallelize_fn!r}."
            )
        self.layout: Mesh = Mesh(parallelize_fn, data_parallel_size, tensor_parallel_size)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.state_dict_type = "sharded" if save_distributed_checkpoint else "full"
