"""How much host memory a copy may take."""

from __future__ import annotations

import math

import pytest

from fabric.plugins.io.snapshot import free_memory, room_for

MEMORY = "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Total:  0\n"
STAT = "anon 5\ninactive_file 300\nactive_file 200\nfile_dirty 7\n"


@pytest.mark.parametrize(
    ("limit", "free"),
    [("9000\n", 9000 - 8000 + 500), ("max\n", 1000 * 1024), (f"{1 << 40}\n", 1000 * 1024)],
)
def test_the_machine_and_its_container_count(tmp_path, limit, free):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMORY)
    assert free_memory(tmp_path) == 1000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"memory.max": limit, "memory.current": "8000\n", "memory.stat": STAT}.items():
        (group / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_a_system_that_does_not_say_has_room(tmp_path):
    assert free_memory(tmp_path) == math.inf


def test_this_machine_has_room_for_a_little_and_not_for_all():
    assert room_for(1)
    if free_memory() < math.inf:
        with pytest.warns(UserWarning, match=r"holds the loop .* 10000000\.0 GB .* are free"):
            assert not room_for(10**16)
