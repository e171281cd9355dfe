"""How many CPU cores this process may really use, and its share of them. Imports no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def usable_cores() -> int:
    """The number of cores, at least 1: the affinity mask, cut by the CPU quota of the cgroup (v1 or v2).

    A container with a quota of 1.5 cores on a large host counts 2.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def share_cores(local_world_size: int) -> None:
    """Set torch's threads to `max(1, usable cores // local ranks)`, unless the user chose a number.

    OMP_NUM_THREADS is a choice (our own launchers set it to the same share), and so is a count other than
    torch's default: all processors, all usable ones, or half of either (physical cores).
    """
    if local_world_size <= 1 or "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    every, usable = os.cpu_count() or 1, usable_cores()
    if torch.get_num_threads() in {every, every // 2, usable, usable // 2}:
        torch.set_num_threads(max(1, usable // local_world_size))


def cgroup_quota(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """The CPU quota of this process in cores: the least over its cgroup and all above; None: no quota.

    Source: "CPU Interface Files" in the kernel's cgroup-v2.rst, and sched-bwc.rst for v1.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            quotas += _quotas_upwards(root, group, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                quotas += _quotas_upwards(root / mount, group, _quota_v1)
    return min(quotas, default=None)


def _quotas_upwards(root: Path, group: str, read: Callable[[Path], float | None]) -> list[float]:
    # Inside a container the path may be the host's and not exist here; the walk still ends at the root.
    found = []
    directory = root / group.strip("/")
    while True:
        quota = read(directory)
        if quota is not None:
            found.append(quota)
        if directory == root or root not in directory.parents:
            return found
        directory = directory.parent


def _quota_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
