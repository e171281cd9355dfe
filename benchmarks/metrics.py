"""Ten classification metrics over 2 ranks: `fabric.compute_metrics`, torchmetrics' own sync, and by hand.

The limit by hand knows the states beforehand: one flat tensor, one all_reduce, and `compute` of each metric.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from harness import interleave, ranks, ratios, report, show, summarise, table, timing_table

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 10
NAMES = (
    "Accuracy", "Precision", "Recall", "F1Score", "Specificity", "StatScores", "HammingDistance",
    "ConfusionMatrix", "CohenKappa", "MatthewsCorrCoef",
)  # fmt: skip
LISTS = ("AUROC", "AveragePrecision", "ROC")
"""Metrics that keep all predictions."""


def main() -> None:
    show(ranks([__file__, "rank"], OMP_NUM_THREADS="1"))


def measure() -> None:
    """Time and count every way; all ranks call this."""
    import torch
    import torch.distributed as dist

    from fabric import Fabric

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    tables, counts = [], []
    for title, names, target in (
        ("10 classification metrics", NAMES, 2.0),
        ("3 metrics that keep 2,000 predictions", LISTS, 2.0),
    ):
        cases = ways(fabric, names)
        check(cases)
        counts.append([title, *(f"{name}: {count(call)}" for name, call in cases.items())])
        samples = interleave(cases, 60, 3, before=dist.barrier)
        base = next(iter(cases))
        tables.append(timing_table(f"{title}, target <= {target}", samples, base, 1e-6, "us"))
        values = {name: f"{value:.2f}" for name, value in ratios(samples, base).items()}
        summarise(tables[-1], f"{title}, 2 ranks, vs {base}", values, "1", f"<= {target}")
    head = ["metrics"] + [""] * (len(counts[0]) - 1)
    tables.append(table("Calls of torch.distributed for one value of each", head, counts))
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(tables)


def ways(fabric: Any, names: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """Each way to the values of the same data, the limit first."""
    flat = by_hand if names is NAMES else by_hand_lists
    collected, own = made(names), made(names, sync_on_compute=True)
    separate = made(names)
    cases = {"by hand, flattened": flat(made(names)), "ours": lambda: fabric.compute_metrics(separate)}
    from torchmetrics import MetricCollection

    collection = MetricCollection(collected, compute_groups=True)
    collection.reset()
    feed(collection)
    cases["ours, a MetricCollection"] = lambda: fabric.compute_metrics(collection)
    cases["torchmetrics"] = lambda: {name: metric.compute() for name, metric in own.items()}
    return cases


def made(names: tuple[str, ...], sync_on_compute: bool = False) -> dict[str, Any]:
    """Updated metrics, by name; they keep no computed value."""
    from torchmetrics import classification

    settings = {"num_classes": CLASSES, "validate_args": False, "compute_with_cache": False}
    metrics = {
        name: getattr(classification, f"Multiclass{name}")(**settings, sync_on_compute=sync_on_compute)
        for name in names
    }
    for metric in metrics.values():
        feed(metric)
    return metrics


def feed(metric: Any) -> None:
    """Ten batches of this rank."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        preds = torch.rand(200, CLASSES, generator=generator).softmax(1)
        metric.update(preds, torch.randint(CLASSES, (200,), generator=generator))


def by_hand(metrics: dict[str, Any]) -> Callable[[], Any]:
    """One all_reduce of all states, which are sums of integers."""
    import torch
    import torch.distributed as dist

    states = [(metric, name) for metric in metrics.values() for name in metric._defaults]

    def values() -> dict[str, Any]:
        local = [getattr(metric, name) for metric, name in states]
        flat = torch.cat([value.reshape(-1) for value in local])
        dist.all_reduce(flat)
        parts = flat.split([value.numel() for value in local])
        for (metric, name), value, part in zip(states, local, parts, strict=True):
            setattr(metric, name, part.view(value.shape))
        result = {name: metric.compute() for name, metric in metrics.items()}
        for (metric, name), value in zip(states, local, strict=True):
            setattr(metric, name, value)
        return result

    return values


def by_hand_lists(metrics: dict[str, Any]) -> Callable[[], Any]:
    """One all_gather of predictions and targets; ranks are known to have equally many."""
    import torch
    import torch.distributed as dist

    first = next(iter(metrics.values()))

    def values() -> dict[str, Any]:
        preds, target = torch.cat(first.preds), torch.cat(first.target)
        mine = torch.cat([preds.view(-1).view(torch.uint8), target.view(torch.uint8)])
        out = mine.new_empty(2 * len(mine))
        dist.all_gather_into_tensor(out, mine)
        size = preds.numel() * 4
        rows = [(row[:size].view(torch.float32).view(-1, CLASSES), row[size:]) for row in out.view(2, -1)]
        everything = [row for row, _ in rows], [rest.view(torch.int64) for _, rest in rows]
        result = {}
        for name, metric in metrics.items():
            kept = metric.preds, metric.target
            metric.preds, metric.target = everything
            result[name] = metric.compute()
            metric.preds, metric.target = kept
        return result

    return values


def check(cases: dict[str, Callable[[], Any]]) -> None:
    """All ways give the same values."""
    import torch

    results = [call() for call in cases.values()]
    for result in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(result[name], value)


def count(call: Callable[[], Any]) -> int:
    """How many functions of torch.distributed `call` calls; all ranks call this."""
    import torch.distributed as dist

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "barrier")
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        function = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    real = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    try:
        for name in real:
            setattr(dist, name, counting(name))
        call()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return sum(calls.values())


if __name__ == "__main__":
    if os.environ.get("RANK") and sys.argv[1:] == ["rank"]:
        measure()
    else:
        main()
