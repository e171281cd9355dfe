"""Warnings of the package are reported at the user's line, not at one of the package."""

from __future__ import annotations

import ast
import warnings

import pytest
import torch
import torch.distributed as dist
from test_architecture import sources
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric import Fabric
from fabric.core.source import library_frames
from fabric.utilities.data import has_len
from fabric.utilities.seed import RngState, collect_rng_states, set_rng_states


def test_each_warning_of_the_package_computes_the_users_line():
    """`rank_zero_warn` does so by default; `warnings.warn` with `stacklevel=library_frames() + 1`."""
    found = []
    for name, source in sources().items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            called, level = ast.unparse(node.func), [k for k in node.keywords if k.arg == "stacklevel"]
            if called.endswith("rank_zero_warn") and level:
                found.append(f"{name}:{node.lineno} stacklevel={ast.unparse(level[0].value)}")
            if called == "warnings.warn" and name != "fabric.utilities.rank_zero":
                wanted = bool(level) and ast.unparse(level[0].value) == "library_frames() + 1"
                found += [] if wanted else [f"{name}:{node.lineno}"]
    assert found == []
    assert library_frames() == 0


def reported(call, *args):
    """The file and the text of each warning of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [(one.filename, str(one.message)) for one in caught]


def check(found, text):
    files = [file for file, message in found if text in message]
    assert files == [__file__], found


@pytest.fixture
def fabric():
    class Callback:
        attribute = 3

    return Fabric(accelerator="cpu", devices=1, callbacks=Callback())


def no_logger(fabric, folder):
    from fabric.checks import warn_of_no_logger

    warn_of_no_logger.cache_clear()
    fabric.log("loss", 1.0)


def other_names(fabric, folder):
    fabric.setup(nn.Linear(2, 2)).load_state_dict({"a": torch.ones(1)}, strict=False)


def nothing_loaded(fabric, folder):
    fabric.save(folder / "a.pt", {"net": nn.Linear(2, 2)})
    fabric.load(folder / "a.pt", {"model": nn.Linear(2, 2)}, strict=False)


def damaged(fabric, folder):
    for step in (1, 2):
        fabric.save_latest(folder, {"a": step}, step=step)
    (folder / "step-00000002.pt").write_bytes(b"nothing")
    fabric.load_latest(folder, {"a": 0})


def fewer_states(fabric, folder):
    one, other = collect_rng_states(), collect_rng_states()
    other["torch"] = one["torch"] + 1
    RngState(2, None).load_state_dict({"ranks": [one, other]})


def no_steps(fabric, folder):
    with fabric.profile(folder):
        pass


def position(fabric, folder):
    data = TensorDataset(torch.ones(16))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    next(iter(loader))
    other = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    other.load_state_dict(loader.state_dict())
    for _ in other:
        pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (no_logger, "this Fabric has no logger"),
        (lambda fabric, _: fabric.call("attribute"), "is not a method"),
        (lambda *_: has_len(DataLoader([])), "has length 0"),
        (other_names, "0 of 2 tensors loaded"),
        (nothing_loaded, "loaded nothing"),
        (damaged, "cannot be loaded, and the one before it is tried"),
        (fewer_states, "The random states of 2 ranks were saved"),
        (lambda *_: set_rng_states({**collect_rng_states(), "torch.cuda": [0] * 99}), "of 99 devices"),
        (no_steps, "fabric.profile has recorded nothing"),
        (position, "The position was saved with 2 samples"),
    ],
)
def test_a_warning_on_one_process(fabric, call, text, tmp_path):
    check(reported(call, fabric, tmp_path), text)


def job():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric


def pair(fabric, net):
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def no_model(fabric):
    net = nn.Linear(1, 1)
    fabric.backward(net(torch.ones(1)).sum())


def raw_loader(fabric):
    model, _ = pair(fabric, nn.Linear(1, 1))
    for (x,) in DataLoader(TensorDataset(torch.ones(4, 1))):
        fabric.backward(model(x).sum())


def batch_norm(fabric):
    pair(fabric, nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))


def workers(fabric):
    fabric.setup_dataloaders(DataLoader([1, 2], num_workers=64))


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean = self.mean + x.mean()
        return self.weight * x


def buffers(fabric):
    model, _ = pair(fabric, Mean())
    fabric.backward(model(torch.ones(1) * fabric.global_rank).sum())


def reduced_loss(fabric):
    model, _ = pair(fabric, nn.Linear(1, 1))
    fabric.backward(fabric.all_reduce(model(torch.ones(1)) * 1.0, reduce_op="sum").exp().sum())


class Stream(IterableDataset):
    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        yield from range(self.begin, self.begin + 4)


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def own_iteration(fabric):
    fabric.setup_dataloaders(Own(Stream(0)))


def streams(fabric):
    for _ in fabric.setup_dataloaders(DataLoader(Stream(100 * fabric.global_rank))):
        pass


def uneven(fabric):
    model, optimizer = pair(fabric, nn.Linear(1, 1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(3, 1)), shuffle=True))
    for (x,) in loader:
        fabric.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(case):
    return reported(CASES[case][0], job())


CASES = {
    "no model": (no_model, "although no model was set up"),
    "raw loader": (raw_loader, "A DataLoader that was not set up"),
    "batch norm": (batch_norm, "batch norm in training"),
    "workers": (workers, "num_workers=64 on each of the 2 ranks"),
    "buffers": (buffers, "forward changed buffers"),
    "reduced loss": (reduced_loss, "A gradient passed through all_reduce"),
    "own iteration": (own_iteration, "Each of the 2 ranks will read all of"),
    "streams": (streams, "begin with different samples"),
    "uneven": (uneven, "which 2 ranks cannot share equally"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_on_two_ranks(ranks, case):
    found, other = ranks.run(on_ranks, case, world_size=2)
    check(found, CASES[case][1])
    assert [text for _, text in other if CASES[case][1] in text] == []
