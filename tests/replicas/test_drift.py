"""Replicas that differ are one error on all ranks, with the name, the values, and what to write."""

from __future__ import annotations

import gc
import os
import re
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import ConfigurationError, FabricError, ReplicasDivergedError

STRATEGIES = ["ddp", "zero1", "fsdp"]
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def started(strategy="ddp", lr=0.1, momentum=0.0, model=None, **settings):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **settings)
    fabric.launch()
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    rate = lr(fabric.global_rank) if callable(lr) else lr
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    return fabric, *fabric.setup(model, optimizer)


def step(fabric, model, optimizer):
    optimizer.zero_grad()
    x = X[fabric.global_rank :: fabric.world_size]
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    fabric.backward(loss)
    optimizer.step()
    return loss


def drift(cause, strategy):
    """Five steps, the third of which does `cause`; the error, or None."""
    lr = (lambda rank: 0.1 * (rank + 1)) if cause == "lr" else 0.2
    fabric, model, optimizer = started(strategy, lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    try:
        for number in range(5):
            step(fabric, model, optimizer)
            if cause == "plateau":
                plateau.step(float(number) if fabric.global_rank else -float(number))
            if number == 2:
                disturb(cause, fabric, model, optimizer)
    except FabricError as error:
        return type(error).__name__, str(error)
    return None


def disturb(cause, fabric, model, optimizer):
    if cause == "clip":
        fabric.clip_gradients(model, optimizer, clip_val=0.1 * (fabric.global_rank + 1))
    if cause == "skip" and fabric.global_rank:
        optimizer.step()
    if cause == "reset":
        torch.manual_seed(fabric.global_rank)
        model[2].reset_parameters()
    if cause == "zero" and fabric.is_global_zero:
        with torch.no_grad():
            model[0].weight.zero_()


EXPECTED = {
    "lr": (
        r"lr of optimizer 0 \(SGD\) differs between ranks \(0: 0\.1 \| 1: 0\.2.*\)\. It arose before the "
        r"first optimizer step, .*The optimizer was made with another lr on each rank\. Write lr = "
        r"fabric\.broadcast\(lr\)\."
    ),
    "plateau": (
        r"lr of optimizer 0 \(SGD\) differs between ranks \(.*\)\. It arose between optimizer steps "
        r"\d and \d, .*scheduler\.step\(fabric\.all_reduce\(loss\)\)"
    ),
    "clip": (
        r"clip_val of optimizer 0 \(SGD\) differs between ranks \(0: 0\.1 \| 1: 0\.2.*\)\..*"
        r"Write clip_val = fabric\.broadcast\(clip_val\)\."
    ),
    "skip": (
        r"steps of optimizer 0 \(SGD\) differ between ranks \(0: 3 \| 1.*: 4\)\..*"
        r"`if fabric\.any\(skip\): continue`"
    ),
    "reset": r"2\.weight of model 0 \(Sequential\) differs between ranks .*random numbers of each rank",
    "zero": (
        r"0\.weight of model 0 \(Sequential\) .*"
        r"`if fabric\.is_global_zero:`\. Make the call on all ranks"
    ),
}


# The watchdog finds a step of zero1 on one rank (test_standstill.py), which takes longer.
CASES = [
    (cause, strategy)
    for cause in EXPECTED
    for strategy in STRATEGIES
    if (cause, strategy) != ("skip", "zero1")
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("cause", "strategy"), CASES)
def test_drift_is_one_error_that_names_its_cause(ranks, cause, strategy, world_size):
    found = ranks.run(drift, cause, strategy, world_size=world_size)
    if (cause, strategy) == ("reset", "fsdp"):  # each rank draws the numbers of one process for its part
        assert found == [None] * world_size
        return
    assert len({*found}) == 1, "one error, the same on all ranks"
    kind, text = found[0]
    if (cause, strategy) == ("skip", "fsdp"):  # steps are collective there: the call check finds it
        assert kind == "CollectiveMismatch"
        assert "Skip a step on all ranks: `if fabric.any(skip): continue`." in text
        return
    assert kind == "ReplicasDivergedError"
    assert re.search(EXPECTED[cause], text), text
    assert re.search(r"found at the next call of all ranks, test_drift\.py:\d+\.", text)


def verb_after_drift(verb, folder):
    fabric, model, optimizer = started("ddp", replica_check=1000)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(X), batch_size=2))
    for _ in loader if verb == "epoch" else range(1):
        step(fabric, model, optimizer)
        if fabric.global_rank and verb in ("lr", "steps"):
            optimizer.param_groups[0]["lr"] = 0.5
        elif fabric.global_rank:
            model[0].bias.data.add_(1)
        try:
            if verb == "save":
                fabric.save(folder / "a.pt", {"model": model})
            elif verb == "lr":
                fabric.all_reduce(torch.ones(2))
            elif verb == "check":
                fabric.check_replicas()
            elif verb == "argument":
                fabric.check_replicas({"a": torch.ones(3), "b": [model[0].bias.detach()]})
        except ReplicasDivergedError as error:
            optimizer.param_groups[0]["lr"] = 0.1
            return str(error), (folder / "a.pt").exists(), float(fabric.all_reduce(1.0))
    return None


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("save", r"^0\.bias of model 0 \(Sequential\) differs between ranks"),
        (
            "check",
            r"^0\.bias of model 0 \(Sequential\) differs between ranks \(0: .* \| 1-2: .* at element 0;",
        ),
        ("argument", r"^tensor 1 differs between ranks"),
        ("lr", r"^lr of optimizer 0 \(SGD\) differs between ranks \(0: 0\.1 \| 1-2: 0\.5\)"),
    ],
)
def test_verbs_find_drift_and_the_group_stays_usable(ranks, tmp_path, verb, text):
    found = ranks.run(verb_after_drift, verb, tmp_path, world_size=3)
    assert len({*found}) == 1
    assert re.search(text, found[0][0])
    assert found[0][1:] == (False, 1.0)


