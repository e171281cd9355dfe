"""Nested dictionaries through a DataLoader, one process: what each engine's wrapper adds to an epoch."""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from harness import as_text, child, installed, interleave, ratios, report, show, summarise, timing_table

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES, BATCH = 2048, 8


def main() -> None:
    show(child([__file__, "measure"], OMP_NUM_THREADS="1"))


def measure() -> None:
    """Time epochs over each engine's loader in this process."""
    import torch
    from torch.utils.data import DataLoader

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = [
        {
            "image": torch.randn(8, 8),
            "text": {"ids": torch.zeros(16, dtype=torch.long), "mask": torch.ones(16)},
            "target": {"class": torch.tensor(i % 10), "boxes": [torch.zeros(4), torch.zeros(4)]},
        }
        for i in range(SAMPLES)
    ]

    def fresh() -> Any:
        return DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]

    loaders = {"raw": fresh(), "raw again": fresh(), "ours": ours(fresh())}
    if installed("lightning"):
        loaders["Lightning Fabric"] = lightning(fresh())
    if installed("accelerate"):
        loaders["Accelerate"] = accelerate(fresh())
    cases = {name: epoch_of(loader) for name, loader in loaders.items()}
    samples = interleave(cases, 40, clock=time.thread_time)
    title = f"An epoch of {SAMPLES // BATCH} nested dictionary batches, target <= 1.05"
    first = interleave({n: first_of(loader) for n, loader in loaders.items()}, 200, clock=time.thread_time)
    note = "What an epoch costs whatever its length (ours draws a sample order equal on all ranks)."
    epochs = timing_table(title, samples, "raw", 1e-3, "ms")
    values = as_text(ratios(samples, "raw"), "{:.2f}")
    summarise(
        epochs, "loader, nested dict batches, vs raw", values, values["raw again"] + " (raw again)", "<= 1.05"
    )
    report([epochs, timing_table("The first batch of an epoch", first, "raw", 1e-6, "us", note)])


def epoch_of(loader: Any) -> Callable[[], None]:
    """One pass over the loader."""

    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def first_of(loader: Any) -> Callable[[], Any]:
    """The start of an epoch, and its first batch."""
    return lambda: next(iter(loader))


def ours(loader: Any) -> Any:
    """This package."""
    from fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def lightning(loader: Any) -> Any:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def accelerate(loader: Any) -> Any:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(loader)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    else:
        main()
