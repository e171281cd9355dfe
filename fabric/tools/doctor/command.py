"""`fabric doctor`: starts ranks, or is a rank of a launcher; rank zero prints the findings of all ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.cores import share_cores
from fabric.core.errors import ConfigurationError
from fabric.launch.commands import run_commands
from fabric.launch.rank_env import first_rank_env
from fabric.plugins.environments.detect import find_environment
from fabric.tools.doctor.report import FAIL, FORMAT, compare_days, counted, format_table, grade, read_baseline

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

LIMIT_S = 300.0
"""Seconds after which ranks that this command has started are killed."""


def doctor(options: argparse.Namespace, count_processes: Callable[[str, str], int]) -> int:
    """Run the checks and return the exit code: 1 if one is FAIL.

    Raises:
        ConfigurationError: An option is wrong.
    """
    if not options.timeout.isdigit() or not int(options.timeout):
        raise ConfigurationError(
            f"--timeout {options.timeout} must be a whole number of seconds, at least 1."
        )
    environment = find_environment().environment
    if not environment.creates_processes_externally:
        _read(options)
        if (count := count_processes(options.devices, options.accelerator)) > 1:
            return _start(options, count)
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":  # as our launchers set it
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # a failed connection would be a page of C++ frames
    from fabric.tools.doctor.job import LostError

    try:
        return _run(options, environment)
    except LostError as error:
        found: dict[str, Any] = {"ranks": environment.world_size(), "nodes": environment.num_nodes() or 1}
        found |= {"seconds": int(options.timeout), "findings": [grade(error.row)]}
        return _print(options, found, sys.stderr if environment.global_rank() else sys.stdout)


def _read(options: argparse.Namespace) -> dict[str, Any] | None:
    """Check the paths on the command line, and return the baseline."""
    if Path(options.dir).is_file():
        raise ConfigurationError(
            f"--dir {options.dir} is a file. Write the directory for checkpoints: --dir DIR."
        )
    return read_baseline(options.baseline) if options.baseline else None


def _start(options: argparse.Namespace, count: int) -> int:
    """Run this command as each of so many ranks of this machine."""
    first, listener = first_rank_env(count, 1, 0, "127.0.0.1", 0)
    names = [name for name in ("accelerator", "baseline", "dir", "timeout") if getattr(options, name)]
    given = [f"--{name}={getattr(options, name)}" for name in names] + ["--json"] * options.json
    argv = [sys.executable, "-m", "fabric", "doctor", *given]
    return run_commands(argv, first, listener, {}, "cli", limit=LIMIT_S)


def _run(options: argparse.Namespace, environment: ClusterEnvironment) -> int:
    """Run all phases on this rank; rank zero prints."""
    from fabric.tools.doctor.checks import run_checks
    from fabric.tools.doctor.job import DoctorJob
    from fabric.tools.doctor.measure import listen, route_to

    begin, rank, node = time.monotonic(), environment.global_rank(), environment.node_rank()
    baseline = _read(options) if rank == 0 else None
    share_cores(environment.local_world_size() or 1)
    address = environment.main_address if environment.world_size() > 1 else "127.0.0.1"
    host = f"node {node} ({os.environ.get('SLURMD_NODENAME') or socket.gethostname()})"
    about = {"host": host, "node": node, "local_rank": environment.local_rank(), "token": uuid.uuid4().hex}
    about["address"] = (route_to(address), listen(rank))
    job = DoctorJob(environment, about, float(options.timeout))
    report = run_checks(job, address, Path(options.dir).absolute(), options.accelerator)
    job.close()
    code = 0
    if rank == 0:
        nodes = len({each["host"] for each in job.ranks.values()})
        report |= {"ranks": job.world_size, "nodes": nodes, "date": time.strftime("%Y-%m-%d %H:%M")}
        report["seconds"] = round(time.monotonic() - begin, 1)
        report["findings"] += [] if baseline is None else compare_days(report, baseline)
        code = _print(options, report, sys.stdout)
    if job.hung:  # a thread is inside of a device, disk or network that does not answer
        sys.stdout.flush()
        os._exit(code)
    return code


def _print(options: argparse.Namespace, report: dict[str, Any], stream: Any) -> int:
    """Print the report and return the exit code."""
    findings = report["findings"]
    if options.json:
        named = {"format": FORMAT, **report, "findings": [each._asdict() for each in findings]}
        print(json.dumps(named), file=stream)
    else:
        size = f"{counted(report['ranks'], 'rank')} on {counted(report['nodes'], 'machine')}"
        print(format_table(f"fabric doctor: {size}, {report['seconds']:.0f} s", findings), file=stream)
    return int(any([finding.status == FAIL for finding in findings]))
