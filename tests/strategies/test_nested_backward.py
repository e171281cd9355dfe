"""Reentrant checkpoints: gradients on N ranks equal plain torch, however often a backward passes a layer."""

from __future__ import annotations

import copy
import gc
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric.core import backward_listeners as passes
from fabric.core.errors import UsageError
from fabric.strategies import DDPStrategy, FSDPStrategy, ZeRO1Strategy
from fabric.strategies.ddp import replicate

STEPS, ROWS = 3, 4
STRATEGIES = {
    "ddp": DDPStrategy,
    "ddp small buckets": lambda: DDPStrategy(bucket_cap_mb=0.0001),
    "zero1": ZeRO1Strategy,
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={nn.Linear}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "zero3 of one group": FSDPStrategy,
}


class Net(nn.Module):
    """Three layers, each computed again in backward; `outside`: layers around them that are not."""

    def __init__(self, outside: bool = False, tied: bool = False, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4) if outside else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.last = nn.Linear(4, 4) if outside else nn.Identity()
        self.tied, self.whole = tied, whole

    def run(self, x, layers):
        for layer in layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        x = self.first(x)
        for layers in [self.layers] if self.whole else [[layer] for layer in self.layers]:
            x = checkpoint(self.run, x, layers, use_reentrant=True)
        return self.last(self.layers[0](x) if self.tied else x)


class Around(nn.Module):
    """A checkpoint in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        with warnings.catch_warnings():  # the outer one calls without gradients, which the inner one notices
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            return checkpoint(self.inner, x, use_reentrant=True)


def batches(world_size: int, forwards: int) -> torch.Tensor:
    """(STEPS, forwards, world_size, ROWS, 4), the same on every rank."""
    draw = torch.Generator().manual_seed(11)
    return torch.randn(
        STEPS, forwards, world_size, ROWS, 4, generator=draw, dtype=torch.float64
    ).requires_grad_()


def start(strategy="ddp") -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    return fabric


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def train(strategy, make, forwards, plainly=False, accumulate=False):
    fabric = start(strategy)
    single = make().double()
    model = fabric.setup(copy.deepcopy(single))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    oracle = torch.optim.SGD(single.parameters(), lr=0.3, momentum=0.9)
    for step in batches(fabric.world_size, forwards):
        optimizer.zero_grad()
        oracle.zero_grad()
        for last in [False, True] if accumulate else [True]:
            with fabric.no_backward_sync(model, enabled=not last):
                loss = torch.stack([model(x[fabric.global_rank]).square().sum() for x in step]).sum()
                loss.backward() if plainly else fabric.backward(loss)
            parts = [single(x[rank]).square().sum() for x in step for rank in range(fabric.world_size)]
            (torch.stack(parts).sum() / fabric.world_size).backward()
        optimizer.step()
        oracle.step()
    for ours, plain in zip(values(model), single.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


def two_forwards():
    return Net()


def whole():
    return Net(whole=True)


def tied():
    return Net(tied=True)


def outside():
    return Net(outside=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("make", "forwards"),
    [(two_forwards, 1), (two_forwards, 2), (whole, 3), (tied, 1), (tied, 2), (Around, 2)],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_equal_plain_torch(ranks, strategy, make, forwards, world_size):
    ranks.run(train, strategy, make, forwards, world_size=world_size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("make", "forwards"), [(two_forwards, 2), (tied, 1)])
@pytest.mark.parametrize(("plainly", "accumulate"), [(True, False), (False, True)])
def test_a_plain_backward_and_accumulation(ranks, strategy, make, forwards, plainly, accumulate):
    ranks.run(train, strategy, make, forwards, plainly, accumulate, world_size=2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "zero3 of one group"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_sharded_models_take_layers_around(ranks, strategy, forwards):
    ranks.run(train, strategy, outside, forwards, world_size=2)


def refused(strategy, forwards, plainly):
    fabric = start(strategy)
    model = fabric.setup(outside().double())
    step = batches(fabric.world_size, forwards)[0]
    loss = torch.stack([model(x[fabric.global_rank]).sum() for x in step]).sum()
    with pytest.raises(UsageError) as error:
        loss.backward() if plainly else fabric.backward(loss)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_ddp_cannot_sum_is_refused_on_all_ranks(ranks, strategy):
    for rank, text in enumerate(ranks.run(refused, strategy, 2, False, world_size=2)):
        assert re.search(rf"Rank {rank}: DDP got the gradient of a parameter twice in one", text)
        assert "checkpoint(..., use_reentrant=False)" in text


def refused_then_right():
    """After what is refused, this model and another go on. torch's own assertion is not shown."""
    fabric = start()
    single = nn.Linear(4, 4).double()
    single.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    refused, model = [fabric.setup(copy.deepcopy(single)) for _ in range(2)]
    step = batches(fabric.world_size, 1)[0, 0]
    own = step[fabric.global_rank]
    with pytest.raises(UsageError, match="DDP got the gradient of a parameter twice in one backward"):
        fabric.backward(refused(checkpoint(refused, own, use_reentrant=True)).sum())
    refused.zero_grad()
    (single(step.flatten(0, 1)).square().sum() / 2).backward()
    for used in (model, refused):
        fabric.backward(used(own).square().sum())
        for ours, plain in zip(used.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad)


def test_what_was_refused_leaves_other_models_usable(ranks):
    ranks.run(refused_then_right, world_size=2)


