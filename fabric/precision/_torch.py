"""Private names of torch for loss scaling; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from operator import attrgetter

COUNTED_STEP, STEPPED = "_wrapped_by_lr_sched", "_opt_called"
"""Attributes of an optimizer's `step` and of the optimizer by which a scheduler detects a step."""

optimizer_states = attrgetter("_per_optimizer_states")
"""Return {id of an optimizer: state since the last update} of a `torch.amp.GradScaler`."""
