"""Forwards that return their tensors in objects of other classes, beside plain torch on the joined batch."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(4, 4), where
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        out = torch.tanh(self.layer(x))
        if self.training:
            self.seen += out.detach().sum()
        self.aside = self.layer(out).tanh()
        return SimpleNamespace(out=out) if self.where in ("block", "twice") else out


class Actor(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Block(where), nn.Linear(4, 4)
        self.where = where

    def forward(self, x, into: list | None = None):
        hidden = self.block(self.first(x))
        if self.where == "twice":
            hidden = self.block(hidden.out)
        mean = self.last(hidden.out if isinstance(hidden, SimpleNamespace) else hidden)
        if self.where == "list":
            into.append(mean)
            return None
        return torch.distributions.Normal(mean, 1.0) if self.where == "root" else mean


def outputs(actor, x):
    into: list = []
    out = actor(x, into) if actor.where == "list" else actor(x)
    return into[0] if into else getattr(out, "mean", None) if actor.where == "root" else out


def one(actor, x, backward) -> None:
    backward(outputs(actor, x).pow(2).mean())


def forwards_first(actor, x, backward) -> None:
    losses = [outputs(actor, scale * x).sin().mean() for scale in (1, -2)]
    for loss in losses:
        backward(loss)


def evaluation_between(actor, x, backward) -> None:
    loss = outputs(actor, x).pow(2).mean()
    with torch.no_grad():
        outputs(actor.eval(), x)
    actor.train()
    backward(loss)


def frozen_between(actor, x, backward) -> None:
    loss = outputs(actor, x).pow(2).mean()
    frozen = next(actor.parameters()).requires_grad_(False)
    backward(loss)
    frozen.requires_grad_()


def states_between(actor, x, backward) -> None:
    loss = outputs(actor, x).pow(2).mean()
    actor.state_dict()
    backward(loss)


def inputs_with_gradients(actor, x, backward) -> None:
    backward(outputs(actor, x.clone().requires_grad_()).pow(2).mean() + outputs(actor, -x).sin().mean())


LOOPS = {
    f.__name__: f
    for f in (one, forwards_first, evaluation_between, frozen_between, states_between, inputs_with_gradients)
}
STRATEGIES = {
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "all freed": lambda: FSDPStrategy(auto_wrap_policy={Block}, reshard_after_forward=True),
}


def train(where: str, loop: str, fabric: Fabric | None) -> dict:
    torch.manual_seed(0)
    actor = Actor(where).double()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.3, momentum=0.5)
    x = torch.randn(12, 4, dtype=torch.float64)
    if fabric is not None:
        actor, optimizer = fabric.setup(actor, optimizer)
        x = x[fabric.global_rank :: fabric.world_size]
    for _ in range(3):
        optimizer.zero_grad()
        LOOPS[loop](actor, x, torch.Tensor.backward if fabric is None else fabric.backward)
        optimizer.step()
        assert all([type(p).__name__ != "Parameter" or fabric is None for p in actor.parameters()])
    return actor.state_dict()


def as_plain(strategy: str) -> None:
    warnings.filterwarnings("ignore", message="forward changed buffers")
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    for where in ("root", "list", "block", "twice"):
        for loop in LOOPS:
            expected, found = train(where, loop, None), train(where, loop, fabric)
            for key in [key for key in expected if "seen" not in key]:
                torch.testing.assert_close(found[key], expected[key], msg=f"{where}, {loop}: {key}")
            seen = fabric.all_gather(found["block.seen"])
            assert torch.equal(seen, seen[0].expand_as(seen)), f"{where}, {loop}: rank zero's buffers"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hidden_outputs_train_as_on_one_process(ranks, strategy, world_size):
    ranks.run(as_plain, strategy, world_size=world_size)


def frozen_after_forward(where: str) -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    fabric.launch()
    actor = fabric.setup(Actor(where))
    frozen_between(actor, torch.ones(2, 4), fabric.backward)
    return [name for name, p in actor.named_parameters() if p.grad is None]


@pytest.mark.parametrize("where", ["root", "list"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_frozen_after_the_forward_gets_no_gradient(ranks, where, world_size):
    assert ranks.run(frozen_after_forward, where, world_size=world_size) == [["first.weight"]] * world_size


class Hidden(nn.Module):
    """Its only output is in a class that nothing looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.distributions.Normal(self.layer(x), 1.0)


def of_one_group() -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    fabric.launch()
    model = fabric.setup(Hidden())
    for _ in range(2):
        fabric.backward(model(torch.full((1, 4), 1.0 + fabric.global_rank)).mean.sum())
    return model.layer.weight.grad.full_tensor().unique().tolist()


def test_a_model_of_one_group_with_hidden_outputs(ranks):
    assert ranks.run(of_one_group, world_size=2) == [[3.0]] * 2  # twice the mean of 1 and 2


def refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES["zero3"]())
    fabric.launch()
    actor = fabric.setup(Actor("nowhere").double())
    x = torch.ones(2, 4, dtype=torch.float64)
    out = actor(x)
    with pytest.raises(
        UsageError, match=r"did not return .* Return the tensor in a tuple, dict or dataclass"
    ):
        fabric.backward(actor.block.aside.sum())
    del out
    hidden = fabric.setup(Actor("root").double())
    with pytest.raises(UsageError, match="create_graph=True went through Actor"):
        fabric.backward(hidden(x).mean.pow(3).sum(), create_graph=True)
    hidden.zero_grad()
    fabric.backward(hidden(x).mean.sum())  # and goes on
    assert all([p.grad is not None for p in hidden.parameters()])


def test_what_a_forward_puts_aside_and_second_derivatives_are_refused(ranks):
    ranks.run(refused, world_size=2)


def frozen() -> None:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES["all freed"]())
    fabric.launch()
    model = Actor("nowhere").double()
    model.block.requires_grad_(False)
    model = fabric.setup(model)
    model(torch.ones(2, 4, dtype=torch.float64)).sum()
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float64))
    gate = model.module.__dict__["_fabric_gate"]
    assert not gate._hidden
    assert all([group.is_sharded for group in gate.shards])


def test_a_frozen_block_is_freed_as_before(ranks):
    ranks.run(frozen, world_size=2)
