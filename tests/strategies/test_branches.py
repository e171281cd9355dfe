"""Branches under FSDP: ranks that reduce gradients of different parameters raise, and mix up no messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, LaunchError
from fabric.guard.call_checker import guard_of
from fabric.strategies import FSDPStrategy
from fabric.testing import rank_info


class Experts(nn.Module):
    """Two experts; `way` is the one whose output is returned."""

    def __init__(self, width: int = 6, every: bool = False) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        self.two = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.every = every

    def forward(self, x, way: str):
        if self.every:  # both are computed, and the loss has one
            one, two = self.one(x), self.two(x)
            return one if way == "one" else two
        if way == "both":
            return self.one(x) + self.two(x)
        return self.one(x) if way == "one" else self.two(x)


def start(strategy, precision: str = "32-true"):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(5)
    return fabric


def rows(fabric, number: int) -> torch.Tensor:
    """This rank's half of batch `number`, or the whole batch on one rank."""
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
    return whole if fabric.world_size == 1 else whole[2 * fabric.global_rank : 2 * fabric.global_rank + 2]


def branch(strategy, ways: list[tuple[str, str]], width: int, every: bool) -> None:
    """A step of several backwards; `ways`: the experts of rank 0 and of rank 1 in each."""
    fabric = start(
        FSDPStrategy(auto_wrap_policy={nn.Sequential}, sharding_strategy="SHARD_GRAD_OP")
        if every
        else strategy
    )
    net = Experts(width, every)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.3, weight_decay=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number, way in enumerate(ways):
        fabric.backward(model(rows(fabric, number), way[fabric.global_rank]).square().mean())
    try:
        optimizer.step()
    finally:
        torch.testing.assert_close(dict(model.state_dict()), before, atol=0, rtol=0)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize(
    ("ways", "left"),
    [
        ([("one", "two")], ["no gradient for two.0", "no gradient for one.0"]),
        ([("both", "two")], ["all parameters have gradients", "no gradient for one.0"]),
        (
            [("one", "two"), ("two", "one")],
            ["two.0.weight, two.0.bias", "one.0.weight, one.0.bias"],
        ),
    ],
    ids=["other experts", "one more", "all after two backwards"],
)
def test_ranks_that_differ_raise_before_the_step(ranks, monkeypatch, strategy, width, ways, left):
    """In the last case gradients of both experts were added up, and the step took them. With another width
    gloo ended the process.
    """
    for error in ranks.run_expecting_errors(branch, strategy, ways, width, False, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert all(text in str(error).replace("...", "") for text in left), error
        assert "run the same layers on all ranks" in str(error)


def test_groups_that_a_backward_reaches_on_one_rank(ranks):
    ways = [("one", "two"), ("two", "one")]
    for error in ranks.run_expecting_errors(branch, "fsdp", ways, 6, True, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert "layers were called in the order" in str(error)


def trained(strategy, precision: str, ways: list[str], hooks: bool = False) -> list[torch.Tensor]:
    """The parameters after a step for each of `ways`, whose experts all ranks use."""
    fabric = start(strategy, precision)
    net = Experts(9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    called: list[nn.Parameter] = []
    for p in model.parameters() if hooks else ():
        p.register_post_accumulate_grad_hook(called.append)
    for number, way in enumerate(ways):
        optimizer.zero_grad()
        for micro in range(2):
            fabric.backward(model(rows(fabric, 2 * number + micro), way).square().mean() / 2)
        unused = model.module.two if way == "one" else model.module.one
        without = [p for p in unused.parameters() if way != "both"]
        assert all(p.grad is None for p in without)
        assert not {*called} & {*without}
        assert not hooks or len(called) == 2 * (4 if without else 8)
        called.clear()
        optimizer.step()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "hsdp"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_a_branch_of_all_ranks_equals_one_process(ranks, strategy, precision):
    """Parameters that no rank used have no gradient: momentum and weight decay do not change them."""
    ways = ["one", "two", "two", "both", "one"]
    expected = ranks.run(trained, "auto", precision, ways, world_size=1)[0]
    found = ranks.run(trained, strategy, precision, ways, world_size=2)[0]
    error = 2e-2 if precision == "bf16-true" else 1e-3 if precision == "16-mixed" else 1e-6
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=error, atol=error)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_hooks_of_parameters_that_no_rank_used_are_not_called(ranks, strategy):
    ranks.run(trained, strategy, "32-true", ["one", "two", "both"], True, world_size=2)


def with_unused(world_size_one: bool) -> list[torch.Tensor]:
    """Other experts on each rank, in several backwards, as one process would compute them."""
    fabric = start("auto" if world_size_one else FSDPStrategy(find_unused_parameters=True))
    net = Experts(9)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.3))
    for number, way in enumerate([("one", "two"), ("two", "one"), ("one", "one")]):
        x = rows(fabric, number)
        parts = [(x[:2], way[0]), (x[2:], way[1])] if world_size_one else [(x, way[fabric.global_rank])]
        for part, one in parts:
            fabric.backward(model(part, one).square().mean() / len(parts))
    optimizer.step()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


