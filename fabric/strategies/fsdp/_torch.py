"""Private names of torch that FSDP alone uses; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.strategies.sharding._torch import fsdp_groups, fsdp_states

if TYPE_CHECKING:
    from collections.abc import Callable


def reduce_in_place(root: Any, reduce: Callable[..., None]) -> None:
    """Replace the reduction of each group of a model by `reduce(torch's reduction, sharded parameters)`."""
    for group in fsdp_groups(fsdp_states(root)):
        group.post_backward = partial(reduce, group.post_backward, group.fsdp_params)


def has_hooks(parameter: Any) -> bool:
    """Whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
