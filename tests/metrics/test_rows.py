"""Metrics and logs where ranks see the same data (pipelines, divided sequences): each row's counts once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_cases import FLAT, counted
from test_log_dict import Kept
from test_metrics import LOCAL, about_updates_only, close, riding_up_to, snapshot, untouched
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision
from torchmetrics.regression import PearsonCorrCoef

from fabric import Fabric
from fabric.collectives.frames import PACK_LIMIT
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError
from fabric.strategies import ContextParallel, DDPStrategy, ModelParallelStrategy, PipelineStrategy

SHAPES = [("pipeline", 2), ("pipeline", 4), ("sequence", 2), ("sequence", 4), ("tensor", 4)]
"""Rows of two ranks: one, or two."""


def launched(kind: str = "pipeline", logger: Kept | None = None, size: int = 2, **settings) -> Fabric:
    """Ranks in rows of `size`."""
    if kind == "pipeline":
        strategy = PipelineStrategy(balance=[2] * size, num_microbatches=2, **settings)
    elif kind == "sequence":
        strategy = DDPStrategy(context_parallel=ContextParallel(size))
    else:
        rows = dist.get_world_size() // size
        strategy = ModelParallelStrategy(
            lambda model, mesh: model, data_parallel_size=rows, tensor_parallel_size=size
        )
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, loggers=logger)
    fabric.launch()
    return fabric


def chain(size: int = 2):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(2 * size)])


def made():
    """Metrics of every way in which states become one."""
    return {
        "means": [kind(**LOCAL) for kind in (MeanMetric, SumMetric, MinMetric, MaxMetric, CatMetric)],
        "auroc": BinaryAUROC(**LOCAL),
        "pearson": PearsonCorrCoef(**LOCAL),  # stacks what ranks have
        "classes": MetricCollection([MulticlassAccuracy(3, **LOCAL), MulticlassPrecision(3, **LOCAL)]),
    }


def update(metrics, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, classes = torch.rand(6, 3, generator=generator), torch.randint(3, (6,), generator=generator)
    for metric in metrics["means"]:
        metric.update(scores[:, 0])
    metrics["auroc"].update(scores[:, 1], (classes > 0).long())
    metrics["pearson"].update(scores[:, 0], scores[:, 2])
    metrics["classes"].update(scores.softmax(1), classes)


# Metrics


def metrics_of_rows(kind, who, limit):
    """Values of all data on every rank, twice, and the metrics as they were."""
    fabric = launched(kind)
    rank, rows = fabric.global_rank, fabric.world_size // 2
    row, place = divmod(rank, 2)
    updates = {"all": True, "last": place == 1, "first": place == 0, "other": place == row % 2}[who]
    with about_updates_only():
        metrics, one = made(), made()
        for step in range(2):
            if updates:
                update(metrics, 10 * step + row)
            for other in range(rows):
                update(one, 10 * step + other)
            before = [snapshot(metric) for metric in (*metrics["means"], metrics["auroc"])]
            with riding_up_to(limit):
                ours = fabric.compute_metrics(metrics)
            after = [snapshot(metric) for metric in (*metrics["means"], metrics["auroc"])]
            ours["means"][4], plain = ours["means"][4].sort().values, one["means"][4].compute().sort().values
            close(ours["means"], [metric.compute() for metric in one["means"][:4]] + [plain])
            close(ours["auroc"], one["auroc"].compute())
            close(ours["pearson"], one["pearson"].compute())
            close(ours["classes"], one["classes"].compute())
            for old, new in zip(before, after, strict=True):
                untouched(old, new)
    return ours


@pytest.mark.parametrize("limit", [PACK_LIMIT, 0])
@pytest.mark.parametrize("who", ["all", "last", "first", "other"])
@pytest.mark.parametrize(("kind", "world_size"), SHAPES)
def test_each_rows_data_count_once_whoever_updated(ranks, kind, world_size, who, limit):
    first, *others = ranks.run(metrics_of_rows, kind, who, limit, world_size=world_size)
    for other in others:
        close(other, first)


def metrics_of_a_model(who):
    """Updated on all stages, or on the last one alone."""
    fabric = launched()
    row = fabric.global_rank // 2
    model, plain = fabric.setup(chain()), chain()
    everyone = [torch.randn(4, 3, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    mean, one, seen, idle = MeanMetric(), MeanMetric(**LOCAL), SumMetric(), SumMetric()
    with torch.no_grad():
        for x in everyone:
            one.update(plain(x))
        out = model(everyone[row])
    if who == "all" or fabric.strategy.is_last_stage:
        mean.update(out)
        seen.update(len(out))
    if fabric.is_global_zero:
        idle.update(3)
    with about_updates_only():
        found = fabric.compute_metrics([mean, seen, idle])
    close(found, [one.compute(), torch.tensor(8.0), torch.tensor(3.0)])
    return found


@pytest.mark.parametrize("who", ["all", "last"])
def test_metrics_of_a_pipeline(ranks, who):
    first, *others = ranks.run(metrics_of_a_model, who, world_size=4)
    for other in others:
        close(other, first)


def messages():
    """How many, for metrics that all ranks updated alike; and for those that the last stages did."""
    fabric = launched()
    row, last = fabric.global_rank // 2, fabric.strategy.is_last_stage
    small, large, theirs = SumMetric(), BinaryAUROC(), BinaryAUROC()
    small.update(row)
    generator = torch.Generator().manual_seed(row)
    scores, truth = torch.rand(60_000, generator=generator), torch.randint(2, (60_000,), generator=generator)
    large.update(scores, truth)
    if last:
        theirs.update(scores, truth)
    counts, values = [], []
    for metric in (small, large, theirs):
        with counted() as calls:
            values.append(fabric.compute_metrics(metric))
        counts.append(dict(calls))
    assert values[1] == values[2]
    return counts


def test_messages(ranks):
    sizes, data = {"frame": 1}, {"frame": 1, FLAT: 1}
    assert ranks.run(messages, world_size=4) == [[sizes, data, data]] * 4
    assert ranks.run(messages, world_size=2) == [[sizes, data, data]] * 2


def other_metrics():
    fabric = launched()
    with pytest.raises(CollectiveMismatch, match="compute_metrics"):
        fabric.compute_metrics(SumMetric() if fabric.global_rank == 1 else MeanMetric())
    return fabric.all_reduce(1.0, reduce_op="sum").item()


def test_ranks_of_a_row_with_other_metrics_are_told(ranks):
    assert ranks.run(other_metrics, world_size=2) == [2.0, 2.0]


# Logs


def logs(kind, reduce_fx):
    logger = Kept()
    fabric = launched(kind, logger)
    row = fabric.global_rank // 2
    with counted() as calls:
        fabric.log_dict({"n": 8.0 + row, "third": torch.tensor(1 / 3)}, sync_dist=True, reduce_fx=reduce_fx)
    with counted() as many:
        fabric.log_dict({f"m{i}": i + row for i in range(4000)}, sync_dist=True, reduce_fx=reduce_fx)
    fabric.log_dict({}, sync_dist=True)
    assert calls == {"frame": 1}
    assert many == {"frame": 1, FLAT: 1}
    return logger.lines


@pytest.mark.parametrize("kind", ["pipeline", "sequence", "tensor"])
@pytest.mark.parametrize(
    ("reduce_fx", "two"), [("sum", 17.0), ("mean", 8.5), ("min", 8.0), ("max", 9.0), ("product", 72.0)]
)
def test_a_logged_sum_counts_each_row_once(ranks, kind, reduce_fx, two):
    lines, *others = ranks.run(logs, kind, reduce_fx, world_size=4)
    assert lines[0][0]["n"] == two
    assert lines[1][0]["m8"] == two
    assert lines[2][0] == {}
    assert others == [[]] * 3
    if kind != "tensor":
        third = torch.tensor(1 / 3).item()
        assert ranks.run(logs, kind, reduce_fx, world_size=2)[0][0][0] == {"n": 8.0, "third": third}


def logs_of_three(reduce_fx):
    """What differs in a row: the last one counts; extremes are those of all ranks."""
    logger = Kept()
    fabric = launched(logger=logger, size=3)
    values = {"own": [5.0, 9.0, 7.0][fabric.global_rank], "nan": [1.0, float("nan"), 2.0][fabric.global_rank]}
    fabric.log_dict(values, sync_dist=True, reduce_fx=reduce_fx)
    return logger.lines


def test_values_that_differ_in_a_row(ranks):
    assert ranks.run(logs_of_three, "sum", world_size=3)[0] == [({"own": 7.0, "nan": 2.0}, None)]
    ((values, _),) = ranks.run(logs_of_three, "max", world_size=3)[0]
    assert values["own"] == 9.0
    assert values["nan"] != values["nan"]


def logs_of_last_stages(reduce_fx):
    logger = Kept()
    fabric = launched(logger=logger)
    model, plain = fabric.setup(chain()), chain()
    everyone = [torch.randn(4, 3, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    out = model(everyone[fabric.global_rank // 2])
    loss = out.pow(2).mean() if fabric.strategy.is_last_stage else None
    fabric.log_dict({"loss": loss, "step": 3}, sync_dist=True, reduce_fx=reduce_fx)
    fabric.log("loss", loss, sync_dist=True, reduce_fx=reduce_fx)
    return logger.lines, [plain(x).pow(2).mean().item() for x in everyone]


@pytest.mark.parametrize(("reduce_fx", "step"), [("mean", 3), ("sum", 6), ("max", 3), ("min", 3)])
def test_values_of_the_last_stages_are_logged(ranks, reduce_fx, step):
    lines, losses = ranks.run(logs_of_last_stages, reduce_fx, world_size=4)[0]
    reduce = {"mean": lambda both: sum(both) / 2, "sum": sum, "max": max, "min": min}[reduce_fx]
    assert lines[0][0] == {"loss": pytest.approx(reduce(losses), rel=1e-5), "step": step}
    assert lines[1][0] == {"loss": lines[0][0]["loss"]}


def refused_logs():
    logger = Kept()
    fabric = launched(logger=logger)
    rank = fabric.global_rank
    nowhere = None if rank < 2 else 1.0
    for metrics, settings, kind, text in (
        ({"loss": nowhere}, {}, ArgumentTypeError, "'loss' is None on all ranks"),
        ({"loss": torch.empty(3)}, {}, ConfigurationError, r"'loss' has shape \[3\]"),
        ({"loss": "low"}, {}, ArgumentTypeError, "str: 'low'"),
        ({"loss": 1.0}, {"reduce_fx": "avrage"}, ConfigurationError, "'avrage' is not a reduction"),
        ({f"loss{rank}": 1.0}, {}, CollectiveMismatch, "loss0.*loss1"),
        ({"loss": 1.0 if rank else "low"}, {}, CollectiveMismatch, "Rank 0 refused"),
    ):
        with pytest.raises(kind, match=f"(?s){text}"):
            fabric.log_dict(metrics, sync_dist=True, **settings)
    assert logger.lines == []
    return fabric.all_reduce(1.0, reduce_op="sum").item()


def test_logs_that_are_refused(ranks):
    assert ranks.run(refused_logs, world_size=4) == [4.0] * 4


# Reductions by hand


def by_hand(kind):
    fabric = launched(kind)
    seen, group = torch.tensor(8.0 + fabric.global_rank // 2), fabric.strategy.data_group
    return [
        fabric.all_reduce(seen, reduce_op="sum", inplace=False).item(),
        fabric.all_reduce(seen, reduce_op="sum", group=group).item(),
    ]


@pytest.mark.parametrize("kind", ["pipeline", "sequence", "tensor"])
def test_all_reduce_is_over_all_ranks_or_over_the_data_group(ranks, kind):
    assert ranks.run(by_hand, kind, world_size=4) == [[34.0, 17.0]] * 4
