"""A format of checkpoints is a module and a row of `FORMATS`: two of this file are saved and loaded."""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fabric.checkpoint.formats.registry as formats
from fabric import Fabric
from fabric.checkpoint.digest import Sealed, damaged
from fabric.core.errors import ConfigurationError, DamagedCheckpointError

# The functions of a format of files, for numbers.


def prepared(checkpoint, path):
    if wrong := [name for name, value in checkpoint.items() if not isinstance(value, float)]:
        raise ConfigurationError(f"{path} can hold numbers, and state[{wrong[0]!r}] is none.")
    return checkpoint


def write(content, facts, file):
    file.write(b"TEXT" + json.dumps(content).encode())


def sealed(path, name="the directory"):
    if path.is_dir():
        return [one for file in sorted(path.glob("rank-*")) for one in sealed(file)]
    text = path.read_bytes()
    return (
        [Sealed(path, 0, 4, zlib.crc32(b"TEXT"), damaged(name, "its first bytes have changed"))]
        if text
        else []
    )


def read(path, name):
    return json.loads(path.read_bytes()[4:])


# Those of a format of directories: a file per rank.


def save(strategy, path, state, filter, facts, wait, allow_pickle):
    if strategy.is_global_zero:
        path.mkdir()
        (path / "index.text").touch()
    strategy.barrier()
    numbers = {name: value for name, value in state.items() if isinstance(value, float)}

    def write_part():
        with (path / f"rank-{strategy.global_rank}").open("wb") as file:
            write(numbers, facts, file)
        strategy.barrier()

    return write_part


def opened(directory, safe):
    files = sorted(directory.glob("rank-*"))
    tree = {"of ranks": [read(file, file)["loss"] for file in files]}
    return SimpleNamespace(tree=lambda: tree, close=lambda: None)


@contextmanager
def rows():
    files = formats.Format("text", __name__, suffix=".text", start=(0, b"TEXT"))
    directories = formats.Format("texts", __name__, files=("index.text",))
    formats.FORMATS += [files, directories]
    try:
        yield
    finally:
        del formats.FORMATS[-2:]


@pytest.fixture
def fabric():
    with rows():
        yield Fabric(accelerator="cpu", devices=1)


def test_a_file_is_written_by_its_name_and_read_by_its_content(fabric, tmp_path):
    path = tmp_path / "numbers.text"
    fabric.save(path, {"loss": 0.5, "lr": 0.1})
    assert path.read_bytes().startswith(b"TEXT{")
    other = path.rename(tmp_path / "numbers.other")
    state = {"loss": 0.0}
    assert fabric.load(other, state) == {"lr": 0.1}
    assert state == {"loss": 0.5}


def test_what_the_format_cannot_hold_is_refused_before_the_file_is_replaced(fabric, tmp_path):
    path = tmp_path / "numbers.text"
    fabric.save(path, {"loss": 0.5})
    with pytest.raises(ConfigurationError, match=r"can hold numbers, and state\['model'\] is none"):
        fabric.save(path, {"model": torch.nn.Linear(2, 1)})
    assert fabric.load(path) == {"loss": 0.5}


def test_the_ranges_of_the_format_are_verified(fabric, tmp_path):
    path = tmp_path / "numbers.text"
    path.write_bytes(b"Text{}")
    with pytest.raises(DamagedCheckpointError, match="its first bytes have changed"):
        fabric.load(path)


def test_an_unknown_format_names_all(fabric, tmp_path):
    with pytest.raises(ConfigurationError, match=r"'full' or 'sharded' or 'texts'\. Did you mean 'texts'"):
        fabric.save(tmp_path / "a", {"loss": 0.5}, format="text")


def test_a_format_of_directories_is_none_of_a_file(fabric, tmp_path):
    with pytest.raises(ConfigurationError, match=r"format='texts'.*a name that ends with \.text is one file"):
        fabric.save(tmp_path / "a.text", {"loss": 0.5}, format="texts")


def directory(path):
    with rows():
        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        fabric.save(path, {"loss": 0.5 + fabric.global_rank}, format="texts")
        return fabric.load(path), sorted(file.name for file in Path(path).iterdir())


def test_ranks_write_a_directory(ranks, tmp_path):
    loaded = {"of ranks": [0.5, 1.5]}, ["index.text", "rank-0", "rank-1"]
    assert ranks.run(directory, str(tmp_path / "run"), world_size=2) == [loaded, loaded]
