"""`fabric.compute_metrics` on 2 and 3 ranks against one process that saw all data."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any
from unittest import mock

import metric_cases
import pytest
import torch
from collective_cases import FLAT, alike, counted, everywhere_alike, launched
from torchmetrics import Metric, MetricCollection, classification, wrappers
from torchmetrics.aggregation import MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryStatScores
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score

from fabric.collectives import frames
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, UsageError
from fabric.core.tree import flatten, map_tree
from fabric.metrics import sync

LOCAL = {"sync_on_compute": False}
"""torchmetrics itself must not synchronise: what `compute` gives is this rank's."""
SIZES = ([12], [17, 1, 4], [3, 16])
"""Batches of each rank in the first round: uneven in number and size."""


def close(ours: Any, one: Any) -> None:
    """Equal structures and dtypes, and values equal but for rounding."""
    leaves, spec = flatten(ours)
    others, other_spec = flatten(one)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5, equal_nan=True)
        else:
            assert a == b


def snapshot(metric: Any) -> dict[str, Any]:
    """What must be the same after a call: the same objects, with the same content."""
    kept = {}
    for module in metric.modules() if not metric._modules else _inside(metric):
        flags = ("_update_count", "_computed", "_to_sync", "_is_synced", "_cache", "_should_unsync")
        for name in (*module._defaults, *flags):
            value = getattr(module, name)
            content = map_tree(lambda e: e.clone() if isinstance(e, torch.Tensor) else e, value)
            kept[f"{id(module)} {name}"] = (value, content)
    return kept


def _inside(metric: Any) -> list[Any]:
    found = [metric] if hasattr(metric, "_defaults") else []
    for child in metric._modules.values():
        found += _inside(child)
    return found


def untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key, (value, content) in before.items():
        assert after[key][0] is value or value == after[key][0], key
        leaves, olds = flatten(after[key][1])[0], flatten(content)[0]
        assert len(leaves) == len(olds)
        for leaf, old in zip(leaves, olds, strict=True):
            assert torch.equal(leaf, old) if isinstance(old, torch.Tensor) else leaf == old


