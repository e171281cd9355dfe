"""A strategy of some ranks, `DDPStrategy(process_group=...)`: all that it does is among these ranks."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import CatMetric

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies import ContextParallel, DDPStrategy, ZeRO1Strategy

STRATEGIES = {"ddp": DDPStrategy, "zero1": ZeRO1Strategy}
SUBSETS = [(3, [1, 2]), (4, [1, 2, 3]), (3, [2]), (3, [0, 1])]
X, Y = (
    torch.arange(24.0, dtype=torch.float64).view(6, 4).sin(),
    torch.arange(6.0, dtype=torch.float64)[:, None],
)


def launched(kind: str, group) -> Fabric:
    strategy = STRATEGIES[kind](process_group=group)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def trained(model, optimizer, backward, x, y, clip=lambda: None):
    for _ in range(3):
        optimizer.zero_grad()
        backward((model(x) - y).pow(2).mean())
        clip()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def trained_inside(kind: str, groups: list[list[int]]):
    """The parameters of each rank after steps of its group; None on ranks outside, which do nothing."""
    rank = dist.get_rank()
    handles = [dist.new_group(members) for members in groups]
    mine = [i for i, members in enumerate(groups) if rank in members]
    if not mine:
        return None
    members, group = groups[mine[0]], handles[mine[0]]
    fabric = launched(kind, group)
    model = made(seed=rank).eval()  # each rank's own; running statistics of one batch are no mean
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    x, y = (t[members.index(rank) :: len(members)] for t in (X, Y))
    clip = partial(fabric.clip_gradients, model, optimizer, max_norm=0.5)
    values = trained(model, optimizer, fabric.backward, x, y, clip)
    return values, len(optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(("size", "groups"), [*((n, [g]) for n, g in SUBSETS), (4, [[0, 1], [2, 3]])])
def test_a_group_trains_as_one_process_on_its_ranks_rows(ranks, kind, size, groups):
    results = ranks.run(trained_inside, kind, groups, world_size=size)
    for members in groups:
        one = made(seed=members[0]).eval()
        rows = len(X) // len(members) * len(members)
        optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
        clip = lambda: nn.utils.clip_grad_norm_(one.parameters(), 0.5)  # noqa: E731, B023
        wanted = trained(one, optimizer, torch.Tensor.backward, X[:rows], Y[:rows], clip)
        for rank in members:
            values, states = results[rank]
            assert states == len(wanted)
            for value, want in zip(values, wanted, strict=True):
                torch.testing.assert_close(value, want)
    outside = {*range(size)} - {rank for members in groups for rank in members}
    assert all(results[rank] is None for rank in outside)


def trained_after(event: str):
    """Ranks 1 and 2 train after their reducer was made anew. Gives the weights that two processes get."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    fabric = launched("ddp", group)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    other = nn.Sequential(net[0], nn.Linear(3, 1)).double()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if event == "shared":
        other = fabric.setup(other)
    else:
        handle = net[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fabric.backward(model(X[:2]).sum())
        handle.remove()
        optimizer.zero_grad()
    x, y = X[dist.get_rank() - 1 :: 2], Y[dist.get_rank() - 1 :: 2]
    return trained(model, optimizer, fabric.backward, x, y)


@pytest.mark.parametrize("event", ["shared", "failed"])
def test_a_groups_reducer_is_made_anew(ranks, event):
    outside, *found = ranks.run(trained_after, event, world_size=3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    wanted = trained(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.Tensor.backward, X, Y)
    assert outside is None
    for values in found:
        torch.testing.assert_close(values, wanted)


def verbs_inside(members: list[int], folder: str):
    """What the verbs without `group=` give inside; ranks outside make no call."""
    rank, group = dist.get_rank(), dist.new_group(members)
    if rank not in members:
        return None
    fabric = launched("ddp", group)
    metric = CatMetric(sync_on_compute=False)
    metric.update(float(rank))
    for local in (False, True):
        with fabric.rank_zero_first(local):
            pass
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True))
    fabric.seed_everything(1, per_rank=True)
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        del os.environ[name]
    rng = fabric.rng_state()
    fabric.save(f"{folder}/rng.pt", {"rng": rng})
    drawn = torch.rand(())
    fabric.load(f"{folder}/rng.pt", {"rng": rng})
    fabric.barrier("here")
    return {
        "facts": (fabric.global_rank, fabric.world_size, fabric.is_global_zero),
        "gathered": fabric.all_gather(torch.tensor(rank)).tolist(),
        "objects": fabric.all_gather_object(rank),
        "sum": fabric.all_reduce(rank, reduce_op="sum").item(),
        "told": fabric.broadcast(rank),
        "told by the last": fabric.broadcast(rank, src=members[-1]),
        "taken": None if (got := fabric.gather(rank)) is None else got.tolist(),
        "part": fabric.scatter(torch.arange(len(members)) * (rank + 1)).tolist(),
        "any": fabric.any(rank == members[-1]),
        "all": fabric.all(True),
        "agreed": fabric.agree(len(members)),
        "metric": fabric.compute_metrics(metric).view(-1).tolist(),
        "logged": fabric.log("rank", float(rank), sync_dist=True),
        "whole": fabric.all_reduce(rank, group=group, reduce_op="max").item(),
        "rows": [i for (batch,) in loader for i in batch.tolist()],
        "same draw": bool(torch.rand(()) == drawn),
        "drawn": drawn.item(),
    }