def epoch_after_drift():
    fabric, model, optimizer = started("ddp", replica_check=1000)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(X), batch_size=2))
    try:
        for _ in loader:
            step(fabric, model, optimizer)
            model[0].bias.data.add_(fabric.global_rank)
    except ReplicasDivergedError as error:
        return str(error)
    return None


def test_the_end_of_an_epoch_finds_drift(ranks):
    first, second = ranks.run(epoch_after_drift, world_size=2)
    assert first == second
    assert "0.bias of model 0 (Sequential) differs between ranks" in first


def small_difference(size):
    fabric, model, optimizer = started("ddp", replica_check=1)
    model[0].weight.data.mul_(1 + size * fabric.global_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(3):
                step(fabric, model, optimizer)
        except ReplicasDivergedError:
            return "error"
    return [str(w.message) for w in caught if "Replicas differ by rounding" in str(w.message)]


def test_rounding_is_warned_of_once_and_more_is_an_error(ranks):
    (warned, others) = ranks.run(small_difference, 3e-7, world_size=2)
    assert len(warned) == 1, warned
    assert "0.weight of model 0 (Sequential)" in warned[0]
    assert others == []
    assert ranks.run(small_difference, 1e-4, world_size=2) == ["error", "error"]


def not_a_number(on_all):
    fabric, model, optimizer = started("ddp", replica_check=1)
    if on_all or fabric.global_rank:
        model[0].weight.data[0, 0] = torch.nan
    try:
        step(fabric, model, optimizer)
        step(fabric, model, optimizer)
    except ReplicasDivergedError as error:
        return str(error)
    return None


def test_nan_equals_nan_and_nothing_else(ranks):
    assert ranks.run(not_a_number, True, world_size=2) == [None, None]
    text, _ = ranks.run(not_a_number, False, world_size=2)
    assert "not finite on some ranks only" in text


def buffer_of_its_own(how):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x):
            if how == "grown":
                self.cache = torch.zeros(2 + dist.get_rank())
            if how == "grown in evaluation":
                with torch.inference_mode():
                    self.cache = torch.zeros(2 + dist.get_rank())
            return self.layer(x)

    fabric, model, optimizer = started("ddp", model=Cached(), replica_check=1)
    for _ in range(3):
        step(fabric, model, optimizer)
    fabric.check_replicas()


@pytest.mark.parametrize("how", ["grown", "grown in evaluation"])
def test_a_cache_that_grows_is_each_ranks_own(ranks, how):
    ranks.run(buffer_of_its_own, how, world_size=2)


def own_models():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", replica_check=1)
    fabric.launch()
    torch.manual_seed(0)
    shared = nn.Linear(4, 1)
    shared, optimizer = fabric.setup(shared, torch.optim.SGD(shared.parameters(), lr=0.1))
    own = nn.Linear(4, 1)
    rate = 0.1 * (fabric.global_rank + 1)
    own, own_optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=rate), replica_check=False)
    for _ in range(3):
        step(fabric, shared, optimizer)
        step(fabric, own, own_optimizer)
    fabric.barrier()
    return own.weight.tolist()


def test_a_model_may_be_each_ranks_own(ranks):
    first, second = ranks.run(own_models, world_size=2)
    assert first != second


