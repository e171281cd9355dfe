"""Saving and loading 400 MB, a model and its Adam, to plain write + fsync and to mmap; memory (Linux)."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import added, as_text, child, interleave, ratios, report, show, summarise, table, timing_table
from memory import MALLOC, MIB, peak, settled
from torch import nn

if TYPE_CHECKING:
    from harness import Samples, Table

WIDTH, DEPTH = 832, 48
"""48 equal layers and the two moments of Adam: 288 tensors, and as many numbers of steps; 399 MB."""
SAVES = ("raw torch.save", "fabric.save", "wait=False", "raw torch.load", "mmap limit", "fabric.load")
LIMIT, PLAIN = "write + fsync", "mmap limit"


class Bench:
    """A model with its optimizer, saved once, and the ways to save and load it again.

    Args:
        directory: On the disk that is measured.
    """

    def __init__(self, directory: str, width: int = WIDTH) -> None:
        from fabric import Fabric
        from fabric.plugins.io import TorchCheckpointIO

        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.unverified = Fabric(accelerator="cpu", devices=1, plugins=TorchCheckpointIO(verify=False))
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])
        self.adam = torch.optim.Adam(self.net.parameters())
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.adam.step()
        self.adam.zero_grad()
        model, optimizer = self.fabric.setup(self.net, self.adam)
        self.state = {"model": model, "optimizer": optimizer, "step": 1}
        again = self.unverified.setup(self.net, self.adam)
        self.again = {"model": again[0], "optimizer": again[1], "step": 1}
        self.saved, self.path = Path(directory, "saved.pt"), Path(directory, "written.pt")
        self.fabric.save(self.saved, self.state)
        self.pending: Any = None

    def settle(self) -> None:
        """Nothing is under way, and nothing waits for the disk."""
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        os.sync()

    def write(self, content: bytes) -> None:
        """The same bytes to the disk."""
        with self.path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())

    def raw_save(self, flush: bool) -> None:
        """As people do."""
        content = {"model": self.net.state_dict(), "optimizer": self.adam.state_dict(), "step": 1}
        with self.path.open("wb") as file:
            torch.save(content, file)
            if flush:
                file.flush()
                os.fsync(file.fileno())

    def save(self) -> None:
        """Durable and verified."""
        self.fabric.save(self.path, self.state)

    def begin(self) -> None:
        """What holds the loop."""
        self.pending = self.fabric.save(self.path, self.state, wait=False)

    def beside(self) -> None:
        """From the call to the file."""
        self.begin()
        self.pending.wait()

    def raw_load(self) -> None:
        """As people do."""
        content = torch.load(self.saved, weights_only=True)
        self.net.load_state_dict(content["model"])
        self.adam.load_state_dict(content["optimizer"])

    def mmap_limit(self) -> None:
        """Each byte from the mapped file to where it belongs, and nothing else."""
        content = torch.load(self.saved, weights_only=True, mmap=True)
        with torch.no_grad():
            for name, value in self.net.state_dict().items():
                value.copy_(content["model"][name])
            for number, parameter in enumerate(self.net.parameters()):
                for name, value in self.adam.state[parameter].items():
                    value.copy_(content["optimizer"]["state"][number][name])

    def load(self, verify: bool = True) -> None:
        """With or without reading the file to its end first."""
        if verify:
            self.fabric.load(self.saved, self.state)
        else:
            self.unverified.load(self.saved, self.again)


def times(rounds: int) -> dict[str, Samples]:
    """Samples of all ways to save, and of all ways to load."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("FABRIC_BENCH_DISK")) as directory:
        bench = Bench(directory)
        content = bench.saved.read_bytes()
        saves = {
            LIMIT: lambda: bench.write(content),
            "write + fsync again": lambda: bench.write(content),
            "raw torch.save": lambda: bench.raw_save(False),
            "raw torch.save + fsync": lambda: bench.raw_save(True),
            "fabric.save": bench.save,
            "wait=False, loop held": bench.begin,
            "wait=False, total": bench.beside,
        }
        loads = {
            PLAIN: bench.mmap_limit,
            "mmap limit again": bench.mmap_limit,
            "raw torch.load": bench.raw_load,
            "fabric.load, verify=False": lambda: bench.load(False),
            "fabric.load": bench.load,
        }
        return {
            "saves": interleave(saves, rounds, before=bench.settle),
            "loads": interleave(loads, rounds, before=bench.settle),
        }


