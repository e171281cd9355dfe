"""Sharded models in the loops that people write: other methods, several models, early exits, failures,
buffers.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, UsageError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


class Block(nn.Sequential):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__(nn.Linear(inside, out), nn.Tanh())


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = Block(5, 7)
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.fail = False

    def forward(self, x):
        h = self.middle(self.body(x))
        if self.fail:
            raise KeyError("on purpose")
        return self.head(h) * self.scale

    def loss(self, x):
        return self.head(torch.sin(self.middle(self.body(x)))).pow(2).mean()

    def head_only(self, x):
        return self.head(torch.sin(x)).pow(2).mean()

    def nested_loss(self, x):
        return self.loss(x) + self.forward(x).mean() + self(x).pow(2).mean()

    def raw_loss(self, x):
        return (x @ self.middle.weight.new_ones(5, 2) * self.scale).pow(2).mean() + self.loss(x)

    def as_output(self, x):
        return Output(self.head(self.middle(self.body(x))), {"sum": self(x).sum()})

    def size(self):
        return sum(p.numel() for p in self.parameters())


STRATEGIES = {
    "zero2": {"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": {Block}},
    "zero3": {"auto_wrap_policy": {Block}},
    "zero3-root-freed": {"auto_wrap_policy": {Block}, "reshard_after_forward": True},
    "one-group": {},
    "checkpointed": {"auto_wrap_policy": {Block}, "activation_checkpointing": Block},
    "layers": {"auto_wrap_policy": {nn.Linear}, "forward_prefetch": True},
    "mesh": None,
}


def by_hand(model, mesh):
    """What a user writes for ModelParallelStrategy."""
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make(strategy: str, **settings):
    if strategy == "mesh":
        return ModelParallelStrategy(by_hand, "auto", 1)
    return FSDPStrategy(**{**STRATEGIES[strategy], **settings})


def start(strategy: str = "zero3", **settings) -> Fabric:
    made = make(strategy, **settings)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=made)
    fabric.launch()
    return fabric


def batches(count: int, world: int | None = None) -> torch.Tensor:
    shape = (count, world or dist.get_world_size(), 6, 5)
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def full_grads(model) -> dict[str, torch.Tensor]:
    return {
        name: None if p.grad is None else p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def joined_grads(loss, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: gradients of the mean over ranks of each rank's losses, in one process."""
    model = Net()
    torch.stack([loss(model, part) for part in data]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_grads(model, expected) -> None:
    got = full_grads(model)
    assert list(got) == list(expected)
    for name, want in expected.items():
        assert (got[name] is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got[name], want, atol=1e-6, rtol=1e-5, msg=name)


def call(how: str):
    return {
        "forward": lambda model, x: model(x).pow(2).mean(),
        "loss": lambda model, x: model.loss(x),
        "nested": lambda model, x: model.nested_loss(x),
        "layer": lambda model, x: model.head(model.middle(model.body(x))).pow(2).mean(),
        "output": lambda model, x: model.as_output(x).logits.pow(2).mean(),
        "extra": lambda model, x: model.as_output(x).extra["sum"],
        "no-collective": lambda model, x: model.loss(x) / model.size(),
    }[how]


def through(how: str, strategy: str, plain: bool) -> None:
    fabric = start(strategy)
    model = fabric.setup(Net())
    if strategy == "layers" and how == "nested":  # no layer of the root group is called before it
        model.mark_forward_method("nested_loss")
    data = batches(2)
    for part in data[:, fabric.global_rank]:
        loss = call(how)(model, part)
        loss.backward() if plain else fabric.backward(loss)
    assert_grads(model, joined_grads(lambda m, x: sum(call(how)(m, p) for p in x), data.transpose(0, 1)))


WAYS = ["forward", "loss", "nested", "layer", "output", "extra", "no-collective"]


@pytest.mark.parametrize(
    ("how", "strategy", "plain"),
    [
        (h, s, plain)
        for h in WAYS
        for s in STRATEGIES
        for plain in (False, True)
        if not plain or h in WAYS[:3]
    ],
)
def test_gradients_through_any_method(ranks, how, strategy, plain):
    ranks.run(through, how, strategy, plain, world_size=2)


def marked_methods() -> None:
    fabric = start()
    model = fabric.setup(Net())
    data = batches(1)[0]
    with pytest.raises(UsageError, match=r"Net\.raw_loss computes .*mark_forward_method\('raw_loss'\)"):
        model.raw_loss(data[fabric.global_rank])
    model.mark_forward_method("raw_loss")
    fabric.backward(model.raw_loss(data[fabric.global_rank]))
    assert_grads(model, joined_grads(lambda m, x: m.raw_loss(x), data))


def test_a_method_that_reads_parameters_is_marked_or_told_so(ranks):
    ranks.run(marked_methods, world_size=2)


def calls_on_one_rank() -> int:
    fabric = start()
    model = fabric.setup(Net())
    size = model.size() if fabric.is_global_zero else 0
    fabric.backward(model(batches(1)[0, fabric.global_rank]).pow(2).mean())
    return size


def test_a_method_that_computes_nothing_may_be_called_on_one_rank(ranks):
    assert ranks.run(calls_on_one_rank, world_size=2) == [sum(p.numel() for p in Net().parameters()), 0]


def forwards_then_backwards(strategy: str) -> None:
    fabric = start(strategy)
    model = fabric.setup(Net())
    data = batches(2)
    losses = [model(part).pow(2).mean() for part in data[:, fabric.global_rank]]
    for loss in losses:
        fabric.backward(loss)
    assert_grads(model, joined_grads(lambda m, x: sum(m(p).pow(2).mean() for p in x), data.transpose(0, 1)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_then_two_backwards(ranks, strategy):
    ranks.run(forwards_then_backwards, strategy, world_size=2)


def no_sync_orders(order: str, strategy: str) -> None:
    fabric = start(strategy)
    model, optimizer = fabric.setup(*with_sgd(Net()))
    data = batches(3)
    mine = data[:, fabric.global_rank]
    if order == "forward inside, backward outside":
        with fabric.no_backward_sync(model):
            fabric.backward(model(mine[0]).pow(2).mean())
            loss = model(mine[1]).pow(2).mean()
        fabric.backward(loss)
        used = data[:2]
    elif order == "left by an exception":
        with pytest.raises(KeyError), fabric.no_backward_sync(model):
            backward_then_raise(fabric, model(mine[0]).pow(2).mean())
        fabric.backward(model(mine[1]).pow(2).mean())
        used = data[:2]
    else:  # the loop ends inside the context, and the next epoch starts afresh
        with fabric.no_backward_sync(model):
            fabric.backward(model(mine[0]).pow(2).mean())
        zero = optimizer.zero_grad if order == "dropped by the optimizer" else model.zero_grad
        zero()
        fabric.backward(model(mine[1]).pow(2).mean())
        used = data[1:2]
    assert_grads(model, joined_grads(lambda m, x: sum(m(p).pow(2).mean() for p in x), used.transpose(0, 1)))
    optimizer.step()


def backward_then_raise(fabric, loss) -> None:
    fabric.backward(loss)
    raise KeyError


def with_sgd(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "one-group"])
@pytest.mark.parametrize(
    "order",
    [
        "forward inside, backward outside",
        "left by an exception",
        "dropped by the optimizer",
        "dropped by the model",
    ],
)
def test_no_backward_sync_is_right_however_it_is_left(ranks, order, strategy):
    ranks.run(no_sync_orders, order, strategy, world_size=2)


def step_without_sync() -> None:
    fabric = start()
    model, optimizer = fabric.setup(*with_sgd(Net()))
    data = batches(1)[0]
    with fabric.no_backward_sync(model):
        fabric.backward(model(data[fabric.global_rank]).pow(2).mean())
    assert_grads(model, joined_grads(lambda m, x: m(x).pow(2).mean(), data))
    optimizer.step()


def test_no_gradient_waits_for_its_reduction(ranks):
    ranks.run(step_without_sync, world_size=2)


def failing_forward(strategy: str) -> None:
    fabric = start(strategy)
    model = fabric.setup(Net())
    data = batches(2)
    model.fail = True
    with pytest.raises(KeyError, match="on purpose"):
        model(data[0, fabric.global_rank])
    model.fail = False
    fabric.backward(model(data[1, fabric.global_rank]).pow(2).mean())
    assert_grads(model, joined_grads(lambda m, x: m(x).pow(2).mean(), data[1]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_forward_leaves_the_model_usable(ranks, strategy):
    ranks.run(failing_forward, strategy, world_size=2)


def compiled(where: str) -> None:
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch asks itself
    fabric = start("zero3")
    model = Net()
    if where == "before":
        model = torch.compile(model, backend="eager")
    model, optimizer = fabric.setup(*with_sgd(model))
    if where == "after":
        model = torch.compile(model, backend="eager")
    plain, step = with_sgd(Net())
    data = batches(2)
    for batch in data:
        optimizer.zero_grad()
        fabric.backward(model(batch[fabric.global_rank]).pow(2).mean())
        optimizer.step()
        step.zero_grad()
        plain(batch.flatten(0, 1)).pow(2).mean().backward()
        step.step()
    for name, value in fabric.strategy.get_module_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_compiled_model_trains_to_the_same_numbers(ranks, where):
    ranks.run(compiled, where, world_size=2)


class Critic(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)


def gan(strategy: str | None) -> list[torch.Tensor]:
    fabric = start(strategy) if strategy else None
    generator, gen_step = with_sgd(Net())
    critic, critic_step = with_sgd(Critic())
    if fabric:
        generator, gen_step = fabric.setup(generator, gen_step)
        critic, critic_step = fabric.setup(critic, critic_step)
    world, rank = (dist.get_world_size(), fabric.global_rank) if fabric else (2, None)
    backward = fabric.backward if fabric else torch.Tensor.backward
    for batch in batches(3, world):
        x = batch.flatten(0, 1) if rank is None else batch[rank]
        critic_step.zero_grad()
        backward(critic(generator(x).detach()).mean() - critic(x[:, :2]).mean())
        critic_step.step()
        gen_step.zero_grad()
        backward(-critic(generator(x)).mean())
        gen_step.step()
    if not fabric:
        return [*generator.state_dict().values(), *critic.state_dict().values()]
    states = [fabric.strategy.get_module_state_dict(m) for m in (generator, critic)]
    return [value for state in states for value in state.values()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gan_equals_plain_torch(ranks, strategy):
    torch.manual_seed(3)
    expected = gan(None)
    for got in ranks.run(gan, strategy, world_size=2):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = Block(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def batch_norm(strategy: str, plain: bool, precision: str) -> dict[str, torch.Tensor]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=make(strategy), precision=precision)
    fabric.launch()
    model, optimizer = fabric.setup(*with_sgd(Normed()))
    for batch in batches(3):
        optimizer.zero_grad()
        loss = model(batch[fabric.global_rank]).pow(2).mean()
        loss.backward() if plain else fabric.backward(loss)
        optimizer.step()
        model.eval()
        if fabric.is_global_zero:
            model.norm.running_mean.add_(0)  # evaluation changes nothing
        model.train()
    return {**fabric.strategy.get_module_state_dict(model), "own": model.norm.running_mean.clone()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "one-group"])
def test_buffers_are_rank_zeros_on_all_ranks(ranks, strategy, plain, precision):
    first, second = ranks.run(batch_norm, strategy, plain, precision, world_size=2)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    assert first["own"].abs().sum() > 0


def different_weights() -> None:
    """Ranks that built different values hold rank zero's after setup, as under DDP."""
    fabric = start()
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(fabric.global_rank)
    model = fabric.setup(model)
    for name, value in fabric.strategy.get_module_state_dict(model).items():
        torch.testing.assert_close(value, Net().state_dict()[name], atol=0, rtol=0)


def test_rank_zeros_values_count(ranks):
    ranks.run(different_weights, world_size=2)


def warm_optimizer() -> None:
    """An optimizer that has stepped before setup keeps its state, split."""
    fabric = start()
    model, optimizer = with_sgd(Net())
    plain, step = with_sgd(Net())
    data = batches(2, 2)
    for net, opt in ((model, optimizer), (plain, step)):
        net(data[0].flatten(0, 1)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, stepped = fabric.setup(model, optimizer)
    fabric.backward(model(data[1, fabric.global_rank]).pow(2).mean())
    stepped.step()
    scheduler.step()
    plain(data[1].flatten(0, 1)).pow(2).mean().backward()
    step.step()
    for name, value in fabric.strategy.get_module_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=1e-5, msg=name)
    state = stepped.state_dict()["state"]
    for index, entry in step.state_dict()["state"].items():
        torch.testing.assert_close(state[index], entry, atol=1e-6, rtol=1e-5)
    assert stepped.param_groups[0]["lr"] == 0.05


def weights_after_two_steps(strategy: str, thaw: bool) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=make(strategy), precision="bf16-mixed")
    fabric.launch()
    net = Net()
    net.body.requires_grad_(not thaw)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.inference_mode():
        model(batches(1)[0, fabric.global_rank])
    model.requires_grad_(True)
    for batch in batches(2):
        optimizer.zero_grad()
        fabric.backward(model(batch[fabric.global_rank]).pow(2).mean())
        optimizer.step()
    return [float(value.sum()) for value in model.state_dict().values()]


@pytest.mark.parametrize("strategy", ["layers", "mesh"])
def test_parameters_that_are_thawed_after_setup_train_like_others(ranks, strategy):
    """Their gradients arrive in the parameters' dtype, whatever is computed in."""
    thawed = ranks.run(weights_after_two_steps, strategy, True, world_size=2)
    assert thawed == ranks.run(weights_after_two_steps, strategy, False, world_size=2)


def test_an_optimizer_with_state_follows_its_model(ranks):
    ranks.run(warm_optimizer, world_size=2)


def scaler_skips(strategy: str) -> list:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=make(strategy), precision="16-mixed")
    fabric.launch()
    model, optimizer = fabric.setup(*with_sgd(Net()))
    before = fabric.strategy.get_module_state_dict(model)
    x = batches(1)[0, fabric.global_rank]
    loss = model(x).pow(2).mean()
    fabric.backward(loss * (torch.inf if fabric.global_rank == 1 else 1.0))
    optimizer.step()
    after = fabric.strategy.get_module_state_dict(model)
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    optimizer.zero_grad()
    fabric.backward(model(x).pow(2).mean() * 1e-3)
    optimizer.step()
    changed = fabric.strategy.get_module_state_dict(model)
    return [
        fabric.strategy.precision.state_dict()["scale"],
        not torch.equal(changed["scale"], before["scale"]),
    ]


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "one-group"])
def test_an_inf_on_one_rank_skips_the_step_on_all(ranks, strategy):
    assert ranks.run(scaler_skips, strategy, world_size=2) == [[32768.0, True]] * 2