class Again(Net):
    """A layer is called once more, or not."""

    def forward(self, x, again=False):
        x = super().forward(x)
        return checkpoint(self.run, x, self.layers[:1], use_reentrant=True) if again else x


def uneven(how):
    """One rank computes more than the other."""
    fabric = start()
    single = Again().double()
    model = fabric.setup(copy.deepcopy(single))

    def loss_of(net, x, more):
        if how == "a layer":
            return net(x, again=more).square().sum()
        return net(x).square().sum() + (net(2 * x).sum() if more else 0)

    for step in batches(2, 1):
        model.zero_grad()
        single.zero_grad()
        fabric.backward(loss_of(model, step[0, fabric.global_rank], fabric.global_rank == 1))
        (sum([loss_of(single, step[0, rank], rank == 1) for rank in range(2)]) / 2).backward()
        for ours, plain in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["a layer", "a forward"])
def test_ranks_may_differ_in_what_they_compute(ranks, how):
    ranks.run(uneven, how, world_size=2)


def several_fabrics():
    """Models of several Fabrics in one checkpoint: gradients of all are sent in one order."""
    fabrics = [start() for _ in range(4)]
    single = [nn.Linear(4, 4).double() for _ in fabrics]
    for number, net in enumerate(single):
        nn.init.constant_(net.weight, 0.1 + number)
        nn.init.zeros_(net.bias)
    models = [fabric.setup(copy.deepcopy(net)) for fabric, net in zip(fabrics, single, strict=True)]

    def loss_of(nets, x):
        def run(z):
            return sum([net(z).square() * (number + 1) for number, net in enumerate(nets)])

        both = [checkpoint(run, factor * x, use_reentrant=True).sum() for factor in (1, 2)]
        return both[0] + both[1]

    (step,) = batches(2, 1)[0]
    fabrics[0].backward(loss_of(models, step[fabrics[0].global_rank]))
    (sum([loss_of(single, part) for part in step]) / 2).backward()
    for model, net in zip(models, single, strict=True):
        torch.testing.assert_close(model.weight.grad, net.weight.grad, rtol=1e-9, atol=1e-9)


def test_models_of_several_fabrics(ranks):
    ranks.run(several_fabrics, world_size=2)


def messages():
    """How often gradients were averaged once more: with every layer in a checkpoint, and one forward."""
    fabric = start()
    model, other = fabric.setup(Net().double()), fabric.setup(Net(whole=True).double())
    calls = []
    original, replicate.average_gradients = replicate.average_gradients, lambda *args: calls.append(args)
    try:
        for step in batches(fabric.world_size, 2):
            fabric.backward(
                model(step[0, fabric.global_rank]).sum() + other(step[1, fabric.global_rank]).sum()
            )
            assert not calls
        fabric.backward(torch.stack([model(x[fabric.global_rank]).sum() for x in step]).sum())
        return len(calls)
    finally:
        replicate.average_gradients = original


def test_nothing_more_is_sent_where_one_pass_was_enough(ranks):
    assert ranks.run(messages, world_size=2) == [1, 1]


def failing_twice():
    """A pass that fails after a part of it was reduced leaves nothing for the next one."""
    fabric = start()
    single = Net().double()
    model = fabric.setup(copy.deepcopy(single))
    step = batches(fabric.world_size, 2)[0]

    def refuse(grad):
        raise ValueError("on purpose")

    early = step[0, fabric.global_rank] * 1
    early.register_hook(refuse)
    with pytest.raises(ValueError, match="on purpose"):
        fabric.backward(model(early).sum() + model(step[1, fabric.global_rank]).sum())
    model.zero_grad()
    fabric.backward(torch.stack([model(x[fabric.global_rank]).sum() for x in step]).sum())
    (sum([single(x[rank]).sum() for x in step for rank in range(2)]) / 2).backward()
    for ours, plain in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-9, atol=1e-9)


def test_a_pass_that_fails_leaves_nothing_behind(ranks):
    ranks.run(failing_twice, world_size=2)


class Counter:
    """Notes the number of the pass that goes on, each time that it is told of one inside."""

    def __init__(self, told) -> None:
        self.passes, self.told = [], told

    def around_pass(self, run, *args, **kwargs):
        run(*args, **kwargs)

    def after_nested_pass(self):
        self.told.append(self)
        self.passes.append(torch._C._current_graph_task_id())


def test_who_attends_is_told_of_passes_inside_and_only_of_those():
    told = []
    counters = [Counter(told) for _ in range(20)]
    for counter in [*counters, counters[7]]:
        passes.add_backward_listener(counter)
    counter = counters[7]
    x = torch.ones(2, 4, requires_grad=True)
    nn.Linear(4, 4)(x).sum().backward()
    assert counter.passes == []
    Net()(x).sum().backward()
    assert len(counter.passes) == 3
    assert told == counters * 3, "in the order in which they came"
    assert len(set(counter.passes)) == 1
    counter.passes.clear()
    Around()(x).sum().backward()
    assert len(counter.passes) == 4
    assert len(set(counter.passes)) == 2

    def fail(x):
        out = x * 1
        if out.requires_grad:  # computed again
            out.register_hook(lambda grad: 1 / 0)
        return out

    with pytest.raises(ZeroDivisionError):
        checkpoint(fail, x, use_reentrant=True).sum().backward()
    told.clear()
    del counter, counters[7]
    gc.collect()
    Net()(x).sum().backward()
    assert told == counters * 3
