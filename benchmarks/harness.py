"""The bench harness: named callables timed in turn, ratios taken round by round, one table per topic.

Every number is a comparison within one run: the machine may be busy, and a busy second hits all cases of
its round.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
MARK = "BENCH-RESULT "
"""Prefix of the one line of JSON by which a benchmark's child process reports."""

Samples = dict[str, list[float]]
Table = dict[str, Any]


def interleave(
    cases: dict[str, Callable[[], Any]],
    rounds: int,
    inner: int = 1,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], Any] | None = None,
) -> Samples:
    """Seconds per call of each case, one sample a round, in an order drawn for each round.

    Args:
        cases: What to time, by name.
        rounds: Samples per case.
        inner: Calls per sample.
        warmup: Rounds before the first sample.
        clock: `time.thread_time` leaves out the time in which other processes held the core.
        before: Called before each sample, outside its time (a barrier that aligns the ranks).
    """
    # Seeded: all ranks take the same turns. Random: a case is timed after each of the others equally often.
    names, order = list(cases), random.Random(0)
    samples: Samples = {name: [] for name in names}
    for number in range(-warmup, rounds):
        order.shuffle(names)
        for name in names:
            call = cases[name]
            if before is not None:
                before()
            begin = clock()
            for _ in range(inner):
                call()
            seconds = (clock() - begin) / inner
            if number >= 0:
                samples[name].append(seconds)
    return samples


def ratios(samples: Samples, to: str) -> dict[str, float]:
    """The median over rounds of each case's time over `to`'s time in the same round."""
    base = samples[to]
    return {
        name: statistics.median([a / b for a, b in zip(times, base, strict=True)])
        for name, times in samples.items()
    }


def added(samples: Samples, to: str) -> dict[str, float]:
    """The median over rounds of each case's time minus `to`'s time in the same round, in seconds."""
    base = samples[to]
    return {
        name: statistics.median([a - b for a, b in zip(times, base, strict=True)])
        for name, times in samples.items()
    }


def spread(times: list[float], unit: float) -> list[str]:
    """Minimum, median and maximum in multiples of `unit` seconds."""
    return [f"{value / unit:.4g}" for value in (min(times), statistics.median(times), max(times))]


def table(title: str, head: list[str], rows: list[list[str]], note: str = "") -> Table:
    """One table of a result file."""
    return {"title": title, "head": head, "rows": rows, "note": note}


def timing_table(title: str, samples: Samples, to: str, unit: float, unit_name: str, note: str = "") -> Table:
    """Min, median and max of each case, what it adds to the case `to`, and the ratio to it."""
    ratio, more = ratios(samples, to), added(samples, to)
    rows = [
        [name, *spread(times, unit), f"{more[name] / unit:+.4g}", f"{ratio[name]:.3f}"]
        for name, times in samples.items()
    ]
    head = ["case", f"min {unit_name}", "median", "max", f"added {unit_name}", f"ratio to {to}"]
    return table(title, head, rows, note)


def summarise(item: Table, what: str, values: dict[str, str], limit: str, target: str) -> None:
    """Add a line for the summary: `values` by case name ("ours", "Lightning Fabric", "Accelerate")."""
    cells = [values.get(name, "-") for name in ("Lightning Fabric", "Accelerate")]
    item.setdefault("summary", []).append([what, *cells, limit, f"**{values['ours']}**", target])


def as_text(values: dict[str, float], pattern: str, scale: float = 1.0) -> dict[str, str]:
    """Each number in a format such as "+{:.1f} us"."""
    return {name: pattern.format(value * scale) for name, value in values.items()}


def markdown(tables: list[Table]) -> str:
    """The tables as markdown."""
    parts = []
    for item in tables:
        lines = [
            "| " + " | ".join(item["head"]) + " |",
            "|" + "|".join(["---"] * len(item["head"])) + "|",
            *["| " + " | ".join(row) + " |" for row in item["rows"]],
        ]
        note = [item["note"], ""] if item["note"] else []
        parts.append("\n".join([f"## {item['title']}", "", *note, *lines, ""]))
    return "\n".join(parts)


