"""`fabric.log` and `fabric.log_dict` with `sync_dist`: values over ranks, one message for the whole dict."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from collective_cases import FLAT, counted
from torchmetrics import MeanMetric

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, UsageError
from fabric.loggers.logger import Logger
from fabric.utilities.rank_zero import rank_zero_only


class Kept(Logger):
    """Keeps what it is given, on rank zero only, as loggers do."""

    name = version = None

    def __init__(self) -> None:
        self.lines: list[tuple[dict, int | None]] = []

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.lines.append((metrics, step))

    def log_hyperparams(self, params, *args, **kwargs):
        raise AssertionError("nothing here logs hyperparameters")


def launched(*loggers: Logger) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", loggers=list(loggers))
    fabric.launch()
    return fabric


def logged(metrics, **settings):
    """What rank zero's logger got (None elsewhere), and how many messages that took."""
    logger = Kept()
    fabric = launched(logger)
    with counted() as calls:
        fabric.log_dict(metrics, **settings)
    assert logger.lines or not fabric.is_global_zero
    return (logger.lines[0] if logger.lines else None), dict(calls)


def usable(fabric: Fabric) -> bool:
    return fabric.all_reduce(1.0, reduce_op="sum").item() == fabric.world_size


# Values


def values_of(rank: int) -> dict:
    """Values of every kind; rank 1 fills the dict in another order."""
    values = {
        "float": 0.1 * (rank + 1),
        "int": 7 - 3 * rank,
        "bool": rank == 1,
        "numpy": torch.tensor(0.25 + rank).numpy()[()],
        "large": 2**40 + rank,
        "infinite": math.inf if rank == 0 else 1.0,
    }
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        values[f"0-dim {dtype}"] = torch.tensor(3 + 2 * rank).to(dtype)
        values[f"(1,) {dtype}"] = torch.tensor([5 - rank]).to(dtype)
    values["truth"] = torch.tensor([rank == 0])
    values["of a graph"] = (torch.ones(1, 1, requires_grad=True) * (rank + 2)).sum()
    return dict(sorted(values.items(), reverse=rank == 1))


def expected(world: int, reduce_fx: str) -> dict[str, float]:
    """By Python's own arithmetic, in the order of ranks."""
    reduce = {
        "mean": lambda numbers: sum(numbers) / world,
        "sum": sum,
        "min": min,
        "max": max,
        "product": math.prod,
    }[reduce_fx]
    everyone = [values_of(rank) for rank in range(world)]
    numbers = [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        for values in everyone
    ]
    return {name: float(reduce([float(values[name]) for values in numbers])) for name in numbers[0]}


def log_of_every_kind(reduce_fx):
    mine = values_of(dist.get_rank())
    before = {name: value.clone() for name, value in mine.items() if isinstance(value, torch.Tensor)}
    line, calls = logged(mine, step=3, sync_dist=True, reduce_fx=reduce_fx)
    for name, value in before.items():
        assert torch.equal(mine[name], value), "what was logged is left as it is"
    assert mine["of a graph"].requires_grad
    return line, calls


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max", "product"])
def test_values_over_ranks_in_one_message(ranks, reduce_fx, world_size):
    (zero, calls), *others = ranks.run(log_of_every_kind, reduce_fx, world_size=world_size)
    values, step = zero
    assert step == 3
    assert all(type(value) is float for value in values.values()), "numbers of Python"
    # Equal to the last bit: everything is added up in float64, in the order of ranks.
    assert values == expected(world_size, reduce_fx)
    assert calls == {"frame": 1}
    assert others == [(None, calls)] * (world_size - 1), "only rank zero's logger writes"


def test_the_logger_gets_the_users_order(ranks):
    (line, _), _ = ranks.run(log_of_every_kind, "mean", world_size=2)
    assert list(line[0]) == list(values_of(0))


def log_python_floats():
    number = 1.0 + (dist.get_rank() + 1) * 2.0**-50
    return logged({"tiny": number, "third": 1 / 3, "count": 2**53 - 1}, sync_dist=True, reduce_fx="max")[0]


def test_floats_of_python_are_not_rounded(ranks):
    line, _ = ranks.run(log_python_floats, world_size=2)
    assert line[0] == {"tiny": 1.0 + 2.0**-49, "third": 1 / 3, "count": 2.0**53 - 1}