class Branches(nn.Module):
    """Ranks take different branches: torch would mix their gradients up, since they are of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Linear(5, 5)
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x, left: bool):
        return (self.left if left else self.right)(self.body(x))


def different_branches(policy) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(auto_wrap_policy=policy))
    fabric.launch()
    model, optimizer = fabric.setup(*with_sgd(Branches()))
    for left in (True, False) * 2:  # the first calls of a group are compared before they gather
        model(batches(1)[0, 0], left=left)
    before = model.state_dict()
    fabric.backward(model(batches(1)[0, fabric.global_rank], left=fabric.global_rank == 0).pow(2).mean())
    with pytest.raises(CollectiveMismatch, match=r"SGD.step.*no gradient for (left|right)"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    optimizer.zero_grad()
    fabric.backward(model(batches(1)[0, fabric.global_rank], left=True).pow(2).mean())
    optimizer.step()  # a branch that no rank uses has no gradient, as in plain torch
    assert torch.equal(model.state_dict()["right.weight"], before["right.weight"])


@pytest.mark.parametrize("policy", [None, {nn.Linear}])
def test_different_branches_are_an_error_before_weights_change(ranks, policy):
    ranks.run(different_branches, policy, world_size=2)


class Wide(Branches):
    """Branches of other sizes: gloo ends a process that gets more bytes than it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Linear(5, 900)

    def method(self, x, left: bool):
        return self.forward(x, left)


