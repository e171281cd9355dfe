import os
from math import inf

import pytest

from fabric.core.cores import cgroup_quota, usable_cores


@pytest.fixture
def cgroups(tmp_path):
    """A function that lays out a cgroup tree and gives its quota."""

    def quota(membership, files):
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return cgroup_quota(tmp_path / "membership", tmp_path / "root")

    return quota


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/job/step\n", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3.0),
        ("0::/job/step\n", {"job/cpu.max": "100000 100000", "job/step/cpu.max": "400000 100000"}, 1.0),
        # the host's path, seen from inside a container: only the root is mounted
        ("0::/docker/abc\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/../other\n", {"cpu.max": "250000 100000"}, 2.5),
        ("4:cpu:/\n", {"cpu.max": "50000 100000"}, inf),  # of version 1
        ("0::/\n", {"cpu.max": "garbage"}, inf),
        ("", {}, inf),
    ],
)
def test_quota(cgroups, membership, files, expected):
    assert cgroups(membership, files) == expected


def test_no_cgroups_at_all(tmp_path):
    assert cgroup_quota(tmp_path / "nothing", tmp_path) == inf


@pytest.mark.parametrize(("quota", "cores"), [(inf, 8), (1.5, 2), (0.1, 1), (7.0, 7), (64.0, 8)])
def test_quota_is_rounded_up_and_never_adds_cores(monkeypatch, quota, cores):
    monkeypatch.setattr("fabric.core.cores.cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == cores


def test_affinity_of_the_real_process_counts():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
