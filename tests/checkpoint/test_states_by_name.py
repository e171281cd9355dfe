"""States of optimizers go by name from any layout into any other, whatever the order of parameters there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import SPECIAL, failure
from torch import nn

from fabric import Fabric


def net(seed, tied):
    """Equal shapes everywhere: a number in place of a name would find a state that fits."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    if tied:
        module[4].weight = module[0].weight
    return module


ORDERS = {
    "as it is": lambda module: list(module.parameters()),
    "reversed": lambda module: list(module.parameters())[::-1],
    "groups": lambda module: [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "lr": 0.01},
    ],
    "reversed groups": lambda module: [
        {"params": group["params"][::-1]} for group in ORDERS["groups"](module)
    ],
}
REORDERED = {"as it is": "reversed", "groups": "reversed groups"}


def trained(name, order, seed=0, tied=True, before=True):
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=SPECIAL.get(name, lambda: name)()
    )
    fabric.launch()
    model = net(seed, tied)
    if before:
        model, optimizer = fabric.setup(model, torch.optim.Adam(ORDERS[order](model), lr=0.1))
    else:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.Adam(ORDERS[order](model), lr=0.1))
    return fabric, model, optimizer, (step(fabric, model, optimizer) for _ in range(3))


def step(fabric, model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.arange(32.0).view(4, 8) / 32).pow(2).mean()
    fabric.backward(loss)
    optimizer.step()


def go_on(steps, fabric, model, folder, name):
    next(steps)
    fabric.save(folder / name, {"model": model}, format="full")


def save(name, order, folder, **how):
    fabric, model, optimizer, steps = trained(name, order, **how)
    next(steps)
    for form in ("full", "sharded"):
        fabric.save(folder / form, {"model": model, "optimizer": optimizer}, format=form)
    go_on(steps, fabric, model, folder, "expected")


def load(name, order, folder, form, **how):
    fabric, model, optimizer, steps = trained(name, order, 3, **how)
    next(steps)
    fabric.load(folder / form, {"optimizer": optimizer, "model": model})
    go_on(steps, fabric, model, folder, f"got-{form}")


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def run(ranks, function, name, *args, **how):
    ranks.run(partial(function, **how), name, *args, world_size=1 if name == "single" else 2)


CHAIN = ["ddp", "single", "fsdp", "pipeline", "zero1", "tp"]


@pytest.mark.parametrize("order", REORDERED)
@pytest.mark.parametrize("saver", range(len(CHAIN)), ids=CHAIN)
def test_any_layout_goes_on_with_the_states_of_any_other(ranks, tmp_path, saver, order):
    name, other = CHAIN[saver], CHAIN[(saver + 1) % len(CHAIN)]
    how = {"before": order == "groups", "tied": "tp" not in (name, other)}  # its plan would part tied weights
    run(ranks, save, name, order, tmp_path, **how)
    expected = weights(tmp_path / "expected")
    for form in ("full", "sharded"):
        run(ranks, load, other, REORDERED[order], tmp_path, form, **how)
        got = weights(tmp_path / f"got-{form}")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "full", weights_only=True)["optimizer"]["param_names"]
    names = [name for name, _ in net(0, how["tied"]).named_parameters()]
    assert sorted(name for group in saved for name in group) == sorted(names)


def load_into_another_grouping(folder):
    fabric, model, optimizer, _ = trained("ddp", "groups", 3)
    return failure(fabric, "load", folder / "full", {"optimizer": optimizer, "model": model})


def test_another_grouping_is_one_error_on_all_ranks(ranks, tmp_path):
    ranks.run(save, "fsdp", "as it is", tmp_path, world_size=2)
    for told in ranks.run(load_into_another_grouping, tmp_path, world_size=2):
        assert told is not None
        assert "'0.bias' is in group 1, and was in group 0" in told[1]
