"""500 random bits, one at a time, in the file of a real model and its optimizer: each is found by `load`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import DamagedCheckpointError


def test_each_of_500_flipped_bits_is_found_and_nothing_is_loaded(tmp_path):
    path = tmp_path / "a.pt"
    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Sequential(nn.Embedding(10, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.arange(10)).pow(2).sum())
        optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 2, "rng": fabric.rng_state()}
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


def _at(file, place, byte=None):
    file.seek(place)
    return file.read(1) if byte is None else file.write(byte)