def branches_of_other_sizes(call: str) -> str:
    policy = FSDPStrategy(auto_wrap_policy={nn.Linear})
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=policy)
    fabric.launch()
    model = fabric.setup(Wide())
    run = {"forward": model, "method": model.method, "part": lambda x, left: model.body(x)}[call]
    for _ in range(3):
        run(torch.ones(2, 5), left=True)
    right = fabric.global_rank > 0
    if call == "part":
        run = lambda x, left: (model.left if left else model.right)(x)  # noqa: E731
    with pytest.raises(CollectiveMismatch) as caught:
        run(torch.ones(2, 5), left=not right)
    run(torch.ones(2, 5), left=True)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("call", ["forward", "method", "part"])
def test_branches_of_other_sizes_are_named_on_all_ranks(ranks, call, world_size):
    for text in ranks.run(branches_of_other_sizes, call, world_size=world_size):
        assert "its left" in text
        assert "its right" in text


class Turned(nn.Sequential):
    """Layers of one size that can be called in two orders: FSDP2 would mix up what it gathers and reduces."""

    def forward(self, x, turned: bool):
        one, other, last = self
        first, second = (other, one) if turned else (one, other)
        return last(second(first(x).tanh()))


def another_order() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}))
    fabric.launch()
    torch.manual_seed(6)
    model, optimizer = fabric.setup(*with_sgd(Turned(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))))
    before, x = model.state_dict(), batches(1)[0, fabric.global_rank]
    for _ in range(2):  # the first calls of a group are compared before they gather
        model(x, turned=True)
    fabric.backward(model(x, turned=fabric.global_rank == 0).pow(2).mean())
    with pytest.raises(CollectiveMismatch, match=r"SGD.step.*layers were called in the order \w{8}"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    optimizer.zero_grad()
    fabric.backward(model(x, turned=True).pow(2).mean())
    optimizer.step()


def test_layers_in_another_order_are_an_error_before_weights_change(ranks):
    ranks.run(another_order, world_size=2)


def models_let_go() -> list[bool]:
    fabric = start()
    model = fabric.setup(Net())
    model(batches(1)[0, 0])
    kept = weakref.ref(model.module)
    del model
    gc.collect()
    return [kept() is None]


def test_models_that_the_user_forgot_are_let_go(ranks):
    assert ranks.run(models_let_go, world_size=2) == [[True]] * 2


def different_policies() -> None:
    own = {Block} if dist.get_rank() == 0 else {nn.Linear}
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(auto_wrap_policy=own))
    fabric.launch()
    with pytest.raises(CollectiveMismatch, match=r"(?s)in 1 groups: body .*in 3 groups"):
        fabric.setup(Net())
    fabric.barrier()