@contextmanager
def about_updates_only():
    """torchmetrics warns of small data; only that a rank was never updated must not come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*was called before the ``update`` method")
        yield


@contextmanager
def riding_up_to(limit: int):
    """Larger data (of all ranks together) have collectives of their own."""
    with mock.patch.object(sync, "PACK_LIMIT", limit):
        yield


# every class of torchmetrics


def against_one_process(domain: str, idle: int | None = None, limit: int = frames.PACK_LIMIT):
    """All metrics of a domain in one call, twice.

    Args:
        domain: Whose metrics.
        idle: A rank that never updates its own.
        limit: Bytes up to which data ride.
    """
    fabric = launched()
    rank, world = fabric.global_rank, fabric.world_size
    cases = metric_cases.cases_of(domain)
    with about_updates_only():
        made, one = [{title: metric_cases.make(*case) for title, case in cases.items()} for _ in range(2)]
    generators = {title: torch.Generator().manual_seed(0) for title in made}
    everyone = [(place, size) for place in range(world) if place != idle for size in SIZES[place]]
    for round_ in ([everyone[0]], everyone):  # first one rank alone, then each as often as it likes
        for place, size in round_:
            for title, metric in made.items():
                args, kwargs = metric_cases.batch(domain, metric, size, generators[title])
                one[title].update(*args, **kwargs)
                if place == rank:
                    metric.update(*args, **kwargs)
        before = {title: snapshot(metric) for title, metric in made.items()}
        with about_updates_only(), riding_up_to(limit):
            ours = fabric.compute_metrics(made)
        for title, metric in made.items():
            try:
                with about_updates_only():
                    close(ours[title], one[title].compute())
                untouched(before[title], snapshot(metric))
            except AssertionError as error:
                raise AssertionError(f"{title}: {error}") from error
        everywhere_alike(ours)


@pytest.mark.parametrize("domain", metric_cases.DOMAINS)
@pytest.mark.parametrize(("world_size", "idle"), [(2, None), (3, 0), (2, 1)])
def test_every_class_gives_the_value_of_one_process(ranks, domain, world_size, idle):
    ranks.run(against_one_process, domain, idle, world_size=world_size)


@pytest.mark.parametrize("domain", metric_cases.DOMAINS)
def test_every_class_does_so_by_reductions(ranks, domain):
    ranks.run(against_one_process, domain, idle=1, limit=0, world_size=3)


@pytest.mark.parametrize("domain", metric_cases.DOMAINS)
def test_no_class_is_left_out(domain):
    """Whatever this version of torchmetrics has is tested, or skipped for a reason."""
    tested = {title.partition(" ")[0] for title in metric_cases.cases_of(domain)}
    skipped = {name for name in metric_cases.all_classes(domain) if name in metric_cases.SKIPPED}
    assert tested | skipped == set(metric_cases.all_classes(domain))
    assert not tested & skipped
    for name in sorted(skipped):
        print(f"{name}: {metric_cases.SKIPPED[name]}")


# states of every kind


class Kept(Metric):
    """One state of each rule, so that each can be told apart in the result."""

    full_state_update = False

    def __init__(self, dtype=torch.float32, shape=(2,), **kwargs):
        super().__init__(**{"sync_on_compute": False, **kwargs})
        plain, low, high = [torch.zeros(shape, dtype=dtype) for _ in range(3)]
        if dtype is not torch.bool:
            extreme = float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
            low, high = (
                low + extreme,
                high + (-extreme if dtype.is_floating_point else torch.iinfo(dtype).min),
            )
        self.add_state("total", plain.to(dtype), "sum")
        self.add_state("least", low.to(dtype) if dtype is not torch.bool else ~plain, "min")
        self.add_state("most", high.to(dtype), "max")
        self.add_state("entries", [], "cat")
        self.add_state("apart", [], None)
        self.add_state("texts", [], None)

    def update(self, value, *entries, text="x"):
        self.total = (self.total | value) if value.dtype is torch.bool else self.total + value
        self.least = torch.minimum(self.least, value)
        self.most = torch.maximum(self.most, value)
        self.entries += entries
        self.apart += [entry * 1 for entry in entries]
        self.texts.append(text)

    def compute(self):
        return {
            "folded": (self.total, self.least, self.most),
            "entries": list(self.entries),
            "apart": list(self.apart),
            "texts": list(self.texts),
        }


NUMBERS = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def draw(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(0, 3, shape, generator=generator)
    return values > 0 if dtype is torch.bool else values.to(torch.float32).to(dtype)


def random_states(seeds, limit):
    """Random numbers of updates, shapes and dtypes; entries may be empty, 0-d, of mixed dtypes."""
    fabric = launched()
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        pick = lambda options: options[int(torch.randint(len(options), (), generator=g))]  # noqa: B023, E731
        setups = [
            {"dtype": pick(NUMBERS), "shape": pick([(), (0,), (1,), (5,), (2, 3), (600,)])}
            for _ in range(pick([1, 2, 5]))
        ]
        mine, one = [[Kept(**setup) for setup in setups] for _ in range(2)]
        for rank in range(fabric.world_size):
            for setup, ours, reference in zip(setups, mine, one, strict=True):
                for _ in range(pick([0, 1, 3])):
                    entry_shapes = [
                        pick([(), (0,), (1,), (4,), (0, 2), (3, 2)]) for _ in range(pick([0, 1, 4]))
                    ]
                    entries = [draw(pick(NUMBERS), shape, g) for shape in entry_shapes]
                    value = draw(setup["dtype"], setup["shape"], g)
                    for metric in [reference] + [ours] * (rank == fabric.global_rank):
                        metric.update(value, *entries, text=f"rank {rank}")
        before = [snapshot(metric) for metric in mine]
        updated = [place for place, metric in enumerate(one) if metric._update_count]
        with riding_up_to(limit):
            ours = fabric.compute_metrics([mine[place] for place in updated])
        alike(ours, [one[place].compute() for place in updated])
        everywhere_alike(ours)
        for old, metric in zip(before, mine, strict=True):
            untouched(old, snapshot(metric))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0, 20_000])
def test_random_states_to_the_last_bit(ranks, world_size, limit):
    ranks.run(random_states, range(25), limit, world_size=world_size)


@pytest.mark.parametrize("guard", ["light", "off"])
@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0])
def test_without_frames(ranks, monkeypatch, guard, limit):
    monkeypatch.setenv("FABRIC_GUARD", guard)
    ranks.run(random_states, range(12), limit, world_size=3)


def rounding_states(limit):
    fabric = launched()
    torch.manual_seed(fabric.global_rank)
    metrics = [Kept(dtype, (300,)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for metric, dtype in zip(metrics, (torch.float32, torch.bfloat16, torch.float16), strict=True):
        metric.update(torch.randn(300).to(dtype))
    with riding_up_to(limit):
        everywhere_alike(fabric.compute_metrics(metrics))


@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0])
def test_rounding_is_the_same_on_every_rank(ranks, limit):
    ranks.run(rounding_states, limit, world_size=3)


class Averaged(Metric):
    """A mean over updates, as torchmetrics' mean states are in `forward`; and a constant."""

    full_state_update = False

    def __init__(self, constant=0.1):
        super().__init__(sync_on_compute=False)
        self.add_state("mean", torch.zeros(2), "mean")
        self.add_state("constant", torch.tensor(constant), "mean")

    def update(self, value):
        self.mean = self.mean + (value - self.mean) / self._update_count

    def compute(self):
        return self.mean, self.constant


