"""What a set-up loader adds to a DataLoader: batches, uneven ends, iterable datasets, going on mid-epoch."""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from harness import (
    added,
    as_text,
    child,
    installed,
    interleave,
    ranks,
    ratios,
    report,
    show,
    summarise,
    table,
    timing_table,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness import Samples, Table

SAMPLES, BATCH = 2048, 8
"""Of the comparison between engines."""
SMALL = 32
"""Samples in a batch of the comparisons with raw torch alone."""
MANY = 10_000_000
"""Samples of the data in which a run goes on near the end."""


def main() -> None:
    found = []
    for topic in TOPICS:
        start = ranks if topic in ("uneven", "shares") else child
        found += start([__file__, topic], OMP_NUM_THREADS="1")
    show(found)


def engines() -> list[Table]:
    """Nested dictionaries, through each engine's loader."""
    data = nested(SAMPLES)

    def fresh() -> Any:
        return DataLoader(data, batch_size=BATCH, shuffle=True)

    loaders = {"raw": fresh(), "raw again": fresh(), "ours": ours(fresh())}
    if installed("lightning"):
        loaders["Lightning Fabric"] = lightning(fresh())
    if installed("accelerate"):
        loaders["Accelerate"] = accelerate(fresh())
    cases = {name: epoch_of(loader) for name, loader in loaders.items()}
    samples = interleave(cases, 60, clock=time.thread_time)
    title = f"An epoch of {SAMPLES // BATCH} nested dictionary batches, target <= 1.05"
    first = interleave({n: first_of(loader) for n, loader in loaders.items()}, 200, clock=time.thread_time)
    note = "What an epoch costs whatever its length (ours draws a sample order equal on all ranks)."
    epochs = timing_table(title, samples, "raw", 1e-3, "ms")
    values = as_text(ratios(samples, "raw"), "{:.2f}")
    summarise(
        epochs, "loader, nested dict batches, vs raw", values, values["raw again"] + " (raw again)", "<= 1.05"
    )
    return [epochs, timing_table("The first batch of an epoch", first, "raw", 1e-6, "us", note)]


def small() -> list[Table]:
    """What one batch costs more: the position and the wait are noted for each."""
    found = []
    data: dict[str, tuple[Any, bool]] = {
        "(row, label) of a TensorDataset": (tensors(2048), False),
        "(row, label) of a TensorDataset, shuffled": (tensors(2048), True),
        "nested dictionaries": (nested(2048), False),
        "numbers of range(2048), nothing to read": (range(2048), False),
    }
    for what, (dataset, shuffle) in data.items():
        names: Any = ("raw", "raw again", "ours")
        loaders = {name: DataLoader(dataset, batch_size=SMALL, shuffle=shuffle) for name in names}
        loaders["ours"] = ours(loaders["ours"])
        cases = {name: epoch_of(loader) for name, loader in loaders.items()}
        samples = per_batch(interleave(cases, 120, clock=time.thread_time), len(dataset) // SMALL)
        item = timing_table(f"A batch of {SMALL} {what}", samples, "raw", 1e-6, "us a batch")
        compare(item, f"a batch of {SMALL} {what}, vs raw", samples, "<= 1.05")
        found.append(item)
    return found


def uneven() -> list[Table]:
    """Data that do not divide: `uneven="exact"` and "pad" against torch's DistributedSampler. All ranks."""
    fabric, found = two_ranks(), []
    rows = tensors(2047)
    for shuffle in (False, True):

        def raw(shuffle: bool = shuffle) -> Any:
            sampler: Any = DistributedSampler(rows, 2, fabric.global_rank, shuffle=shuffle)
            return DataLoader(rows, batch_size=SMALL, sampler=sampler)

        loaders = {"raw": raw(), "raw again": raw()}
        for policy in ("pad", "exact", "drop"):
            loader: Any = DataLoader(rows, batch_size=SMALL, shuffle=shuffle)
            loaders[policy] = fabric.setup_dataloaders(loader, uneven=policy)
        own = fabric.setup_dataloaders(raw(), use_distributed_sampler=False)
        loaders["ours, the sampler's own shares"] = own
        cases = {name: epoch_of(loader) for name, loader in loaders.items()}
        samples = per_batch(interleave(cases, 80, clock=time.thread_time), 32)
        order = "shuffled" if shuffle else "in order"
        title = f"2,047 samples on 2 ranks, {order}, batches of {SMALL}, by what happens to the last one"
        note = "Raw is a DataLoader with a DistributedSampler, which pads; the time is rank zero's own."
        found.append(timing_table(title, samples, "raw", 1e-6, "us a batch", note))
        compare(found[-1], f'uneven="exact", 2 ranks, {order}, vs raw', samples, "<= 1.05", "exact")
    return found


def iterables() -> list[Table]:
    """Iterable datasets on one rank, in this process and with 2 workers."""
    found = []
    for workers, cost, count in ((0, 0, 2048), (0, 20, 1024), (2, 0, 16384), (2, 20, 8192)):

        def fresh(dataset: Any, workers: int = workers) -> Any:
            return DataLoader(dataset, batch_size=SMALL, num_workers=workers)

        fabric = one_rank()
        loaders = {
            "raw": fresh(Parts(count, cost)),
            "raw again": fresh(Parts(count, cost)),
            "ours, dealt out": fabric.setup_dataloaders(fresh(Rows(count, cost))),
            "ours, dealt out, with state_dict()": fabric.setup_dataloaders(fresh(Placed(count, cost))),
            "ours, shard_iterable=False": fabric.setup_dataloaders(
                fresh(Parts(count, cost)), shard_iterable=False
            ),
        }
        cases = {name: epoch_of(loader) for name, loader in loaders.items()}
        title = f"{count:,} samples of an iterable dataset, {workers} workers, " + (
            "rows of a tensor" if cost == 0 else f"{cost} small operations each"
        )
        note = "CPU of loop and workers, their start included. Dealt out: each worker reads all samples."
        clock, rounds = (processor_time, 10) if workers else (time.thread_time, 60)
        samples = per_batch(interleave(cases, rounds, clock=clock), count // SMALL)
        found.append(timing_table(title, samples, "raw", 1e-6, "us a batch", note if workers else ""))
        compare_each(found[-1], title, samples)
    return found


def shares() -> list[Table]:
    """Iterable datasets on 2 ranks: dealt out without a message, or in shares of their own. All ranks."""
    fabric, found, count = two_ranks(), [], 4096

    def parts() -> Any:
        return DataLoader(Parts(count, 0, fabric.global_rank, 2), batch_size=SMALL)

    loaders = {
        "raw": parts(),
        "raw again": parts(),
        "ours, dealt out": fabric.setup_dataloaders(DataLoader(Rows(count, 0), batch_size=SMALL)),
        "ours, shard_iterable=False": fabric.setup_dataloaders(parts(), shard_iterable=False),
        'ours, shard_iterable=False, uneven="exact"': fabric.setup_dataloaders(
            parts(), shard_iterable=False, uneven="exact"
        ),
    }
    cases = {name: epoch_of(loader) for name, loader in loaders.items()}
    for clock, what in ((time.thread_time, "rank zero's CPU"), (time.perf_counter, "wall clock")):
        samples = interleave(cases, 20, clock=clock, before=torch.distributed.barrier)
        title = f"{count:,} rows of an iterable dataset on 2 ranks, {what}"
        note = "Raw takes every second row. Dealt out: each rank reads all rows, and keeps every second."
        found.append(
            timing_table(title, per_batch(samples, count // SMALL // 2), "raw", 1e-6, "us a batch", note)
        )
        compare_each(found[-1], title, samples)
    return found


def skipping() -> list[Table]:
    """The first batch at a position near the end, and that of a fresh epoch."""
    held: list[Any] = []
    cases = {name: going_on(held, *loader) for name, loader in big_loaders().items()}
    found = []
    for clock, what in ((time.thread_time, "the loop's CPU"), (time.perf_counter, "wall clock")):
        samples = interleave(cases, 5, warmup=1, clock=clock, before=held.clear)
        title = f"First batch of {MANY:,} samples, fresh and from position {MANY - 64:,}, {what}"
        note = "From the call of load_state_dict; nothing before the position is read. Target < 1 s."
        found.append(timing_table(title, samples, "raw, shuffled, fresh", 1, "s", note))
        middle = {name: f"{statistics.median(times):.3f} s" for name, times in samples.items()}
        for name in [name for name in samples if "position" in name]:
            fresh = name.replace("from the position", "fresh")
            limit = f"{middle[fresh]} (fresh), {middle[fresh.replace('ours', 'raw')]} (raw, fresh)"
            summarise(found[-1], f"{MANY:,} samples, {name}, {what}", {"ours": middle[name]}, limit, "< 1 s")
    held.clear()
    return found


def peaks() -> list[Table]:
    """Memory until the first batch, each case in a process of its own."""
    found = {name: child([__file__, "peak", name], OMP_NUM_THREADS="1") for name in big_loaders()}
    rows = [[name, f"{more / 1e6:.0f}", f"{more / MANY:.1f}"] for name, more in found.items()]
    note = "The order itself is a tensor of 8 bytes a sample; a list of it as Python's integers is 40."
    title = f"Peak memory to the 1,000th batch of {MANY:,} samples, or the last"
    item = table(title, ["case", "MB", "bytes a sample"], rows, note)
    values = {"ours": f"{found['ours, shuffled, fresh'] / 1e6:.0f} MB"}
    limit = f"{found['raw, shuffled, fresh'] / 1e6:.0f} MB (raw)"
    summarise(item, f"{MANY:,} samples shuffled, peak", values, limit, "")
    return [item]


def states() -> list[Table]:
    """The cost of state_dict() in the middle of an epoch."""
    fabric, running, cases = one_rank(), [], {}
    rows = tensors(8192)
    loaders: dict[str, Any] = {
        "dataset order": DataLoader(rows, batch_size=SMALL),
        "shuffled": DataLoader(rows, batch_size=SMALL, shuffle=True),
        "shuffled, 2 workers": DataLoader(rows, batch_size=SMALL, shuffle=True, num_workers=2),
        "iterable, dealt out": DataLoader(Rows(8192, 0), batch_size=SMALL),
        "iterable, dealt out, with state_dict()": DataLoader(Placed(8192, 0), batch_size=SMALL),
        "iterable, shard_iterable=False": DataLoader(Parts(8192, 0), batch_size=SMALL),
    }
    for name, given in loaders.items():
        loader = fabric.setup_dataloaders(given, shard_iterable="shard" not in name)
        running.append(iter(loader))
        next(running[-1])
        cases[name] = loader.state_dict
    samples = interleave(cases, 100, inner=20, clock=time.thread_time)
    item = timing_table("state_dict() in the middle of an epoch", samples, "dataset order", 1e-6, "us")
    most = max(statistics.median(times) for times in samples.values())
    usual = statistics.median(samples["shuffled"]) * 1e6
    values = {"ours": f"{usual:.1f} us, shuffled; at most {most * 1e6:.0f} us"}
    summarise(item, "state_dict() of a loader", values, "", "")
    return [item]


class Rows(IterableDataset[Any]):
    """Rows of a tensor, after some operations each."""

    def __init__(self, count: int, cost: int) -> None:
        self.rows = torch.randn(1024, 16)
        self.count, self.cost = count, cost

    def read(self, index: int) -> Any:
        """One sample."""
        row = self.rows[index % 1024]
        for _ in range(self.cost):
            row = row + 1
        return row

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, range(self.count))


class Parts(Rows):
    """The same, in batches' worth per rank and worker."""

    def __init__(self, count: int, cost: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(count, cost)
        self.place, self.places = rank, world  # not the names by which Fabric knows a dataset that has a rank

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first, step = self.place * workers + worker, self.places * workers
        return map(self.read, range(first, self.count, step))


class Placed(Rows):
    """The same, able to say where it is."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield self.read(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self.at = state["at"]


def big_loaders() -> dict[str, tuple[Any, bool]]:
    """Loaders of many samples by case, and whether they go on at a position."""
    found: dict[str, tuple[Any, bool]] = {}
    for order, keywords in {
        "in order": {},
        "shuffled": {"shuffle": True},
        "shuffled, 2 workers": {"shuffle": True, "num_workers": 2},
    }.items():

        def fresh(keywords: dict[str, Any] = keywords) -> Any:  # type: ignore[assignment]
            return DataLoader(range(MANY), batch_size=SMALL, **keywords)  # type: ignore[arg-type]

        found[f"raw, {order}, fresh"] = fresh(), False
        for goes_on in (False, True):
            found[f"ours, {order}, {'from the position' if goes_on else 'fresh'}"] = ours(fresh()), goes_on
    return found


def going_on(held: list[Any], loader: Any, goes_on: bool) -> Callable[[], None]:
    """To the first batch of an epoch, or of its end; the iterator is put into `held`, to be dropped later."""
    state = {**loader.state_dict(), "samples": MANY - 2 * SMALL} if goes_on else None

    def first() -> None:
        if state is not None:
            loader.load_state_dict(state)
        held.append(iter(loader))
        next(held[0])

    return first


def peak_of(name: str) -> int:
    """Bytes that the case adds at its peak."""
    from memory import peak, settled

    few: Any = range(64)
    next(iter(ours(DataLoader(few, batch_size=SMALL, shuffle=True))))  # loads the code that an epoch needs
    held: list[Any] = []
    first = going_on(held, *big_loaders()[name])

    def batches() -> None:
        first()
        for _ in itertools.islice(held[0], 999):
            pass

    before = settled()
    return peak(batches) - before


def compare(item: Table, what: str, samples: Samples, target: str, case: str = "ours") -> None:
    """A line of the summary."""
    values, more = as_text(ratios(samples, "raw"), "{:.3f}"), added(samples, "raw")[case]
    text = f"{values[case]} ({more * 1e6:+.1f} us a batch)"
    summarise(item, what, {"ours": text}, f"{values['raw again']} (raw again)", target)


def compare_each(item: Table, what: str, samples: Samples) -> None:
    """One line of the summary for all cases."""
    values = ratios(samples, "raw")
    text = ", ".join(
        [f"{name.removeprefix('ours, ')} {value:.2f}" for name, value in values.items() if "ours" in name]
    )
    summarise(item, f"{what}, vs raw", {"ours": text}, f"{values['raw again']:.2f} (raw again)", "")


def per_batch(samples: Samples, count: int) -> Samples:
    """Seconds per batch."""
    return {name: [seconds / count for seconds in times] for name, times in samples.items()}


def processor_time() -> float:
    """CPU seconds of this process and of all workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def epoch_of(loader: Any) -> Callable[[], None]:
    """One pass over the loader."""

    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def first_of(loader: Any) -> Callable[[], Any]:
    """The start of an epoch, and its first batch."""
    return lambda: next(iter(loader))


def tensors(count: int) -> TensorDataset:
    """Rows of 16 numbers, and labels."""
    return TensorDataset(torch.randn(count, 16), torch.arange(count) % 10)


def nested(count: int) -> list[Any]:
    """Dictionaries of dictionaries and lists of small tensors."""
    return [
        {
            "image": torch.randn(8, 8),
            "text": {"ids": torch.zeros(16, dtype=torch.long), "mask": torch.ones(16)},
            "target": {"class": torch.tensor(i % 10), "boxes": [torch.zeros(4), torch.zeros(4)]},
        }
        for i in range(count)
    ]


def one_rank() -> Any:
    """This package, in one process."""
    from fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def two_ranks() -> Any:
    """This package, on the ranks that are there."""
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric


def ours(loader: Any) -> Any:
    """This package."""
    return one_rank().setup_dataloaders(loader)


def lightning(loader: Any) -> Any:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def accelerate(loader: Any) -> Any:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(loader)


TOPICS = {
    function.__name__: function
    for function in (engines, small, uneven, iterables, shares, skipping, peaks, states)
}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        result = peak_of(sys.argv[2]) if sys.argv[1] == "peak" else TOPICS[sys.argv[1]]()
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            report(result)