def header() -> list[str]:
    """Machine, versions and commit, one fact a line."""
    versions = [f"{name} {version(name)}" for name in ("torch", "lightning", "accelerate", "torch-fabric")]
    return [
        f"- machine: {cpu_name()}, {len(os.sched_getaffinity(0))} usable cores, {platform.system()} "
        f"{platform.release()}{gpu_name()}",
        f"- Python {platform.python_version()}, {', '.join(versions)}",
        f"- commit: {commit()}",
        f"- load average at the start: {os.getloadavg()[0]:.2f} (shared machine: read ratios, not seconds)",
    ]


def version(distribution: str) -> str:
    """The installed version, or "absent"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def cpu_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_name() -> str:
    """The first CUDA device as a suffix of the machine line; empty without one."""
    import torch

    return f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""


def commit() -> str:
    """The short commit, with "+" where the tree has changes of its own."""

    def git(*arguments: str) -> str:
        if shutil.which("git") is None:
            return ""
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--short", "-uno") else ""
    )


def installed(distribution: str) -> bool:
    """Whether an anchor of the comparison is there."""
    return version(distribution) != "absent"


def report(result: Any) -> None:
    """Hand `result` from a child process to the parent that waits in `child` or `ranks`."""
    print(MARK + json.dumps(result), flush=True)


def on_a_rank(measure: Callable[[], Any]) -> None:
    """Measure in a group of one-threaded ranks, and let rank zero report; all ranks call this."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(result)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a child: bytecode cached as in an installed package, no leftover rank variables."""
    env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / f"fabric-bench-pyc-{os.getuid()}")
    return {**env, **variables}


_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def child(arguments: list[str], timeout: float = 600, python: str = sys.executable, **variables: str) -> Any:
    """Run this interpreter, or another one, with `arguments` and return what it reported."""
    done = subprocess.run(
        [python, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return _reported(done.stdout, done.stderr, done.returncode)


def ranks(
    arguments: list[str],
    world_size: int = 2,
    timeout: float = 900,
    python: str = sys.executable,
    **variables: str,
) -> Any:
    """Run `arguments` once per rank, torchrun's variables set, and return what rank zero reported."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    place |= {"LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "bench", "GROUP_RANK": "0"}
    others = [
        subprocess.Popen(
            [python, *arguments],
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), **variables),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, world_size)
    ]
    try:
        return child(arguments, timeout, python, **place, RANK="0", LOCAL_RANK="0", **variables)
    finally:
        for other in others:
            try:
                other.wait(60)
            except subprocess.TimeoutExpired:
                other.kill()


def free_port() -> int:
    """A port that the kernel says is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _reported(out: str, err: str, code: int) -> Any:
    for line in out.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    raise RuntimeError(f"the benchmark's process ended with {code} and no result:\n{out}\n{err}")


def tree_cost(command: list[str], timeout: float = 120, **variables: str) -> tuple[float, float]:
    """CPU seconds (user + system) and wall seconds of a command and of every process that it leaves behind.

    Linux: this process becomes the reaper of orphans, so that a fork server's time is counted too.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        wall = time.perf_counter() - begin
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        if code:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def turns(rounds: int, label: str) -> Iterator[int]:
    """Round numbers with a line of progress on standard error, where that is a terminal."""
    for number in range(rounds):
        if sys.stderr.isatty():
            print(
                f"\r{label}: {number + 1}/{rounds}", end="\n" if number + 1 == rounds else "", file=sys.stderr
            )
        yield number


def show(tables: list[Table]) -> None:
    """Print a benchmark's tables, and hand them to `run_all` where that started this process."""
    print(markdown(tables))
    if os.environ.get("FABRIC_BENCH_CHILD"):
        report(tables)


def show_and_write(tables: list[Table], out: Path | None) -> None:
    """Print tables, and write them to a file with date and machine, if one is given."""
    show(tables)
    if out:
        first = [f"# Benchmarks of {datetime.date.today().isoformat()}", "", *header(), "", ""]
        out.write_text("\n".join(first) + markdown(tables), encoding="utf-8")
