"""Buffers on several ranks: alike by name; caches that grow stay each rank's own; `rank_local`; a warning."""

from __future__ import annotations

import copy
import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies import ModelParallelStrategy
from fabric.strategies.buffers import rank_local_names, shared_buffers
from fabric.utilities.warnings import PossibleUserWarning

LAYOUTS = [
    *product(["ddp", "zero1", "zero2", "fsdp"], [2, 3]),
    ("local_sgd", 2),
    ("mesh", 2),
    ("pipeline", 2),
]
TRAINED = [*product(["ddp", "zero1", "fsdp"], [2, 3])]
BATCH = torch.arange(6 * 4, dtype=torch.float64).view(6, 4).sin()


def launched(strategy):
    if strategy == "mesh":
        strategy = ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def train(fabric, model, optimizer, steps=3):
    """Two rows, or three, of six on each rank; the batch is the same in each step."""
    for _ in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(BATCH[fabric.global_rank :: fabric.world_size]).square().mean())
        optimizer.step()


def plain(model, steps=3):
    """The weights that plain torch makes of the joined batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()
    return model.state_dict()


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x)


class Table(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("table", torch.full((4,), value, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return x + self.table


class Ordered(nn.Sequential):
    """Buffers of one module, and modules with a buffer each, in another order on odd ranks."""

    def __init__(self, turned):
        tables = nn.ModuleDict({name: Table(ord(name)) for name in sorted("ab", reverse=turned)})
        tables.forward = lambda x: x + tables["a"].table - tables["b"].table
        super().__init__(Linear(), tables)
        for name in sorted(("full", "sliding"), reverse=turned):
            self[0].register_buffer(name, torch.full((4,), float(len(name)), dtype=torch.float64))


def by_name(strategy):
    fabric = launched(strategy)
    odd = fabric.global_rank % 2 == 1
    model = Ordered(odd)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    there = {name: b for name, b in model.named_buffers() if b.numel()}
    at_setup = {name: b.tolist() for name, b in there.items()}
    if odd:
        for buffer in there.values():
            buffer.zero_()
    if strategy != "pipeline":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            train(fabric, model, optimizer, steps=1)
            if strategy == "local_sgd":
                fabric.strategy.end_round()
    return at_setup, {name: b.tolist() for name, b in there.items()}


@pytest.mark.parametrize(("strategy", "world_size"), LAYOUTS)
def test_buffers_are_sent_by_name(ranks, strategy, world_size):
    wanted = {"0.full": 4.0, "0.sliding": 7.0, "1.a.table": 97.0, "1.b.table": 98.0}
    found = ranks.run(by_name, strategy, world_size=world_size)
    assert {name for at_setup, _ in found for name in at_setup} == set(wanted)
    for at_setup, after in found:
        assert at_setup == {name: [wanted[name]] * 4 for name in at_setup}
        if strategy not in ("pipeline", "local_sgd"):  # one is not trained, the other takes the mean
            assert after == at_setup


def refused(strategy, what):
    fabric = launched(strategy)
    model, rank = Linear(), fabric.global_rank
    if what == "shape":
        model.register_buffer("positions", torch.zeros(5 + 2 * (rank == 1)))
    elif what == "dtype":
        model.register_buffer("positions", torch.zeros(5, dtype=torch.int64 if rank == 1 else torch.float32))
    elif rank == 1:
        model.register_buffer("positions", torch.zeros(5))
    with pytest.raises(UsageError) as error:
        fabric.setup(model)
    fabric.setup(Linear())  # the ranks still agree on where they are
    return str(error.value)


@pytest.mark.parametrize(("strategy", "world_size"), TRAINED)
@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("shape", "0{}: float32[5] | 1: float32[7]"),
        ("dtype", "0{}: float32[5] | 1: int64[5]"),
        ("name", "0{}: missing | 1: float32[5]"),
    ],
)
def test_other_buffers_are_an_error_that_names_the_first(ranks, strategy, world_size, what, values):
    found = ranks.run(refused, strategy, what, world_size=world_size)
    text = (
        f"Buffer positions of Linear differs between ranks ({values.format(', 2' * (world_size == 3))}). "
        "Rank zero's values are broadcast, so shapes must be equal. Register it with the same shape on all "
        'ranks, or exclude it from the broadcast: fabric.setup(model, rank_local=("positions",)).'
    )
    assert found == [text] * world_size


class Rotary(Linear):
    """A cache that grows with the longest sequence that this rank has read; a shared scale beside it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.arange(2.0, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def grow(self, how, length):
        grown = torch.arange(float(length), dtype=torch.float64)
        if how == "replaced":
            self.cache = grown
        elif how == "data":
            self.cache.data = grown
        elif how == "dtype":
            self.cache = grown[:2].float()
        else:
            self.register_buffer("late", grown, persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale + self.cache[:2].sum()


def growing(strategy, how, growing_rank):
    fabric = launched(strategy)
    model = Rotary()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if fabric.global_rank == growing_rank:
            model.module.grow(how, 5 + step)
        train(fabric, model, optimizer, steps=1)
    weights = copy.deepcopy(model.state_dict())
    if fabric.global_rank:
        model.scale.fill_(9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        train(fabric, model, optimizer, steps=1)
    return weights, {name: b for name, b in model.named_buffers() if name != "scale"}, model.scale.item()


@pytest.mark.parametrize(("strategy", "world_size"), TRAINED)
@pytest.mark.parametrize("how", ["replaced", "data", "dtype", "late"])
@pytest.mark.parametrize("growing_rank", [0, 1])
def test_a_cache_that_grows_on_a_rank_is_left_to_each(ranks, strategy, world_size, how, growing_rank):
    wanted = plain(Rotary())
    found = ranks.run(growing, strategy, how, growing_rank, world_size=world_size)
    for rank, (weights, held, scale) in enumerate(found):
        torch.testing.assert_close(weights, wanted)
        assert scale == 2.0
        cache = torch.arange(2.0, dtype=torch.float64)
        if rank == growing_rank:
            grown = torch.arange(7.0, dtype=torch.float64)
            late = {"late": grown} if how == "late" else {}
            cache = {"late": cache, "dtype": cache.float()}.get(how, grown)
            assert held.keys() == {"cache", *late}
            assert not late or torch.equal(held["late"], grown)
        assert held["cache"].dtype == cache.dtype
        assert torch.equal(held["cache"], cache)


class Own(Rotary):
    """Of each rank: a cache, and two buffers of a part; shared: a scale."""

    def __init__(self, rank):
        super().__init__()
        self.cache = torch.arange(2.0 + rank, dtype=torch.float64)
        self.part = Table(float(rank))
        self.part.register_buffer("other", torch.tensor(10.0 * rank))


def rank_local(strategy, empty):
    fabric = launched(strategy)
    rank = fabric.global_rank
    with fabric.init_module(empty_init=empty):
        model = Own(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer, rank_local=("cache", "part.*"))
    assert rank_local_names(model.module) == {"cache", "part.table", "part.other"}
    assert list(shared_buffers(model.module)) == ["scale"]
    at_setup = {name: b.tolist() for name, b in model.named_buffers()}
    train(fabric, model, optimizer)
    copied = copy.deepcopy(model) if strategy == "ddp" else model
    copied.part.other += 1.0
    train(fabric, copied, optimizer, steps=1)
    return at_setup, {name: b.tolist() for name, b in copied.named_buffers()}


@pytest.mark.parametrize(("strategy", "world_size"), LAYOUTS[:-1])
def test_a_rank_keeps_its_rank_local_buffers(ranks, strategy, world_size):
    for rank, (at_setup, after) in enumerate(ranks.run(rank_local, strategy, False, world_size=world_size)):
        own = {"cache": [*map(float, range(2 + rank))], "part.table": [float(rank)] * 4, "scale": 2.0}
        assert at_setup == {**own, "part.other": 10.0 * rank}
        assert after == {**own, "part.other": 10.0 * rank + 1}


@pytest.mark.parametrize("strategy", ["fsdp", "mesh"])
def test_rank_local_buffers_without_memory_get_their_own_values(ranks, strategy):
    found = ranks.run(rank_local, strategy, True, world_size=2)
    assert [at_setup["cache"] for at_setup, _ in found] == [[0.0, 1.0], [0.0, 1.0, 2.0]]
    assert [at_setup["part.table"] for at_setup, _ in found] == [[0.0] * 4, [1.0] * 4]


def stages():
    fabric = launched("pipeline")
    model = nn.Sequential(Linear(), Table(float(fabric.global_rank)), Linear())
    model = fabric.setup(model, rank_local="1.table")
    return [b.tolist() for b in model.buffers() if b.numel()]


def test_a_stage_keeps_its_rank_local_buffers(ranks):
    stage = 1
    assert ranks.run(stages, world_size=2)[stage] == [[1.0] * 4]


@pytest.mark.parametrize(
    ("given", "named"),
    [(("positions",), "'positions'"), ("cach", "'cach'"), (5, "5"), (("cache", None), "None")],
)
def test_rank_local_names_buffers(given, named):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    for setup in (fabric.setup, fabric.setup_module):
        with pytest.raises(ConfigurationError) as error:
            setup(Rotary(), rank_local=given)
        assert str(error.value) == (
            f"rank_local={named} matches no buffer of Rotary. Its buffers are: cache, scale. Write these "
            "names, or patterns: rank_local=('cache.*',)."
        )


def test_rank_local_of_another_setup_is_forgotten():
    model = Rotary()
    for given, wanted in ((("*",), {"cache", "scale"}), ((), set())):
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        fabric.setup(model, rank_local=given)
        assert rank_local_names(model) == wanted


class Codes(Linear):
    """A mean over the rows of a batch and a count of them, by `.data`, in place, or as a new tensor."""

    def __init__(self, how="in place", reduce=lambda mean, count: (mean, count)):
        super().__init__()
        self.how, self.reduce = how, reduce
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64, affine=False)
        self.codes = nn.Module()
        self.codes.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.codes.register_buffer("seen", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.norm(x)
        if self.training:
            mean, count = self.reduce(x.mean(0), len(x))
            self.calls += 1
            self.codes.seen += count
            if self.how == "data":
                self.codes.mean.data.add_(mean)
            elif self.how == "in place":
                self.codes.mean += mean
            else:
                self.codes.mean = self.codes.mean + mean
        return self.layer(x - self.codes.mean)


WARNING = (
    "forward changed buffers of Codes by each rank's part of the batch: codes.mean, codes.seen. All ranks "
    "got rank zero's values; one process has those of the whole batch. Reduce the update over ranks in "
    "forward (mean = fabric.all_reduce(x.mean(0))), or exclude the buffers from the broadcast: "
    "fabric.setup(model, rank_local=('codes.mean', 'codes.seen'))."
)


def warned(strategy, how, first=0, local=()):
    """The warnings of buffers in a loop whose forwards change them from step `first` on."""
    fabric = launched(strategy)
    model = Codes(how)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), rank_local=local)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            model.train(step >= first)
            train(fabric, model, optimizer, steps=1)
    return [str(w.message) for w in caught if issubclass(w.category, PossibleUserWarning)]


@pytest.mark.parametrize(("strategy", "world_size"), TRAINED)
@pytest.mark.parametrize("how", ["data", "in place", "new"])
def test_buffers_that_hold_a_part_of_the_batch_are_warned_of_once(ranks, strategy, world_size, how):
    assert ranks.run(warned, strategy, how, world_size=world_size) == [[WARNING]] + [[]] * (world_size - 1)


def test_the_warning_comes_in_the_first_training_steps_after_evaluation(ranks):
    assert ranks.run(warned, "ddp", "new", 2, world_size=2) == [[WARNING], []]


def test_nobody_is_warned_of_rank_local_buffers(ranks):
    assert ranks.run(warned, "ddp", "data", 0, ("codes.*",), world_size=2) == [[], []]


def reduced(strategy):
    """All warnings are errors here."""
    fabric = launched(strategy)
    model = Codes(reduce=lambda mean, n: (fabric.all_reduce(mean), fabric.all_reduce(n, reduce_op="sum")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    train(fabric, model, optimizer)
    return {name: value for name, value in model.state_dict().items() if "norm" not in name}


@pytest.mark.parametrize(("strategy", "world_size"), TRAINED)
def test_what_the_warning_says_is_one_process(ranks, strategy, world_size):
    wanted = {name: value for name, value in plain(Codes()).items() if "norm" not in name}
    for state in ranks.run(reduced, strategy, world_size=world_size):
        torch.testing.assert_close(state, wanted)