def mean_states(limit):
    fabric = launched()
    mine, one, whole = Averaged(), Averaged(), Averaged(constant=3)
    for rank, updates in enumerate((1, 3, 0)):
        for step in range(updates):
            for metric in [one] + [mine, whole] * (rank == fabric.global_rank):
                metric.update(torch.tensor([rank + 10.0 * step, 1.0]))
    with riding_up_to(limit):
        ours, integer = fabric.compute_metrics((mine, whole))
    close(ours[0], one.mean)
    assert ours[1].item() == torch.tensor(0.1).item(), "the mean of equal numbers is that number"
    assert integer[1].dtype is torch.int64
    whole.constant += fabric.global_rank
    return fabric.compute_metrics(whole)[1]


@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0])
def test_means_are_weighted_by_updates(ranks, limit):
    values = ranks.run(mean_states, limit, world_size=3)
    assert [value.item() for value in values] == [3.75] * 3  # (1 * 3 + 3 * 4) / 4


class Reduced(Metric):
    """The metric's own reduction, of a tensor and of a list; and a tensor without one."""

    def __init__(self):
        super().__init__(sync_on_compute=False)
        self.add_state("tensor", torch.zeros(2), self.widest)
        self.add_state("entries", [], self.longest)
        self.add_state("raw", torch.zeros(2), None)

    @staticmethod
    def widest(stacked):
        assert stacked.shape[1:] == (2,)
        return (stacked.max(0).values - stacked.min(0).values) * 10 + len(stacked)

    @staticmethod
    def longest(entries):
        return [max(entries, key=len)]

    def update(self, value):
        self.tensor, self.raw = self.tensor + value, self.raw + value
        self.entries.append(torch.ones(int(value.sum())))

    def compute(self):
        return self.tensor, list(self.entries), self.raw


def own_reductions(limit):
    fabric = launched()
    metric, alone = Reduced(), Reduced()
    rank = fabric.global_rank
    if rank != 1:
        metric.update(torch.tensor([1.0, 2.0]) * (rank + 1))
    if rank == 1:
        alone.update(torch.tensor([1.0, 2.0]))
        alone.update(torch.tensor([1.0, 1.0]))
    with riding_up_to(limit):
        reduced, single = fabric.compute_metrics([metric, alone])
    alike(reduced[0], torch.tensor([22.0, 42.0]))
    alike(reduced[1], [torch.ones(9)])
    alike(reduced[2], torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    alike(single, (torch.tensor([2.0, 3.0]), [torch.ones(3), torch.ones(2)], torch.tensor([2.0, 3.0])))


@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0])
def test_own_reductions_get_the_ranks_that_updated(ranks, limit):
    ranks.run(own_reductions, limit, world_size=3)


class Odd(Metric):
    """States that are not what they were declared as."""

    def __init__(self):
        super().__init__(sync_on_compute=False)
        self.add_state("total", torch.zeros(2, 3), "sum")
        self.add_state("number", torch.tensor(0.0), "sum")
        self.add_state("joined", torch.zeros(0), "cat")
        self.add_state("listed", [], "cat")
        self.add_state("phase", torch.zeros(2, dtype=torch.complex64), "sum")

    def update(self, value, rank):
        self.total = (self.total.t() + value.t()).t()  # strided
        self.number = float(self.number) + 1
        self.joined = torch.cat([self.joined, value[0]])
        self.listed.append(value[:, 0])
        if rank == 1:
            self.listed = torch.cat(self.listed)  # a tensor where other ranks have a list
            self.total = self.total.double()
        self.phase = (self.phase + value[0, :2]).conj()

    def compute(self):
        listed = self.listed if isinstance(self.listed, torch.Tensor) else torch.cat(list(self.listed))
        return self.total, self.number + torch.zeros(()), self.joined, listed, self.phase


