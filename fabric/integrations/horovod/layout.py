"""`HorovodLayout`: `Replicate` with gradients averaged by Horovod."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fabric.collectives.objects import broadcast_tree
from fabric.core.errors import UsageError
from fabric.integrations.horovod.buckets import average_bucket
from fabric.strategies.ddp._torch import has_built_buckets
from fabric.strategies.ddp.replicate import Replicate

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.topology import Topology


class HorovodLayout(Replicate):
    """DDP whose gradient buckets Horovod averages during the backward.

    Args:
        settings: As in `Replicate`.
        compression: A name of `horovod.torch.Compression`.
    """

    traits = replace(
        Replicate.traits,
        precisions=("64-true", "32-true", "16-true", "16-mixed", "bf16-mixed"),
        precisions_why="Horovod does not send bfloat16",
        lockstep=False,
    )

    def __init__(self, settings: dict[str, Any] | None = None, compression: str = "none") -> None:
        super().__init__(settings)
        self.compression = compression

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "compression": self.compression}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return DDP around the module. All ranks must call this."""
        wrapped = super().wrap(module, topology)
        self._models = 0  # ranks in `join()` make no call check of a backward
        replica = self._replica_of(wrapped)
        if replica is not None:
            replica.register_comm_hook(self.compression, average_bucket)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the user's optimizer, with rank zero's state if it has one. All ranks must call this."""
        optimizer, channel = super().setup_optimizer(optimizer), self.channel
        if channel is not None and channel.world_size > 1:
            local = optimizer.state_dict() if channel.collective.rank == 0 else None
            state = broadcast_tree(local, 0, channel)
            if state["state"]:
                optimizer.load_state_dict(state)
        return optimizer

    def check_join(self) -> None:
        """Raise unless this rank can add zeros to the reductions of other ranks.

        Raises:
            UsageError: The other ranks would also send buffers, or agree on the order of gradients.
        """
        if any([known.buffers for known in self._replicas.values()]):
            raise UsageError(
                "join() cannot keep the buffers of a model alike (batch norm), which ranks send after each "
                "backward. Write HorovodStrategy(broadcast_buffers=False)."
            )
        if not all([has_built_buckets(replica) for replica in self._replicas]):
            raise UsageError(
                "join() came before the first backward of this rank, in which ranks agree on the order of "
                "gradients. Give each rank one batch or more."
            )