@pytest.mark.parametrize(("size", "members"), SUBSETS)
def test_verbs_are_among_the_ranks_of_the_group(ranks, size, members, tmp_path):
    results = ranks.run(verbs_inside, members, str(tmp_path), world_size=size)
    found = [results[rank] for rank in members]
    for place, (rank, got) in enumerate(zip(members, found, strict=True)):
        assert got["facts"] == (rank, size, place == 0)
        assert got["gathered"] == got["objects"] == got["metric"] == members
        assert got["sum"] == sum(members)
        assert (got["told"], got["told by the last"]) == (members[0], members[-1])
        assert got["taken"] == (members if place == 0 else None)
        assert got["part"] == [place * (members[0] + 1)]
        assert got["any"]
        assert got["all"]
        assert got["agreed"] == len(members)
        assert got["logged"] == sum(members) / len(members)
        assert got["whole"] == members[-1]
        assert got["same draw"]
    assert sorted(i for got in found for i in got["rows"]) == [*range(12)]
    assert len({got["drawn"] for got in found}) == len(members)


def saved_inside(kind: str, members: list[int], folder: str, format: str):
    """A save and a load among the members."""
    rank, group = dist.get_rank(), dist.new_group(members)
    if rank not in members:
        return None
    own = [rows[members.index(rank) :: len(members)] for rows in (X, Y)]
    fabric = launched(kind, group)
    model = made(seed=3)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    trained(model, optimizer, fabric.backward, *own)
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    wanted = copy.deepcopy(fabric.strategy.get_module_state_dict(model))
    fabric.save(f"{folder}/one", state, format=format)
    fabric.save_latest(f"{folder}/runs", state, step=7)
    trained(model, optimizer, fabric.backward, *own)
    loaded = []
    for load in (
        lambda: fabric.load(f"{folder}/one", state),
        lambda: fabric.load_latest(f"{folder}/runs", state),
    ):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load()
        now = fabric.strategy.get_module_state_dict(model)
        loaded.append(all(torch.equal(now[name], wanted[name]) for name in wanted))
    with fabric.whole(model) as plain:
        return loaded, plain is not None


@pytest.mark.parametrize(("kind", "format"), [("ddp", "full"), ("zero1", "full"), ("zero1", "sharded")])
@pytest.mark.parametrize(("size", "members"), [(3, [1, 2]), (4, [1, 2, 3])])
def test_the_groups_first_rank_writes_and_all_of_it_load(ranks, kind, format, size, members, tmp_path):
    results = ranks.run(saved_inside, kind, members, str(tmp_path), format, world_size=size)
    assert results[0] is None
    assert [results[rank] for rank in members] == [([True, True], rank == 1) for rank in members]


def called_outside(call: str):
    """A rank outside makes a call of the strategy's; the members do not wait for it."""
    group = dist.new_group([1, 2])
    fabric = launched("ddp", group)
    if dist.get_rank() > 0:
        return fabric.all_gather(dist.get_rank()).tolist()
    if call == "setup":
        fabric.setup(nn.Linear(1, 1))
    elif call == "broadcast":
        fabric.broadcast(1)
    else:
        fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(4))))
    return None


@pytest.mark.parametrize("call", ["setup", "broadcast", "setup_dataloaders"])
def test_a_rank_outside_that_makes_a_call_gets_an_error(ranks, call):
    error, *others = ranks.run_expecting_errors(called_outside, call, world_size=3)
    assert isinstance(error, UsageError)
    assert "not in the group" in str(error)
    assert others == [[1, 2], [1, 2]]


def warned_inside(members: list[int]):
    """What a rank warns of in a loop of a group whose ranks have unequal numbers of rows."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    fabric = launched("ddp", group)
    model, optimizer = fabric.setup(m := nn.Linear(4, 1).double(), torch.optim.SGD(m.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fabric.backward(model(X[: 2 + members.index(dist.get_rank())]).mean())
            optimizer.step()
    return [str(w.message)[:60] for w in caught]


@pytest.mark.parametrize(("size", "members"), [(3, [1, 2]), (3, [0, 1])])
def test_the_groups_first_rank_warns(ranks, size, members):
    found = ranks.run(warned_inside, members, world_size=size)
    told = ["Ranks were given unequal numbers of rows: 2 on rank 0, 3 on "]
    assert found == [told if rank == members[0] else [] for rank in range(size)]


def test_a_group_of_some_ranks_cannot_share_sequences():
    with pytest.raises(ConfigurationError, match=r"process_group=.* context_parallel="):
        DDPStrategy(process_group=object(), context_parallel=ContextParallel(2))
