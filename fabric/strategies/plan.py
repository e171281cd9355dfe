"""`Plan`: what `resolve` decided, as a value. A strategy is completed by one (`bind`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.io.checkpoint_io import CheckpointIO
    from fabric.plugins.precision.precision import Precision


@dataclass(frozen=True)
class Plan:
    """Everything decided."""

    strategy: Any
    accelerator: Accelerator
    devices: list[torch.device]
    """Those of this machine."""
    num_nodes: int
    precision: Precision
    environment: ClusterEnvironment
    checkpoint_io: CheckpointIO | None
    """None: the strategy's own."""