def odd_states(limit):
    fabric = launched()
    metric = Odd()
    with torch.inference_mode():  # evaluation
        metric.update(torch.arange(6.0).view(2, 3) + fabric.global_rank, fabric.global_rank)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), riding_up_to(limit):
            total, number, joined, listed, phase = fabric.compute_metrics(metric)
        alike(total, torch.arange(6.0, dtype=torch.float64).view(2, 3) * 3 + 3)
        assert number.item() == 3.0
        assert joined.tolist() == [0.0, 1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
        assert listed.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
        assert phase.tolist() == [3, 6]
    assert metric.number == 1.0


@pytest.mark.parametrize("limit", [frames.PACK_LIMIT, 0])
def test_states_that_became_something_else(ranks, limit):
    ranks.run(odd_states, limit, world_size=3)


# how many messages


def count_messages():
    fabric = launched()
    names = ("Accuracy", "Precision", "Recall", "F1Score", "Specificity", "StatScores", "HammingDistance")
    names = (*names, "ConfusionMatrix", "CohenKappa", "AUROC")
    ten = {name: getattr(classification, f"Multiclass{name}")(num_classes=5) for name in names}
    means = [MeanMetric() for _ in range(30)]
    for metric in ten.values():
        metric.update(torch.rand(40, 5).softmax(1), torch.randint(5, (40,)))
    for metric in means:
        metric.update(fabric.global_rank)
    predictions = BinaryAUROC()
    predictions.update(torch.rand(5000), torch.randint(2, (5000,)))
    large = [SumMetric() for _ in range(2)] + [MaxMetric()]
    for metric in large:
        metric.update(1.0)
        setattr(metric, metric.state_name, torch.ones(frames.PACK_LIMIT // 8))
    predictions_too = BinaryAUROC()
    predictions_too.update(torch.rand(50_000), torch.randint(2, (50_000,)))
    counts = []
    with about_updates_only():
        for metrics in (ten, means, predictions, large, [*large, predictions_too, *means], {}):
            with counted() as calls:
                fabric.compute_metrics(metrics)
            counts.append(dict(calls))
    return counts


def test_messages(ranks):
    expected = [
        {"frame": 1},  # ten metrics ride in the frame
        {"frame": 1},
        {"frame": 1, FLAT: 1},  # sizes, data
        {"frame": 3, "all_reduce": 2},  # layout; two ops with a frame each
        {"frame": 3, FLAT: 1, "all_reduce": 2},
        {"frame": 1},
    ]
    assert ranks.run(count_messages, world_size=2) == [expected, expected]


def compute_alone():
    fabric = launched(1)
    metric = PearsonCorrCoef()  # would stack its states, did torchmetrics synchronise them
    metric.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 3.0]))
    with counted() as calls:
        value = fabric.compute_metrics({"a": [metric]})
    assert not calls
    assert value["a"][0].shape == ()
    with pytest.raises(ArgumentTypeError, match=r"metrics\['a'\]\[0\] is int: 3"):
        fabric.compute_metrics({"a": [3]})
    return value["a"][0].item()


def test_a_world_of_one_sends_nothing(ranks):
    assert ranks.run(compute_alone, world_size=1) == [pytest.approx(0.7559289)]


# local before and after


def used_on():
    """Updates, values, forward and reset go on as if nothing had happened."""
    fabric = launched()
    rank = fabric.global_rank
    collection = MetricCollection([MeanMetric(**LOCAL), SumMetric(**LOCAL)], prefix="val_", postfix="_x")
    auroc = BinaryAUROC(**LOCAL)
    for step in range(3):
        collection.update(float(rank + step))
        auroc.update(torch.tensor([0.1, 0.4, 0.6]), torch.tensor([0, 1, rank]))
        local = collection.compute(), auroc.compute()
        value = fabric.compute_metrics(collection)
        both = sum([r + s for r in range(2) for s in range(step + 1)])
        assert value.keys() == {"val_MeanMetric_x", "val_SumMetric_x"}
        assert value["val_SumMetric_x"].item() == both
        assert value["val_MeanMetric_x"].item() == pytest.approx(both / (2 * step + 2))
        alike((collection.compute(), auroc.compute()), local)
        assert collection["SumMetric"]._computed.item() == local[0]["val_SumMetric_x"].item()
        again = fabric.compute_metrics([collection, {"a": auroc, "b": auroc}])
        alike(again[0], value)
        alike(again[1]["a"], again[1]["b"])
        alike((collection.compute(), auroc.compute()), local)
    auroc.forward(torch.tensor([0.9, 0.2]), torch.tensor([1, 0]))
    assert sum([len(entry) for entry in auroc.preds]) == 11
    collection.reset()
    collection.update(1.0)
    assert fabric.compute_metrics(collection)["val_SumMetric_x"].item() == 2.0


