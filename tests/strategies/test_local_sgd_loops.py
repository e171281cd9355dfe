"""strategy="local_sgd" in loops as users write them: optimizers in optimizers, copies, loads in a round."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, NAdam, Optimizer

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import LocalSGDStrategy, ZeRO1Strategy

WORLD = 2
MOVES = partial(Adam, lr=0.05, weight_decay=0.1)
"""Moves what no step of a rank has moved."""


class Net(nn.Module):
    """With a parameter of one number, one that is frozen, one that is complex, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.scale, self.turn = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3) + 1j)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return (self.norm(self.layer(x)) * self.scale * self.turn).abs() + self.frozen


def batch(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def launched(sync_every=3, outer=None, strategy=None, precision=None):
    if strategy == "zero1":
        strategy = ZeRO1Strategy(find_unused_parameters=True)
    strategy = strategy or LocalSGDStrategy(sync_every, outer_optimizer=outer)
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def train(fabric, model, optimizer, steps, factor=1.0):
    for step in steps:
        optimizer.zero_grad()
        fabric.backward((model(batch(step, fabric.global_rank)) * factor).pow(2).mean())
        optimizer.step()


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def alike(found):
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)
    return found[0]


def saved(path, kind, outer, other, format):
    fabric = launched(3, outer)
    model, optimizer = fabric.setup(net := Net(), kind(net.parameters()))
    train(fabric, model, optimizer, range(4))
    fabric.save(path, {"model": model, "optimizer": optimizer}, format=format)
    entries = copy.deepcopy(optimizer.state_dict()["state"])
    train(fabric, model, optimizer, range(4, 9))
    went_on = values(model)
    fabric = launched(3, outer, other)
    model = Net()
    parameters = [*model.parameters()]
    if other is None:  # in another order: names tell which is which
        parameters.reverse()
    model, optimizer = fabric.setup(model, kind(parameters))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(4, 9))
    return went_on, values(model), entries


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize("outer", [partial(SGD, lr=0.7, momentum=0.9), partial(Adam, lr=0.05), MOVES])
@pytest.mark.parametrize("kind", [partial(SGD, lr=0.1), partial(Adam, lr=0.05)])
def test_what_the_outer_optimizer_knows_is_kept_of_all_parameters(ranks, tmp_path, kind, outer, format):
    for went_on, resumed, _ in ranks.run(saved, tmp_path / "c", kind, outer, None, format, world_size=WORLD):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


@pytest.mark.parametrize("other", ["ddp_find_unused_parameters_true", "zero1", "local_sgd"])
def test_it_is_nothing_to_those_that_have_no_outer_optimizer(ranks, tmp_path, other):
    kind = partial(Adam, lr=0.05)
    ranks.run(saved, tmp_path / "c", kind, MOVES, other, "full", world_size=WORLD)
    state = torch.load(tmp_path / "c", weights_only=True)
    net = Net()
    plain = kind(net.parameters())
    plain.load_state_dict(state["optimizer"])
    net(batch(0, 0)).sum().backward()
    plain.step()
    assert all("exp_avg" in entry for entry in plain.state.values())


