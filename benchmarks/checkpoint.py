"""Saving and loading 400 MB, a model and its Adam, to plain write + fsync and to mmap; memory (Linux)."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import (
    added,
    as_text,
    child,
    interleave,
    on_a_rank,
    ranks,
    ratios,
    report,
    show,
    summarise,
    table,
    timing_table,
)
from memory import MALLOC, MIB, peak, settled
from torch import nn

from fabric.checkpoint.freed_files import wait_until_freed

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Samples, Table

WIDTH, DEPTH = 832, 48
"""48 equal layers and the two moments of Adam: 288 tensors, and as many numbers of steps; 399 MB."""
SAVES = ("raw torch.save", "fabric.save", "wait=False", "raw torch.load", "mmap limit", "fabric.load")
LIMIT, PLAIN = "write + fsync", "mmap limit"
EACH = "each rank writes + fsync"
ANEW = "with crc32, over another file"
PARTS = ("full", "sharded", "sharded, wait=False", "load full", "load sharded")


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
        wait_until_freed()
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


class Parts:
    """The same model and Adam, split over the ranks by zero3, and the ways to save and load them.

    Args:
        directory: On the disk that is measured; of all ranks.
    """

    def __init__(self, directory: str, width: int = WIDTH) -> None:
        from fabric import Fabric

        self.fabric = fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zero3")
        fabric.launch()
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])
        model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
        fabric.backward(model(torch.ones(1, width)).sum())
        optimizer.step()
        optimizer.zero_grad()
        self.state = {"model": model, "optimizer": optimizer, "step": 1}
        self.net, self.adam = net, optimizer.optimizer
        self.at = {name: Path(directory, f"{width}-{name}") for name in ("full", "sharded", "dcp")}
        self.saved = {name: Path(directory, f"{width}-{name}-saved") for name in ("full", "sharded")}
        for name, path in self.saved.items():
            fabric.save(path, self.state, format=name)
        self.raw_save()
        tensors = [*self.net.parameters(), *[v for s in self.adam.state.values() for v in s.values()]]
        parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        self.content = bytes(sum([part.nbytes for part in parts]))
        self.own = Path(directory, f"{width}-rank-{fabric.global_rank}")
        self.pending: Any = None

    def settle(self) -> None:
        """Nothing is under way on any rank, and nothing waits for the disk."""
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        wait_until_freed()
        dist.barrier()
        os.sync()
        dist.barrier()

    def write(self) -> None:
        """The bytes of each rank's part to the disk, at the same time."""
        with self.own.open("wb", buffering=0) as file:
            file.write(self.content)
            os.fsync(file.fileno())
        dist.barrier()

    def write_anew(self) -> None:
        """The least that a verified checkpoint needs: a digest, and a new file that replaces the old."""
        new = self.own.with_suffix(".new")
        with new.open("wb", buffering=0) as file:
            crc = 0
            for start in range(0, len(self.content), MIB):
                piece = memoryview(self.content)[start : start + MIB]
                crc = zlib.crc32(piece, crc)
                file.write(piece)
            os.fsync(file.fileno())
        new.replace(self.own)
        dist.barrier()

    def raw_state(self) -> dict[str, Any]:
        """Of torch's own: the parts under names."""
        moments = [self.adam.state[p] for p in self.net.parameters()]
        return {"model": self.net.state_dict(), "adam": {str(n): dict(m) for n, m in enumerate(moments)}}

    def raw_save(self) -> None:
        """torch.distributed.checkpoint as people call it; it flushes its files."""
        dcp.save(self.raw_state(), checkpoint_id=self.at["dcp"])

    def raw_load(self) -> None:
        """And back, in place."""
        dcp.load(self.raw_state(), checkpoint_id=self.at["dcp"])

    def save(self, name: str) -> None:
        """Durable and verified."""
        self.fabric.save(self.at[name], self.state, format=name)

    def begin(self) -> None:
        """What holds the loop."""
        self.pending = self.fabric.save(self.at["sharded"], self.state, format="sharded", wait=False)

    def beside(self) -> None:
        """From the call to the directory."""
        self.begin()
        self.pending.wait()

    def load(self, name: str) -> None:
        """Checked, each rank its part."""
        self.fabric.load(self.saved[name], self.state)


