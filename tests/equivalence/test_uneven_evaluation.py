"""Sharded models evaluate on ranks that have different numbers of batches, or on one rank; nothing hangs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.shared, self.unused = Block(), Block(), Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        # The second block twice, the third in training only: the order of gathering is not that of the
        # modules.
        h = self.shared(self.first(self.shared(x)))
        return self.head(self.unused(h) if self.training else h)

    def loss(self, x):
        return self.head(self.first(x)).pow(2).mean()


def replicas(model, mesh):
    for block in (model.first, model.shared, model.unused):
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "zero3-prefetch": lambda: FSDPStrategy(auto_wrap_policy={Block}, forward_prefetch=True),
    "one-group": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(device_mesh=(2, dist.get_world_size() // 2), auto_wrap_policy={Block}),
    "mesh": lambda: ModelParallelStrategy(replicas, "auto", 1),
}


def start(strategy: str):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return fabric, model, optimizer


def rows(epoch: int) -> torch.Tensor:
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(epoch))


def evaluate(model, batches, how) -> float:
    model.eval()
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        if how == "method":
            return float(sum(model.loss(batch).item() for batch in batches))
        return float(sum(model(batch).sum().item() for batch in batches))


def train_and_evaluate(strategy: str, counts: list[list[int]], how: str, then: str) -> list:
    fabric, model, optimizer = start(strategy)
    rank, results = fabric.global_rank, []
    for epoch, count in enumerate(counts):
        batch = rows(epoch)
        optimizer.zero_grad()
        fabric.backward(model(batch[rank]).pow(2).mean())
        optimizer.step()
        own = evaluate(model, batch[: count[rank]], how)
        if then == "verb":
            results.append(fabric.all_gather(torch.tensor(own)).tolist())
        else:
            results.append(own)
        model.train()
    fabric.barrier()
    return results


def oracle(counts: list[list[int]], how: str) -> list[list[float]]:
    """Per epoch, each rank's result, by one process on the joined batch."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for epoch, count in enumerate(counts):
        batch = rows(epoch)
        optimizer.zero_grad()
        torch.stack([model(batch[rank]).pow(2).mean() for rank in range(len(count))]).mean().backward()
        optimizer.step()
        results.append([evaluate(model, batch[:n], how) for n in count])
        model.train()
    return results


COUNTS = {2: [[1, 2], [4, 0], [0, 3], [2, 2]], 4: [[1, 2, 1, 3], [0, 4, 0, 0], [3, 1, 0, 2]]}
CASES = [
    (strategy, world, how, then)
    for strategy in STRATEGIES
    for world in (2, 4)
    for how in ("no_grad", "inference", "method")
    for then in ("verb", "train")
    if (world == 2 or how == "no_grad") and not (strategy == "hsdp" and world == 2)
]


@pytest.mark.parametrize(("strategy", "world_size", "how", "then"), CASES)
def test_ranks_may_evaluate_different_numbers_of_batches(ranks, strategy, world_size, how, then):
    counts = COUNTS[world_size]
    expected = oracle(counts, how)
    for rank, got in enumerate(
        ranks.run(train_and_evaluate, strategy, counts, how, then, world_size=world_size)
    ):
        want = expected if then == "verb" else [epoch[rank] for epoch in expected]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-5, rtol=1e-4)


def on_rank_zero_only() -> float:
    fabric, model, _ = start("zero3")
    model.eval()
    with torch.no_grad():
        model(rows(0)[0])
        value = model(rows(0)[1]).sum().item() if fabric.is_global_zero else 0.0
    return fabric.broadcast(value)


def test_rank_zero_may_evaluate_alone(ranks):
    model = Net().eval()
    with torch.no_grad():
        expected = model(rows(0)[1]).sum().item()
    assert ranks.run(on_rank_zero_only, world_size=4) == pytest.approx([expected] * 4, abs=1e-5)


def alone_at_first(strategy: str) -> list[float]:
    """The first evaluation of all, on rank zero only; then rank one only; then both."""
    fabric, model, _ = start(strategy)
    model.eval()
    values = []
    for who in ((0,), (0,), (1,), (0, 1), (0, 1)):
        with torch.no_grad():
            own = model(rows(0)[len(values)]).sum().item() if fabric.global_rank in who else 0.0
        values.append(fabric.all_reduce(own, reduce_op="sum").item() / len(who))
    return values


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "hsdp"])
def test_the_very_first_evaluation_may_be_on_one_rank(ranks, strategy):
    model = Net().eval()
    with torch.no_grad():
        expected = [model(rows(0)[i]).sum().item() for i in range(5)]
    for got in ranks.run(alone_at_first, strategy, world_size=2):
        assert got == pytest.approx(expected, abs=1e-4)


def two_models() -> list[float]:
    fabric, one, _ = start("zero3")
    two = fabric.setup(Net())
    one.eval(), two.eval()
    values = []
    with torch.no_grad():
        for model in (one, two):
            values.append(model(rows(0)[0]).sum().item())
        for batch in range(3 - fabric.global_rank):
            values.append((one if fabric.global_rank == 0 else two)(rows(1)[batch]).sum().item())
    fabric.barrier()
    return values


def test_ranks_may_evaluate_different_models(ranks):
    model = Net().eval()
    with torch.no_grad():
        first = model(rows(0)[0]).sum().item()
        rest = [model(rows(1)[batch]).sum().item() for batch in range(3)]
    zero, one = ranks.run(two_models, world_size=2)
    assert zero == pytest.approx([first, first, *rest], abs=1e-5)
    assert one == pytest.approx([first, first, *rest[:2]], abs=1e-5)


@pytest.mark.parametrize("guard", ["light", "off"])
def test_other_guards(ranks, guard, monkeypatch):
    """`light` helps too; `off` sends nothing, so ranks must evaluate alike."""
    monkeypatch.setitem(os.environ, "FABRIC_GUARD", guard)
    counts = [[2, 2], [1, 1]] if guard == "off" else COUNTS[2]
    expected = oracle(counts, "no_grad")
    for got in ranks.run(train_and_evaluate, "zero3", counts, "no_grad", "verb", world_size=2):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-4)
