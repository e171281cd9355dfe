"""Optimizers around others, in the manner of Lookahead: many do not call torch's constructor."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer, RAdam

from fabric import Fabric


class Bare(Optimizer):
    """It sets what its own methods read."""

    def __init__(self, base, every=2, alpha=0.5):
        self.base, self.every, self.alpha, self.count = base, every, alpha, 0
        self.param_groups = base.param_groups
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for p in [p for group in self.param_groups for p in group["params"]]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, self.alpha))
        return loss

    def zero_grad(self):
        self.base.zero_grad()


class WithStepHooks(Bare):
    """As in timm."""

    def __init__(self, base):
        super().__init__(base)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.defaults = base.defaults


X = torch.arange(48.0, dtype=torch.float64).view(12, 4).sin()


def trained(kind, strategy, rank=0, size=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = kind(RAdam(model.parameters(), lr=0.1))
    backward = torch.Tensor.backward
    if strategy is not None:
        fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    x = X[rank::size]
    for _ in range(5):
        optimizer.zero_grad()
        backward((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def on_ranks(kind, strategy):
    return trained(kind, strategy, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("kind", [Bare, WithStepHooks])
def test_they_train_as_in_one_process(ranks, kind, strategy):
    want = trained(kind, None)
    for found in ranks.run(on_ranks, kind, strategy, world_size=2):
        torch.testing.assert_close([p.detach() for p in found], [p.detach() for p in want])
