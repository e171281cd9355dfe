"""0-dim parameters of sharded models, such as a temperature, are whole on every rank, and averaged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp_cpu_offload")


class Scaled(nn.Module):
    """Two layers, a trained scale, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x, scaled=True):
        out = self.second(torch.tanh(self.first(x))) / self.frozen
        return self.scale.exp() * out if scaled else out


def start(strategy) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def trained(fabric: Fabric | None, model: nn.Module | None = None):
    """The model and its optimizer after four steps of two backwards each, and the norms of gradients."""
    torch.manual_seed(7 if fabric is None else 7 + fabric.global_rank)
    if model is None:
        model = Scaled()
        torch.manual_seed(7)
        model.load_state_dict(Scaled().state_dict())
        model.scale.data.add_(0 if fabric is None else fabric.global_rank)  # rank zero's value counts
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(4, 2, 12, 4, generator=torch.Generator().manual_seed(1))
    backward, norms, shard = torch.Tensor.backward, [], slice(None)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        backward, shard = fabric.backward, slice(*fabric_rows(fabric))
    for step in data:
        for x in step:
            backward((model(x[shard]) - 1).square().mean() / 2)
        if fabric is None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        else:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def fabric_rows(fabric):
    rank, world = fabric.strategy.data_rank
    return rank * 12 // world, (rank + 1) * 12 // world


def equals_one_process(strategy, path=None) -> None:
    fabric = start(strategy)
    model, optimizer, norms = trained(fabric)
    plain, _, expected = trained(None)
    assert norms == pytest.approx(expected, rel=1e-4)
    with fabric.whole(model) as whole:
        if whole is not None:
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert model.scale.shape == ()
    if path is None:
        return
    scale, state = model.scale.detach().clone(), {"model": model, "optimizer": optimizer}
    fabric.save(path, state, format="sharded" if path.endswith("sharded") else "full")
    with torch.no_grad():
        model.scale.zero_()
        optimizer.state[model.scale]["exp_avg"].zero_()
    fabric.load(path, state)
    assert torch.equal(model.scale, scale)
    assert optimizer.state[model.scale]["exp_avg"] != 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_they_train_as_on_one_process(ranks, strategy, world_size):
    ranks.run(equals_one_process, strategy, world_size=world_size)


def split_by_layers() -> None:
    equals_one_process(FSDPStrategy(auto_wrap_policy={nn.Linear}))


def under_tensor_parallel(data: int, tensor: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(model, mesh):
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        return parallelize_module(model, mesh["tensor_parallel"], plan)

    equals_one_process(
        ModelParallelStrategy(parallelize, data_parallel_size=data, tensor_parallel_size=tensor)
    )


def many_under_tensor_parallel(empty_init: bool) -> None:
    """Values and gradients of many are not mixed up, and those of the meta device are averaged, too."""
    fabric = start(
        ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=1)
    )
    with fabric.init_module(empty_init=empty_init):
        model = nn.Linear(2, 2)
        model.scales = nn.ParameterList([nn.Parameter(torch.ones(()) * number) for number in range(30)])
    if fabric.global_rank and not empty_init:
        hold = [nn.Parameter(scale.detach().clone()) for scale in model.scales][::-1]  # other addresses
        model.scales = nn.ParameterList(hold[::-1])
    model = fabric.setup(model)
    assert [scale.item() for scale in model.scales] == [*range(30)]
    weight = 1 + fabric.global_rank
    model(torch.ones(1, 2))
    fabric.backward(sum([weight * number * scale for number, scale in enumerate(model.scales)]))
    assert [scale.grad.item() for scale in model.scales] == [1.5 * number for number in range(30)]


@pytest.mark.parametrize("empty_init", [False, True])
def test_many_under_tensor_parallel(ranks, empty_init):
    ranks.run(many_under_tensor_parallel, empty_init, world_size=2)


def test_they_train_in_groups_of_layers(ranks):
    ranks.run(split_by_layers, world_size=2)


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_they_train_under_tensor_parallel(ranks, data, tensor):
    ranks.run(under_tensor_parallel, data, tensor, world_size=data * tensor)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("name", ["full", "sharded"])
def test_they_are_saved_and_loaded(ranks, strategy, name, tmp_path):
    ranks.run(equals_one_process, strategy, str(tmp_path / name), world_size=2)


def from_the_meta_device() -> None:
    fabric = start("fsdp")
    torch.manual_seed(7)
    with fabric.init_module(empty_init=True):
        model = Scaled()
    model, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert (model.scale.item(), model.frozen.item()) == (0.5, 2.0)


def test_they_are_initialised_from_the_meta_device(ranks):
    ranks.run(from_the_meta_device, world_size=2)


def used_by_one_rank() -> None:
    fabric = start("fsdp")
    model = fabric.setup(Scaled())
    fabric.backward(model(torch.ones(2, 4), scaled=fabric.global_rank == 0).sum())
    fabric.barrier()


def test_one_that_only_some_ranks_use_is_named(ranks):
    for error in ranks.run_expecting_errors(used_by_one_rank, world_size=2):
        assert "gradients of scale" in str(error), error


def with_a_loss_scale(strategy) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="16-mixed")
    fabric.launch()
    torch.manual_seed(7)
    model = Scaled()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = model.scale.item()
    fabric.backward(model(torch.ones(4, 4)).square().mean())
    scaled = model.scale.grad.item()
    optimizer.step()
    changed = before - model.scale.item()
    assert abs(changed) > 1e-4
    assert changed == pytest.approx(0.5 * scaled / 2**16, rel=1e-3)
    optimizer.zero_grad()
    kept = [p.detach().clone() for p in model.parameters()]
    fabric.backward(model(torch.ones(4, 4)).square().mean())
    model.scale.grad.fill_(float("inf"))
    optimizer.step()  # which is skipped, for all parameters
    assert all([bool((p == old).all()) for p, old in zip(model.parameters(), kept, strict=True)])


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_they_train_with_a_loss_scale(ranks, strategy):
    ranks.run(with_a_loss_scale, strategy, world_size=2)


def shared() -> None:
    fabric = start("fsdp")
    scale = nn.Parameter(torch.tensor(0.5))
    first, second = Scaled(), Scaled()
    first.scale = second.scale = scale
    first, second = fabric.setup(first), fabric.setup(second)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([scale], lr=1.0))
    x = torch.ones(2, 4) * (1 + fabric.global_rank)
    fabric.backward(first(x).mean() + second(x).mean())
    found = scale.grad.clone()
    optimizer.step()
    assert torch.equal(found, fabric.all_reduce(found.clone()))
    assert first.scale is second.scale is scale


def test_two_models_share_one(ranks):
    ranks.run(shared, world_size=2)
