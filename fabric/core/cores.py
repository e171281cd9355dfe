"""The number of CPU cores that this process may use, and its share of them. Imports no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores, at least 1: the affinity mask, limited by the cgroup's CPU quota (v2).

    A container with a quota of 1.5 cores on a large host counts 2.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cgroup_quota())))


def share_cores(local_world_size: int) -> None:
    """Set torch's threads to OMP_NUM_THREADS, else `max(1, usable cores // local ranks)`.

    A number that the user chose stays: one that differs from torch's default, which is all processors, all
    usable ones, or half of either (physical cores). Fabric's launchers set the variable to the same share.
    """
    if local_world_size <= 1:
        return
    import torch

    total, usable, variable = os.cpu_count() or 1, usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if torch.get_num_threads() in {total, total // 2, usable, usable // 2}:
        torch.set_num_threads(int(variable) if variable.isdigit() else max(1, usable // local_world_size))


def cgroup_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of this process in cores: the minimum over its cgroup and all parents; infinity:
    no quota.

    Source: "CPU Interface Files" in the kernel's cgroup-v2.rst.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    groups = [root / line[3:].strip("/") for line in lines if line.startswith("0::")]
    # Inside a container the path may be the host's and not exist; `parents` still contains the root.
    return min([_quota(each) for group in groups for each in (group, *group.parents)], default=math.inf)


def _quota(directory: Path) -> float:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
