"""500 random bits, one at a time, in the files of a real model and its optimizer: each is found by `load`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import DamagedCheckpointError, UsageError


def trained(fabric):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.arange(10)).pow(2).sum())
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 2, "rng": fabric.rng_state()}


def test_each_of_500_flipped_bits_is_found_and_nothing_is_loaded(tmp_path):
    path = tmp_path / "a.pt"
    fabric = Fabric(accelerator="cpu", devices=1)
    state = trained(fabric)
    model = state["model"]
    fabric.save(path, state)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draw, size = random.Random(0), path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        for _ in range(500):
            place, bit = draw.randrange(size), draw.randrange(8)
            (byte,) = _at(file, place)
            _at(file, place, bytes([byte ^ 1 << bit]))
            with pytest.raises(DamagedCheckpointError, match=r"a\.pt is damaged: "):
                fabric.load(path, state)
            _at(file, place, bytes([byte]))
    assert all([value.equal(before[name]) for name, value in model.state_dict().items()])
    fabric.load(path, state)


def save_parts(path):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3")
    fabric.launch()
    fabric.save(path, trained(fabric))


def test_each_of_500_flipped_bits_of_a_directory_is_found_and_its_file_named(ranks, tmp_path):
    path = tmp_path / "parts"
    ranks.run(save_parts, path, world_size=2)
    fabric = Fabric(accelerator="cpu", devices=1)
    state = trained(fabric)
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    files = sorted(path.iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", "__1_0.distcp", "fabric.json"]
    draw = random.Random(0)
    for number in range(500):
        name = files[number % len(files)]
        place, bit = draw.randrange(name.stat().st_size), draw.randrange(8)
        with name.open("r+b", buffering=0) as file:
            (byte,) = _at(file, place)
            _at(file, place, bytes([byte ^ 1 << bit]))
            with pytest.raises(DamagedCheckpointError, match=rf"{path} is damaged: {name.name} "):
                fabric.load(path, state)
            _at(file, place, bytes([byte]))
    assert all([value.equal(before[name]) for name, value in state["model"].state_dict().items()])
    fabric.load(path, state)
    assert issubclass(DamagedCheckpointError, UsageError)


def _at(file, place, byte=None):
    file.seek(place)
    return file.read(1) if byte is None else file.write(byte)