def times_of_parts(directory: str, rounds: int) -> dict[str, Samples]:
    """Samples on rank zero of all ways to save and load what is split."""
    bench = Parts(directory)
    saves = {
        EACH: bench.write,
        f"{EACH} again": bench.write,
        ANEW: bench.write_anew,
        "raw dcp.save": bench.raw_save,
        "fabric.save, sharded": lambda: bench.save("sharded"),
        "fabric.save, full": lambda: bench.save("full"),
        "wait=False, loop held": bench.begin,
        "wait=False, total": bench.beside,
    }
    loads = {
        "raw dcp.load": bench.raw_load,
        "fabric.load, sharded": lambda: bench.load("sharded"),
        "fabric.load, full": lambda: bench.load("full"),
    }
    return {
        "saves": interleave(saves, rounds, before=bench.settle),
        "loads": interleave(loads, rounds, before=bench.settle),
    }


def memory_of_parts(directory: str, name: str) -> dict[str, float]:
    """As `memory`, the most of all ranks."""
    calls = {
        "full": lambda bench: bench.save("full"),
        "sharded": lambda bench: bench.save("sharded"),
        "sharded, wait=False": Parts.beside,
        "load full": lambda bench: bench.load("full"),
        "load sharded": lambda bench: bench.load("sharded"),
    }
    calls[name](Parts(directory, 16))
    bench = Parts(directory)
    most = torch.tensor([*most_of(lambda: calls[name](bench)).values()])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"anonymous": most[0].item(), "whole": most[1].item()}


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
        return most_of(lambda: call(bench))


def most_of(call: Callable[[], None]) -> dict[str, float]:
    """The most that a call takes over what was there before, in MiB."""
    whole, anonymous = settled(), status("RssAnon")
    seen = [anonymous]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.001):
            seen.append(status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    most = peak(call)
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


def parts_tables(samples: dict[str, Samples], found: dict[str, dict[str, float]], count: int) -> list[Table]:
    """What zero3 has split over the ranks."""
    note = f"zero3 on {count} ranks, 399 MB in all. Times of rank zero, to the end on all ranks."
    item = timing_table("Saving what is split", samples["saves"], EACH, 1, "s", note)
    share = shares(samples["saves"], EACH)
    ours = f"sharded {share['fabric.save, sharded']:.0%} (raw dcp.save {share['raw dcp.save']:.0%}); "
    ours += f"full {share['fabric.save, full']:.0%}"
    limit = f"100 % (again: {share[f'{EACH} again']:.0%}; with crc32 over another file: {share[ANEW]:.0%})"
    summarise(item, "save, zero3 on 2 ranks, share of write + fsync", {"ours": ours}, limit, ">= 80 %")
    to_save = ratios(samples["saves"], "fabric.save, sharded")
    ours = f"{to_save['wait=False, loop held']:.0%}; {to_save['wait=False, total']:.2f}"
    summarise(item, "sharded, wait=False: loop held, of a save; total", {"ours": ours}, "0; 1", "-")
    loads = timing_table("Loading what is split", samples["loads"], "raw dcp.load", 1, "s", note)
    rows = [[name, f"{sizes['anonymous']:.0f}", f"{sizes['whole']:.0f}"] for name, sizes in found.items()]
    head = ["case", "anonymous MiB", "whole MiB"]
    peaks = table(
        f"Peaks of a rank, zero3 on {count} ranks",
        head,
        rows,
        f"The most of all ranks; a part is {380 // count} MiB.",
    )
    ours = f"+{found['sharded']['anonymous']:.0f} MiB; loading +{found['load sharded']['anonymous']:.0f}"
    summarise(peaks, "extra resident memory of sharded, zero3", {"ours": ours}, "0", "<= 20 MB")
    return [item, loads, peaks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2, help="of saves of what is split; not 2: only these")
    options = parser.parse_args()
    if options.what:
        measure(options.rounds, *options.what)
        return
    common = {"OMP_NUM_THREADS": "1"}
    rounds = f"--rounds={options.rounds}"
    count, tables = options.ranks, []
    if count == 2:
        samples = child([__file__, "times", rounds], 1500, **common)
        found = {name: child([__file__, "memory", name], **common, **MALLOC) for name in SAVES}
        tables = [save_table(samples["saves"]), load_table(samples["loads"]), memory_table(found)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("FABRIC_BENCH_DISK")) as directory:
        split = ranks([__file__, "times_of_parts", directory, rounds], count, timeout=1500, **common)
        found = {
            name: ranks([__file__, "memory_of_parts", directory, name], count, **common, **MALLOC)
            for name in PARTS
        }
    show([*tables, *parts_tables(split, found, count)])


def measure(rounds: int, what: str, *rest: str) -> None:
    """In a child process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if what == "times_of_parts":
        on_a_rank(lambda: times_of_parts(*rest, rounds))
    elif what == "memory_of_parts":
        on_a_rank(lambda: memory_of_parts(*rest))
    else:
        report(times(rounds) if what == "times" else memory(*rest))


if __name__ == "__main__":
    main()