def test_ranks_may_differ_with_find_unused_parameters(ranks):
    expected = ranks.run(with_unused, True, world_size=1)[0]
    for value, other in zip(ranks.run(with_unused, False, world_size=2)[0], expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def without_sync(strategy: str) -> list[torch.Tensor]:
    """Two backwards of which torch's own switch reduces the second one."""
    fabric = start(strategy)
    net = WithUnused()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer = fabric.setup(net, optimizer)
    for number in range(4):
        if fabric.world_size > 1:
            model.module.set_requires_gradient_sync(number % 2 == 1)
        fabric.backward(model(rows(fabric, number)).square().mean() / 2)
        if number % 2:
            assert all(p.grad is None for p in model.module.unused.parameters())
            optimizer.step()
            optimizer.zero_grad()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_torchs_switch_of_the_reduction_leaves_unused_parameters_alone(ranks, strategy):
    expected = ranks.run(without_sync, "auto", world_size=1)[0]
    for value, other in zip(ranks.run(without_sync, strategy, world_size=2)[0], expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def other_order(fabric, path: str, same: list[str], last: tuple[str, str], grad: bool) -> None:
    """Calls without a step between them, whose layers have different sizes."""
    torch.manual_seed(5)
    net = Experts(9)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.3))
    for number, way in enumerate([*same, last[fabric.global_rank]]):
        try:
            with torch.set_grad_enabled(grad):
                loss = model(rows(fabric, number), way).square().mean()
        except CollectiveMismatch as error:
            Path(path).write_text(str(error))
            raise
        if grad:
            fabric.backward(loss)


def launch(jobs: list[tuple], path: str) -> str:
    """On each rank of the pool a job of its own: the error of its rank that was in another call."""
    _, strategy, *parts, _ = jobs[rank_info().rank]
    os.environ["FABRIC_HANG_REPORT_AFTER"] = "40"
    blocks = FSDPStrategy(auto_wrap_policy={nn.Sequential}, sharding_strategy=strategy, start_method="fork")
    fabric, path = Fabric(accelerator="cpu", devices=2, strategy=blocks), f"{path}.{rank_info().rank}"
    try:
        fabric.launch(other_order, path, *parts)
    except LaunchError:
        return Path(path).read_text()
    finally:
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"
    return "no error"


ORDERS = [
    ("another layer", "FULL_SHARD", ["one"] * 4, ("one", "two"), True, ("its two", "(one.0.weight)")),
    ("known", "SHARD_GRAD_OP", ["one", "two"] * 2, ("one", "two"), True, ("its one", "(two.0.weight)")),
    ("one more", "FULL_SHARD", ["one"] * 4, ("one", "both"), True, ("its two", "pre_backward")),
    ("one less", "FULL_SHARD", ["both"] * 4, ("both", "one"), False, ("its end", "(two.0.weight)")),
]


def test_layers_of_different_size_in_another_order(forking_ranks, tmp_path):
    """gloo ended a process by SIGABRT, unless it was in call 1, 2, 4, 8, ... of the model."""
    found = forking_ranks.run(launch, ORDERS, str(tmp_path / "error"), world_size=4, group=False, timeout=100)
    for (case, *_, texts), error in zip(ORDERS, found, strict=True):
        for text in (f"forward of model 0 (Experts), {texts[0]}", texts[1], "each waits for a call"):
            assert text in error, f"{case}: {error}"


