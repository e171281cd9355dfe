"""Private names of torch's optimizers; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with the hooks of its step."""

UNCOMPILED = "_torchdynamo_orig_callable"
"""Attribute of a compiled function with the function that was passed to `torch.compile`."""