def test_policies_that_differ_between_ranks_are_an_error(ranks):
    ranks.run(different_policies, world_size=2)


def no_parameters() -> None:
    fabric = start()
    model = fabric.setup(nn.Sequential(nn.Flatten(), nn.Tanh()))
    assert model(torch.ones(2, 3, 1)).shape == (2, 3)


def test_a_model_without_parameters_is_left_as_it_is(ranks):
    ranks.run(no_parameters, world_size=2)


def already_split() -> None:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    with pytest.raises(UsageError, match=r"that are DTensors, whose gradients DDP cannot average"):
        fabric.setup(model)


def test_ddp_refuses_a_model_that_is_split(ranks):
    ranks.run(already_split, world_size=2)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("on purpose")


def failing_backward(strategy: str, plain: bool) -> None:
    fabric = start(strategy)
    model, optimizer = fabric.setup(*with_sgd(Net()))
    data = batches(2)
    loss = model.head(Raises.apply(model.middle(model.body(data[0, fabric.global_rank])))).pow(2).mean()
    with pytest.raises(MemoryError, match="on purpose"):
        loss.backward() if plain else fabric.backward(loss)
    optimizer.zero_grad()
    fabric.backward(model(data[1, fabric.global_rank]).pow(2).mean())
    assert_grads(model, joined_grads(lambda m, x: m(x).pow(2).mean(), data[1]))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "one-group", "checkpointed"])