def log_many():
    rank = dist.get_rank()
    (line, calls), fabric = logged({f"m{i}": i * (rank + 1) for i in range(3000)}, sync_dist=True), launched()
    assert usable(fabric)
    return line, calls


def test_more_than_fits_a_frame_is_one_message_more(ranks):
    (line, calls), (_, other) = ranks.run(log_many, world_size=2)
    assert line[0] == {f"m{i}": 1.5 * i for i in range(3000)}
    assert calls == other == {"frame": 1, FLAT: 1}


def log_one():
    logger = Kept()
    fabric = launched(logger)
    rank = fabric.global_rank
    with counted() as calls:
        fabric.log("loss", torch.tensor([0.5 + rank]), step=1, sync_dist=True)
        fabric.log("steps", 2 + rank, sync_dist=True, reduce_fx="sum")
        fabric.log("here", rank, step=4)
    return logger.lines, dict(calls)


def test_log_is_log_dict_of_one(ranks):
    (lines, calls), (none, _) = ranks.run(log_one, world_size=2)
    assert lines == [({"loss": 1.0}, 1), ({"steps": 5.0}, None), ({"here": 0}, 4)]
    assert calls == {"frame": 2}
    assert none == []


def log_without_sync():
    rank = dist.get_rank()
    metrics = {"loss": torch.tensor([rank + 0.5]), "step": rank, f"only on {rank}": True}
    return logged(metrics, step=2)


def test_without_sync_dist_nothing_is_sent(ranks):
    (line, calls), (none, other) = ranks.run(log_without_sync, world_size=2)
    assert line == ({"loss": 0.5, "step": 0, "only on 0": True}, 2)
    assert [type(value) for value in line[0].values()] == [float, int, bool]
    assert calls == other == {}
    assert none is None


def log_nothing():
    return logged({}, sync_dist=True)


def test_an_empty_dict_is_one_message(ranks):
    (line, calls), (_, other) = ranks.run(log_nothing, world_size=2)
    assert line == ({}, None)
    assert calls == other == {"frame": 1}


def log_metrics():
    logger = Kept()
    fabric = launched(logger)
    mean = MeanMetric()
    mean.update(torch.tensor([1.0, 5.0]) if fabric.global_rank else torch.tensor([3.0]))
    fabric.log("mean", mean, 4)
    fabric.log_dict({"loss": 1.0, "mean": mean, "lr": 0.5}, 5, sync_dist=True, reduce_fx="sum")
    with pytest.raises(CollectiveMismatch, match="compute_metrics"):
        fabric.log("mean", mean) if fabric.is_global_zero else fabric.all_reduce(1.0)
    assert usable(fabric)
    return logger.lines


def test_a_metric_is_logged_by_its_value_over_all_ranks(ranks):
    lines, none = ranks.run(log_metrics, world_size=2)
    assert lines == [({"mean": 3.0}, 4), ({"loss": 2.0, "mean": 3.0, "lr": 1.0}, 5)]
    assert list(lines[1][0]) == ["loss", "mean", "lr"]
    assert none == []


def test_one_process():
    logger = Kept()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    values = {"loss": 1 / 3, "count": torch.tensor([4]), "right": True}
    for reduce_fx in ("mean", "sum", "min", "max", "product"):
        fabric.log_dict(values, sync_dist=True, reduce_fx=reduce_fx)
    assert [line for line, _ in logger.lines] == [{"loss": 1 / 3, "count": 4.0, "right": 1.0}] * 5


def returned():
    fabric, rank = launched(), dist.get_rank()
    mean = MeanMetric()
    mean.update(torch.tensor(1.0 + 2 * rank))
    one = fabric.log("loss", torch.tensor(0.5 + rank), sync_dist=True)
    many = fabric.log_dict({"mean": mean, "here": torch.tensor([rank])})
    both = fabric.log_dict({"mean": mean, "worst": rank}, sync_dist=True, reduce_fx="max")
    return one, fabric.log("mean", mean), many, both


def test_what_was_logged_is_given_back_the_same_reduced_number_on_all_ranks(ranks):
    both = {"mean": 2.0, "worst": 1.0}
    found = ranks.run(returned, world_size=2)
    assert found == [(1.0, 2.0, {"mean": 2.0, "here": rank}, both) for rank in range(2)]
    assert [type(value) for value in found[1][2].values()] == [float, int]


