"""A checkpoint is deleted or replaced without waiting until the file system has freed its blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint import atomic_write, freed_files
from fabric.checkpoint.atomic_write import commit_path, temporary_path
from fabric.checkpoint.freed_files import freed_later, wait_until_freed

LARGE = bytes(freed_files._SMALLEST)


@pytest.fixture
def held(monkeypatch):
    """The threads that free blocks do so after `held.set()`."""
    close, event = freed_files._close, threading.Event()

    def close_later(descriptors):
        event.wait()
        close(descriptors)

    monkeypatch.setattr(freed_files, "_close", close_later)
    yield event
    event.set()
    wait_until_freed()


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def descriptors():
    return set(Path("/proc/self/fd").iterdir())


def open_links(directory):
    """Deleted files of a directory that this process has open."""
    found = []
    for link in descriptors():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(directory)) and name.endswith(" (deleted)")]


@needs_proc
@pytest.mark.parametrize("directory", [False, True])
def test_the_old_checkpoint_is_deleted_and_a_thread_frees_its_blocks(tmp_path, held, directory):
    path = tmp_path / "c"
    for content in (LARGE + b"1", LARGE + b"2"):
        part = temporary_path(path, directory)
        file = part / "f" if directory else part
        file.write_bytes(content)
        commit_path(part, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert (path / "f" if directory else path).read_bytes() == content
    assert len(open_links(tmp_path)) == 1
    held.set()
    wait_until_freed()
    assert open_links(tmp_path) == []
    assert (freed_files._threads, freed_files._descriptors) == ({}, set())


@needs_proc
@pytest.mark.parametrize("directory", [False, True])
def test_blocks_of_small_files_and_of_links_are_not(tmp_path, held, directory):
    (tmp_path / "target").write_bytes(LARGE)
    path = tmp_path / "c"
    if directory:
        path.mkdir()
        (path / "small").write_bytes(b"1")
        (path / "link").symlink_to(tmp_path / "target")
        os.mkfifo(path / "fifo")
    else:
        path.symlink_to(tmp_path / "target")
    part = temporary_path(path, directory)
    commit_path(part, path)
    assert freed_files._threads == {}
    assert (tmp_path / "target").read_bytes() == LARGE


def test_the_next_save_waits_until_the_disk_has_the_space(tmp_path, held):
    order = []
    (tmp_path / "old").write_bytes(LARGE)
    with freed_later(tmp_path / "old"):
        (tmp_path / "old").unlink()

    def save():
        part = temporary_path(tmp_path / "new", directory=False)
        order.append("save")
        atomic_write.remove(part)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(0.5)
    order.append("freed")
    held.set()
    thread.join()
    assert order == ["freed", "save"]


@needs_proc
def test_a_forked_process_does_not_keep_the_blocks(tmp_path, held):
    (tmp_path / "old").write_bytes(LARGE)
    with freed_later(tmp_path / "old"):
        (tmp_path / "old").unlink()
    assert len(open_links(tmp_path)) == 1
    child = os.fork()
    if child == 0:
        os._exit(len(open_links(tmp_path)))  # workers of a loader, which live for an epoch
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(open_links(tmp_path)) == 1  # this process's own is untouched


@needs_proc
def test_an_error_in_between_leaves_nothing_open(tmp_path):
    (tmp_path / "old").write_bytes(LARGE)
    before = descriptors()
    with pytest.raises(OSError, match="no"), freed_later(tmp_path / "old"):
        raise OSError("no")
    wait_until_freed()
    assert descriptors() == before
    assert (tmp_path / "old").read_bytes() == LARGE


def test_a_network_file_system_that_keeps_names_of_open_files(tmp_path, monkeypatch):
    """NFS renames a file that is deleted while it is open: its directory can be deleted after the closing."""
    delete = shutil.rmtree

    def delete_like_nfs(directory, **arguments):
        if freed_files._threads or not (directory / "f").exists():
            delete(directory, **arguments)
        else:
            (directory / "f").rename(directory / ".nfs0001")

    monkeypatch.setattr(atomic_write.shutil, "rmtree", delete_like_nfs)
    path = tmp_path / "c"
    for _ in range(2):
        part = temporary_path(path, directory=True)
        (part / "f").write_bytes(LARGE)
        commit_path(part, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert [entry.name for entry in path.iterdir()] == ["f"]
    assert freed_files._threads == {}


def test_a_replaced_file_on_such_a_file_system_is_closed_before_the_save_returns(tmp_path):
    (tmp_path / "old").write_bytes(LARGE)
    with freed_later(tmp_path / "old"):
        (tmp_path / "old").rename(tmp_path / ".nfs0001")
    assert freed_files._threads == {}


@needs_proc
def test_no_thread_can_be_started(tmp_path, monkeypatch):
    """Python 3.12 starts none while it exits, as in a `wait=False` save on the last line of a script."""
    (tmp_path / "old").write_bytes(LARGE)
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: threading.Lock().release())  # RuntimeError
        with freed_later(tmp_path / "old"):
            (tmp_path / "old").unlink()
    assert descriptors() == before
    wait_until_freed()


def test_another_thread_waits_while_the_thread_is_started(tmp_path, monkeypatch):
    start = threading.Thread.start

    def started_slowly(thread):
        if thread.name == "fabric-free":
            wait_until_freed()  # as another thread may do here
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started_slowly)
    (tmp_path / "old").write_bytes(LARGE)
    with freed_later(tmp_path / "old"):
        (tmp_path / "old").unlink()
    wait_until_freed()


@needs_proc
def test_a_program_that_closes_all_descriptors(tmp_path, held, recwarn):
    (tmp_path / "old").write_bytes(LARGE)
    with freed_later(tmp_path / "old"):
        (tmp_path / "old").unlink()
    (descriptor,) = freed_files._descriptors
    os.close(descriptor)  # os.closerange() of a daemon
    held.set()
    wait_until_freed()
    assert (freed_files._threads, freed_files._descriptors) == ({}, set())


@needs_proc
def test_few_descriptors(tmp_path):
    """A directory of many large files is deleted whole, and leaves descriptors to the program."""
    path = tmp_path / "c"
    code = f"""
import resource
from pathlib import Path
from fabric.checkpoint.atomic_write import commit_path, temporary_path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [open("/dev/null") for _ in range(30)]
for _ in range(2):
    part = temporary_path(Path({str(path)!r}), directory=True)
    for number in range(100):
        (part / f"f{{number}}").open("wb").truncate({len(LARGE)})
    commit_path(part, Path({str(path)!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_saves_over_checkpoints_keep_the_last(tmp_path, format):
    fabric, path = Fabric(accelerator="cpu", devices=1), tmp_path / "c"
    for step in range(3):
        fabric.save(path, {"step": step, "w": torch.full((300_000,), float(step))}, format=format)
    loaded = fabric.load(path)
    assert (loaded["step"], loaded["w"].sum().item()) == (2, 600_000.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
