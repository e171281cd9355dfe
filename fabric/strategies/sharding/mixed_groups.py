"""Steps of optimizers that have shards and whole parameters in one group.

torch's optimizers join the parameters of a group in one operation on many tensors (`foreach`, the default on
GPUs), which does not take DTensors and plain tensors together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.strategies.sharding.split import is_dtensor

if TYPE_CHECKING:
    from torch.optim import Optimizer


def separate_kinds(optimizer: Optimizer) -> None:
    """Step shards and whole parameters apart, if this optimizer of torch has both in one group. Others may
    compute something of a whole group, and are not changed.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if is_torchs and len(_groups_of_one_kind(optimizer)) > len(optimizer.param_groups):
        optimizer.register_step_pre_hook(_step_separately)
        # `zero_grad(set_to_none=False)` joins the gradients of all groups. It reads the defaults only.
        optimizer.defaults.update(dict.fromkeys({"foreach", "fused"} & {*optimizer.defaults}, False))


def _step_separately(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step pre-hook: replace one of torch's optimizers by a view of it, in whose groups parameters are of one
    kind; None: they are already.
    """
    groups = _groups_of_one_kind(optimizer)
    if len(groups) == len(optimizer.param_groups):
        return None
    view = object.__new__(type(optimizer))
    vars(view).update({**vars(optimizer), "param_groups": groups})
    return (view, *args[1:]), kwargs


def _groups_of_one_kind(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups; instead of one with both kinds, one for each kind."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        whole = [p for p in group["params"] if not is_dtensor(p)]
        if 0 < len(whole) < len(group["params"]):
            groups += [
                {**group, "params": [*filter(is_dtensor, group["params"])]},
                {**group, "params": whole},
            ]
        else:
            groups.append(group)
    return groups