def test_a_failed_backward_leaves_no_gradients(ranks, strategy, plain):
    ranks.run(failing_backward, strategy, plain, world_size=2)


def layer_after_setup(strategy) -> None:
    made = strategy if isinstance(strategy, str) and strategy == "ddp" else make(strategy)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=made)
    fabric.launch()
    model = fabric.setup_module(Net())
    model.module.late = nn.Linear(2, 2)  # other values on each rank
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = copy.deepcopy(model.module.late)
    data = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(4))
    fabric.backward(model.module.late(data[fabric.global_rank]).pow(2).mean())
    optimizer.step()
    plain(data.flatten(0, 1)).pow(2).mean().backward()
    torch.testing.assert_close(model.module.late.weight, plain.weight - 0.1 * plain.weight.grad)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_layer_added_after_setup_is_averaged(ranks, strategy):
    ranks.run(layer_after_setup, strategy, world_size=2)


def refused(case: str) -> None:
    fabric = start()
    model = Net()
    if case == "hook":
        model.head.weight.register_hook(lambda grad: grad * 0.5)
        with pytest.raises(UsageError, match=r"head\.weight has a hook on its gradient"):
            fabric.setup(model)
    elif case == "sparse":
        model.words = nn.Embedding(3, 2, sparse=True)
        with pytest.raises(UsageError, match=r"words has sparse=True, .* Write sparse=False, or strategy="):
            fabric.setup(model)
    elif case == "LBFGS":
        with pytest.raises(UsageError, match="LBFGS joins all parameters in one vector"):
            fabric.setup(model, torch.optim.LBFGS(model.parameters()))
    elif case == "functional_call":
        model = fabric.setup(model)
        others = {name: value * 2 for name, value in Net().state_dict().items()}
        with pytest.raises(UsageError, match=r"functional_call or other replacements of parameters"):
            torch.func.functional_call(model, others, (batches(1)[0, 0],))
        fabric.backward(model(batches(1)[0, fabric.global_rank]).pow(2).mean())
    else:
        model, optimizer = fabric.setup(*with_sgd(model))
        fabric.backward(model(batches(1)[0, fabric.global_rank]).pow(2).mean())
        clip = partial(fabric.clip_gradients, model, optimizer, max_norm=1.0)
        with pytest.raises(CollectiveMismatch, match=r"clip_gradients"):
            (clip if fabric.is_global_zero else fabric.barrier)()


