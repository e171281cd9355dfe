"""Detection of optimizers whose update of a parameter depends on other parameters.

A trial steps small copies of the parameters in two halves, and all together.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.backward_listeners import parameters_of, trial_of_steps
from fabric.core.tree import flatten

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_PER_GROUP, _STEPS = 4, 8


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's update depends on others: on a global norm, or an estimate of the learning rate.

    So does an update by a list of the optimizer's own with an entry for each parameter: the entries of some
    parameters are those of others. False without a trial result: the step draws random numbers, needs a
    closure or a device, or raises.
    """
    step: Any = type(optimizer).step
    if step.__module__.startswith("torch.optim") or len({*parameters_of(optimizer)}) < 2:
        return False
    rng = torch.get_rng_state()
    has_own = False
    try:
        with torch.no_grad():
            together = _stepped(optimizer, [0, 1])
            if not torch.equal(torch.get_rng_state(), rng):
                return False
            has_own = bool(_own_tensors(optimizer))
            separate = _stepped(optimizer, [0]) + _stepped(optimizer, [1])  # zero for the other half
    except Exception:
        return has_own  # entries of other shapes
    finally:
        torch.set_rng_state(rng)
    return not torch.allclose(together, separate, rtol=1e-4, atol=0.0, equal_nan=True)


def _stepped(optimizer: Optimizer, halves: list[int]) -> Tensor:
    """Return the change of all parameters by steps with the parameters of `halves`; zeros for the others."""
    params = [*dict.fromkeys(parameters_of(optimizer))]
    small = {id(p): _small(p) for p in params}
    local = optimizer.__dict__
    empty: Any = {id(v): OrderedDict() for v in local.values() if isinstance(v, OrderedDict)}  # hooks
    # A deep copy whose references to parameters are replaced by the small copies.
    own = {id(tensor): _small_own(tensor) for tensor in _own_tensors(optimizer)}
    memo: dict[int, Any] = {**small, **own, **empty, id(optimizer.state): defaultdict(dict)}
    trial = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    trial.__dict__.update(deepcopy({name: v for name, v in local.items() if name != "step"}, memo))
    half = {id(small[id(p)]): i % 2 for i, p in enumerate(params)}
    for group in trial.param_groups:
        group["params"] = [p for p in group["params"][:_PER_GROUP] if half[id(p)] in halves]
    stepped = parameters_of(trial)
    before = [p.clone() for p in small.values()]
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without hooks of all optimizers
    for count in range(_STEPS):
        for p in stepped:
            # Gradients of one half keep their direction; those of the other change sign and size each step.
            p.grad = (-0.01 if count % 2 else 1e4) * p.cos() if half[id(p)] else p.sin() * 0.1 + 1.0
        with trial_of_steps():
            step(trial)
    return torch.cat([(p - old).flatten() for p, old in zip(small.values(), before, strict=True)])


def _small(parameter: Tensor) -> Tensor:
    shape = [min(size, 3) for size in parameter.shape]
    values = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).cos()
    return torch.nn.Parameter(values.view(shape), parameter.requires_grad)


def _own_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in attributes of the optimizer that are no parameters, states or numbers."""
    params = {id(p) for p in parameters_of(optimizer)}
    leaves = flatten([value for name, value in vars(optimizer).items() if name != "state"])[0]
    return [v for v in leaves if isinstance(v, torch.Tensor) and v.dim() and id(v) not in params]


def _small_own(tensor: Tensor) -> Tensor:
    # Large, so that an entry that is not the parameter's own shows also if it has little weight.
    return 1e4 * tensor.detach()[tuple([slice(3)] * tensor.dim())].double()
