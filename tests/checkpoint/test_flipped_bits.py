"""500 random bits, one at a time, in the files of a real model and its optimizer: each is found by `load`."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import crc as crcs
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


# ranks of one host share the digest


def load_counted(path, file_of_rank=None):
    """Load on each rank, and return the bytes that it has read for the digest, and its error."""
    fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy="ddp")
    fabric.launch()
    state = {"w": torch.zeros(1)} if file_of_rank is None else {}
    read = []

    class Counting(crcs.Crc32):
        def read(self, file, length):
            read.append(length)
            return super().read(file, length)

    try:
        with mock.patch.object(crcs, "Crc32", Counting):
            fabric.load(path if file_of_rank is None else f"{path}-{fabric.global_rank}", state)
    except Exception as error:
        return sum(read), repr(error)
    return sum(read), ""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_each_byte_is_read_by_one_rank_and_an_error_is_raised_by_all(ranks, tmp_path, world_size, name):
    path = tmp_path / name
    Fabric(accelerator="cpu", devices=1).save(path, {"w": torch.randn(300_000)})
    content = path.read_bytes()
    told = ranks.run(load_counted, path, world_size=world_size)
    assert [error for _, error in told] == [""] * world_size
    assert max([read for read, _ in told]) <= len(content) // world_size + 1
    assert 1_200_000 <= sum([read for read, _ in told]) <= len(content)
    for place in (len(content) // 4, len(content) * 3 // 4):
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(changed)
        told = ranks.run(load_counted, path, world_size=world_size)
        error = f"DamagedCheckpointError('{path} is damaged: its bytes are not those that were written."
        assert all([found.startswith(error) for _, found in told])
        assert len({found for _, found in told}) == 1


def test_ranks_with_files_of_their_own_read_all_of_them(ranks, tmp_path):
    for rank in range(2):
        Fabric(accelerator="cpu", devices=1).save(tmp_path / f"a-{rank}", {"w": torch.randn(300_000)})
    size = (tmp_path / "a-0").stat().st_size
    told = ranks.run(load_counted, tmp_path / "a", True, world_size=2)
    assert all([not error and size - 1000 < read <= size for read, error in told])
    damaged = bytearray((tmp_path / "a-1").read_bytes())
    damaged[size // 2] ^= 1
    (tmp_path / "a-1").write_bytes(damaged)
    (_, quoting), (_, own) = ranks.run(load_counted, tmp_path / "a", True, world_size=2)
    assert own.startswith(f"DamagedCheckpointError('{tmp_path / 'a-1'} is damaged")
    assert quoting.startswith("RankError('rank 1 failed while loading")