@pytest.mark.parametrize("case", ["hook", "sparse", "LBFGS", "functional_call", "clip on rank zero"])
def test_what_would_go_wrong_silently_is_refused(ranks, case):
    ranks.run(refused, case, world_size=2)


class Either(nn.Module):
    """Each rank uses another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return self.layers[dist.get_rank()](x)


def used_by_one_rank() -> list[bool]:
    strategy = FSDPStrategy(find_unused_parameters=True)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    model = fabric.setup(Either())
    fabric.backward(model(torch.ones(2, 4)).sum())
    bias = torch.ones(4)  # two rows on one of two ranks, and none on the other
    return [torch.equal(layer.bias.grad.full_tensor(), bias) for layer in model.layers]


def test_parameters_that_one_rank_uses_in_half_precision(ranks):
    assert ranks.run(used_by_one_rank, world_size=2) == [[True, True]] * 2


def numbers_of_parts() -> None:
    fabric = start()
    model = fabric.setup(Net())
    fabric.backward(model(batches(1)[0, fabric.global_rank]).pow(2).mean())
    grad = model.head.weight.grad
    for ask in (lambda: grad.norm().item(), lambda: float(grad.sum())):
        with pytest.raises(UsageError, match=r"split over ranks .*full_tensor\(\)\.item\(\)"):
            ask()
    expected = joined_grads(lambda m, x: m(x).pow(2).mean(), batches(1)[0])["head.weight"]
    assert grad.norm().full_tensor().item() == pytest.approx(expected.norm().item(), rel=1e-5)
    # A truth value decides where the loop goes on: the same on all ranks, also if one of them has the cause.
    highest = expected.max() * (1 - 1e-4)
    assert (grad > highest).any()
    assert not (grad < highest).all()


def test_a_number_of_a_part_is_refused(ranks):
    ranks.run(numbers_of_parts, world_size=2)
