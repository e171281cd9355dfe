"""Every registered strategy keeps the contract, a third party's too; broken ones are told what they break."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import ContractError
from fabric.core.traits import Traits
from fabric.plugins.environments import ProcessGroupEnvironment
from fabric.strategies import (
    STRATEGY_REGISTRY,
    DataParallelStrategy,
    DDP2Strategy,
    DDPStrategy,
    LocalSGDStrategy,
    ParallelStrategy,
)
from fabric.strategies.layout import Layout
from fabric.testing.contract import check_strategy
from fabric.testing.promises import PROMISES


class AverageAfterwards(Layout):
    """Gradients averaged by hand after each backward: a layout that a third party might write."""

    traits = Traits(needs_launch=True, data_parallel=True, owns_backward=True)

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self.local = False

    def wrap(self, module: torch.nn.Module, topology: Any) -> torch.nn.Module:
        self.modules.append(module)
        return module

    def no_sync(self, wrapped: torch.nn.Module) -> Any:
        layout = self

        class Local:
            def __enter__(self) -> None:
                layout.local = True

            def __exit__(self, *exc: object) -> None:
                layout.local = False

        return Local()

    def backward(self, run: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        before = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}
        run(tensor, *args, **kwargs)
        if self.local:
            return
        for p in self.parameters():
            if p.grad is not None and (p not in before or not torch.equal(p.grad, before[p])):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]


class ThirdParty(ParallelStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.layout = AverageAfterwards()


class NoGradientSync(DDPStrategy):
    """Broken: never averages gradients, and saves less of the optimizer than there is."""

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
        return nullcontext()

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {"state": {}}


class SumsForMeans(DDPStrategy):
    """Broken: reduces by sums, and never restores the optimizer."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().all_reduce(tensor, group, "sum")

    def load_optimizer_state(self, optimizer: Any, state: Any) -> None:
        pass


class SumsGradients(DDPStrategy):
    """Broken: gradients are world_size times too large."""

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * self.world_size, module, *args, **kwargs)


class SplitsAndForgets(DataParallelStrategy):
    """Broken: gives back the output of the first replica."""

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        split = super().setup_module(module)
        split.forward = lambda x: module(x[: -(-len(x) // split.count)])
        return split


class Dies(DDPStrategy):
    """Broken: cannot even broadcast."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        raise NotImplementedError("no broadcast here")


def not_launchable() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


class MachineEach(ProcessGroupEnvironment):
    """Every rank of the pool as a machine of its own."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()

    def local_world_size(self) -> int:
        return 1


def ddp2_on_machines() -> DDP2Strategy:
    return DDP2Strategy(cluster_environment=MachineEach())


def local_sgd_of_one_step() -> LocalSGDStrategy:
    return LocalSGDStrategy(sync_every=1)


SO_MADE = {"ddp2": ddp2_on_machines, "local_sgd": local_sgd_of_one_step}
"""Whose ranks are machines: the pool's ranks, which share one, are told that each is its own; and whose ranks
are alike after some steps only.
"""


ELSEWHERE = ("horovod", "deepspeed", "xla", "single_xla")
"""Names of engines with packages of their own (`tests/integrations/`), or errors that say what to write."""


@pytest.mark.parametrize(
    "name", [n for n in sorted(STRATEGY_REGISTRY.names()) if not n.startswith(ELSEWHERE)]
)
def test_every_registered_strategy(ranks, name):
    check_strategy(SO_MADE.get(name, name), pool=ranks)


@pytest.mark.parametrize("strategy", ["dp", ddp2_on_machines])
def test_batches_split_over_three_devices(ranks, strategy):
    check_strategy(strategy, devices=3, pool=ranks)


def of_the_example() -> ParallelStrategy:
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from custom_engine import FlatGradientsStrategy

    return FlatGradientsStrategy()


@pytest.mark.parametrize("make", [ThirdParty, not_launchable, of_the_example])
def test_strategies_of_third_parties(ranks, make):
    check_strategy(make, pool=ranks)


def closures(make, rank, count):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    backward = torch.Tensor.backward
    if make is not None:
        fabric = Fabric(accelerator="cpu", devices=count, strategy=make())
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        rank, backward = fabric.global_rank, fabric.backward
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).chunk(count)[rank]

        def closure(x=x):
            optimizer.zero_grad()
            backward(loss := model(x).pow(2).mean())
            return loss

        optimizer.step(closure)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_engine_of_the_examples_takes_closures_that_are_called_again(ranks):
    for found in ranks.run(closures, of_the_example, 0, 2, world_size=2):
        torch.testing.assert_close(found, closures(None, 0, 1))


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_on_three_ranks(ranks, name):
    check_strategy(name, devices=3, pool=ranks)


def test_a_pool_is_made_where_none_is_given():
    check_strategy("single_device")


def broken(strategy, ranks):
    with pytest.raises(ContractError) as caught:
        check_strategy(strategy, pool=ranks)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    return {line[2:].partition(":")[0]: line for line in lines}, str(caught.value)


@pytest.mark.slow
def test_a_strategy_without_gradient_sync_is_found_out(ranks):
    found, message = broken(NoGradientSync, ranks)
    assert set(found) == {
        "training_equals_plain_torch",
        "models_are_independent",
        "accumulation_equals_the_big_batch",
        "closures_equal_plain_torch",
        "normalizing_equals_the_joined_batch",
        "clipping_sees_the_whole_gradient",
        "state_keys_are_the_users",
        "checkpoints_round_trip",
        "sharded_checkpoints_round_trip",
        "overrides_take_effect",
    }
    assert f"strategy 'NoGradientSync' on 2 x cpu breaks 10 of {len(PROMISES)} promises" in message
    training = found["training_equals_plain_torch"]
    assert "the model after three steps['body.0.weight'] differs from plain torch" in training
    assert "['state']" in found["state_keys_are_the_users"]


@pytest.mark.slow
def test_a_strategy_that_sums_for_means_is_found_out(ranks):
    found, _ = broken(SumsForMeans, ranks)
    trips = {"checkpoints_round_trip", "sharded_checkpoints_round_trip"}
    assert set(found) == {"collectives_are_right", *trips}
    assert "all_reduce(mean)['a'] differs" in found["collectives_are_right"]
    assert "one step after loading" in found["checkpoints_round_trip"]


@pytest.mark.slow
def test_a_strategy_whose_gradients_have_the_wrong_size_is_found_out(ranks):
    found, _ = broken(SumsGradients, ranks)
    assert {"training_equals_plain_torch", "clipping_sees_the_whole_gradient"} <= set(found)


@pytest.mark.slow
def test_a_strategy_of_one_process_that_loses_rows_is_found_out(ranks):
    found, message = broken(SplitsAndForgets, ranks)
    assert {"forward_equals_plain_torch", "training_equals_plain_torch"} <= set(found)
    assert "'SplitsAndForgets' on 2 x cpu" in message


@pytest.mark.slow
def test_a_strategy_that_raises_is_found_out(ranks):
    found, _ = broken(Dies, ranks)
    needs_it = {"loaders_are_split", "overrides_take_effect", "sharded_checkpoints_round_trip"}
    assert set(found) == {"collectives_are_right", *needs_it}
    assert "NotImplementedError: no broadcast here" in found["collectives_are_right"]


def test_auto_is_no_strategy_by_itself():
    with pytest.raises(TypeError, match="Check each by its own name"):
        check_strategy("auto")