def test_metrics_stay_usable_and_local(ranks):
    ranks.run(used_on, world_size=2)


def without_updates():
    fabric = launched()
    metric = SumMetric(**LOCAL)
    with pytest.warns(UserWarning, match="SumMetric was called before the ``update`` method"):
        value = fabric.compute_metrics(metric)
    assert value.item() == 0.0
    for compute in (fabric.compute_metrics, lambda metric: metric.compute()):
        with pytest.warns(UserWarning, match="before the"), pytest.raises(ValueError, match="No samples"):
            compute(BinaryAUROC(**LOCAL))


def test_never_updated_anywhere_is_as_on_one_process(ranks):
    ranks.run(without_updates, world_size=2)


class Failing(SumMetric):
    def compute(self):
        if self.sum_value.item() == 3.0 and torch.distributed.get_rank() == self.where:
            raise ArithmeticError("only here")
        return super().compute()


def failing_on_one_rank():
    fabric = launched()
    metric = Failing(**LOCAL)
    metric.where = 1
    metric.update(fabric.global_rank + 1.0)
    before = snapshot(metric)
    if fabric.global_rank == 1:
        with pytest.raises(ArithmeticError):
            fabric.compute_metrics(metric)
    else:
        assert fabric.compute_metrics(metric).item() == 3.0
        metric._computed = None
    untouched(before, snapshot(metric))
    metric.where = -1
    assert fabric.compute_metrics(metric).item() == 3.0
    assert metric.compute().item() == fabric.global_rank + 1


def test_an_error_in_compute_leaves_metric_and_group_usable(ranks):
    ranks.run(failing_on_one_rank, world_size=2)


# collections and wrappers


def threshold_pair(compute_groups=True):
    """Two metrics with equal states as long as no prediction lies between 0.5 and 0.6."""
    pair = {"a": BinaryStatScores(**LOCAL), "b": BinaryStatScores(threshold=0.6, **LOCAL)}
    return MetricCollection(pair, compute_groups=compute_groups)


def grouped_by_chance():
    fabric = launched()
    rank = fabric.global_rank
    plain, between = torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0.1, 0.55, 0.55])
    target = torch.tensor([0, 1, 1])
    mine, one = threshold_pair(), threshold_pair(compute_groups=False)
    for place, preds in enumerate((plain, between)):
        one.update(preds, target)
        if place == rank:
            mine.update(preds, target)
    groups = mine.compute_groups
    assert len(groups) == 1 + rank, "rank 0 took both for one"
    alike(fabric.compute_metrics(mine), one.compute())
    assert mine.compute_groups is groups
    mine["a"]  # torchmetrics now holds copies of the states
    alike(fabric.compute_metrics(mine), one.compute())

    mine.update(between, target)  # on rank 0, of "a" alone
    with pytest.raises(UsageError, match=r"only 'a' in place of 'b' on rank 0.*compute_groups=False"):
        fabric.compute_metrics(mine)
    assert fabric.all_reduce(1.0, reduce_op="sum").item() == 2.0, "the group is usable"

    apart, one = threshold_pair(compute_groups=False), threshold_pair(compute_groups=False)
    for place, preds in ((0, plain), (0, between), (1, between), (1, plain)):
        one.update(preds, target)
        if place == rank:
            apart.update(preds, target)
    alike(fabric.compute_metrics(apart), one.compute())


def test_compute_groups_that_were_equal_by_chance(ranks):
    ranks.run(grouped_by_chance, world_size=2)


