"""What `fabric.setup` finds in a model that comes from a loop without it: wrappers of its own, batch norm."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fabric import Fabric
from fabric.core.errors import UsageError

WRAPS = {
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compiled DDP": lambda m: torch.compile(DistributedDataParallel(m), backend="eager"),
    "DDP of compiled": lambda m: DistributedDataParallel(torch.compile(m, backend="eager")),
}


def started(strategy: str = "ddp") -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def warned(fabric: Fabric, text: str):
    """The block warns so on rank zero, and on no other."""
    return pytest.warns(UserWarning, match=text) if fabric.is_global_zero else contextlib.nullcontext()


def trained(strategy: str, wrap: str) -> dict:
    fabric = started(strategy)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = WRAPS[wrap](plain)
    name = "DataParallel" if wrap == "DataParallel" else "DistributedDataParallel"
    with warned(fabric, rf"fabric\.setup removed {name} around your Sequential"):
        model, optimizer = fabric.setup(model, optimizer)
    assert model.module is plain
    shared = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        optimizer.zero_grad()
        fabric.backward(model(shared[fabric.global_rank :: 2]).square().mean())
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("strategy", "wrap"),
    [*[(strategy, "DDP") for strategy in ("ddp", "zero1", "zero2", "fsdp")], *[("ddp", w) for w in WRAPS]],
)
def test_a_wrapper_of_the_users_own_is_taken_off(ranks, strategy, wrap):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        optimizer.step()
    for state in ranks.run(trained, strategy, wrap, world_size=2):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def refused(strategy: str) -> None:
    fabric = started(strategy)
    cpu = torch.device("cpu")
    for made, where in (
        (lambda: nn.Sequential(DistributedDataParallel(net()), nn.ReLU()), "0 is wrapped in Distributed"),
        (lambda: FullyShardedDataParallel(net(), device_id=cpu), "this model is wrapped in FullySharded"),
    ):
        for setup in (fabric.setup, fabric.setup_module):
            with pytest.raises(UsageError, match=re.escape(f"fabric.setup: {where}")):
                setup(made())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "pipeline"])
def test_wrappers_that_cannot_be_taken_off_are_refused(ranks, strategy):
    ranks.run(refused, strategy, world_size=2)


def batch_norm() -> None:
    fabric = started("fsdp")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[2].eval()  # frozen
    text = r"^1 \(BatchNorm1d\): batch norm in training sees only a rank's part .* use another norm\.$"
    with warned(fabric, text):
        fabric.setup(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = fabric.setup(nn.SyncBatchNorm.convert_sync_batchnorm(model)).eval()
        fabric.backward(model(torch.ones(2, 4)).sum())
        fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4).eval()))


def test_batch_norm_over_several_ranks_is_warned_of_once(ranks):
    ranks.run(batch_norm, world_size=2)


def test_one_process_keeps_its_data_parallel():
    model = Fabric(accelerator="cpu", devices=1).setup(nn.DataParallel(net()))
    assert isinstance(model.module, nn.DataParallel)


class Rotary(nn.Module):
    """Parts of complex numbers, as rotary embeddings keep them: between two of them is one of another's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        table = torch.complex(torch.full((3, 4), 1.0 + rank), torch.full((3, 4), 10.0 + rank))
        self.register_buffer("cos", table.real)
        self.weight = nn.Parameter(torch.complex(torch.full((3, 4), 2.0 + rank), torch.zeros(3, 4)).real)
        self.beside = table.imag

    def forward(self, x):
        return self.layer(x) + self.cos[0] + self.weight.sum(0)


def strided(strategy: str) -> list:
    fabric = started(strategy)
    model = Rotary(fabric.global_rank)
    if strategy == "fsdp":
        with pytest.raises(
            UsageError, match=r"weight \(shape \[3, 4\], stride \[8, 2\]\) is a view with gaps"
        ):
            fabric.setup(model)
        model.weight = nn.Parameter(model.weight.detach().contiguous())
    beside = model.beside
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    weight = model.weight.full_tensor() if strategy == "fsdp" else model.weight
    return [model.cos.unique().tolist(), weight.detach().unique().tolist(), beside.unique().tolist()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_tensors_with_gaps_between_their_numbers(ranks, strategy):
    """What lies in the gaps is not sent, and not written."""
    for rank, found in enumerate(ranks.run(strided, strategy, world_size=2)):
        assert found == [[1.0], [pytest.approx(1.8)], [10.0 + rank]]


def test_a_fabric_is_freed_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        fabric = Fabric(accelerator="cpu", devices=1)
        model = nn.Linear(2, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader([1.0, 2.0]))
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        found = weakref.ref(fabric)
        del fabric, model, optimizer, loader
        assert found() is None
    finally:
        gc.enable()
