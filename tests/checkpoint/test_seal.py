"""The seal of a checkpoint file: whatever is changed in the file is found, and nobody else minds it."""

from __future__ import annotations

import gc
import io
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch

from fabric.checkpoint.digest import DigestWriter, read_seal, verify
from fabric.core.errors import DamagedCheckpointError, UsageError
from fabric.plugins.io import TorchCheckpointIO

DATA = {"step": 7, "w": torch.arange(3.0), "text": "fabric-seal: a word of the data"}


def check(path):
    """Verify a file."""
    verify(TorchCheckpointIO().sealed(path))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    path = tmp_path_factory.mktemp("sealed") / "a.pt"
    storage = TorchCheckpointIO()
    storage.facts = {"strategy": "DDPStrategy", "step": 7}
    storage.save_checkpoint(DATA, path)
    return path


def test_it_says_what_was_written(sealed):
    with sealed.open("rb") as file:
        told = read_seal(file, sealed)
    assert told == {
        "format": 1,
        "torch": torch.__version__,
        "strategy": "DDPStrategy",
        "step": 7,
        "size": told["size"],
        "crc32": told["crc32"],
    }


def test_torch_and_unzip_read_on(sealed):
    for mmap in (False, True):
        assert torch.load(sealed, weights_only=True, mmap=mmap)["w"].equal(DATA["w"])
    assert zipfile.ZipFile(sealed).comment.startswith(b"\x93fabric-seal")
    assert len(zipfile.ZipFile(sealed).namelist()) > 3


def test_every_flipped_bit_is_found(sealed, tmp_path, monkeypatch):
    whole = sealed.read_bytes()
    monkeypatch.chdir(tmp_path)
    check(sealed)
    for place in range(len(whole)):
        for bit in range(8) if place > len(whole) - 300 else (place % 8,):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            Path("a.pt").write_bytes(changed)
            with pytest.raises(DamagedCheckpointError, match=r"^a\.pt is damaged: "):
                check("a.pt")


def test_every_cut_and_every_addition_is_found(sealed, tmp_path):
    whole = sealed.read_bytes()
    storage = TorchCheckpointIO()
    cut = tmp_path / "cut.pt"
    for length in [*range(0, len(whole), 61), *range(len(whole) - 400, len(whole))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpointError, match=r"cut\.pt"):
            storage.load_checkpoint(cut)
    cut.write_bytes(whole + b"more")
    with pytest.raises(DamagedCheckpointError, match=r"cut\.pt is damaged"):
        storage.load_checkpoint(cut)


def test_a_file_of_others_is_loaded_as_it_is(tmp_path):
    torch.save(DATA, tmp_path / "a.pt")
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "a.pt")["step"] == 7
    with (tmp_path / "a.pt").open("rb") as file:
        assert read_seal(file, "a.pt") is None


def test_verify_false_loads_what_torch_loads(sealed, tmp_path):
    changed = bytearray(sealed.read_bytes())
    place = changed.index(torch.arange(3.0).numpy().tobytes()) + 4
    changed[place] ^= 1
    (tmp_path / "a.pt").write_bytes(bytes(changed))
    with pytest.raises(UsageError, match=r"a\.pt is damaged: its bytes are not those that were written"):
        TorchCheckpointIO().load_checkpoint(tmp_path / "a.pt")
    assert TorchCheckpointIO(verify=False).load_checkpoint(tmp_path / "a.pt")["step"] == 7


class Trickle(io.BytesIO):
    """Takes some bytes at a time, as a disk may."""

    def write(self, data):
        return super().write(bytes(data[: 1 + len(data) * 2 // 3]))


class Full(io.BytesIO):
    def write(self, data):
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_said_once(tmp_path):
    for data in ({"w": torch.ones(3)}, {"w": torch.ones(1_000_000)}):
        writer = DigestWriter(Full())
        with pytest.raises(OSError, match="No space left"):
            _write(data, writer)
        del writer
        gc.collect()  # an error there would be a warning


def _write(data, writer):
    try:
        torch.save(data, writer)
        writer.seal({})
    except RuntimeError as error:  # torch's, of bytes that are missing
        raise error.__context__ from None


@pytest.mark.parametrize("seed", range(40))
def test_writes_of_any_size_come_to_the_same(seed, tmp_path):
    rng = random.Random(seed)
    sizes = [0, 1, 2, 3, 1000, 1 << 16, (1 << 16) + 1, (1 << 17) - 1, 1 << 17, 1 << 20, 3 << 20]
    parts = [rng.randbytes(rng.choice(sizes)) for _ in range(9)]
    file = Trickle()
    writer = DigestWriter(file)
    for part in parts:
        assert writer.write(part) == len(part)
    writer.seal({"n": seed})
    content = b"".join(parts)
    assert file.getvalue()[: max(0, len(content) - 2)] == content[:-2]
    if len(content) >= 2:
        assert read_seal(file, "a.pt")["n"] == seed
        (tmp_path / "a.pt").write_bytes(file.getvalue())
        check(tmp_path / "a.pt")


def test_checksums_of_torch_are_as_they_were(tmp_path):
    TorchCheckpointIO().save_checkpoint(DATA, tmp_path / "a.pt")
    assert torch.serialization.get_crc32_options()
    with pytest.raises((AttributeError, pickle.PicklingError)):  # Python 3.14
        TorchCheckpointIO().save_checkpoint({"bad": lambda: None}, tmp_path / "b.pt")
    assert torch.serialization.get_crc32_options()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


class Pieces(io.BytesIO):
    """A file that keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def write(self, data):
        self.given.append(data)
        return super().write(data)


def test_a_piece_of_more_than_64_kib_is_written_from_its_own_memory():
    file, data = Pieces(), bytes(700_000)
    writer = DigestWriter(file)
    for _ in range(3):
        writer.write(b"head")
        writer.write(data)
        writer.write(b"tail")
    writer.finish()
    assert sum(len(piece) for piece in file.given if piece.obj is data) == 3 * (700_000 - 2)
    assert file.getvalue() == (b"head" + data + b"tail") * 3
