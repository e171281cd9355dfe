"""Models that share modules, each set up by a call of its own, beside plain torch on the joined batch."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import FSDPStrategy


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        self.register_buffer("first", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.first.copy_(x[0, 0].detach())  # rank zero's rows are the first ones of the batch
        return self.layers(x)


class Agent(nn.Module):
    def __init__(self, actor: nn.Module, out: int) -> None:
        super().__init__()
        self.actor, self.value = actor, nn.Linear(2, out)

    def forward(self, x):
        return self.value(self.actor(x))


STRATEGIES = {
    "ddp": lambda: "ddp",
    "unused": lambda: "ddp_find_unused_parameters_true",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
    "zero3": FSDPStrategy,
    "encoder-group": lambda: FSDPStrategy(auto_wrap_policy={Encoder}),
    "layer-groups": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "checkpointed": lambda: FSDPStrategy(activation_checkpointing_policy={Encoder}),
}
ALL = [*STRATEGIES]


def nets(kind: str) -> list[nn.Module]:
    """Two or three models that share parameters."""
    torch.manual_seed(7)
    encoder = Encoder()
    actor = nn.Sequential(encoder, nn.Tanh(), nn.Linear(6, 2))
    if kind == "part last":  # the second model has all of the first
        return [m.double() for m in (actor, Agent(actor, 2))]
    if kind == "part first":
        return [m.double() for m in (Agent(actor, 2), actor)]
    if kind == "three":
        critic = nn.Sequential(encoder, nn.Linear(6, 3), nn.Linear(3, 2))
        return [m.double() for m in (actor, critic, nn.Sequential(encoder, nn.Tanh(), critic[1]))]
    return [m.double() for m in (actor, nn.Sequential(encoder, nn.Linear(6, 2)))]


class Loop:
    """Models with their optimizers, set up or plain, and the batch of a rank or of all."""

    def __init__(self, strategy: str | None, kind: str = "encoder", optimizers: str = "each") -> None:
        self.fabric = None
        warnings.filterwarnings("ignore", "forward changed buffers")  # rank zero's are the oracle's
        if strategy is not None:
            made = STRATEGIES[strategy]()
            self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=made)
            self.fabric.launch()
        self.models = nets(kind)
        held = list(dict.fromkeys(p for m in self.models for p in m.parameters()))
        if optimizers == "one":
            groups = [held]
        elif optimizers == "overlapping":  # both step the encoder
            groups = [[*m.parameters()] for m in self.models]
        else:
            groups, left = [], {*held}
            for model in self.models:
                groups.append([p for p in model.parameters() if p in left])
                left -= {*groups[-1]}
        self.optimizers = [torch.optim.SGD(group, lr=0.2, momentum=0.5) for group in groups if group]
        if self.fabric is not None:
            self.models = [self.fabric.setup(m) for m in self.models]
            self.optimizers = [self.fabric.setup_optimizers(o) for o in self.optimizers]

    def data(self, step: int, models: int = 3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()
        if self.fabric is not None:
            x = x.chunk(self.fabric.world_size)[self.fabric.global_rank]
        return x

    def backward(self, loss) -> None:
        loss.backward() if self.fabric is None else self.fabric.backward(loss)

    def loss(self, number: int, x):
        return (self.models[number](x) - number).pow(2).mean()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def values(self) -> list[dict[str, torch.Tensor]]:
        return [{name: v.clone() for name, v in m.state_dict().items()} for m in self.models]


def alternating(loop: Loop, steps: int = 2) -> None:
    """A backward through each model alone, and a step after each; then one through all of them."""
    for step in range(steps):
        for number in range(len(loop.models)):
            loop.zero_grad()
            loop.backward(loop.loss(number, loop.data(step)))
            loop.step()
    loop.zero_grad()
    x = loop.data(steps)
    loop.backward(sum(loop.loss(number, x) for number in range(len(loop.models))))
    loop.step()


def assert_like_one_process(loop: Loop, plain: Loop) -> None:
    for mine, other in zip(loop.values(), plain.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def trains(strategy: str, kind: str, optimizers: str) -> None:
    loop, plain = Loop(strategy, kind, optimizers), Loop(None, kind, optimizers)
    for one in (loop, plain):
        alternating(one)
    assert_like_one_process(loop, plain)


@pytest.mark.parametrize("kind", ["encoder", "part first", "part last", "three"])
@pytest.mark.parametrize("strategy", ALL)
def test_models_that_share_modules_train_like_one_process(ranks, strategy, kind):
    ranks.run(trains, strategy, kind, "each", world_size=2)


@pytest.mark.parametrize("optimizers", ["one", "overlapping"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_shared_parameters_in_one_optimizer_and_in_several(ranks, strategy, optimizers):
    ranks.run(trains, strategy, "encoder", optimizers, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_models_that_share_modules_on_three_ranks(ranks, strategy):
    ranks.run(trains, strategy, "three", "each", world_size=3)


def given_to_setup(strategy: str) -> None:
    """`fabric.setup(model, optimizer)` for each, with optimizers that were made before."""
    loop, plain = Loop(None), Loop(None)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    loop.fabric = fabric
    actor, critic = loop.models
    first = torch.optim.SGD(actor[2].parameters(), lr=0.2, momentum=0.5)
    second = torch.optim.SGD(critic.parameters(), lr=0.2, momentum=0.5)
    plain.optimizers = [
        torch.optim.SGD(plain.models[0][2].parameters(), lr=0.2, momentum=0.5),
        torch.optim.SGD(plain.models[1].parameters(), lr=0.2, momentum=0.5),
    ]
    actor, first = fabric.setup(actor, first)
    critic, second = fabric.setup(critic, second)
    loop.models, loop.optimizers = [actor, critic], [first, second]
    for one in (loop, plain):
        alternating(one)
    assert_like_one_process(loop, plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "encoder-group"])
def test_optimizers_made_before_setup_follow_shared_parameters(ranks, strategy):
    ranks.run(given_to_setup, strategy, world_size=2)


def accumulates(strategy: str) -> None:
    """Local gradients of shared parameters wait for a backward that synchronises them, through any model."""
    loop, plain = Loop(strategy), Loop(None)
    for one in (loop, plain):
        for step in range(2):
            one.zero_grad()
            with nullcontext() if one is plain else one.fabric.no_backward_sync(one.models[1]):
                one.backward(one.loss(1, one.data(2 * step)))
            one.backward(one.loss(1, one.data(2 * step + 1)))
            one.backward(one.loss(0, one.data(9)))
            one.step()
    assert_like_one_process(loop, plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_gradients_of_shared_parameters_accumulate(ranks, strategy):
    ranks.run(accumulates, strategy, world_size=2)


def never_synchronised() -> None:
    loop = Loop("ddp", optimizers="one")
    with loop.fabric.no_backward_sync(loop.models[1]):
        loop.backward(loop.loss(1, loop.data(dist.get_rank())))
    with pytest.raises(UsageError, match="were never synchronised"):
        loop.step()


def test_local_gradients_of_shared_parameters_are_refused_in_a_step(ranks):
    ranks.run(never_synchronised, world_size=2)


def copied(together: bool) -> None:
    """A copy of one model shares nothing any more; copies made together share as their originals do."""
    loop, plain = Loop("ddp"), Loop(None)
    for one in (loop, plain):
        alternating(one, 1)
        if together:
            one.models = copy.deepcopy(one.models)
        else:
            one.models = [copy.deepcopy(one.models[1])]
        held = dict.fromkeys(p for m in one.models for p in m.parameters())
        one.optimizers = [torch.optim.SGD(held, lr=0.1)]
        alternating(one, 1)
    assert_like_one_process(loop, plain)


@pytest.mark.parametrize("together", [False, True])
def test_copies_of_models_that_share_modules_are_trained(ranks, together):
    ranks.run(copied, together, world_size=2)


def one_goes(strategy: str) -> None:
    loop, plain = Loop(strategy, "three", "one"), Loop(None, "three", "one")
    gone = weakref.ref(loop.models[0])
    for one in (loop, plain):
        del one.models[0]
        alternating(one)
    assert gone() is None
    assert_like_one_process(loop, plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_model_that_shared_modules_may_go(ranks, strategy):
    ranks.run(one_goes, strategy, world_size=2)


def shares_a_parameter_alone() -> None:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    fabric.launch()
    one, two = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    two[0].weight = one[0].weight
    fabric.setup(one)
    with pytest.raises(UsageError, match=r"0\.weight is a parameter of another model, too.*Share the module"):
        fabric.setup(two)


def test_a_shared_parameter_without_its_module_is_refused_where_it_is_split(ranks):
    ranks.run(shares_a_parameter_alone, world_size=2)


def with_hooks() -> None:
    """A communication hook stays where another model takes parameters out of its replica."""
    calls = []

    def counting(state, bucket):
        calls.append(state)
        return allreduce_hook(None, bucket)

    loop, plain = Loop("ddp", "encoder", "one"), Loop(None, "encoder", "one")
    net = nn.Sequential(loop.models[0].module[0], nn.Linear(6, 1).double())
    loop.models[0]._forward_module.register_comm_hook("actor", counting)
    loop.models.append(loop.fabric.setup(net))
    plain.models.append(nn.Sequential(plain.models[0][0], copy.deepcopy(net[1])))
    for one in (loop, plain):
        alternating(one)
    assert calls == ["actor"] * 3
    assert_like_one_process(loop, plain)


def test_communication_hooks_stay(ranks):
    ranks.run(with_hooks, world_size=2)
