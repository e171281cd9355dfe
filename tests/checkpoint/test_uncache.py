"""A sharded save removes the files that it replaces from the page cache while the disk writes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint.atomic_write import uncache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")


def cached_pages(path):
    """Pages of a file in the page cache, and all its pages."""
    size = path.stat().st_size
    count = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        code = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), found)
        del first
    assert code == 0
    return sum(page & 1 for page in found), count


def test_a_flushed_file_leaves_the_cache_and_keeps_its_bytes(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(1 << 20)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    cached, pages = cached_pages(path)
    if cached < pages:
        pytest.skip("this file system does not cache what it writes")
    uncache(path)
    left, _ = cached_pages(path)
    if left == pages:
        pytest.skip("this file system keeps its pages, as tmpfs does")
    assert left < pages // 10
    assert path.read_bytes() == content


def test_a_missing_file_a_directory_and_a_fifo_without_a_writer_are_left_alone(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "fifo"):
        uncache(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["fifo"]


def test_a_save_over_a_checkpoint_uncaches_its_file_before_the_flush(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fabric.checkpoint.formats.sharded.dcp.uncache", seen.append)
    fabric, path = Fabric(accelerator="cpu", devices=1), tmp_path / "c"
    for step in range(2):
        fabric.save(path, {"step": step, "w": torch.full((3,), float(step))}, format="sharded")
    assert seen == [path / "__0_0.distcp"] * 2
    assert fabric.load(path)["step"] == 1
