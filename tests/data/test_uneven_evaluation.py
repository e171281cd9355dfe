"""Evaluation on ranks that differ: right where parameters are whole, an error at once where split."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from machine import ACCELERATOR
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch
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

    def looks(self, x, times):
        return sum(self(x).sum() for _ in range(times))

    def rolls(self, x, times):
        for _ in range(times):
            x = self.first(x)
        return x.sum()


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
    split = {
        "columns": columns,
        "columns in groups": lambda model, mesh: replicas(columns(model, mesh), mesh),
    }
    made = ModelParallelStrategy(split[strategy], 1, 2) if strategy in split else STRATEGIES[strategy]()
    fabric = Fabric(accelerator=ACCELERATOR, devices=dist.get_world_size(), strategy=made)
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return fabric, model, optimizer


def rows(epoch: int) -> torch.Tensor:
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(epoch)).to(ACCELERATOR)


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
    model = Net().to(ACCELERATOR)
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


UNEVEN = {2: [[1, 2], [4, 0], [0, 3], [2, 2]], 4: [[1, 2, 1, 3], [0, 4, 0, 0], [3, 1, 0, 2]]}
WHOLE = ("ddp", "zero1")
CASES = [
    (strategy, world, how, then)
    for strategy in STRATEGIES
    for world in (2, 4)
    for how in ("no_grad", "inference", "method")
    for then in ("verb", "train")
    if (world == 2 or how == "no_grad") and not (strategy == "hsdp" and world == 2)
]


DEVICE_CASES = [
    pytest.param(*case, marks=pytest.mark.device) if case[1:] == (2, "no_grad", "verb") else case
    for case in CASES
]


@pytest.mark.parametrize(("strategy", "world_size", "how", "then"), DEVICE_CASES)
def test_ranks_evaluate_and_train(ranks, strategy, world_size, how, then):
    """Where parameters are whole, ranks may differ in how many batches they evaluate."""
    counts = (
        UNEVEN[world_size] if strategy in WHOLE else [[2] * world_size, [0] * world_size, [3] * world_size]
    )
    expected = oracle(counts, how)
    for rank, got in enumerate(
        ranks.run(train_and_evaluate, strategy, counts, how, then, world_size=world_size)
    ):
        want = expected if then == "verb" else [epoch[rank] for epoch in expected]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-5, rtol=1e-4)


def evaluates_more(strategy: str, how: str) -> float:
    """Rank zero evaluates a batch more than the others, which are in another call of Fabric then."""
    fabric, model, optimizer = start(strategy)

    def alone() -> None:
        evaluate(model, rows(0)[: 2 - min(fabric.global_rank, 1)], how)
        fabric.barrier()

    with pytest.raises(CollectiveMismatch) as caught:
        alone()
    text = str(caught.value)
    assert "forward without gradients of model 0 (Net)" in text, text
    assert "barrier()" in text, text
    assert text.endswith("write `with fabric.whole(model) as plain:` on all ranks."), text
    assert text.count("test_uneven_evaluation.py:") == fabric.world_size, text
    model.train()
    optimizer.zero_grad()  # and all is well again
    fabric.backward(model(rows(0)[fabric.global_rank]).pow(2).mean())
    optimizer.step()
    return evaluate(model, rows(1), "no_grad")


@pytest.mark.parametrize("how", ["no_grad", "inference", pytest.param("method", marks=pytest.mark.device)])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in (*WHOLE, "hsdp")])
def test_a_rank_that_evaluates_alone_is_told_at_once(ranks, strategy, how):
    model = Net().to(ACCELERATOR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.stack([model(rows(0)[rank]).pow(2).mean() for rank in range(2)]).mean().backward()
    optimizer.step()
    expected = evaluate(model, rows(1), "no_grad")
    assert ranks.run(evaluates_more, strategy, how, world_size=2) == pytest.approx([expected] * 2, abs=1e-4)


def calls_another_method(strategy: str, calls: list[tuple[str, int]]) -> None:
    """Ranks differ in what a method calls of the model, or how often."""
    fabric, model, _ = start(strategy)
    name, times = calls[fabric.global_rank]

    def differ() -> None:
        with torch.no_grad():
            getattr(model, name)(rows(0)[0], times)
        fabric.barrier()

    with pytest.raises(CollectiveMismatch, match=r"forward without gradients of model 0 \(Net\)"):
        differ()


@pytest.mark.parametrize(
    "calls",
    [
        [("looks", 2), ("looks", 1)],
        [("rolls", 3), ("rolls", 2)],
        [("looks", 3), ("rolls", 3)],
        [("looks", 1), ("rolls", 2)],
    ],
    ids=lambda calls: "-".join([f"{name}{times}" for name, times in calls]),
)
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "one-group", "mesh", "columns"])
def test_what_a_method_calls_is_the_same_on_all_ranks(ranks, strategy, calls):
    if strategy == "one-group" and ("rolls", 2) in calls:
        return  # it gathers the one group once, however often it computes
    ranks.run(calls_another_method, strategy, calls, world_size=2)


def columns(model, mesh):
    plan = {"layer": ColwiseParallel(output_layouts=Replicate())}
    for block in (model.first, model.shared, model.unused):
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def evaluates_alone_in_its_row() -> float:
    """What one rank of a tensor parallel group sends in evaluation, the others must answer."""
    fabric, model, _ = start("columns")
    with pytest.raises(CollectiveMismatch, match=r"forward without gradients of model 0 \(Net\)"):
        evaluate(model, rows(0)[:1], "no_grad") if fabric.is_global_zero else fabric.barrier()
    model.train()
    fabric.backward(model(rows(0)[0]).sum())
    return evaluate(model, rows(1), "no_grad")


def test_a_rank_that_evaluates_alone_in_a_tensor_parallel_group(ranks):
    expected = evaluate(Net(), rows(1), "no_grad")
    assert ranks.run(evaluates_alone_in_its_row, world_size=2) == pytest.approx([expected] * 2, abs=1e-4)


def evaluates_while_another_trains(strategy) -> None:
    """As often as the other, but elsewhere in the loop: of other data, the outputs would be wrong."""
    fabric, model, _ = start(strategy)
    model.train(fabric.is_global_zero)
    with torch.no_grad(), pytest.raises(CollectiveMismatch, match=r"in training(?s:.)*in evaluation"):
        model(rows(fabric.global_rank)[0])


@pytest.mark.parametrize("strategy", ["columns", "columns in groups"])
def test_a_rank_that_evaluates_while_another_trains_in_a_tensor_parallel_group(ranks, strategy):
    ranks.run(evaluates_while_another_trains, strategy, world_size=2)


def two_models() -> None:
    fabric, one, _ = start("zero3")
    two = fabric.setup(Net())
    with (
        torch.no_grad(),
        pytest.raises(CollectiveMismatch, match=r"of model 0 \(Net\)(?s:.)*of model 1 \(Net\)"),
    ):
        (one if fabric.is_global_zero else two)(rows(0)[0])


def test_models_are_told_apart(ranks):
    ranks.run(two_models, world_size=2)


@pytest.mark.parametrize("guard", ["light", "off"])
def test_other_guards(ranks, guard, monkeypatch):
    monkeypatch.setitem(os.environ, "FABRIC_GUARD", guard)
    counts = [[2, 2], [1, 1]]
    expected = oracle(counts, "no_grad")
    for got in ranks.run(train_and_evaluate, "zero3", counts, "no_grad", "verb", world_size=2):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-4)