def stops_early():
    """Each rank's own loss gets better at another step; the number that `log` gives is one."""
    fabric, best, step = launched(), float("inf"), 0
    curves = [[3.0, 2.0, 4.0, 1.0, 9.0, 9.0], [3.0, 2.0, 1.0, 5.0, 1.0, 1.0]]
    for step, own in enumerate(curves[fabric.global_rank]):
        loss = fabric.log("val_loss", own, step, sync_dist=True)
        if loss > best:
            break
        best = loss
    assert usable(fabric)
    return step, best


def test_early_stopping_by_what_log_gives_ends_at_one_step(ranks):
    assert ranks.run(stops_early, world_size=2) == [(2, 2.0)] * 2


# What ranks do not agree on, and what cannot be logged


def disagree(metrics_of_ranks, settings_of_ranks):
    logger = Kept()
    fabric = launched(logger)
    rank = fabric.global_rank
    settings = {"sync_dist": True, **settings_of_ranks[rank]}
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.log_dict(metrics_of_ranks[rank], **settings)
    assert logger.lines == [], "nothing is logged"
    assert usable(fabric)
    return str(caught.value)


DISAGREE = {
    "other names": (
        [{"loss": 1.0, "acc": 2.0}, {"loss": 1.0, "accuracy": 2.0}],
        [{}, {}],
        ["acc", "accuracy"],
    ),
    "a name more": ([{"loss": 1.0}, {"loss": 1.0, "extra": 2.0}], [{}, {}], ["loss", "extra"]),
    "none at all": ([{}, {"loss": 1.0}], [{}, {}], ["nothing", "loss"]),
    "reductions": ([{"loss": 1.0}] * 2, [{}, {"reduce_fx": "sum"}], ["log_dict(mean)", "log_dict(sum)"]),
    "one refuses": ([{"loss": 1.0}, {"loss": "low"}], [{}, {}], ["Rank 1 refused", "str: 'low'"]),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_that_disagree_all_learn_it(ranks, case):
    metrics, settings, words = DISAGREE[case]
    one, other = ranks.run(disagree, metrics, settings, world_size=2)
    assert one == other
    assert "log_dict" in one
    assert "test_log_dict.py" in one, "the user's line"
    for word in words:
        assert word in one


def other_kinds_of_numbers():
    kinds = [1, torch.tensor([1.0], dtype=torch.float16), True]
    return logged({"value": kinds[dist.get_rank()]}, sync_dist=True, reduce_fx="sum")[0]


def test_ranks_may_hold_numbers_of_other_kinds(ranks):
    assert ranks.run(other_kinds_of_numbers, world_size=3)[0] == ({"value": 3.0}, None)


REFUSED = [
    (
        {"a": 1.0, "hits": torch.ones(2, 3)},
        {},
        ConfigurationError,
        r"'hits' has shape \[2, 3\].*value\.mean\(\)",
    ),
    ({"hits": torch.ones(0)}, {}, ConfigurationError, r"'hits' has shape \[0\]"),
    ({"a": 1.0, "note": "text"}, {}, ArgumentTypeError, "log_dict takes .* str: 'text'"),
    ({"note": None}, {}, ArgumentTypeError, "NoneType"),
    ({"nested": {"a": 1.0}}, {}, ArgumentTypeError, "dict"),
    ({"phase": 1j}, {}, ArgumentTypeError, "'phase' is complex"),
    ({"phase": torch.tensor(1j)}, {}, ArgumentTypeError, "'phase' is complex"),
    ({"a": 1.0}, {"reduce_fx": "avrage"}, ConfigurationError, "'avrage' is not a reduction"),
]


def refuse(case):
    metrics, settings, kind, message = REFUSED[case]
    logger = Kept()
    fabric = launched(logger)
    with pytest.raises(kind, match=message):
        fabric.log_dict(metrics, sync_dist=True, **settings)
    assert logger.lines == []
    assert usable(fabric)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_logged_is_refused_on_all_ranks(ranks, case):
    ranks.run(refuse, case, world_size=2)


@pytest.mark.parametrize(
    "call", [lambda f: f.log_dict({"a": 1.0}, sync_dist=True), lambda f: f.log("a", 1.0, sync_dist=True)]
)
def test_before_launch(call):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    with pytest.raises(UsageError, match=r"was used before fabric\.launch\(\)"):
        call(fabric)
