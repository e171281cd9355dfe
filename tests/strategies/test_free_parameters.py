"""Parameters that optimizers have and no model, beside plain torch on the joined batch."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.strategies import PipelineStrategy

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def start(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def batches(fabric: Fabric | None) -> list[torch.Tensor]:
    data = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(2)).double()
    if fabric is None:
        return [*data]
    return [x.chunk(fabric.world_size)[fabric.global_rank] for x in data]


def train(fabric: Fabric | None, averaged: bool = False, accumulate: bool = False):
    """A model, and a temperature that is trained beside it, in a backward of its own and in that of the
    model. Gives the temperature, its optimizer, and the model's weights.
    """
    torch.manual_seed(5)
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = 0 if fabric is None else fabric.global_rank
    free = nn.ParameterDict({"a": torch.full((2,), 1.0 + rank).double(), "b": torch.zeros(3).double()})
    free_optimizer = torch.optim.Adam(free.values(), lr=0.1)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        free_optimizer = fabric.setup_optimizers(free_optimizer)
    backward = torch.Tensor.backward if fabric is None else fabric.backward
    for x in batches(fabric):
        y = model(x)
        optimizer.zero_grad()
        backward((free["a"].detach().exp().sum() * y).pow(2).mean())
        optimizer.step()
        if not accumulate:
            free_optimizer.zero_grad()
        backward((free["a"].exp().sum() * (y.detach() - 1).pow(3)).mean())
        backward((free["b"].sum() * model(x)).mean())  # the other one gets nothing
        if averaged:
            for parameter in free.values():
                parameter.grad = fabric.all_reduce(parameter.grad)
        free_optimizer.step()
    return free, free_optimizer, {name: v.clone() for name, v in model.state_dict().items()}


def trains(strategy: str, averaged: bool, accumulate: bool) -> None:
    free, _, weights = train(start(strategy), averaged, accumulate)
    plain, _, plain_weights = train(None, accumulate=accumulate)
    torch.testing.assert_close(dict(free.items()), dict(plain.items()), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("averaged", "accumulate"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_free_parameters_train_like_one_process(ranks, strategy, averaged, accumulate):
    ranks.run(trains, strategy, averaged, accumulate, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_free_parameters_on_three_ranks(ranks, strategy):
    ranks.run(trains, strategy, False, False, world_size=3)


def alone(strategy: str) -> None:
    """Without any model; more parameters are added later."""
    fabric = start(strategy)
    results = []
    for own in (fabric, None):
        weight, late = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.ones(4).double())
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
        if own is not None:
            optimizer = own.setup_optimizers(optimizer)
        optimizer.add_param_group({"params": [late]})
        for x in batches(own):
            optimizer.zero_grad()
            loss = ((x @ weight - 1).pow(2) + (x @ late).pow(2)).mean()
            loss.backward() if own is None else own.backward(loss)
            optimizer.step()
        results.append((weight.detach(), late.detach()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_no_model_at_all(ranks, strategy):
    ranks.run(alone, strategy, world_size=2)


def grown(strategy: str) -> None:
    """Every second step replaces the parameters in the groups by longer ones, as Gaussian splatting does."""
    fabric = start(strategy)
    results = []
    for own in (fabric, None):
        bias = nn.Parameter(torch.zeros(1).double())
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(4).double())], lr=0.1)
        optimizer.add_param_group({"params": [bias], "lr": 0.01})
        if own is not None:
            optimizer = own.setup_optimizers(optimizer)
        for step, x in enumerate(batches(own) * 2):
            group = optimizer.param_groups[0]
            weight = group["params"][0]
            loss = ((x.repeat(1, 4)[:, : len(weight)] @ weight - 1 + bias).pow(2)).mean()
            loss.backward() if own is None else own.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                state = optimizer.state.pop(weight, None)
                group["params"][0] = weight = nn.Parameter(torch.cat([weight.detach(), torch.ones(1)]))
                if state is not None:
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.cat([state[name], torch.zeros(1)])
                    optimizer.state[weight] = state
        results.append((weight.detach(), bias.detach()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_replace_others_in_the_groups(ranks, strategy, world_size):
    ranks.run(grown, strategy, world_size=world_size)


def in_turn(strategy: str) -> None:
    """New free parameters for each task. Those of the last one were freed, and their ids are used again."""
    fabric = start(strategy)
    held = [nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.full((2,), 2.0).double())]
    reused, mean = 0, batches(None)[0].mean()
    for _ in range(6):
        optimizer = fabric.setup_optimizers(torch.optim.SGD(held, lr=0.1))
        fabric.backward((held[0].sum() * held[1].sum() * batches(fabric)[0]).mean())
        torch.testing.assert_close(held[0].grad, torch.full((3,), 4.0).double() * mean)
        torch.testing.assert_close(held[1].grad, torch.full((2,), 3.0).double() * mean)
        optimizer.zero_grad()
        del optimizer
        gc.collect()
        values, ids = [p.detach().clone() for p in held], [*map(id, held)]
        del held[1 - fabric.global_rank], held[0]  # freed in another order on each rank
        held += map(nn.Parameter, values)
        reused += {*ids} == {*map(id, held)}
    assert all(fabric.all_gather_object(reused > 0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_free_parameters_of_one_task_after_another(ranks, strategy):
    ranks.run(in_turn, strategy, world_size=2)


def scale_of(fabric: Fabric | None) -> torch.Tensor:
    """The scale of a pipeline's loss, after three steps."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    scale = nn.Parameter(torch.ones(2).double() + (0 if fabric is None else fabric.global_rank))
    optimizer = torch.optim.SGD([scale], lr=0.5)
    if fabric is not None:
        model, optimizer = fabric.setup(model), fabric.setup_optimizers(optimizer)
    for x in torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(2)).double():
        rows = x if fabric is None else x.chunk(2)[fabric.global_rank // 2]
        loss = (scale.sum() * model(rows)).pow(2).mean()
        loss.backward() if fabric is None else fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return scale.detach()


def beside_pipelines() -> None:
    strategy = PipelineStrategy(num_stages=2, num_microbatches=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    torch.testing.assert_close(scale_of(fabric), scale_of(None), rtol=1e-9, atol=1e-12)


def test_free_parameters_of_two_pipelines(ranks):
    ranks.run(beside_pipelines, world_size=4)


def saved(strategy: str, path: str) -> None:
    fabric = start(strategy)
    free, optimizer, _ = train(fabric)
    fabric.save(path, {"a": free["a"], "b": free["b"], "optimizer": optimizer}, format="full")
    other, again, _ = train(fabric, accumulate=True)
    assert not torch.equal(other["a"], free["a"])
    fabric.load(path, {"a": other["a"], "b": other["b"], "optimizer": again})
    assert torch.equal(other["a"], free["a"])  # in place: the optimizer has it
    for one, held in ((free, optimizer), (other, again)):
        for parameter in one.values():
            parameter.grad = torch.ones_like(parameter)
        held.step()
    assert torch.equal(other["a"], free["a"])
    assert torch.equal(other["b"], free["b"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_free_parameters_are_saved_and_loaded(ranks, strategy, tmp_path):
    ranks.run(saved, strategy, str(tmp_path / "free.pt"), world_size=2)


def on_one_rank_only() -> None:
    fabric = start("ddp")
    weight = nn.Parameter(torch.ones(4).double())
    fabric.setup_optimizers(torch.optim.SGD([weight], lr=0.1))
    x = batches(fabric)[0]
    (weight * x).sum().backward() if fabric.global_rank == 0 else fabric.barrier()


def test_a_backward_on_some_ranks_only_is_named(ranks):
    errors = ranks.run_expecting_errors(on_one_rank_only, world_size=2)
    assert all("gradients of free parameter 0" in str(error) for error in errors)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp_cpu_offload"])
def test_on_one_rank_of_each_strategy(ranks, strategy):
    ranks.run(trains, strategy, False, False, world_size=1)


def test_on_one_process():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    torch.testing.assert_close(dict(train(fabric)[0].items()), dict(train(None)[0].items()))
