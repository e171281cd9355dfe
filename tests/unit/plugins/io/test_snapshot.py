"""How much host memory a copy may take."""

from __future__ import annotations

import math

import pytest

from fabric.plugins.io.snapshot import free_memory, room_for

MEMORY = "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Total:  0\n"
STAT = "anon 5\ninactive_file 300\nactive_file 200\nfile_dirty 7\n"


@pytest.mark.parametrize(
    ("group", "limit", "used", "free"),
    [
        ("sys/fs/cgroup", ("memory.max", "9000\n"), "memory.current", 9000 - 8000 + 500),
        ("sys/fs/cgroup", ("memory.max", "max\n"), "memory.current", 1000 * 1024),
        ("sys/fs/cgroup", ("memory.max", f"{1 << 40}\n"), "memory.current", 1000 * 1024),
        ("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "9000\n"), "memory.usage_in_bytes", 1500),
    ],
)
def test_the_machine_and_its_container_count(tmp_path, group, limit, used, free):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMORY)
    assert free_memory(tmp_path) == 1000 * 1024
    (tmp_path / group).mkdir(parents=True)
    for name, text in (limit, (used, "8000\n"), ("memory.stat", STAT)):
        (tmp_path / group / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_a_system_that_does_not_say_has_room(tmp_path):
    assert free_memory(tmp_path) == math.inf


def test_this_machine_has_room_for_a_little_and_not_for_all():
    assert room_for(1)
    if free_memory() < math.inf:
        with pytest.warns(UserWarning, match=r"holds the loop .* 10000000\.0 GB .* are free"):
            assert not room_for(10**16)
