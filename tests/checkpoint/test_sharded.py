"""The directory of a sharded checkpoint by one process: damage, kills, one file of it, safe loading."""

from __future__ import annotations

import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path, PosixPath, PurePosixPath

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from fabric import Fabric
from fabric.checkpoint.formats.sharded._torch import place_in_file
from fabric.checkpoint.formats.sharded.dcp import ShardWriter
from fabric.checkpoint.formats.sharded.directory import write_manifest
from fabric.checkpoint.portable import LazyTensor, placeholder_of
from fabric.cli import main
from fabric.core.errors import DamagedCheckpointError, UsageError


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def saved(fabric, path, **state):
    fabric.save(path, state or {"step": 1, "w": torch.arange(300.0)}, format="sharded")
    return path


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # torch 2.15, of reading any
def test_values_of_all_kinds_come_back_as_of_a_full_file(fabric, tmp_path):
    torch.manual_seed(0)
    state = {
        "numbers": [1, 2.5, True, None, 1j, b"", b"x", "text", torch.Size([2]), torch.float16, {1, 2}],
        "containers": {"empty": {}, 5: [], "t": ((1, [torch.ones(2)]), ())},
        "ordered": OrderedDict(a=1, b=torch.ones(1)),
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "numpy": {"array": np.arange(4), "scalar": np.float32(2)},
        "path": Path("here"),
        "tensors": [
            torch.tensor(3), torch.empty(0, 3), torch.ones(2, 2).to_sparse(), nn.Parameter(torch.ones(2)),
            torch.arange(12).view(3, 4).t(), torch.ones(3).expand(2, 3), torch.tensor([True]),
            torch.ones(2).bfloat16(), torch.ones(2, requires_grad=True),
        ],
    }  # fmt: skip
    fabric.save(tmp_path / "full", state, format="full")
    fabric.save(tmp_path / "parts", state, format="sharded")
    full, parts = fabric.load(tmp_path / "full"), fabric.load(tmp_path / "parts")
    assert repr(parts) == repr(full)
    assert type(parts["ordered"]) is OrderedDict
    assert [type(t) for t in parts["tensors"]] == [type(t) for t in full["tensors"]]
    assert [t.requires_grad for t in parts["tensors"]] == [t.requires_grad for t in full["tensors"]]
    assert parts["numpy"]["array"].dtype == full["numpy"]["array"].dtype


def test_views_of_one_memory_with_other_values_are_two(fabric, tmp_path):
    number = torch.tensor([1 + 2j, 3 - 4j])
    path = saved(fabric, tmp_path / "c", plain=number, lazy=number.conj())
    assert fabric.load(path)["plain"].tolist() == [1 + 2j, 3 - 4j]
    assert fabric.load(path)["lazy"].tolist() == [1 - 2j, 3 + 4j]


# damage


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "fabric.json"])
def test_a_missing_or_truncated_file_is_named(fabric, tmp_path, name):
    path = saved(fabric, tmp_path / "c")
    good = (path / name).read_bytes()
    (path / name).write_bytes(good[:-1])
    with pytest.raises(
        DamagedCheckpointError, match=rf"{name} (has {len(good) - 1} bytes|is not what was written)"
    ):
        fabric.load(path)
    (path / name).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"is damaged: {name} is missing. Load another"):
        fabric.load(path)


def test_a_manifest_of_a_later_format(fabric, tmp_path, monkeypatch):
    monkeypatch.setattr("fabric.checkpoint.formats.sharded.directory.FORMAT", 2)
    path = saved(fabric, tmp_path / "c")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="is a checkpoint of format 2, and this fabric reads up to 1"):
        fabric.load(path)


# kills, and what is at the path


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.save(sys.argv[1], {"step": 1, "w": torch.zeros(10)}, format="sharded")
    at, renames, rename = sys.argv[2], 0, Path.rename
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    def counted(self, target):
        global renames
        renames += Path(sys.argv[1]).parent == Path(target).parent
        return killed() if renames == int(at) else rename(self, target)
    if at == "fsync":
        os.fsync = killed
    else:
        Path.rename = counted
    fabric.save(sys.argv[1], {"step": 2, "w": torch.ones(100_000)}, format="sharded")