def in_the_environment(values):
    os.environ["FABRIC_REPLICA_CHECK"] = values[dist.get_rank()]
    try:
        fabric, model, optimizer = started("ddp")
        model[0].bias.data.add_(fabric.global_rank)
        step(fabric, model, optimizer)
        fabric.barrier()
    except FabricError as error:
        return str(error)
    finally:
        del os.environ["FABRIC_REPLICA_CHECK"]
    return None


def test_the_environment_sets_the_schedule(ranks):
    assert ranks.run(in_the_environment, ["off", "0"], world_size=2) == [None, None]
    assert "0.bias" in ranks.run(in_the_environment, ["1", "1"], world_size=2)[0]
    text, _ = ranks.run(in_the_environment, ["True", "7"], world_size=2)
    assert text.startswith("replica_check differs between ranks (0: True | 1: 7)")


@pytest.mark.parametrize("value", [0, -1, "sometimes", 1.5, [1]])
def test_a_schedule_that_is_none_is_refused(value):
    with pytest.raises(
        ConfigurationError, match=re.escape(f"replica_check={value!r} is not a schedule. Write True")
    ):
        Fabric(accelerator="cpu", devices=1, replica_check=value)


def test_the_environment_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("FABRIC_REPLICA_CHECK", "sometimes")
    with pytest.raises(ConfigurationError, match="FABRIC_REPLICA_CHECK=sometimes is not a schedule"):
        Fabric(accelerator="cpu", devices=1)


def checks_of(every):
    fabric, model, optimizer = started("ddp", replica_check=every)
    counted = []
    check = fabric.strategy.find_part("replica check")
    compare = check.compare
    check.compare = lambda label, *args, **kwargs: (
        counted.append(check.backwards),
        compare(label, *args, **kwargs),
    )
    for _ in range(20):
        step(fabric, model, optimizer)
    return counted


@pytest.mark.parametrize(("every", "expected"), [(True, [1, 2, 4, 8, 16]), (6, [6, 12, 18]), (False, [])])
def test_the_schedule(ranks, every, expected):
    assert ranks.run(checks_of, every, world_size=2) == [expected, expected]


def with_garbage():
    fabric, model, optimizer = started("ddp", replica_check=1)
    step(fabric, model, optimizer)
    other = nn.Linear(4, 1)
    other, other_optimizer = fabric.setup(other, torch.optim.Adam(other.parameters(), lr=0.1))
    step(fabric, other, other_optimizer)
    kept = other_optimizer if fabric.global_rank else None
    del other, other_optimizer
    gc.collect()
    step(fabric, model, optimizer)
    fabric.barrier()
    return kept is not None


def test_an_optimizer_that_is_garbage_on_some_ranks_is_not_compared(ranks):
    assert ranks.run(with_garbage, world_size=2) == [False, True]


def quantised():
    from torch.testing._internal.two_tensor import TwoTensor

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    value, scale = torch.ones(3), torch.ones(3)
    fabric.check_replicas(TwoTensor(value, scale))
    try:
        fabric.check_replicas(TwoTensor(value, scale + fabric.global_rank))
    except ReplicasDivergedError as error:
        return str(error)
    return None


def test_tensors_that_consist_of_others_are_compared_by_these(ranks):
    first, second = ranks.run(quantised, world_size=2)
    assert first == second
    assert first.startswith("b of tensor 0 differs between ranks (0: 1 | 1: 2 at element 0")


def other_rates(kind, strategy):
    fabric, model, optimizer = started(strategy)
    rate = 0.05 * (fabric.global_rank + 1)
    if kind == "never set up":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if kind == "numpy":
        optimizer.param_groups[0]["lr"] = numpy.float32(rate)
    if kind == "tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(rate)
    try:
        for _ in range(4):
            step(fabric, model, optimizer)
        fabric.check_replicas()
    except ReplicasDivergedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("numpy", "optimizer 0 (SGD)"),
        ("tensor", "optimizer 0 (SGD)"),
        ("never set up", "the optimizer of 0.weight of model 0 (Sequential), ... (SGD)"),
    ],
)
def test_rates_that_are_no_floats_and_optimizers_that_were_not_set_up(ranks, strategy, kind, name):
    first, second = ranks.run(other_rates, kind, strategy, world_size=2)
    assert first == second
    assert first.startswith(f"lr of {name} differs between ranks (0: 0.05"), first


def stepped_without_parameters():
    fabric, model, _ = started("ddp")
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.param_groups[0]["params"] = []  # as those of a rank that owns none, in a step of zero1
    fabric.strategy.find_part("replica check").stepping(other)


def test_an_optimizer_without_parameters_is_not_compared(ranks):
    ranks.run(stepped_without_parameters, world_size=2)