def memory(name: str) -> dict[str, float]:
    """The most that one call takes over what was there: anonymous memory, and with mapped files, in MiB."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("FABRIC_BENCH_DISK")) as directory:
        calls = {
            "raw torch.save": lambda bench: bench.raw_save(True),
            "fabric.save": Bench.save,
            "wait=False": Bench.beside,
            "raw torch.load": Bench.raw_load,
            "mmap limit": Bench.mmap_limit,
            "fabric.load": Bench.load,
        }
        call = calls[name]
        small = Bench(directory, 16)
        call(small)  # all code is loaded
        bench = Bench(directory)
        whole, anonymous = settled(), status("RssAnon")
        seen = [anonymous]
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.001):
                seen.append(status("RssAnon"))

        sampler = threading.Thread(target=sample)
        sampler.start()
        most = peak(lambda: call(bench))
        over.set()
        sampler.join()
        return {"anonymous": (max(seen) - anonymous) / MIB, "whole": (most - whole) / MIB}


def status(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def shares(samples: Samples, of: str) -> dict[str, float]:
    """The median over rounds of `of`'s time over each case's in the same round."""
    pairs = {name: zip(samples[of], values, strict=True) for name, values in samples.items()}
    return {name: statistics.median([a / b for a, b in pair]) for name, pair in pairs.items()}


def save_table(samples: Samples) -> Table:
    """Saves, to the limit of the disk."""
    note = "One file of 399 MB in a directory of this disk. Before each sample `sync`, outside its time."
    item = timing_table("Saving", samples, LIMIT, 1, "s", note)
    share = shares(samples, LIMIT)
    item["head"].append("share of its speed")
    for row in item["rows"]:
        row.append(f"{share[row[0]]:.0%}")
    raw = f"raw + fsync {share['raw torch.save + fsync']:.0%}, without {share['raw torch.save']:.0%}"
    ours = {"ours": f"{share['fabric.save']:.0%} ({raw})"}
    summarise(item, "save, full, durable and verified, share of write + fsync", ours, "100 %", ">= 85 %")
    to_save = ratios(samples, "fabric.save")
    held, total = to_save["wait=False, loop held"], to_save["wait=False, total"]
    ours = {"ours": f"{held:.0%}; {total:.2f}"}
    summarise(item, "wait=False: loop held, of a save; total", ours, "0; 1", "<= 15 %; <= 1.2")
    return item


def load_table(samples: Samples) -> Table:
    """Loads, to the limit of a mapped file that is in memory already."""
    note = "Into a model and an Adam that has its moments; the file is in the page cache."
    item = timing_table("Loading", samples, PLAIN, 1, "s", note)
    ratio = ratios(samples, PLAIN)
    more = as_text(added(samples, "fabric.load, verify=False"), "{:+.2f} s")["fabric.load"]
    ours = f"{ratio['fabric.load, verify=False']:.2f} / {ratio['fabric.load']:.2f} ({more})"
    summarise(item, "load, to mmap limit, without / with verification", {"ours": ours}, "1", "<= 1.3 / shown")
    return item


def memory_table(found: dict[str, dict[str, float]]) -> Table:
    """Peaks of one call."""
    note = (
        "MiB over what was there before, of a model and an Adam of 399 MB. Anonymous: RssAnon of "
        "/proc/self/status, sampled every millisecond. Whole: VmHWM, with pages of mapped files, which the "
        "kernel takes back when it needs them."
    )
    rows = [[name, f"{sizes['anonymous']:.0f}", f"{sizes['whole']:.0f}"] for name, sizes in found.items()]
    item = table("Peaks of resident memory", ["case", "anonymous MiB", "whole MiB"], rows, note)
    for what, name in (("saving", "fabric.save"), ("loading", "fabric.load")):
        sizes = found[name]
        ours = f"+{sizes['anonymous']:.0f} MiB (with mapped pages +{sizes['whole']:.0f})"
        summarise(item, f"extra resident memory while {what}", {"ours": ours}, "0", "<= 20 MB")
    return item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.what:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        what, *rest = options.what
        report(times(options.rounds) if what == "times" else memory(*rest))
        return
    common = {"OMP_NUM_THREADS": "1"}
    samples = child([__file__, "times", f"--rounds={options.rounds}"], 1500, **common)
    found = {name: child([__file__, "memory", name], **common, **MALLOC) for name in SAVES}
    show([save_table(samples["saves"]), load_table(samples["loads"]), memory_table(found)])


if __name__ == "__main__":
    main()
