"""From a rank's death to the last process gone, from a hang to its table, the watchdog's cost. Linux only."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import HERE, Samples, Table, environment, installed, ranks, report, show, summarise, table, turns

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = str(HERE / "launched" / "failing.py")
LONGEST = 30.0
WAYS = (
    "kill, others sleep",
    "kill, others in collective",
    "raise, others sleep",
    "raise, others in collective",
)
REPORT_AFTER = 3.0


def main(rounds: int = 5) -> None:
    show([deaths(rounds), hangs(rounds), watchdog()])


def deaths(rounds: int) -> Table:
    """How long processes outlive the first of them."""
    engines = all_engines()
    samples: Samples = {f"{engine}: {way}": [] for way in WAYS for engine in engines}
    for _ in turns(rounds, "deaths"):
        for way in WAYS:
            for engine, command in engines.items():
                samples[f"{engine}: {way}"].append(
                    until_gone(command(way.replace(", others", "").replace(" ", "-")))
                )
    rows = [[name, *cells(times)] for name, times in samples.items()]
    done = table(
        "Seconds from a rank's death to the last process gone (2 ranks)",
        ["case", "min s", "median", "max"],
        rows,
        f"The others would sleep for 20 s. More than {LONGEST:g} s is shown as such.",
    )
    worst = {
        engine: max([statistics.median(samples[f"{engine}: {way}"]) for way in WAYS]) for engine in engines
    }
    ours = ", ".join([f"{name.removeprefix('ours, ')} {worst[name]:.2f}" for name in worst if "ours" in name])
    values = {
        "ours": ours,
        **{name: f"{seconds:.1f} s" for name, seconds in worst.items() if "ours" not in name},
    }
    limit = f"torchrun {worst['torchrun']:.1f}"
    summarise(
        done, "from a rank's death to the last process gone, worst of four ways, s", values, limit, "<= 2"
    )
    return done


def all_engines() -> dict[str, Callable[[str], list[str]]]:
    """The command line of each engine, for a way to fail."""
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    engines: dict[str, Callable[[str], list[str]]] = {
        "ours, script": lambda way: [python, SCRIPT, "ours", way],
        "ours, fabric run": lambda way: [python, "-m", "fabric", "run", "--devices=2", SCRIPT, "ours", way],
        "ours, spawn": lambda way: [python, SCRIPT, "ours", way, "ddp_spawn"],
        "ours, fork": lambda way: [python, SCRIPT, "ours", way, "ddp_fork"],
        "torchrun": lambda way: [*torchrun, "torch", way],
    }
    if installed("lightning"):
        engines["Lightning Fabric"] = lambda way: [python, SCRIPT, "lightning", way]
    if installed("accelerate"):
        engines["Accelerate"] = lambda way: [*torchrun, "accelerate", way]
    return engines


def until_gone(command: list[str]) -> float:
    """Seconds from the moment that rank 1 prints to the end of the last process."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env=environment(OMP_NUM_THREADS="1", BENCH_MARK=mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        at = moment(process)
        while marked(mark) and time.monotonic() < at + LONGEST:
            process.poll()
            time.sleep(0.01)
        return time.monotonic() - at
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def moment(process: subprocess.Popen[str]) -> float:
    """The time that rank 1 printed."""
    for line in process.stdout or ():
        if "AT " in line:
            return float(line.rpartition("AT ")[2])
    raise RuntimeError(f"{process.args} ended without a word")


def marked(mark: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def hangs(rounds: int) -> Table:
    """How long after FABRIC_HANG_REPORT_AFTER the table comes."""
    late = []
    for _ in turns(rounds, "hangs"):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, "ours", "late"],
            env=environment(OMP_NUM_THREADS="1", FABRIC_HANG_REPORT_AFTER=f"{REPORT_AFTER:g}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        at = moment(process)
        for line in process.stderr or ():
            if "Where the ranks are" in line:
                late.append(time.monotonic() - at - REPORT_AFTER)
                break
        process.terminate()
        process.communicate()
    row = ["rank 1 sleeps, rank 0 in a barrier", *cells(late)]
    title = f"Seconds from a hang to the table, after the {REPORT_AFTER:g} s of FABRIC_HANG_REPORT_AFTER"
    done = table(title, ["case", "min s", "median", "max"], [row])
    summarise(done, "from a hang to the table, s after report_after", {"ours": row[2]}, "", "<= 2")
    return done


def watchdog() -> Table:
    """What the watchdog's thread uses while ranks work."""
    used = ranks([str(HERE / "failure.py"), "watched"], FABRIC_HANG_REPORT_AFTER="60")
    head = [
        "looks share of a core",
        "us per second",
        "us per step of 1 ms",
        "steps in the run",
        "us per step of it",
    ]
    share = used["cpu"] / used["wall"]
    row = [f"{share:.6f}", f"{share * 1e6:.0f}", f"{share * 1e3:.2f}", str(used["steps"])]
    done = table(
        "CPU time of the watchdog's thread, 2 ranks",
        head,
        [[*row, f"{used['cpu'] / used['steps'] * 1e6:.2f}"]],
    )
    summarise(done, "watchdog, CPU per step of 1 ms", {"ours": f"{share * 1e3:.2f} us"}, "0", "<= 0.5 us")
    return done


def watched(seconds: float = 15.0) -> None:
    """A rank that works; reports what the watchdog's thread has used."""
    import torch

    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(256, 256))
    x = torch.randn(64, 256)
    begin, cpu, steps = time.monotonic(), thread_cpu(), 0
    while fabric.broadcast(time.monotonic() - begin < seconds):
        fabric.backward(model(x).square().mean())
        steps += 1
    used: dict[str, Any] = {"cpu": thread_cpu() - cpu, "wall": time.monotonic() - begin, "steps": steps}
    if fabric.is_global_zero:
        report(used)


def thread_cpu() -> float:
    """CPU seconds of the watchdog's thread so far."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "fabric-watchdog"]
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def cells(times: list[float]) -> list[str]:
    """Minimum, median and maximum."""
    return [
        f"> {LONGEST:g}" if value >= LONGEST else f"{value:.2f}"
        for value in (min(times), statistics.median(times), max(times))
    ]


if __name__ == "__main__":
    watched() if sys.argv[1:] == ["watched"] else main()
