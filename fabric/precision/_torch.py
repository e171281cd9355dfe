"""Private names of torch around loss scaling; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from operator import attrgetter

COUNTED_STEP, STEPPED = "_wrapped_by_lr_sched", "_opt_called"
"""Attributes of an optimizer's `step` and of the optimizer by which a scheduler sees that it stepped."""

optimizer_states = attrgetter("_per_optimizer_states")
"""Return what a `torch.amp.GradScaler` stores of optimizers since its last update, by their ids."""
