from __future__ import annotations

import io
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

import fabric.checkpoint.torch_io as torch_io
from fabric.checkpoint import digest
from fabric.checkpoint.formats import safetensors
from fabric.core.errors import ConfigurationError, FabricError, UsageError
from fabric.plugins.io import TorchCheckpointIO

OLD, NEW = {"step": 1, "w": torch.zeros(3)}, {"step": 2, "w": torch.ones(3)}


class Thing:
    pass


@pytest.fixture
def storage():
    return TorchCheckpointIO()


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# one file


@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_is_what_torch_reads(storage, tmp_path, kind):
    path = kind(tmp_path / "deep" / "er" / "a.pt")
    storage.save_checkpoint(NEW, path)
    plain = torch.load(path, weights_only=True)
    loaded = storage.load_checkpoint(path)
    assert plain["step"] == loaded["step"] == 2
    assert plain["w"].equal(loaded["w"])
    assert names(tmp_path / "deep" / "er") == ["a.pt"]


def test_what_torch_saved_is_read_also_in_the_old_format(storage, tmp_path):
    torch.save(NEW, tmp_path / "new.pt")
    torch.save(NEW, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        assert storage.load_checkpoint(tmp_path / name)["w"].equal(NEW["w"])


def test_a_relative_path_means_the_working_directory(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage.save_checkpoint(NEW, "a.pt")
    assert storage.load_checkpoint("a.pt")["step"] == 2
    assert names(tmp_path) == ["a.pt"]


def test_a_name_that_leaves_no_letters_for_the_one_beside_it(storage, tmp_path):
    with pytest.raises(OSError, match=r"File name too long: '.*nn\.pt'"):
        storage.save_checkpoint(NEW, tmp_path / ("n" * 245 + ".pt"))
    assert names(tmp_path) == []


def test_permissions_follow_the_umask_and_those_of_an_old_file_are_kept(storage, tmp_path):
    path = tmp_path / "a.pt"
    before = os.umask(0o027)
    try:
        storage.save_checkpoint(OLD, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    storage.save_checkpoint(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_device_is_written_to_and_never_replaced(storage):
    storage.save_checkpoint(NEW, "/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        storage.save_checkpoint(NEW, "/dev/full")


@pytest.mark.parametrize("name", ["last.pt", "last.safetensors"])
def test_what_a_link_points_to_is_written(storage, tmp_path, name):
    (tmp_path / "big").mkdir()
    link = tmp_path / name
    link.symlink_to("big/link")
    (tmp_path / "big" / "link").symlink_to("a.pt")
    for values in (torch.ones(2), torch.zeros(2)):  # it need not be there
        storage.save_checkpoint({"w": values}, link)
        assert [str(path.readlink()) for path in (link, tmp_path / "big" / "link")] == ["big/link", "a.pt"]
        for path in (link, tmp_path / "big" / "a.pt"):
            assert storage.load_checkpoint(path)["w"].equal(values)
        assert (names(tmp_path), names(tmp_path / "big")) == (["big", name], ["a.pt", "link"])


def test_a_link_to_a_pipe_is_written_to(storage, tmp_path):
    (tmp_path / "out").symlink_to("/proc/self/fd/1")
    code = (
        "import sys, torch, fabric.plugins.io as io; io.TorchCheckpointIO().save_checkpoint({}, sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], stdout=subprocess.PIPE, check=True)
    assert torch.load(io.BytesIO(done.stdout), weights_only=True) == {}
    assert names(tmp_path) == ["out"]


def test_removing(storage, tmp_path):
    storage.save_checkpoint(NEW, tmp_path / "a.pt")
    storage.remove_checkpoint(tmp_path / "a.pt")
    storage.remove_checkpoint(tmp_path / "a.pt")
    assert names(tmp_path) == []


# whole or untouched


def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(storage, tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    storage.save_checkpoint(OLD, path)

    def half(data, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        storage.save_checkpoint(NEW, path)
    assert names(tmp_path) == ["a.pt"]
    assert storage.load_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_after_the_writing_leaves_the_old_file_and_nothing_else(
    storage, tmp_path, monkeypatch, step
):
    path = tmp_path / "a.pt"
    storage.save_checkpoint(OLD, path)

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync", fail) if step == "fsync" else (Path, "replace", fail)))
    with pytest.raises(KeyboardInterrupt):
        storage.save_checkpoint(NEW, path)
    monkeypatch.undo()
    assert names(tmp_path) == ["a.pt"]
    assert storage.load_checkpoint(path)["step"] == 1


def test_everything_reaches_the_disk_before_the_name_changes(storage, tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file") or fsync(fd),
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("rename") or replace(self, to))
    storage.save_checkpoint(NEW, tmp_path / "a.pt")
    assert events == ["file", "rename", "folder"]


KILLED = """
    import os, signal, sys, torch
    from fabric.plugins.io import TorchCheckpointIO

    class Bomb:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    TorchCheckpointIO().save_checkpoint({"w": torch.ones(100_000), "bomb": Bomb()}, sys.argv[1])
"""


def test_a_process_killed_while_it_writes_leaves_the_old_file(storage, tmp_path):
    path = tmp_path / "a.pt"
    storage.save_checkpoint(OLD, path)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert storage.load_checkpoint(path)["step"] == 1
    storage.save_checkpoint(NEW, path)
    assert storage.load_checkpoint(path)["step"] == 2


FULL = """
    import resource, signal, sys, torch
    from fabric.plugins.io import TorchCheckpointIO

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        TorchCheckpointIO().save_checkpoint({"w": torch.ones(1_000_000)}, sys.argv[1])
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_disk_without_room_is_an_error_that_leaves_the_old_file(storage, tmp_path):
    path = tmp_path / "a.pt"
    storage.save_checkpoint(OLD, path)
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(path)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert names(tmp_path) == ["a.pt"]
    assert storage.load_checkpoint(path)["step"] == 1


def test_what_was_loaded_outlives_a_save_to_the_same_path(storage, tmp_path):
    path = tmp_path / "a.pt"
    storage.save_checkpoint({"w": torch.ones(1_000_000)}, path)
    loaded = storage.load_checkpoint(path)
    storage.save_checkpoint({"w": torch.zeros(10)}, path)
    assert loaded["w"].sum() == 1_000_000


def test_only_safe_loads_to_the_host_are_mapped(storage, tmp_path, monkeypatch):
    storage.save_checkpoint(NEW, tmp_path / "a.pt")
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: mapped.append(k.get("mmap")) or load(*a, **k))
    storage.load_checkpoint(tmp_path / "a.pt")
    storage.load_checkpoint(tmp_path / "a.pt", map_location=torch.device("cpu"))
    storage.load_checkpoint(tmp_path / "a.pt", map_location=lambda storage, place: storage)
    storage.load_checkpoint(tmp_path / "a.pt", map_location=None)
    storage.load_checkpoint(tmp_path / "a.pt", weights_only=False)
    assert mapped == [True, True, False, False, False]


# bad input


def error_of(call, *args, **kwargs):
    with pytest.raises((FabricError, OSError)) as caught:
        call(*args, **kwargs)
    return caught.value


def test_texts_of_bad_paths(storage, tmp_path):
    (tmp_path / "file").write_text("")
    folder, below = tmp_path, tmp_path / "file" / "a.pt"
    save = error_of(storage.save_checkpoint, NEW, folder)
    assert isinstance(save, IsADirectoryError)
    assert str(save) == f"{folder} is a directory. Give a file name, for example {folder}/checkpoint.pt."
    load = error_of(storage.load_checkpoint, folder)
    assert isinstance(load, IsADirectoryError)
    assert str(load).startswith(f"{folder} is a directory, not a checkpoint file of fabric.save. If an")
    under = error_of(storage.save_checkpoint, NEW, below)
    assert isinstance(under, NotADirectoryError)
    assert str(under) == f"{below} cannot be written: {tmp_path}/file is a file. Write a path in a directory."
    absent = error_of(storage.load_checkpoint, tmp_path / "absent.pt")
    assert isinstance(absent, FileNotFoundError)
    assert str(absent) == f"There is no checkpoint file at {tmp_path}/absent.pt."
    relative = error_of(storage.load_checkpoint, "absent.pt")
    assert str(relative) == f"There is no checkpoint file at absent.pt (looked in {Path.cwd()})."
    assert isinstance(error_of(storage.load_checkpoint, below), FileNotFoundError)
    assert isinstance(
        error_of(storage.save_checkpoint, NEW, tmp_path / "file" / "deep" / "a.pt"), NotADirectoryError
    )


def test_storage_options_are_refused(storage, tmp_path):
    error = error_of(storage.save_checkpoint, NEW, tmp_path / "a.pt", {"region": "x"})
    assert isinstance(error, ConfigurationError)
    assert "storage_options={'region': 'x'}. TorchCheckpointIO has no options." in str(error)
    assert names(tmp_path) == []


def test_objects_are_read_from_trusted_files_only(storage, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"thing": Thing()}, path)
    error = error_of(storage.load_checkpoint, path)
    assert isinstance(error, UsageError)
    assert str(error) == (
        f"{path} refers to test_torch_io.Thing, which safe loading refuses, because reading it can run any "
        f"code. If you trust the file, write fabric.load(path, ..., weights_only=False)."
    )
    assert isinstance(storage.load_checkpoint(path, weights_only=False)["thing"], Thing)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 junk", "cut"])
@pytest.mark.parametrize("safe", [None, False])
def test_a_damaged_file_is_called_so(storage, tmp_path, content, safe):
    path = tmp_path / "a.pt"
    if content == "cut":
        whole = io.BytesIO()
        torch.save(NEW, whole)
        content = whole.getvalue()[:-200]
    path.write_bytes(content)
    error = error_of(storage.load_checkpoint, path, weights_only=safe)
    assert isinstance(error, UsageError)
    kinds = (
        {b"": "no checkpoint: it is empty.", b"hello": "no checkpoint: it is a text file"}
        if safe is None
        else {}
    )
    assert str(error).startswith(
        f"{path} is {kinds.get(content, 'damaged: it was cut short, or not written by')}"
    )


class Evil:
    def __reduce__(self):
        return print, ("evil",)


@pytest.mark.parametrize("content", [b'{"a": 1}', b"[1]", b"# readme"])
def test_text_is_no_checkpoint(storage, tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    error = error_of(storage.load_checkpoint, tmp_path / "a.json")
    assert str(error) == (
        f"{tmp_path}/a.json is no checkpoint: it is a text file, which begins with {content.decode()!r}. "
        "Load a file that fabric.save or torch.save has written."
    )


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_a_pickle_that_safe_loading_does_not_know_is_refused(storage, tmp_path):
    torch.save({"a": (1, 2)}, tmp_path / "a.pt", pickle_protocol=4)
    error = error_of(storage.load_checkpoint, tmp_path / "a.pt")
    assert "a.pt holds more than data (Unsupported operand 149), which safe loading refuses" in str(error)
    assert storage.load_checkpoint(tmp_path / "a.pt", weights_only=False) == {"a": (1, 2)}


def test_a_file_that_calls_functions_is_refused(storage, tmp_path, capsys):
    torch.save([Evil()], tmp_path / "a.pt")
    error = error_of(storage.load_checkpoint, tmp_path / "a.pt")
    assert "refers to print, which safe loading refuses" in str(error)
    assert capsys.readouterr().out == ""


def test_other_errors_of_torch_stay_as_they_are(storage, tmp_path, monkeypatch):
    storage.save_checkpoint(NEW, tmp_path / "a.pt")

    def load(*args, **kwargs):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        storage.load_checkpoint(tmp_path / "a.pt")


# URLs


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_urls_go_through_fsspec(storage, memory):
    url = "memory://runs/deep/a.pt"
    storage.save_checkpoint(OLD, url)
    storage.save_checkpoint(NEW, url)
    assert storage.load_checkpoint(url)["w"].equal(NEW["w"])
    assert memory.find("/") == ["/runs/deep/a.pt"]
    storage.remove_checkpoint(url)
    storage.remove_checkpoint(url)
    assert memory.find("/") == []
    for absent in (url, "memory://runs/deep/a.safetensors"):
        with pytest.raises(FileNotFoundError, match=rf"^There is no checkpoint file at {absent}\.$"):
            storage.load_checkpoint(absent)
    memory.touch("/runs/deep/other")
    with pytest.raises(IsADirectoryError, match=r"^memory://runs is a directory, not a checkpoint file"):
        storage.load_checkpoint("memory://runs")
    for call in (storage.load_checkpoint, lambda path: storage.save_checkpoint(NEW, path)):
        with pytest.raises(ConfigurationError, match=r"'nosuch://b/a\.pt' cannot be opened: Protocol not"):
            call("nosuch://b/a.pt")


def test_a_failed_save_to_a_url_leaves_the_old_object(storage, memory, monkeypatch):
    storage.save_checkpoint(OLD, "memory://runs/a.pt")

    def half(data, file):
        file.write(b"half")
        raise OSError("connection lost")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="connection lost"):
        storage.save_checkpoint(NEW, "memory://runs/a.pt")
    monkeypatch.undo()
    assert storage.load_checkpoint("memory://runs/a.pt")["step"] == 1
    storage.save_checkpoint(NEW, "memory://runs/a.pt")
    assert storage.load_checkpoint("memory://runs/a.pt")["step"] == 2


def test_file_urls_are_files_like_any_other(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_io, "_save_to_url", pytest.fail)
    storage.save_checkpoint(NEW, f"file://{tmp_path}/a.pt")
    assert names(tmp_path) == ["a.pt"]
    assert storage.load_checkpoint(f"file://{tmp_path}/a.pt")["step"] == 2


def test_a_url_that_went_through_pathlib_is_refused(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: storage.save_checkpoint(NEW, Path("s3://bucket/a.pt")),
        lambda: storage.load_checkpoint(Path("s3://bucket/a.pt")),
    ):
        error = error_of(call)
        assert isinstance(error, ConfigurationError)
        assert str(error).endswith(
            "was a URL, but Path removes a slash from URLs. Pass the string 's3://bucket/a.pt'."
        )
    assert names(tmp_path) == []


# files that are no checkpoints


def in_archive(pickled: bytes) -> bytes:
    """A file of torch.save with this pickle in it."""
    whole, made = io.BytesIO(), io.BytesIO()
    torch.save({"a": 1}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return made.getvalue()


def saved(tree) -> bytes:
    made = io.BytesIO()
    torch.save(tree, made)
    return made.getvalue()


class System:
    def __reduce__(self):
        return os.system, ("echo harm",)


def laughs(levels: int) -> list:
    node: list = [1, 1]
    for _ in range(levels):
        node = [node, node]
    return node


FORMAT = {"__fabric_type__": "ndarray"}
ODD = {
    "a bomb": (lambda: saved({"a": System()}), "holds code: os.system, which would run when the file is unp"),
    "an old bomb": (lambda: pickle.dumps(System(), 0), "holds code: os.system"),
    "a new bomb": (lambda: pickle.dumps(System(), 4), "holds code: os.system"),
    "zeros": (
        lambda: bytes(1000),
        "is no checkpoint: it begins with zeros, as a file whose bytes were not",
    ),
    "a table": (lambda: b"a,b\n1,2\n", "is no checkpoint: it is a text file, which begins with 'a,b"),
    "Git LFS": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "which `git lfs pull` fetches"),
    "one byte": (lambda: b"\0", "is damaged: it was cut short, or not written by"),
    "noise": (lambda: b"\xff" * 1000, "is damaged: it was cut short, or not written by"),
    "deep": (
        lambda: in_archive(b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 10_000 + b"a" * 9_999 + b"s."),
        "is damaged: its data nest more than 200 levels deep, or contain themselves",
    ),
    "a dict in itself": (
        lambda: in_archive(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."),
        "contain themselves",
    ),
    "a list in itself": (lambda: in_archive(b"\x80\x02]q\x00h\x00a."), "contain themselves"),
    "a billion": (
        lambda: saved({"a": laughs(40)}),
        "its lists contain each other so often that",
    ),
    "no array": (lambda: saved({"a": FORMAT}), "that is marked as 'ndarray' has a value of type NoneType"),
    "giant": (
        lambda: saved({"a": [{**FORMAT, "value": torch.zeros(9), "dtype": "U100000"}]}),
        "marked as 'ndarray' has a value of type Tensor and U100000",
    ),
    "no path": (
        lambda: saved({"a": {"__fabric_type__": "path", "value": 3}}),
        "a value of type int",
    ),
    "no tag": (lambda: saved({"a": {"__fabric_type__": ["x"]}}), "marked as"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("kind", ODD)
def test_files_that_are_no_checkpoints_are_called_what_they_are(storage, tmp_path, capfd, kind):
    make, expected = ODD[kind]
    path = tmp_path / "a.pt"
    path.write_bytes(make())
    error = error_of(storage.load_checkpoint, path)
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"{path} ")
    assert expected in str(error)
    assert ("copy this one from its source" in str(error)) == ("damaged" in str(error)), (
        "a bomb is not copied again"
    )
    assert capfd.readouterr().out == ""


def test_what_is_shared_or_deep_is_loaded(storage, tmp_path):
    shared, node = list(range(1000)), [0]
    for _ in range(150):
        node = [node]
    tree = {"shared": [shared] * 1000, "deep": node}
    storage.save_checkpoint(tree, tmp_path / "a.pt")
    assert storage.load_checkpoint(tmp_path / "a.pt") == tree


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_a_private_file_is_private_before_its_first_byte(storage, tmp_path, monkeypatch, suffix, mode):
    path = tmp_path / f"a.{suffix}"
    storage.save_checkpoint({"a": torch.ones(3)}, path)
    path.chmod(mode)
    found = []

    def fsync(descriptor):
        found.append(stat.S_IMODE(os.fstat(descriptor).st_mode))

    real = digest.write_all
    for module in (digest, safetensors):
        monkeypatch.setattr(
            module, "write_all", lambda file, data: (fsync(file.fileno()), real(file, data))[1]
        )
    storage.save_checkpoint({"a": torch.ones(3)}, path)
    assert set(found) == {mode}
    assert stat.S_IMODE(path.stat().st_mode) == mode