"""


@pytest.mark.parametrize("at", ["fsync", "1", "2"])
def test_a_run_killed_in_save_can_be_resumed(fabric, tmp_path, at):
    path = tmp_path / "c"
    script = textwrap.dedent(KILLED)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), at], timeout=120, stderr=subprocess.DEVNULL
    )
    assert done.returncode == -signal.SIGKILL
    assert path.exists() == (at != "2")
    assert fabric.load(path)["step"] == 1
    saved(fabric, path, step=3)
    assert fabric.load(path) == {"step": 3}
    assert names(tmp_path) == ["c"]


def test_a_file_set_aside_is_loaded_too(fabric, tmp_path):
    fabric.save(tmp_path / "c", {"step": 1})
    (tmp_path / "c").rename(tmp_path / ".c.0123abcd.old")
    (tmp_path / ".c.d.0123abcd.old").write_text("of another one")
    assert fabric.load(tmp_path / "c") == {"step": 1}
    with pytest.raises(FileNotFoundError, match="no checkpoint file at"):
        fabric.load(tmp_path / "b")


def test_files_of_the_user_are_not_deleted(fabric, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(IsADirectoryError, match=r"with 'notes\.txt' in it, which a new"):
        saved(fabric, tmp_path)
    path = saved(fabric, tmp_path / "c")
    (path / "tokenizer.json").write_text("mine")
    with pytest.raises(IsADirectoryError, match=r"with 'tokenizer\.json' in it"):
        saved(fabric, path)
    assert fabric.load(path)["step"] == 1
    (tmp_path / "empty").mkdir()
    saved(fabric, tmp_path / "empty")
    with pytest.raises(NotADirectoryError, match="is a file"):
        saved(fabric, tmp_path / "notes.txt" / "c")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="neither a file nor a directory"):
        saved(fabric, tmp_path / "pipe")
    assert names(tmp_path) == ["c", "empty", "notes.txt", "pipe"]


@pytest.mark.parametrize("wait", [True, False])
def test_what_a_link_points_to_is_written(fabric, tmp_path, wait):
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to("big/c")
    for step in (1, 2):  # it need not be there
        saving = fabric.save(tmp_path / "link", {"step": step}, format="sharded", wait=wait)
        if saving is not None:
            saving.wait()
        assert fabric.load(tmp_path / "link") == fabric.load(tmp_path / "big" / "c") == {"step": step}
        assert (names(tmp_path), names(tmp_path / "big")) == (["big", "link"], ["c"])
        assert (tmp_path / "link").is_symlink()


def test_a_url_of_this_machine(fabric, tmp_path):
    saved(fabric, f"file://{tmp_path}/c", step=1)
    assert fabric.load(f"file://{tmp_path}/c") == fabric.load(tmp_path / "c") == {"step": 1}


# loading


def test_tensors_are_read_when_they_are_used(fabric, tmp_path):
    path = saved(fabric, tmp_path / "c", model=nn.Linear(3, 2), big=torch.ones(5))

    class Keeps(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *args):
            self.kept = state[f"{prefix}weight"]
            super()._load_from_state_dict(state, prefix, *args)

    model = Keeps(3, 2)
    fabric.load(path, {"model": model})
    assert isinstance(model.kept, LazyTensor)
    assert (model.kept.shape, model.kept.dtype, model.kept.dim()) == ((2, 3), torch.float32, 2)
    with pytest.raises(UsageError, match=r"was kept, and used after it was loaded\. Copy"):
        model.kept + 1


def test_any_use_of_a_stored_tensor_is_one_of_its_values():
    values = torch.arange(6.0).view(2, 3)

    def fill(target, offsets):
        assert list(offsets) == [0, 0]
        return target.copy_(values)

    stored = LazyTensor.of(values.shape, values.dtype, fill)
    assert stored.tolist() == values.tolist()
    assert stored.device.type == "cpu"
    assert not stored.is_meta
    assert stored.numpy().sum() == 15
    assert type(stored.clone()) is type(stored[0]) is type(torch.cat([stored, stored])) is torch.Tensor
    assert torch.zeros(2, 3).copy_(stored).equal(values)
    assert pickle.loads(pickle.dumps(stored)).equal(values)
    assert repr(stored) == repr(values)


class Bomb:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_description_that_python_3_13_wrote(fabric, tmp_path):
    """Its paths call themselves pathlib._local.PosixPath, which no other Python has."""
    save_by_torch({"step": 1}, checkpoint_id=tmp_path / "a")
    metadata = tmp_path / "a" / ".metadata"
    by_name = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    assert b"cpathlib" in by_name
    metadata.write_bytes(by_name.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert fabric.load(tmp_path / "a") == {"step": 1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_code_in_a_checkpoint_is_refused(fabric, tmp_path):
    save_by_torch({"bomb": Bomb(), "step": 1}, checkpoint_id=tmp_path / "a")
    with pytest.raises(UsageError, match=r"'bomb' in .* is an object that safe loading refuses"):
        fabric.load(tmp_path / "a")
    assert fabric.load(tmp_path / "a", weights_only=False) == {"bomb": 0, "step": 1}
    save_by_torch({"step": 1}, checkpoint_id=tmp_path / "b")
    (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UsageError, match=r"b/.metadata holds code: os.system, which would run"):
        fabric.load(tmp_path / "b")
    for text in (b"ctorch.distributed.checkpoint.filesystem\nos.system\n.", b"ctorch\nload\n."):
        (tmp_path / "b" / ".metadata").write_bytes(text)
        with pytest.raises(UsageError, match=r"b/\.metadata refers to torch.* safe loading refuses"):
            fabric.load(tmp_path / "b")
    (tmp_path / "b" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata cannot be read"):
        fabric.load(tmp_path / "b")


# one file


def test_consolidate(fabric, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fabric.checkpoint.formats.sharded.dcp.LARGE", 64)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.again = model[0]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "at": Path("x"), "none": torch.empty(0)}
    saved(fabric, tmp_path / "c", **state)
    fabric.save(tmp_path / "full", state)
    assert main(["consolidate", str(tmp_path / "c")]) == 0
    assert main(["consolidate", f"{tmp_path}/c/", "--output", str(tmp_path / "deep" / "f.pt")]) == 0
    expected = torch.load(tmp_path / "full", weights_only=True)
    for file in (tmp_path / "c.full.pt", tmp_path / "deep" / "f.pt"):
        got = torch.load(file, weights_only=True)
        assert repr(got) == repr(expected)
        assert got["model"]["again.weight"].data_ptr() == got["model"]["0.weight"].data_ptr()
    assert names(tmp_path / "deep") == ["f.pt"]
    assert "is now also one file" in capsys.readouterr().err


def test_consolidate_asks_before_it_replaces_a_file(fabric, tmp_path, capsys, monkeypatch):
    path = str(saved(fabric, tmp_path / "c", model=nn.Linear(2, 2)))
    file = tmp_path / "c.full.pt"
    file.write_text("mine")
    assert main(["consolidate", path]) == 2
    assert f"{file} exists. Write --force to replace it, or another --output." in capsys.readouterr().err
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if "Replace it?" in question else "y")
    assert main(["consolidate", path]) == 1
    assert file.read_text() == "mine"
    assert main(["consolidate", path, "--force"]) == 0
    assert set(torch.load(file, weights_only=True)) == {"model"}
    assert "2 of 2 tensors" in capsys.readouterr().err


def test_consolidate_refuses_what_is_none_or_damaged(fabric, tmp_path, capsys):
    assert main(["consolidate", str(tmp_path / "absent")]) == 1
    assert re.search(r"There is no \S+/absent\. Give the directory", capsys.readouterr().err)
    (tmp_path / "file.pt").write_bytes(b"")
    assert main(["consolidate", str(tmp_path / "file.pt")]) == 1
    assert "file.pt is not a sharded checkpoint" in capsys.readouterr().err
    (tmp_path / "file.pt").unlink()
    path = saved(fabric, tmp_path / "c")
    (path / "__0_0.distcp").write_bytes(b"")
    assert main(["consolidate", str(path)]) == 1
    assert f"fabric consolidate: {path} is damaged: __0_0.distcp has 0" in capsys.readouterr().err
    assert names(tmp_path) == ["c"]


def test_consolidate_to_what_is_no_other_path(fabric, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fabric.save("c", {"w": torch.ones(2)}, format="sharded")
    (tmp_path / "link").symlink_to("c")
    for output in ("c", f"{tmp_path}/c", "link"):
        assert main(["consolidate", "c", "--output", output]) == 2
        assert (
            "is the checkpoint itself, which the file would replace. Write another" in capsys.readouterr().err
        )
    for given in (["c", "--output", "memory://x/a.safetensors"], ["s3://x/c"]):
        assert main(["consolidate", *given]) == 2
        assert f"{given[-1]} is a URL, but consolidate reads and" in capsys.readouterr().err
    assert main(["consolidate", f"file://{tmp_path}/c", "--output", f"file://{tmp_path}/f.pt"]) == 0
    assert torch.load("f.pt")["w"].equal(torch.ones(2))
    assert names(tmp_path) == ["c", "f.pt", "link"]


def test_a_value_that_no_rank_holds_is_not_saved(tmp_path):
    part = ShardWriter({"here": torch.ones(1), "away": {"w": placeholder_of(torch.ones(2))}})
    assert part.owners == {"away.w": 0}
    with pytest.raises(UsageError, match=r"No rank holds the value of away\.w, so it cannot be saved"):
        part.describe([part.plan(part.owners)])
    assert names(tmp_path) == []


# files and modes of others


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_a_private_directory_stays_private(fabric, tmp_path, monkeypatch, mode):
    path = saved(fabric, tmp_path / "a")
    assert mode_of(path) == 0o755, "by the umask"
    path.chmod(mode)
    for file in path.iterdir():
        file.chmod(0o600)
    found = []
    write = ShardWriter.write

    def spy(self, directory):
        found.append(mode_of(directory))
        return write(self, directory)

    monkeypatch.setattr(ShardWriter, "write", spy)
    saved(fabric, path)
    assert found == [0o700], "while it is written"
    assert mode_of(path) == mode
    assert {mode_of(file) for file in path.iterdir()} == {0o600}


def test_what_is_replaced_by_another_kind_keeps_who_may_read_it(fabric, tmp_path):
    fabric.save(tmp_path / "a", {"step": 1})
    (tmp_path / "a").chmod(0o640)
    saved(fabric, tmp_path / "a")
    assert mode_of(tmp_path / "a") == 0o750
    assert {mode_of(file) for file in (tmp_path / "a").iterdir()} == {0o640}
    (tmp_path / "a").chmod(0o700)
    fabric.save(tmp_path / "a", {"step": 1}, format="full")
    assert mode_of(tmp_path / "a") == 0o600


FOREIGN = ["/etc/passwd", "../outside", "pipe", "link", "loop", "sub/../../outside", ""]


@pytest.fixture
def foreign(tmp_path):
    """Puts what a manifest must not name into a directory, and a file beside it."""

    def put(directory):
        (tmp_path / "outside").write_bytes(b"x")
        os.mkfifo(directory / "pipe")
        (directory / "link").symlink_to(tmp_path / "outside")
        (directory / "loop").symlink_to("loop")
        return directory

    return put


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_description_names_files_of_its_directory_only(fabric, foreign, tmp_path, name):
    save_by_torch({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    path = foreign(tmp_path / "a")
    described = pickle.loads((path / ".metadata").read_bytes())
    for place in described.storage_data.values():
        place.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(DamagedCheckpointError, match=f"{path} is damaged: .*{name}"):
        fabric.load(path)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_manifest_names_files_of_its_directory_only(fabric, foreign, tmp_path, name):
    path = foreign(saved(fabric, tmp_path / "a"))
    (path / "fabric.json").unlink()
    write_manifest(path, {name: {"size": 1, "crc32": 1}})
    with pytest.raises(DamagedCheckpointError, match=f"{path} is damaged: .*{name}"):
        fabric.load(path)


@pytest.mark.parametrize("name", ["fabric.json", ".metadata"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(fabric, tmp_path, name):
    path = saved(fabric, tmp_path / "a")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpointError, match=f"a is damaged: {name} is (no reg|mis)"):
        fabric.load(path)


class Build:
    """Pickles as its class, or function, with attributes set."""

    def __init__(self, what, **attributes):
        self.what, self.attributes = what, attributes

    def opcodes(self):
        pickled = pickle.dumps((None, self.attributes), 2)[2:-1]
        return f"c{self.what.__module__}\n{self.what.__qualname__}\n".encode() + pickled + b"b0"


@pytest.mark.parametrize(
    "what",
    [
        PosixPath,
        PurePosixPath,
        Counter,
        MetadataIndex,
        TensorProperties,
        torch.serialization._get_layout,
        type(place_in_file("", 0, 0)),
    ],
)
@pytest.mark.parametrize(
    "attribute", ["exists", "__eq__", "__hash__", "__defaults__", "__qualname__", "offset"]
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loading_leaves_no_trace_in_classes_and_functions(fabric, tmp_path, what, attribute):
    save_by_torch({"step": 1}, checkpoint_id=tmp_path / "a")
    metadata = tmp_path / "a" / ".metadata"
    plain = pickle.dumps(pickle.loads(metadata.read_bytes()), 2)
    value = "name" if attribute == "__qualname__" else ("x",)
    metadata.write_bytes(plain[:2] + Build(what, **{attribute: value}).opcodes() + plain[2:])
    before = dict(vars(what)), getattr(what, "__defaults__", None), what.__qualname__
    with suppress(UsageError):  # of a function that was made for the pickle nobody sees what was changed
        fabric.load(tmp_path / "a")
    assert (dict(vars(what)), getattr(what, "__defaults__", None), what.__qualname__) == before
    if what is MetadataIndex:
        with pytest.raises(UsageError, match=f"holds code: it replaces MetadataIndex.{attribute}"):
            fabric.load(tmp_path / "a")