@pytest.mark.parametrize("kind", [partial(Adam, lr=0.05), partial(NAdam, lr=0.05)])
def test_moments_of_one_number_and_of_complex_ones_are_means_too(ranks, tmp_path, kind):
    *_, entries = ranks.run(saved, tmp_path / "c", kind, None, None, "full", world_size=WORLD)[0]
    models = [Net() for _ in range(WORLD)]
    optimizers = [kind(net.parameters()) for net in models]
    for step in range(4):
        for rank, (net, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            net(batch(step, rank)).pow(2).mean().backward()
            optimizer.step()
        if step == 2:
            with torch.no_grad():
                for tensors in zip(*[[*n.parameters(), *n.buffers()] for n in models], strict=True):
                    if not tensors[0].dtype.is_floating_point and not tensors[0].is_complex():
                        continue
                    mean = torch.stack(tensors).mean(0)
                    [tensor.copy_(mean) for tensor in tensors]
    for number, name in enumerate(dict(models[0].named_parameters())):
        own = [optimizer.state_dict()["state"].get(number) for optimizer in optimizers]
        if own[0] is None:
            assert number not in entries
            continue
        for key, value in entries[number].items():
            mean = torch.stack([entry[key] for entry in own]).mean(0)
            torch.testing.assert_close(value, mean, msg=f"{name} {key}")
        assert entries[number]["step"] == 4


def half(path):
    fabric = launched(4, precision="16-mixed")
    model, optimizer = fabric.setup(net := nn.Linear(4, 3), Adam(net.parameters(), lr=0.05))
    train(fabric, model, optimizer, range(3), 1e30 if fabric.global_rank else 1.0)
    scaler = fabric.strategy.precision
    model.zero_grad()  # after a skipped step
    fabric.save(path, {"model": model, "optimizer": optimizer, "scaler": scaler})
    train(fabric, model, optimizer, range(3, 8), 300.0)
    went_on = values(model), scaler.state_dict()
    fabric = launched(4, precision="16-mixed")
    model, optimizer = fabric.setup(net := nn.Linear(4, 3), Adam(net.parameters(), lr=0.05))
    scaler = fabric.strategy.precision
    fabric.load(path, {"model": model, "optimizer": optimizer, "scaler": scaler})
    train(fabric, model, optimizer, range(3, 8), 300.0)
    return went_on, (values(model), scaler.state_dict())


def test_a_saved_scale_of_gradients_is_that_of_all_ranks(ranks, tmp_path):
    for went_on, resumed in ranks.run(half, tmp_path / "c", world_size=WORLD):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


def half_saved_before_a_step(path):
    fabric = launched(4, precision="16-mixed")
    model, optimizer = fabric.setup(net := nn.Linear(4, 3), SGD(net.parameters(), lr=0.1))
    train(fabric, model, optimizer, range(2), 1e30 if fabric.global_rank else 1.0)
    found = []
    for saves in (False, True):
        optimizer.zero_grad()
        fabric.backward(model(batch(2, 0)).pow(2).mean())
        if saves:
            fabric.save(path, {"scaler": fabric.strategy.precision})
        found.append(net.weight.grad.clone())
        fabric.clip_gradients(model, optimizer, max_norm=1e9)
        found.append(net.weight.grad.clone())
    return found


def test_gradients_that_wait_for_their_step_come_to_the_scale_of_rank_zero(ranks, tmp_path):
    by_rank = ranks.run(half_saved_before_a_step, tmp_path / "c", world_size=WORLD)
    for rank, (before, true, saved, clipped) in enumerate(by_rank):
        torch.testing.assert_close(before / true, torch.full_like(true, 2.0 ** (14 if rank else 16)))
        torch.testing.assert_close(saved / true, torch.full_like(true, 2.0**16))
        torch.testing.assert_close(clipped, true)


class Around(Optimizer):
    """Steps by another optimizer, as SAM and Lookahead do."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)
        self.base = SGD(self.param_groups, **settings)

    def step(self, closure=None):
        self.base.step()


def stepped_by_another(kind):
    fabric = launched(2)
    model, optimizer = fabric.setup(net := Net(), kind(net.parameters(), lr=0.1))
    train(fabric, model, optimizer, range(4))
    return values(model)


def test_an_optimizer_may_step_by_another_one(ranks):
    found = alike(ranks.run(stepped_by_another, Around, world_size=WORLD))
    torch.testing.assert_close(found, alike(ranks.run(stepped_by_another, SGD, world_size=WORLD)))


def loads_in_a_round(how, path):
    outer = partial(SGD, lr=0.7, momentum=0.9)
    fabric = launched(3, outer)
    model, optimizer = fabric.setup(net := Net(), Adam(net.parameters(), lr=0.05))
    other, step_other = fabric.setup(net := Net(), Adam(net.parameters(), lr=0.05))
    state = {name: value + 1 for name, value in values(other).items()}
    fabric.save(path, {"other": state, "optimizer": step_other})
    train(fabric, model, optimizer, range(1))
    train(fabric, other, step_other, range(2))
    if how == "model.load_state_dict":
        other.load_state_dict(state)
    elif how == "fabric.load":
        fabric.load(path, {"other": other})
    elif how == "only the optimizer":
        fabric.load(path, {"optimizer": step_other})
    elif how == "the given optimizer":
        step_other.optimizer.load_state_dict(copy.deepcopy(step_other.optimizer.state_dict()))
    elif how == "strategy":
        fabric.strategy.load_module_state_dict(other, state)
    train(fabric, model, optimizer, range(1, 3))
    loaded = values(other)
    train(fabric, other, step_other, range(2, 5))
    fabric.strategy.end_round()
    moments = [entry["exp_avg"] for entry in step_other.optimizer.state.values() if entry]
    return values(model), values(other), moments, loaded


HOW = ["nothing", "model.load_state_dict", "fabric.load", "strategy", "only the optimizer",
       "the given optimizer"]  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_a_load_in_a_round_is_of_what_was_loaded_only(ranks, tmp_path, how):
    found = ranks.run(loads_in_a_round, how, tmp_path / "c", world_size=WORLD)
    quiet = ranks.run(loads_in_a_round, "nothing", tmp_path / "c", world_size=WORLD)
    for mine, its in zip(found, quiet, strict=True):
        torch.testing.assert_close(mine[0], its[0], rtol=0, atol=0)  # the other model has its own rounds
    alike([(mine, other, moments) for mine, other, moments, _ in found])
    if how in ("model.load_state_dict", "fabric.load", "strategy"):
        start = {name: value + 1 for name, value in values(Net()).items()}
        alike([loaded for *_, loaded in found])
        # A round from these values moves them as far as steps do, and not as far as they are from others.
        assert (found[0][1]["layer.weight"] - start["layer.weight"]).abs().max() < 0.3
        assert (found[0][1]["layer.weight"] - start["layer.weight"]).abs().max() > 1e-3


def copies(outer):
    fabric = launched(2, outer)
    model, optimizer = fabric.setup(net := Net(), SGD(net.parameters(), lr=0.1, momentum=0.9))
    train(fabric, model, optimizer, range(1))
    model, optimizer = copy.deepcopy((model, optimizer))
    train(fabric, model, optimizer, range(1, 5))
    return values(model)


@pytest.mark.parametrize("outer", [None, partial(SGD, lr=0.7, momentum=0.9)])
def test_a_copied_model_and_its_optimizer_are_averaged(ranks, outer):
    alike(ranks.run(copies, outer, world_size=WORLD))


def copy_stepped_past():
    fabric = launched(2)
    model = copy.deepcopy(fabric.setup(Net()))
    fabric.backward(model(batch(0, fabric.global_rank)).sum())
    SGD(model.parameters(), lr=0.1).step()


def test_a_copied_model_takes_no_steps_of_an_optimizer_that_was_not_set_up(ranks):
    for error in ranks.run_expecting_errors(copy_stepped_past, world_size=WORLD):
        assert isinstance(error, UsageError)
        assert "SGD.step() was called on an optimizer that setup did not return" in str(error)
