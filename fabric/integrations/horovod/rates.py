"""`scale_learning_rate`: the linear rule for larger batches, with its warm-up."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fabric.core.errors import ConfigurationError


def scale_learning_rate(optimizer: Any, world_size: int, warmup_steps: int = 0) -> LRScheduler:
    """A scheduler that brings the learning rates of an optimizer to `world_size` times what they are.

    A global batch that is so many times larger wants so many times the rate, from the rate of one process at
    the start, in equal parts a step. Source: Goyal et al., arXiv 1706.02677, 2.1 and 2.2. Nothing is scaled
    unless this is called; the optimizer takes no other scheduler then.

    Args:
        optimizer: As it was made, or as `fabric.setup` gave it.
        world_size: `fabric.world_size`.
        warmup_steps: Calls of the scheduler's `step()`, one after each optimizer step, until the full rate is
            reached; 0: at once.

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
