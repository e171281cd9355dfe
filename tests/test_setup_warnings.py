"""What a loop on several ranks is warned of once: a loader that was never set up, more workers than cores."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from fabric import Fabric
from fabric.checks import warn_of_batch_norm
from fabric.strategies import ModelParallelStrategy
from fabric.utilities.warnings import PossibleUserWarning

DATA = TensorDataset(torch.ones(16, 4))
NEVER = (
    "A DataLoader that was not set up (TensorDataset of 16, batch_size=2) is iterated in training. Unless "
    "each rank has its own part, all {} ranks do the same work"
)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(16, 4)


def started(strategy="ddp"):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = nn.Linear(4, 1)
    return fabric, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def messages(caught):
    return [str(w.message) for w in caught if issubclass(w.category, PossibleUserWarning)]


def loop(fabric, model, optimizer, train_loader):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in train_loader:
            x = batch[0] if isinstance(batch, list) else batch
            fabric.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    return messages(caught)


def raw_model():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2))
    model = nn.Linear(4, 1)
    return loop(fabric, model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_a_model_that_was_never_set_up_is_said_once(ranks):
    (told,), others = ranks.run(raw_model, world_size=2)
    assert told == (
        "fabric.backward ran although no model was set up: each rank keeps its own gradients, and the "
        "models diverge. Write model, optimizer = fabric.setup(model, optimizer); or average the "
        "gradients yourself."
    )
    assert others == []


def parameters_of_no_model():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    weight = torch.ones(4, requires_grad=True)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric.backward((weight * (fabric.global_rank + 1)).sum())
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 0.15))  # of the averaged gradient
    return messages(caught)


def test_parameters_of_no_model_are_averaged_without_a_warning(ranks):
    assert ranks.run(parameters_of_no_model, world_size=2) == [[], []]


def never_set_up(shuffle):
    parts = started()
    loader = DataLoader(DATA, batch_size=2, shuffle=shuffle)
    return loop(*parts, loader) + loop(*parts, loader)  # two epochs


@pytest.mark.parametrize(("shuffle", "world_size"), [(False, 2), (True, 2), (True, 3)])
def test_a_loader_that_was_never_set_up_is_said_once(ranks, shuffle, world_size):
    (told,), *others = ranks.run(never_set_up, shuffle, world_size=world_size)
    assert told == (
        f"{NEVER.format(world_size)}. Write loader = fabric.setup_dataloaders(loader) and iterate the "
        "result; if each rank has its own part, with use_distributed_sampler=False."
    )
    assert others == [[]] * (world_size - 1)


def held_by_the_loop_alone():
    fabric, model, optimizer = started()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in DataLoader(DATA, batch_size=8):
                fabric.backward(model(x).sum())
                optimizer.step()
    return messages(caught)


def test_a_loader_that_is_made_in_the_line_of_the_loop(ranks):
    (text,), others = ranks.run(held_by_the_loop_alone, world_size=2)
    assert "A DataLoader that was not set up (TensorDataset of 16, batch_size=8)" in text
    assert others == []


def beside_one_that_is(case):
    parts = started()
    fabric = parts[0]
    raw = DataLoader(DATA, batch_size=2)
    if case == "not assigned":
        fabric.setup_dataloaders(raw)
    else:
        ready = fabric.setup_dataloaders(DataLoader(DATA, batch_size=4))
    if case == "first the one that is":
        return loop(*parts, ready) + loop(*parts, raw)
    if case == "two":
        return loop(*parts, raw) + loop(*parts, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    return loop(*parts, raw)


@pytest.mark.parametrize(
    ("case", "count"), [("another one is", 1), ("not assigned", 1), ("first the one that is", 1), ("two", 2)]
)
def test_each_loader_that_was_not_set_up_is_said_where_another_one_is(ranks, case, count):
    told, others = ranks.run(beside_one_that_is, case, world_size=2)
    assert [text.partition(" (")[0] for text in told] == ["A DataLoader that was not set up"] * count
    assert others == []
    if case == "two":
        assert "(TensorDataset of 8, batch_size=4)" in told[1]


def in_an_outer_frame():
    fabric, model, optimizer = started()
    train_loader = DataLoader(DATA, batch_size=2)

    def step(x):
        fabric.backward(model(x).sum())
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, (x,) in enumerate(train_loader):
            step(x)
            if number == 1:
                break
    return messages(caught)


def test_it_is_seen_from_a_function_that_the_loop_calls(ranks):
    told, _ = ranks.run(in_an_outer_frame, world_size=2)
    assert [text.partition(". Write")[0] for text in told] == [NEVER.format(2)]


def evaluating(how):
    """A loop that evaluates with a loader of each rank's own after each step."""
    fabric, model, optimizer = started()
    train = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2))
    raw = DataLoader(DATA, batch_size=2)
    kept = iter(raw) if how == "iterator made before" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in train:
            fabric.backward(model(x).sum())
            optimizer.step()
            with torch.set_grad_enabled(how != "no_grad"):
                for number, (y,) in enumerate(kept or raw):
                    with torch.no_grad():
                        model(y)
                    if how != "whole" and number == 1:
                        break
    return messages(caught)


