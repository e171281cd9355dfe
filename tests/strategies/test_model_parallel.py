"""Ranks that share one model see the same data: loaders, seeds and metrics go by the data parallel rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


def split(model, mesh):
    return parallelize_module(
        model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def start(data: int, tensor) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(split, data_parallel_size=data, tensor_parallel_size=tensor),
    )
    fabric.launch()
    return fabric


def places() -> tuple:
    fabric = start(2, "auto")
    mesh = fabric.device_mesh
    fabric.seed_everything(5, verbose=False, per_rank=True)
    drawn = torch.rand(1).item()
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        os.environ.pop(name)
    return mesh.mesh_dim_names, tuple(mesh.shape), fabric.strategy.distributed_sampler_kwargs, drawn


def test_the_mesh_and_what_follows_from_it(ranks):
    got = ranks.run(places, world_size=4)
    assert [g[0] for g in got] == [("data_parallel", "tensor_parallel")] * 4
    assert [g[1] for g in got] == [(2, 2)] * 4
    assert [g[2]["rank"] for g in got] == [0, 0, 1, 1]
    assert {g[2]["num_replicas"] for g in got} == {2}
    drawn = [g[3] for g in got]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def batches(shuffle: bool) -> list[list[int]]:
    fabric = start(2, 2)
    loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=2, shuffle=shuffle)
    return [batch.tolist() for (batch,) in fabric.setup_dataloaders(loader)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_are_sharded_by_the_data_parallel_rank(ranks, shuffle):
    zero, one, two, three = ranks.run(batches, shuffle, world_size=4)
    assert zero == one
    assert two == three
    assert sorted([i for batch in zero + two for i in batch]) == list(range(16))


def metrics() -> tuple[float, float]:
    fabric = start(2, 2)
    part = fabric.strategy.distributed_sampler_kwargs["rank"]
    accuracy, total = MulticlassAccuracy(3), SumMetric()
    guesses = [torch.tensor([0, 1, 1]), torch.tensor([2, 0])][part]
    truth = [torch.tensor([0, 1, 2]), torch.tensor([2, 2])][part]
    accuracy.update(guesses, truth)
    total.update(float(len(truth)))
    got = fabric.compute_metrics({"accuracy": accuracy, "total": total})
    return got["accuracy"].item(), got["total"].item()


def test_metrics_count_each_sample_once(ranks):
    accuracy = MulticlassAccuracy(3)
    accuracy.update(torch.tensor([0, 1, 1, 2, 0]), torch.tensor([0, 1, 2, 2, 2]))
    expected = accuracy.compute().item()
    for got in ranks.run(metrics, world_size=4):
        assert got == pytest.approx((expected, 5.0))


def held() -> dict[str, int]:
    fabric = start(1, "auto")
    model = fabric.setup(net())
    return {
        name: p.to_local().numel() if hasattr(p, "to_local") else p.numel()
        for name, p in model.named_parameters()
    }


def test_each_rank_holds_its_part(ranks):
    for got in ranks.run(held, world_size=2):
        assert got == {"0.weight": 16, "0.bias": 4, "2.weight": 12, "2.bias": 3}


def one_group(strategy) -> tuple:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy())
    fabric.launch()
    return fabric.device_mesh.mesh_dim_names, tuple(fabric.device_mesh.shape)


def hybrid() -> FSDPStrategy:
    return FSDPStrategy(device_mesh=(2, 2))


def test_the_mesh_of_sharded_strategies(ranks):
    assert ranks.run(one_group, FSDPStrategy, world_size=4) == [(("shard",), (4,))] * 4
    assert ranks.run(one_group, hybrid, world_size=4) == [(("replicate", "shard"), (2, 2))] * 4


def optimizer_made_after() -> None:
    fabric = start(2, 2)
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    plain = net()
    step = torch.optim.SGD(plain.parameters(), lr=0.5)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))
    fabric.backward(model(x[fabric.strategy.distributed_sampler_kwargs["rank"]]).pow(2).mean())
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    plain(x.flatten(0, 1)).pow(2).mean().backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    step.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_optimizer_made_after_setup(ranks):
    ranks.run(optimizer_made_after, world_size=4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def tied(again: bool, empty: bool):
    def split_tied(model, mesh):
        rows = RowwiseParallel(input_layouts=Replicate())
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tensor_parallel"], {"embedding": rows, "head": columns})
        if again:
            model.head.weight = model.embedding.weight
        return model

    fabric = Fabric(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(split_tied, 1, 2))
    fabric.launch()
    with fabric.init_module(empty_init=empty):
        model = Tied()
    return fabric, model


def trains_as_one(empty: bool) -> None:
    fabric, model = tied(True, empty)
    model = fabric.setup(model)
    plain, x = Tied(), torch.tensor([0, 3, 5])
    for net_, backward in ((model, fabric.backward), (plain, torch.Tensor.backward)):
        backward(net_(x).pow(2).mean())
        optimizer = torch.optim.SGD(net_.parameters(), lr=0.5)
        (fabric.setup_optimizers(optimizer) if net_ is model else optimizer).step()
    assert len(list(model.parameters())) == 1
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def come_apart(empty: bool) -> None:
    fabric, model = tied(False, empty)
    with pytest.raises(UsageError, match=r"^parallelize_fn made several parameters of") as caught:
        fabric.setup(model)
    assert str(caught.value) == (
        "parallelize_fn made several parameters of embedding.weight and head.weight of Tied, which were "
        "one: they would be trained separately. Tie them again after parallelize_module, and before "
        "fully_shard: model.head.weight = model.embedding.weight (models of transformers: "
        "model.tie_weights())."
    )


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("case", [trains_as_one, come_apart])
def test_tied_weights_stay_one_parameter(ranks, case, empty):
    ranks.run(case, empty, world_size=2)
