"""Checks of software and of this machine that need no other rank. Torch is imported inside functions."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.cores import cgroup_quota
from fabric.tools.doctor.report import Reading, format_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import torch

GB, MB = 1e9, 1_000_000
WRITTEN_MB, WRITE_S = 32, 2.0
"""Most megabytes that each rank writes to `--dir`; seconds after which it stops."""
PREFIXES = ("CUDA_", "FI_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_NCCL_", "UCX_")
OF_ONE_RANK = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SLOW = "CUDA_LAUNCH_BLOCKING NCCL_IB_DISABLE NCCL_NET_GDR_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE"
"""Variables that make devices wait for each kernel, or communicate over a slower path."""


def software_rows() -> list[Reading]:
    """Return the checks of the versions of torch, CUDA and driver, and of variables that make a job slow."""
    import torch

    driver, newest = _driver()
    given = {name: os.environ.get(name, "0") for name in SLOW.split()}
    slow = [f"{name}={value}" for name, value in given.items() if value not in ("0", "")]
    fits, text = driver_fits(torch.version.cuda, driver, newest)
    rows = [Reading("driver", fits, text)]
    rows.append(Reading("slow variables", float(not slow), ", ".join(slow) or "none"))
    blind = bool(driver and fits and not torch.cuda.is_available())
    return [*rows, Reading("device seen", 0, f"driver {driver}, but torch sees no device")] if blind else rows


def driver_fits(cuda: str | None, driver: str, newest: str) -> tuple[float, str]:
    """Return 1 or 0, and a text, for the CUDA of torch, a driver ("": none) and the newest CUDA of it."""
    build = f"torch is built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if not driver:
        return 1.0, f"{build}; no NVIDIA driver"
    fits = cuda is not None and int(cuda.split(".")[0]) <= int(newest.split(".")[0])
    return float(fits), f"{build}; driver {driver} supports CUDA {newest}"


def versions() -> dict[str, str]:
    """Return the versions of this rank by name."""
    import torch

    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    found["fabric"] = sys.modules["fabric"].__version__
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        found["driver"] = _driver()[0]
    return found


def variables() -> dict[str, str]:
    """Return the variables that matter and must be equal on all ranks."""
    names = [name for name in os.environ if name.startswith(PREFIXES) and name not in OF_ONE_RANK]
    return {name: os.environ[name] for name in sorted(names)}


def machine_rows(device: torch.device, local_world_size: int) -> list[Reading]:
    """Return the checks of device, memory, load and limits of this process."""
    free, total = host_memory()
    text = f"{free / GB:.1f} of {total / GB:.1f} GB available"
    rows = [_device(device), Reading("memory", free / total, text)]
    count, load = os.cpu_count() or 1, os.getloadavg()[0]
    text = f"{load:.1f} processes ran in the last minute on {count} cores"
    rows.append(Reading("load", count - load + 0.2 * local_world_size, text))
    if Path("/dev/shm").is_dir():
        whole, _, shm = shutil.disk_usage("/dev/shm")
        rows.append(Reading("/dev/shm", shm / GB, f"{shm / MB:,.0f} of {whole / MB:,.0f} MB free"))
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    files, locked = [float("inf") if each < 0 else float(each) for each in limits]
    needed = any(Path("/sys/class/infiniband").glob("*"))
    text = f"{locked / MB:,.0f} MB{'' if needed else ', no InfiniBand that needs it'}"
    rows.append(Reading("locked memory", locked / GB if needed else float("inf"), text))
    return [*rows, Reading("open files", files, f"{files:g} for a process")]


def _device(device: torch.device) -> Reading:
    import torch

    if device.type != "cuda":
        return Reading("device", 1, str(device))
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    apps = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader").splitlines()
    who = [line.split(", ", 1)[1] for line in apps if uuid in line and f" {os.getpid()}," not in line]
    text = f"{free / GB:.1f} of {total / GB:.1f} GB free on {device}, {torch.cuda.get_device_name(device)}"
    return Reading("device", free / total, f"{text}; other processes: {'; '.join(who) or 'none seen'}")


def host_memory() -> tuple[float, float]:
    """Return the available and the whole memory of this host in bytes; (1, 1) without /proc."""
    with suppress(OSError, KeyError):
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        kb = {line[0]: float(line[1]) for line in lines}
        return kb["MemAvailable:"] * 1024, kb["MemTotal:"] * 1024
    return 1.0, 1.0


def cores_row(by_rank: Mapping[int, Any], nodes: Mapping[int, str]) -> Reading:
    """Return the check of cores per rank, on the machine with the fewest; pinned ranks may share cores."""
    machines: dict[str, list[int]] = {}
    for rank in by_rank:
        machines.setdefault(nodes.get(rank, ""), []).append(rank)
    rows = []
    for ranks in machines.values():
        cores = {core for rank in ranks for core in by_rank[rank]["cores"]}
        each = min(len(cores), by_rank[ranks[0]]["quota"]) / len(ranks)
        rows.append(Reading("cores", each, f"{each:.1f} for each of {format_ranks(ranks, nodes)}"))
    return min(rows, key=lambda row: row.value)


def cores() -> dict[str, Any]:
    """Return the cores on which this process may run, and the quota of its cgroup."""
    every = range(os.cpu_count() or 1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every
    return {"cores": sorted(allowed), "quota": min(cgroup_quota(), 1e9)}


def disk_rows(directory: Path, rank: int) -> tuple[list[Reading], float]:
    """Return the checks of `--dir`, and MB/s of write and fsync; 0: it cannot be written."""
    file, begin, count = directory / f".fabric-doctor-{os.getpid()}-{rank}", time.perf_counter(), 0
    try:
        free, block = shutil.disk_usage(directory).free, os.urandom(MB)
        with file.open("xb") as out:
            while count < WRITTEN_MB and time.perf_counter() - begin < WRITE_S:
                count += bool(out.write(block))
            out.flush()
            os.fsync(out.fileno())
        speed = count / (time.perf_counter() - begin)
    except OSError as error:
        return [Reading("--dir", 0, f"{directory} cannot be written ({error.strerror})")], 0.0
    finally:
        with suppress(OSError):
            file.unlink()
    space = Reading("free disk", free / GB, f"{free / GB:.1f} GB in {directory}")
    return [space, Reading("disk", speed, f"{speed:.0f} MB/s for write and fsync")], speed


def _driver() -> tuple[str, str]:
    """Return the version of the NVIDIA driver ("": none) and the newest CUDA that it supports."""
    found = re.search(r"Driver Version: *([\d.]+) +CUDA Version: *([\d.]+)", nvidia_smi())
    return (found[1], found[2]) if found else ("", "0")


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" where it is not installed or fails."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=8, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