@pytest.mark.parametrize("how", ["no_grad", "whole", "some batches", "iterator made before"])
def test_loaders_of_an_evaluation_are_not_said(ranks, how):
    assert ranks.run(evaluating, how, world_size=2) == [[], []]


def split(model, mesh):
    return model


def of_the_users(case):
    rank = dist.get_rank()
    parts = started()
    fabric = parts[0]
    loader = DataLoader(DATA, batch_size=2)
    match case:
        case "set up":
            loader = fabric.setup_dataloaders(loader)
        case "own part, said":
            own = DataLoader(Subset(DATA, range(rank, 16, 2)), batch_size=2)
            loader = fabric.setup_dataloaders(own, use_distributed_sampler=False)
        case "sampler of torch":
            loader = DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 2, rank))
        case "stream":
            loader = DataLoader(Stream(), batch_size=2)
        case "evaluated before":
            for _ in DataLoader(DATA, batch_size=8, num_workers=1, persistent_workers=True):
                pass
            loader = [torch.ones(2, 4)]
        case "no loader":
            loader = [torch.ones(2, 4)]
        case "same data for all":
            strategy = ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)
            parts = started(strategy)
    return loop(*parts, loader)


CASES = [
    "set up",
    "own part, said",
    "sampler of torch",
    "stream",
    "evaluated before",
    "no loader",
    "same data for all",
]


@pytest.mark.parametrize("case", CASES)
def test_who_shares_the_data_out_hears_nothing(ranks, case):
    assert ranks.run(of_the_users, case, world_size=2) == [[], []]


def test_one_process_hears_nothing():
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert loop(fabric, model, optimizer, DataLoader(DATA, batch_size=2)) == []


def test_where_there_is_a_synchronised_batch_norm_the_warning_names_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(PossibleUserWarning) as caught:
        warn_of_batch_norm(model, torch.device("cuda"))
    assert str(caught[0].message) == (
        "1 (BatchNorm1d): batch norm in training sees only a rank's part of each batch, so results differ "
        "from those of one process. For equal results, write model = "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup, or use another norm."
    )


# workers


class Letters(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def with_workers(count):
    fabric, *_ = started()
    loader = DataLoader(Letters(), num_workers=count)  # with all cores: torch has a warning of its own
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fabric.setup_dataloaders(loader, DataLoader(Letters()))
    finally:
        os.sched_setaffinity(0, cores)
    return messages(caught)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_workers_of_all_ranks_beyond_the_cores(ranks):
    told, others = ranks.run(with_workers, 2, world_size=2)
    assert told == [
        "num_workers=2 on each of the 2 ranks of this machine are 4 processes in addition to the ranks, on 1 "
        "cores. Write num_workers=1, a rank's share."
    ]
    assert others == []
    assert ranks.run(with_workers, 1, world_size=2) == ranks.run(with_workers, 0, world_size=2) == [[], []]
