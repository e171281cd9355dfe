"""Loaders that a loop sets up anew: for each epoch, of a subset, for another trial."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fabric import Fabric

DATA = TensorDataset(torch.arange(24.0)[:, None])
OTHER = TensorDataset(torch.arange(24.0)[:, None])


def started() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size() if dist.is_initialized() else 1)
    fabric.launch()
    torch.manual_seed(1)
    return fabric


def model_of(fabric: Fabric):
    model = nn.Linear(1, 1)
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.001))


def epoch(fabric: Fabric, loader, trained) -> list[float]:
    """Train one epoch; return its order over all ranks."""
    model, optimizer = trained
    order = []
    for (x,) in loader:
        order += fabric.all_gather(x.flatten(), uneven="cat").sort()[0].tolist()
        optimizer.zero_grad()
        fabric.backward(model(x).mean())
        optimizer.step()
    return order


def ready(fabric: Fabric, data=DATA, shuffle: bool = True):
    return fabric.setup_dataloaders(
        DataLoader(data, batch_size=6 // fabric.world_size, shuffle=shuffle, drop_last=True)
    )


def orders(how: str) -> list[list[float]]:
    fabric = started()
    first = ready(fabric) if how == "first before the model" else None
    trained = model_of(fabric)
    if how == "kept":
        loader = ready(fabric)
        return [epoch(fabric, loader, trained) for _ in range(3)]
    if how == "first before the model":
        return [epoch(fabric, first, trained), *[epoch(fabric, ready(fabric), trained) for _ in range(2)]]
    if how == "evaluated between":
        found = []
        for _ in range(3):
            found.append(epoch(fabric, ready(fabric), trained))
            with torch.no_grad():
                list(ready(fabric))
        return found
    data = [Subset(DATA, range(24)) for _ in range(3)] if how == "subsets" else [DATA] * 3
    return [epoch(fabric, ready(fabric, one), trained) for one in data]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("how", ["anew", "subsets", "first before the model", "evaluated between"])
def test_a_loader_for_each_epoch_has_the_orders_of_one_loader(ranks, how, world_size):
    expected = ranks.run(orders, "kept", world_size=1)[0]
    assert len({*map(tuple, expected)}) == 3
    for found in ranks.run(orders, how, world_size=world_size):
        assert found == expected


def trials() -> None:
    """Each trial begins with epoch 0, as other data do and loaders whose epoch is set."""
    fabric = started()
    before = [x.tolist() for (x,) in ready(fabric)]
    assert [x.tolist() for (x,) in ready(fabric)] == before  # nothing is trained
    found = []
    for _ in range(2):
        trained = model_of(fabric)
        found.append([epoch(fabric, ready(fabric), trained) for _ in range(2)])
    assert found[0] == found[1]
    loader, other = ready(fabric), ready(fabric, OTHER)
    loader.set_epoch(0)
    assert epoch(fabric, loader, trained) == epoch(fabric, other, trained) == found[0][0]
    state = loader.state_dict()
    again = ready(fabric)
    again.load_state_dict(state)
    assert epoch(fabric, again, trained) == epoch(fabric, loader, trained) == found[0][1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_trials_begin_with_the_first_epoch(ranks, world_size):
    ranks.run(trials, world_size=world_size)


def looked_into() -> list[float]:
    """Rank zero alone looks at a batch of another loader."""
    fabric = started()
    model_of(fabric)
    peek = ready(fabric)
    if fabric.is_global_zero:
        next(iter(peek))
    return sorted([number for (x,) in ready(fabric) for number in x[:, 0].tolist()])


def test_a_look_of_one_rank_does_not_count_for_new_loaders(ranks):
    first, second = ranks.run(looked_into, world_size=2)
    assert len({*first, *second}) == len(first) + len(second)
