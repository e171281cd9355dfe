"""Steps of optimizers that have shards and whole parameters in one group.

torch's optimizers join the parameters of a group in one operation on many tensors (`foreach`, the default on
GPUs), which does not take DTensors and plain tensors together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.strategies.sharding.split import is_dtensor

if TYPE_CHECKING:
    from torch.optim import Optimizer


def step_separately(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step pre-hook: replace one of torch's optimizers by a view of it, in whose groups parameters are of one
    kind; None: they are already. Others, which may compute something of a whole group, are not changed.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
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
    if len(groups) == len(optimizer.param_groups):
        return None
    view = object.__new__(type(optimizer))
    vars(view).update({**vars(optimizer), "param_groups": groups})
    return (view, *args[1:]), kwargs