def grouped_rightly():
    fabric = launched()
    settings = {"num_classes": 3, **LOCAL}
    kinds = (
        classification.MulticlassPrecision,
        classification.MulticlassRecall,
        classification.MulticlassAUROC,
    )

    def made(groups):
        return MetricCollection([kind(**settings) for kind in kinds], compute_groups=groups)

    everyone = [
        made(True),
        made([["MulticlassPrecision", "MulticlassRecall"], ["MulticlassAUROC"]]),
        made(False),
    ]
    one = made(False)
    g = torch.Generator().manual_seed(0)
    for step in range(3):
        for rank in range(fabric.world_size):
            preds, target = torch.rand(9, 3, generator=g).softmax(1), torch.randint(3, (9,), generator=g)
            if rank == 2 and step < 2:
                continue  # idle at first
            one.update(preds, target)
            for collection in everyone if rank == fabric.global_rank else []:
                collection.update(preds, target)
        with about_updates_only():
            for value in fabric.compute_metrics(everyone):
                close(value, one.compute())


@pytest.mark.parametrize("world_size", [2, 3])
def test_collections_with_and_without_groups(ranks, world_size):
    ranks.run(grouped_rightly, world_size=world_size)


def wrapped():
    """Name to a function that makes it, and the arguments of its update for a generator."""

    def three(g):
        return torch.rand(6, 3, generator=g).softmax(1), torch.randint(3, (6,), generator=g)

    def two(g):
        return torch.rand(6, 2, generator=g), torch.rand(6, 2, generator=g)

    def tasks(g):
        (a, b), (c, d) = three(g), (torch.rand(6, generator=g), torch.rand(6, generator=g))
        return {"class": a, "real": c}, {"class": b, "real": d}

    accuracy = lambda **kwargs: classification.MulticlassAccuracy(num_classes=3, **LOCAL, **kwargs)  # noqa: E731
    error = lambda: MeanSquaredError(**LOCAL)  # noqa: E731
    pair = lambda: MetricCollection({"mse": error(), "r2": R2Score(**LOCAL)})  # noqa: E731
    inputs = {"BinaryTargetTransformer": lambda g: (torch.rand(6, generator=g), torch.randn(6, generator=g))}
    makes = {
        "ClasswiseWrapper": lambda: wrappers.ClasswiseWrapper(accuracy(average=None), labels=["x", "y", "z"]),
        "ClasswiseWrapper of means": lambda: wrappers.ClasswiseWrapper(Averaged()),
        "in a collection": lambda: MetricCollection(
            {"c": wrappers.ClasswiseWrapper(accuracy(average=None)), "a": accuracy()},
            compute_groups=False,  # with them torchmetrics forgets to drop the old value inside the wrapper
        ),
        "MinMaxMetric": lambda: wrappers.MinMaxMetric(accuracy()),
        "CompositionalMetric": lambda: accuracy() + 2 * accuracy(average="micro"),
        "MetricTracker": lambda: wrappers.MetricTracker(accuracy()),
        "MultioutputWrapper": lambda: wrappers.MultioutputWrapper(R2Score(**LOCAL), 2),
        "MultitaskWrapper": lambda: wrappers.MultitaskWrapper({"class": accuracy(), "real": pair()}),
        "BinaryTargetTransformer": lambda: wrappers.BinaryTargetTransformer(BinaryAUROC(**LOCAL)),
        "BootStrapper": lambda: wrappers.BootStrapper(accuracy(), num_bootstraps=4, raw=True),
    }
    special = {
        "MultioutputWrapper": two,
        "ClasswiseWrapper of means": lambda g: (torch.rand(2, generator=g),),
        "MultitaskWrapper": tasks,
        **inputs,
    }
    return {name: (make, special.get(name, three)) for name, make in makes.items()}


def wrappers_against_one_process():
    fabric = launched()
    rank = fabric.global_rank
    for name, (make, inputs) in wrapped().items():
        mine, one = make(), make()
        if name == "MetricTracker":
            mine.increment(), mine.increment(), one.increment()
            for metric in (mine, one):
                metric.increment()
        for turn in range(2):
            for place in (0, 1):  # rank 2 is idle
                args = inputs(torch.Generator().manual_seed(10 * place + turn))
                for metric in [one] + [mine] * (place == rank):
                    torch.manual_seed(place + 5 * turn)  # for the bootstrap's own numbers
                    metric.update(*args)
            before = [snapshot(mine)] if name != "MetricTracker" else []
            with about_updates_only():
                ours, expected = fabric.compute_metrics(mine), one.compute()
            try:
                close(ours, expected)
                everywhere_alike(ours)
                for old in before:
                    untouched(old, snapshot(mine))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_wrappers_give_the_value_of_one_process(ranks):
    ranks.run(wrappers_against_one_process, world_size=3)


