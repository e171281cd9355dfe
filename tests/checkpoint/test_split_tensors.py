"""What users do with parameters that are split over ranks: initialise them, make tensors like them, mix."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from machine import needs_torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fabric import Fabric
from fabric.core.errors import MissingExtraError, UsageError
from fabric.core.torch_versions import older_than
from fabric.strategies import FSDPStrategy, ModelParallelStrategy

INITS = {
    "trunc_normal_": lambda p: nn.init.trunc_normal_(
        p, std=0.02, a=-0.02, b=0.02
    ),  # many draws are thrown away
    "trunc_normal_ far out": lambda p: nn.init.trunc_normal_(p, mean=1.0, a=1.5, b=2.0, std=0.5),
    "normal_": lambda p: nn.init.normal_(p, std=0.1),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "with a generator": lambda p: nn.init.xavier_normal_(p, generator=torch.Generator().manual_seed(3)),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def init_weights(self, init) -> None:
        for layer in (self.up, self.down):
            init(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        return self.down(self.up(x).relu())


def with_two(parallelize) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(
            parallelize, data_parallel_size=dist.get_world_size() // 2, tensor_parallel_size=2
        ),
    )
    fabric.launch()
    return fabric


def parallel(model, mesh):
    return parallelize_module(
        model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def initialised(name: str, sharded: bool) -> None:
    init = INITS[name]
    expected = Mlp()

    def plan(model, mesh):
        torch.manual_seed(1)
        parallel(model, mesh).init_weights(init)
        return model

    if sharded:
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
        fabric.launch()
        model = fabric.setup(Mlp())
        torch.manual_seed(1)
        model.init_weights(init)
    else:
        model = with_two(plan).setup(Mlp())
    after = torch.rand(1)
    torch.manual_seed(1)
    expected.init_weights(init)
    assert torch.equal(after, torch.rand(1))  # and the stream of draws goes on from the same place
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=0, atol=0)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", INITS)
def test_initialisers_give_split_parameters_the_values_of_whole_ones(ranks, name, sharded):
    ranks.run(initialised, name, sharded, world_size=2)


@needs_torch("2.11", "an older one reads uneven parts of parts in a wrong order")
def test_initialisers_on_a_mesh_of_two_dimensions(ranks):
    ranks.run(initialised, "trunc_normal_", False, world_size=4)


def unevenly_split():
    fabric = with_two(parallel)
    if not older_than("2.11"):
        return str(fabric.setup(Mlp()).up.weight.shape)
    with pytest.raises(MissingExtraError) as caught:
        fabric.setup(Mlp())
    return str(caught.value)


def test_uneven_parts_of_parts_are_whole_or_refused(ranks):
    refused = (
        "up.weight [10, 6] is sharded by tensor parallel and by FSDP, in 4 parts of dimension 0 that differ "
        f"in size. It needs torch 2.11 or newer, but {torch.__version__} is installed. Make its size a "
        "multiple of 4, or write data_parallel_size=1."
    )
    found = refused if older_than("2.11") else "torch.Size([10, 6])"
    assert ranks.run(unevenly_split, world_size=4) == [found] * 4


# tensors like a parameter


class Recurrent(nn.Module):
    """The language model of torch's own examples: its state is made from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.rnn, self.dec = nn.Embedding(10, 8), nn.LSTM(8, 8), nn.Linear(8, 10)

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(1, size, 8), weight.new_full((1, size, 8), 0.0)

    def forward(self, x, hidden=None):
        hidden = self.init_hidden(x.shape[1]) if hidden is None else hidden
        out, hidden = self.rnn(self.enc(x), hidden)
        return self.dec(out), hidden


def recurrent(strategy: str, inside: bool) -> list:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = Recurrent()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randint(0, 10, (5, 4))
    hidden, losses = None if inside else model.init_hidden(4), []
    for _ in range(2):
        out, hidden = model(x, hidden)
        hidden = tuple([part.detach() for part in hidden])
        losses.append(out.square().mean())
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    for made in (hidden[0], *model.init_hidden(3), model.dec.weight.new_ones(2), model.dec.bias.new_empty(1)):
        assert type(made) is torch.Tensor
        assert not made.requires_grad
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("inside", [False, True])
def test_a_state_made_from_a_parameter_is_a_plain_tensor(ranks, inside):
    expected = ranks.run(recurrent, "ddp", inside, world_size=2)[0]
    for strategy in ("zero2", "fsdp"):
        assert ranks.run(recurrent, strategy, inside, world_size=2)[0] == pytest.approx(expected, rel=1e-6)


# plain tensors and DTensors in one operation


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, state=None):
        if state is not None:
            return self.body(x) + state
        return F.linear(self.body(x), self.head.weight)

    def other(self, x):
        return F.linear(self.body(x), self.head.weight)


class Ones(Mixing):
    def forward(self, x, state=None):
        return self.head(self.body(x) * torch.ones(8))


def gathered_by_two(model, mesh):
    parallelize_module(model, mesh["tensor_parallel"], {"body": ColwiseParallel(use_local_output=False)})
    return fully_shard(model, mesh=mesh["data_parallel"])


def mixed(case: str) -> None:
    if case == "tensor parallel":
        model, x = with_two(gathered_by_two).setup(Ones()), torch.ones(2, 8)
    else:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}))
        fabric.launch()
        model, x = fabric.setup(Mixing()), torch.ones(2, 8)
    here = re.escape("test_split_tensors.py:")
    said = (
        rf"computes \({here}\d+\) with a tensor that is split over ranks, .*mixed torch\.Tensor and DTensor"
    )
    if case == "tensor parallel":
        with pytest.raises(UsageError, match=rf"forward of Ones {said}.*remove use_local_output=False"):
            model(x)
    elif case == "forward":
        with pytest.raises(UsageError, match=rf"forward of Mixing {said}.*If it is a parameter of a layer"):
            model(x)
    elif case == "method":
        with pytest.raises(UsageError, match=rf"Mixing\.other {said}.*mark_forward_method\('other'\)"):
            model.other(x)
        model.mark_forward_method("other")
        with pytest.raises(
            UsageError, match=rf"Mixing\.other {said}.*If it is a parameter of a layer.*auto_wrap_policy"
        ):
            model.other(x)
    else:
        with pytest.raises(UsageError, match=rf"forward of Mixing {said}.*\.full_tensor\(\) on it, on all"):
            model(x, model.body.weight * 2)
    if case != "tensor parallel":  # what failed leaves no trace
        model(x, torch.ones(8)).sum().backward()
        assert model.head.weight.grad is None or not model.head.weight.grad.full_tensor().any()


@pytest.mark.parametrize("case", ["forward", "method", "argument", "tensor parallel"])
def test_mixed_tensors_are_named(ranks, case):
    ranks.run(mixed, case, world_size=2)
