"""Whether an optimizer updates each parameter by itself, found by a trial: small copies of its parameters
are stepped in two parts and all together.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.backward_listeners import parameters_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_PER_GROUP, _STEPS = 4, 8


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's update depends on others: on a norm over all, or an estimate of the rate.

    False where it cannot be tried: the step draws random numbers, needs a closure or a device, or fails.
    """
    step: Any = type(optimizer).step
    if step.__module__.startswith("torch.optim") or len({*parameters_of(optimizer)}) < 2:
        return False
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            together = _stepped(optimizer, [0, 1])
            if not torch.equal(torch.get_rng_state(), rng):
                return False
            apart = _stepped(optimizer, [0]) + _stepped(optimizer, [1])  # each is zero where the other is not
    except Exception:
        return False
    finally:
        torch.set_rng_state(rng)
    return not torch.allclose(together, apart, rtol=1e-4, atol=0.0, equal_nan=True)


def _stepped(optimizer: Optimizer, parts: list[int]) -> Tensor:
    """Return the change of all parameters by steps with those of some parts: zeros for the other parts."""
    params = [*dict.fromkeys(parameters_of(optimizer))]
    small = {id(p): _small(p) for p in params}
    own = optimizer.__dict__
    empty: Any = {id(v): OrderedDict() for v in own.values() if isinstance(v, OrderedDict)}  # hooks
    # A deep copy in which whatever refers to a parameter refers to its stand-in, and nothing large is copied.
    memo: dict[int, Any] = {**small, **empty, id(optimizer.state): defaultdict(dict)}
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    twin.__dict__.update(deepcopy({name: v for name, v in own.items() if name != "step"}, memo))
    part = {id(small[id(p)]): i % 2 for i, p in enumerate(params)}
    for group in twin.param_groups:
        group["params"] = [p for p in group["params"][:_PER_GROUP] if part[id(p)] in parts]
    held = parameters_of(twin)
    before = [p.clone() for p in small.values()]
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without hooks of all optimizers
    for count in range(_STEPS):
        for p in held:
            # One part goes on in a direction; gradients of the other change their sign, and size, each time.
            p.grad = (-0.01 if count % 2 else 1e4) * p.cos() if part[id(p)] else p.sin() * 0.1 + 1.0
        step(twin)
    return torch.cat([(p - old).flatten() for p, old in zip(small.values(), before, strict=True)])


def _small(parameter: Tensor) -> Tensor:
    shape = [min(size, 3) for size in parameter.shape]
    values = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).cos()
    return torch.nn.Parameter(values.view(shape), parameter.requires_grad)
