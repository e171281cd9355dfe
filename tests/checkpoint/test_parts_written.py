"""What users write into parameters and gradients that are split over ranks: it counts, or is refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError

NUMBERS = torch.arange(20.0, dtype=torch.float64).reshape(5, 4) / 7
MASK = NUMBERS > 1


def clamp(weight) -> None:
    weight.clamp_(-NUMBERS, NUMBERS)


def operators(weight) -> None:
    weight += NUMBERS
    weight -= 2 * NUMBERS
    weight *= NUMBERS
    weight /= NUMBERS + 1


WRITES = {
    "add_": lambda w: w.add_(NUMBERS, alpha=2),
    "sub_": lambda w: w.sub_(NUMBERS),
    "mul_": lambda w: w.mul_(MASK.double()),
    "div_": lambda w: w.div_(NUMBERS + 1),
    "copy_": lambda w: w.copy_(NUMBERS),
    "copy_ of a parameter": lambda w: w.copy_(nn.Parameter(NUMBERS.clone())),
    "copy_ into data": lambda w: w.data.copy_(NUMBERS),
    "lerp_": lambda w: w.lerp_(NUMBERS, 0.5),
    "lerp_ by a tensor": lambda w: w.lerp_(NUMBERS, weight=NUMBERS / 2),
    "addcmul_": lambda w: w.addcmul_(NUMBERS, NUMBERS, value=0.5),
    "addcdiv_": lambda w: w.addcdiv_(NUMBERS, NUMBERS + 1),
    "masked_fill_": lambda w: w.masked_fill_(MASK, 3.0),
    "clamp_": clamp,
    "one row": lambda w: w.mul_(NUMBERS[1]),
    "one column": lambda w: w.add_(NUMBERS[:, :1]),
    "operators": operators,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "exponential_": lambda w: w.exponential_(),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "log_normal_": lambda w: w.log_normal_(),
    "cauchy_": lambda w: w.cauchy_(),
    "geometric_": lambda w: w.geometric_(0.5),
}


def fabric_of(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 5).double()


def written(strategy: str, names: list[str]) -> None:
    fabric = fabric_of(strategy)
    for name in names:
        write = WRITES[name]
        plain, model = layer(), fabric.setup(layer())
        for one in (plain, model):
            torch.manual_seed(1)
            with torch.no_grad():
                write(one.weight)
        torch.testing.assert_close(model.state_dict()["weight"], plain.weight.data, msg=name)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_of_whole_tensors(ranks, strategy, world_size):
    ranks.run(written, strategy, [*WRITES], world_size=world_size)


def gradients(strategy: str) -> None:
    fabric = fabric_of(strategy)
    plain, model = layer(), fabric.setup(layer())
    for one in (plain, model):
        one(torch.ones(2, 4).double()).sum().backward()
        one.weight.grad.mul_(MASK)
        one.weight.grad += NUMBERS
        one.weight.grad.data.copy_(one.weight.grad.data * 0.5)
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_written_to_without_no_grad(ranks, world_size):
    ranks.run(gradients, "fsdp", world_size=world_size)


def data_refused(strategy: str) -> None:
    fabric = fabric_of(strategy)
    net = nn.Sequential(layer(), nn.Linear(5, 6).double())
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weight = model[0].weight
    before = model.state_dict()["0.weight"].clone()
    for values in (weight.data * 2, weight * 2, NUMBERS, model[1].weight.data):
        with pytest.raises(
            UsageError, match=r"^0\.weight\.data = .* Write 0\.weight\.data\.copy_\(\.\.\.\)\.$"
        ):
            weight.data = values
    weight.data = weight.data  # is what it was
    fabric.backward(model(torch.ones(2, 4).double()).sum())
    with pytest.raises(
        UsageError, match=r"^0\.weight\.grad\.data = .* Write 0\.weight\.grad\.copy_\(\.\.\.\)\.$"
    ):
        weight.grad.data = weight.grad.data * 0.5
    assert torch.equal(model.state_dict()["0.weight"], before)
    if dist.get_world_size() == 2:
        flat = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
        with pytest.raises(UsageError, match=r"0\.weight\.data\.copy_"):
            nn.utils.vector_to_parameters(flat * 0, model.parameters())
    weight.grad = NUMBERS.clone()
    with pytest.raises(UsageError, match=re.escape("Write p.grad = torch.zeros_like(p).copy_(g)")):
        optimizer.step()
    weight.grad = torch.zeros_like(weight).copy_(NUMBERS)
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["0.weight"], before - 0.1 * NUMBERS)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_assigned_data_is_refused(ranks, strategy, world_size):
    ranks.run(data_refused, strategy, world_size=world_size)


def hooks(strategy: str) -> None:
    fabric = fabric_of(strategy)
    model = fabric.setup(layer())
    with pytest.raises(UsageError, match=r"Write weight\.register_post_accumulate_grad_hook\(hook\)"):
        model.weight.register_hook(lambda grad: grad * 0)

    def drop(parameter) -> None:
        parameter.grad.mul_(0)

    model.weight.register_post_accumulate_grad_hook(drop)
    fabric.backward(model(torch.ones(2, 4).double()).sum())
    assert not model.weight.grad.full_tensor().any()
    assert model.bias.grad.full_tensor().all()


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_tensor_hook_is_refused(ranks, strategy, world_size):
    ranks.run(hooks, strategy, world_size=world_size)