def test_no_wrapper_is_left_out():
    tested = {name.removeprefix("in a collection") for name in wrapped()} | {"Running"}
    base = {"MetricInputTransformer", "LambdaInputTransformer"}  # of BinaryTargetTransformer
    network = {"FeatureShare"}  # a collection; needs a network
    assert set(wrappers.__all__) - base - network <= tested


# refusals


def synced():
    metric = MeanMetric()
    metric._is_synced = True
    return metric


def unpicklable():
    metric = Kept()
    metric.update(torch.ones(2), text=lambda: None)
    return metric


REFUSALS = {
    "no metric": (lambda: {"a": [MeanMetric(), 3]}, ArgumentTypeError, r"metrics\['a'\]\[1\] is int: 3"),
    "a class": (lambda: MeanMetric, ArgumentTypeError, "metrics is .*MeanMetric"),
    "a step": (
        lambda: wrappers.MetricTracker(MeanMetric(), maximize=True),
        UsageError,
        r"Call tracker.increment\(\) first",
    ),
    "synced": (synced, UsageError, r"MeanMetric has the states of all ranks.*unsync"),
    "unpicklable": (unpicklable, ArgumentTypeError, "state 'texts' of Kept.*cannot be pickled"),
}


def refused(name):
    fabric = launched()
    make, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        fabric.compute_metrics(make())
    # On one rank only: the other hears of it.
    bad = fabric.global_rank == 1
    with pytest.raises(CollectiveMismatch, match=r"(?s)Rank 1 refused.*" + message):
        fabric.compute_metrics(make() if bad else MeanMetric())
    fabric.barrier()


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(ranks, name):
    ranks.run(refused, name, world_size=2)


def mismatched():
    fabric = launched()
    rank = fabric.global_rank
    accuracy = lambda n: classification.MulticlassAccuracy(num_classes=n, **LOCAL)  # noqa: E731
    pairs = [
        (MeanMetric(), SumMetric()),
        ({"a": MeanMetric()}, {"b": MeanMetric()}),
        ({"a": MeanMetric()}, MetricCollection({"a": MeanMetric()})),
        (MetricCollection([MeanMetric()], prefix="x"), MetricCollection([MeanMetric()], prefix="y")),
        ([MeanMetric()], [MeanMetric(), MeanMetric()]),
        (accuracy(3), accuracy(4)),
        (wrappers.MinMaxMetric(MeanMetric()), wrappers.MinMaxMetric(SumMetric())),
    ]
    for pair in pairs:
        with pytest.raises(CollectiveMismatch, match=r"compute_metrics.* with different data"):
            fabric.compute_metrics(pair[rank])
        assert not _inside(pair[rank])[0]._is_synced if hasattr(pair[rank], "_modules") else True
    with pytest.raises(CollectiveMismatch, match="different calls"):
        fabric.compute_metrics(MeanMetric()) if rank else fabric.barrier()
    shapes = Kept()
    shapes.update(torch.ones(2) if rank else torch.ones(3, 2))
    with pytest.raises(CollectiveMismatch, match=r"'total' of Kept.*rank 0: \[3, 2\], rank 1: \[2\]"):
        fabric.compute_metrics(shapes)
    total = SumMetric()
    total.update(1.0)
    assert fabric.compute_metrics(total).item() == 2.0


def test_different_metrics_are_one_error_on_all_ranks(ranks):
    ranks.run(mismatched, world_size=2)


# devices


def states_on_a_device():
    fabric = launched()
    rank = fabric.global_rank
    for limit in (frames.PACK_LIMIT, 0):
        metrics = [Kept().to("cuda"), BinaryAUROC(compute_on_cpu=True, **LOCAL).to("cuda")]
        if rank == 0:
            metrics[0].update(torch.ones(2, device="cuda"), torch.ones(3, device="cuda"))
        metrics[1].update(torch.rand(4, device="cuda"), torch.tensor([0, 1, 1, 0], device="cuda"))
        with riding_up_to(limit):
            value, score = fabric.compute_metrics(metrics)
        assert {leaf.device.type for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)} == {"cuda"}
        assert score.device.type == "cpu"
        assert metrics[0].total.device.type == "cuda"


@pytest.mark.gpu
def test_states_stay_on_their_device(ranks):
    ranks.run(states_on_a_device, world_size=2)
