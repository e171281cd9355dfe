"""`scale_learning_rate`: the linear scaling rule for larger batches, with warm-up."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fabric.core.errors import ConfigurationError


def scale_learning_rate(optimizer: Any, world_size: int, warmup_steps: int = 0) -> LRScheduler:
    """Return a scheduler that raises the learning rates of an optimizer to `world_size` times their values.

    For a global batch that is `world_size` times larger. The rate rises linearly from that of one process.
    Source: Goyal et al., arXiv 1706.02677, 2.1 and 2.2. Nothing is scaled unless this is called. Use no other
    scheduler for the optimizer then.

    Args:
        optimizer: The optimizer, set up or not.
        world_size: `fabric.world_size`.
        warmup_steps: Number of the scheduler's `step()` calls (one after each optimizer step) to the full
            rate; 0: full rate at once.

    Raises:
        ConfigurationError: `world_size` is less than 1, or `warmup_steps` negative.
    """
    if world_size < 1 or warmup_steps < 0:
        raise ConfigurationError(
            f"scale_learning_rate(world_size={world_size}, warmup_steps={warmup_steps}): give the number of "
            "processes, 1 or more, and of steps, 0 or more."
        )
    return LambdaLR(
        getattr(optimizer, "optimizer", optimizer),
        lambda step: 1 + (world_size - 1) * (min(1.0, step / warmup_steps) if warmup_steps else 1.0),
    )