def equal_orders(strategy: str, ways: list[str]) -> list[int]:
    """The number of calls that each forward compares. All ranks make the same forwards."""
    fabric = start(FSDPStrategy(auto_wrap_policy={nn.Sequential}, sharding_strategy=strategy))
    net = Experts(9)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.3))
    compared = []
    for number, way in enumerate(ways):
        counts = guard_of(dist.group.WORLD).count
        out = model(rows(fabric, number), way)
        compared.append(guard_of(dist.group.WORLD).count - counts)
        fabric.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return compared


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_an_order_that_repeats_is_not_compared(ranks, strategy):
    """The first two forwards compare their start, their layers and their end, and a change compares one call.
    Forwards 4 and 8 are compared in any case.
    """
    ways = ["both", "both", "both", "one", "one", "both", "both", "one"]
    assert ranks.run(equal_orders, strategy, ways, world_size=2)[0] == [4, 4, 1, 3, 1, 1, 0, 3]


class Raises(Experts):
    def forward(self, x, way: str):
        out = super().forward(x, "both")
        if way == "bad":
            raise ValueError("a bad batch")
        return out


def skipped_batches(world_size_one: bool) -> list[torch.Tensor]:
    """A forward that raises on one rank, after its last layer: all ranks skip the batch."""
    fabric = start(FSDPStrategy(auto_wrap_policy={nn.Sequential}) if not world_size_one else "auto")
    net = Raises(9)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(8):
        bad = number in (2, 4, 5)
        way = "bad" if bad and fabric.global_rank == number % fabric.world_size else "good"
        try:
            loss, failed = model(rows(fabric, number), way).square().mean(), False
        except ValueError:
            failed = True
        if fabric.any(failed):
            continue
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


def test_a_forward_that_raises_on_one_rank_after_its_layers(ranks):
    expected = ranks.run(skipped_batches, True, world_size=1)[0]
    for value, other in zip(ranks.run(skipped_batches, False, world_size=2)[0], expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def called_alone(grad: bool, numbers: tuple[int, ...], way: str) -> list[torch.Tensor]:
    """Rank zero calls the model alone and skips the error, as other ranks do; then all ranks train."""
    several = dist.get_world_size() > 1
    fabric = start(FSDPStrategy(auto_wrap_policy={nn.Sequential}) if several else "auto")
    net = Experts(9)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(8):
        if several and number in numbers:
            with pytest.raises(CollectiveMismatch), torch.set_grad_enabled(grad):
                model(rows(fabric, number), way) if fabric.global_rank == 0 else fabric.barrier()
        optimizer.zero_grad()
        fabric.backward(model(rows(fabric, number), "both").square().mean())
        optimizer.step()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


@pytest.mark.parametrize(
    ("grad", "numbers", "way"),
    [(False, (3, 4, 5), "both"), (True, (0, 1, 3), "both"), (True, (5, 6), "two")],
    ids=["evaluation", "training", "a layer in it"],
)
def test_a_forward_of_one_rank_leaves_the_order_of_calls_equal(ranks, grad, numbers, way):
    """A trace of the refused call made rank zero compare a later one alone: its end, its number, a layer."""
    expected = ranks.run(called_alone, grad, numbers, way, world_size=1)[0]
    for value, other in zip(
        ranks.run(called_alone, grad, numbers, way, world_size=2)[0], expected, strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


class LastIsEnd(nn.Module):
    """Its last layer has the name of the end of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.end = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x, last: bool):
        return self.end(self.one(x)) if last else self.one(x)


def without_last() -> None:
    fabric = start(FSDPStrategy(auto_wrap_policy={nn.Sequential}))
    model, _ = fabric.setup(net := LastIsEnd(), torch.optim.SGD(net.parameters(), lr=0.1))
    model(rows(fabric, 0), fabric.global_rank == 0)


def test_a_layer_with_the_name_end(ranks):
    for error in ranks.run_expecting_errors(without_last, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert "its end " in str(error)
        assert "its end, after its last layer" in str(error)
