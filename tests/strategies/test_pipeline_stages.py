"""What a pipeline does beside training: balance, states, outputs on one stage, refusals, stages that fail."""

import contextlib
import copy
import io
import re
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import (
    ArgumentTypeError,
    ConfigurationError,
    RankError,
    UsageError,
)
from fabric.strategies import PipelineStrategy
from fabric.strategies.pipeline.cut import partition


class Net(nn.Module):
    """Five blocks, the first and the last of which share a weight; a buffer that changes, and one that does
    not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.tensor(3.0))

    def pipeline_blocks(self):
        return [self.first, self.norm, self.second, self.last]

    def forward(self, x):
        return self.last(self.second(self.norm(self.first(x))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def deep(count=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def start(strategy=None, precision=None, **settings):
    strategy = strategy or PipelineStrategy(**settings)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    warnings.filterwarnings("ignore", message=".*batch norm, spectral norm and")
    return fabric


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


# Balance


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1] * 8, 2, [4, 4]),
        ([1] * 7, 3, [2, 2, 3]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([5, 1, 1, 1, 1, 5], 3, [1, 4, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([0, 0, 7, 0], 2, None),
        ([3], 1, [3 // 3]),
    ],
)
def test_partition(costs, stages, expected):
    found = partition(costs, stages)
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert expected is None or sorted(found) == sorted(expected)


def test_partition_is_the_best_there_is():
    import itertools
    import random

    source = random.Random(0)
    for _ in range(60):
        costs = [source.choice([0.1, 1.0, 2.5, 7.0]) for _ in range(source.randint(3, 9))]
        stages = source.randint(1, 3)

        def dearest(sizes, costs=costs):
            ends = list(itertools.accumulate(sizes))
            return max([sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)])

        every = [
            sizes
            for sizes in itertools.product(range(1, len(costs) + 1), repeat=stages)
            if sum(sizes) == len(costs)
        ]
        assert dearest(partition(costs, stages)) == pytest.approx(min([dearest(sizes) for sizes in every]))


def balances():
    """By parameters the large layer is one half, wherever values are."""
    found, said = [], io.StringIO()
    for empty in (False, True):
        fabric = start(num_stages=2)
        torch.manual_seed(0)
        with fabric.init_module(empty_init=empty):
            model = nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 4), nn.Linear(4, 4), nn.ReLU())
        with contextlib.redirect_stderr(said):
            fabric.setup(model)
        found.append(fabric.strategy.balance)
    fabric = start(balance=[3, 1])
    model = fabric.setup(deep())
    return [*found, fabric.strategy.balance, [not p.numel() for p in model.parameters()], said.getvalue()]


def test_the_balance_is_by_parameters(ranks):
    found, other = ranks.run(balances, world_size=2)
    assert found[:3] == [[1, 3], [1, 3], [3, 1]]
    assert found[:3] == other[:3]
    assert found[3] == [False] * 6 + [True] * 2
    assert other[3] == [True] * 6 + [False] * 2
    said = found[4].splitlines()
    assert len(said) == 2
    assert "balance=[1, 3]; parameters of the stages: 20,480, 16,408." in said[0]
    assert other[4] == ""  # rank zero says it


# States


def states(path):
    fabric = start(balance=[2, 1, 1] if dist.get_world_size() == 3 else [1, 3], num_microbatches=1)
    plain, model = net(), net()
    if fabric.global_rank:  # rank zero's values count
        nn.init.zeros_(model.second.weight)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    model, own = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for _ in range(3):
        for m, o, backward in ((plain, optimizer, torch.Tensor.backward), (model, own, fabric.backward)):
            o.zero_grad()
            backward(m(X).pow(2).mean())
            o.step()
    assert_states(model.state_dict(), plain.state_dict())
    fabric.save(path, {"model": model, "optimizer": own, "step": 3})
    fabric.barrier()
    fresh = net(1)
    fresh, other = fabric.setup(fresh, torch.optim.Adam(fresh.parameters(), lr=0.1))
    state = {"model": fresh, "optimizer": other, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 3
    assert_states(fresh.state_dict(), plain.state_dict())
    assert_states(other.state_dict()["state"][0], optimizer.state_dict()["state"][0])
    fresh.load_state_dict({key: torch.zeros_like(value) for key, value in plain.state_dict().items()})
    assert not any([value.any() for value in fresh.state_dict().values()])
    fabric.load(path, {"model": fresh}, strict=False)
    for m, o in ((model, own), (fresh, other)):
        o.zero_grad()
        fabric.backward(m(X).pow(2).mean())
        o.step()
    assert_states(fresh.state_dict(), model.state_dict())
    one, two = fresh.pipeline_blocks()[0], fresh.pipeline_blocks()[-1]
    return [None if not p.numel() else p.tolist() for p in (one.weight, two.weight)]


def assert_states(got, expected):
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(got[key], value, atol=1e-6), key


@pytest.mark.parametrize("world_size", [2, 3])
def test_states_are_those_of_the_whole_model(ranks, world_size, tmp_path):
    found = ranks.run(states, str(tmp_path / "saved.pt"), world_size=world_size)
    assert found[0][0] == found[-1][1]  # tied to the bit, on two stages
    assert found[0][0] is not None


def loads(path, strategy):
    settings = {"balance": [2, 2], "num_microbatches": 2} if strategy == "pipeline" else None
    fabric = start(PipelineStrategy(**settings) if settings else strategy)
    model = net(5)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    fabric.backward(model(X).pow(2).mean())
    optimizer.step()
    if path.endswith("none.pt"):
        fabric.save(path.replace("none", strategy), {"model": model, "optimizer": optimizer})
    else:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    state = optimizer.state_dict()["state"]
    return dict(model.state_dict()), {number: entry["exp_avg"] for number, entry in state.items()}


@pytest.mark.parametrize(
    ("writer", "reader"), [("pipeline", "ddp"), ("ddp", "pipeline"), ("pipeline", "zero3")]
)
def test_checkpoints_go_to_other_strategies_and_back(ranks, tmp_path, writer, reader):
    saved = ranks.run(loads, str(tmp_path / "none.pt"), writer, world_size=2)[0]
    for found in ranks.run(loads, str(tmp_path / f"{writer}.pt"), reader, world_size=2):
        for got, expected in zip(found, saved, strict=True):
            assert_states(got, expected)
    if writer == "pipeline":  # and to plain torch
        read = torch.load(tmp_path / "pipeline.pt", weights_only=True)
        model = net(9)
        model.load_state_dict(read["model"])
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(read["optimizer"])
        assert_states(model.state_dict(), saved[0])


def wrong_states():
    fabric = start(balance=[2, 2])
    model = fabric.setup(deep())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"3.weight".*Unexpected key\(s\).*"extra"'):
        model.load_state_dict({**{k: v for k, v in state.items() if k != "3.weight"}, "extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .*\[2, 2\].*\[4, 4\]"):
        model.load_state_dict({**state, "0.weight": torch.ones(2, 2)})
    found = model.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
    assert found.missing_keys == [key for key in state if key != "0.weight"]
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(model)


def test_states_that_do_not_fit(ranks):
    ranks.run(wrong_states, world_size=2)


def deferred():
    """Built without memory: the values of a plain construction, tied weights tied, on every stage."""
    fabric = start(balance=[1, 3])
    torch.manual_seed(4)
    with fabric.init_module(empty_init=True):
        model = Net()
    model.second.weight.data.normal_(std=0.02)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)  # has states at once
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(4)
    plain = Net()
    plain.second.weight.data.normal_(std=0.02)
    assert_states(model.state_dict(), plain.state_dict())
    states = optimizer.state_dict()["state"].values()
    assert [state["sum"].unique().tolist() for state in states] == [[0.5]] * len([*plain.parameters()])


def test_models_without_memory(ranks):
    ranks.run(deferred, world_size=2)


# What is refused


class Unlisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class Listing(Net):
    def __init__(self, listed) -> None:
        super().__init__()
        self.listed = listed

    def pipeline_blocks(self):
        return self.listed(self)


def stranger(model):
    return [*Net.pipeline_blocks(model), nn.Linear(4, 4)]


def lambdas(model):
    return [*Net.pipeline_blocks(model), torch.relu]


def incomplete(model):
    return [model.first, model.norm, model.last]


class Words(nn.Module):
    def forward(self, x):
        return "words"


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class Transposed(nn.Module):
    def forward(self, x):
        return x.T


def shared_norm():
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Linear(4, 4), norm)


def hooked():
    model = deep()
    model.register_forward_hook(lambda *_: None)
    return model


REFUSED = {
    "fewer blocks": (
        {},
        lambda: deep(1),
        ConfigurationError,
        "which cannot be put on 2 stages",
    ),
    "sum": (
        {"balance": [1, 2]},
        deep,
        ConfigurationError,
        r"on 2 stages by balance=\[1, 2\]",
    ),
    "not listed": ({}, Unlisted, ConfigurationError, "Unlisted is neither an nn.Sequential nor has it a"),
    "stranger": ({}, lambda: Listing(stranger), ArgumentTypeError, "Block 4 of Listing is no submodule"),
    "function": ({}, lambda: Listing(lambdas), ArgumentTypeError, "Block 4 of Listing is a builtin_function"),
    "incomplete": ({}, lambda: Listing(incomplete), ConfigurationError, "second.weight, second.bias of"),
    "buffers": ({"balance": [1, 2]}, shared_norm, UsageError, "are one buffer, used by stages 0 and 1"),
    "hooks": ({}, hooked, UsageError, "Sequential has forward or backward hooks, which"),
    "compiled": ({}, lambda: torch.compile(deep(), backend="eager"), UsageError, "Compile its blocks before"),
}


def refused(name):
    settings, make, kind, message = REFUSED[name]
    fabric = start(**settings)
    with pytest.raises(kind, match=message):
        fabric.setup(make())
    fabric.barrier()


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_cannot_be_cut(ranks, name):
    ranks.run(refused, name, world_size=2)


FAILS = {
    "words": (Words, UsageError, r"Block 2 \(2, a Words\) returned str \('words'\), which cannot be sent"),
    "mean": (Mean, UsageError, r"returned shapes \[\], \[\].* which cannot be joined"),
    "transposed": (
        Transposed,
        UsageError,
        r"returned shapes \[4, 1\], \[4, 2\] for micro-batches of 1, 2 rows",
    ),
}


def bad_outputs(name):
    kind, error, message = FAILS[name]
    fabric = start(balance=[2, 1], num_microbatches=4)
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), kind()))
    last = fabric.strategy.is_last_stage
    with pytest.raises(error if last or name != "words" else RankError, match=message):
        model(X)
    with pytest.raises(ConfigurationError, match="split into micro-batches along dim 0, but"):
        model((X, X[:3]))


@pytest.mark.parametrize("name", list(FAILS))
def test_outputs_that_cannot_go_on(ranks, name):
    ranks.run(bad_outputs, name, world_size=2)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"balance": [2, 0]}, ConfigurationError, r"balance\[1\]=0 must be 1 or more"),
        ({"balance": []}, ArgumentTypeError, r"balance=\[\] is neither"),
        ({"balance": "even"}, ArgumentTypeError, 'is neither "auto" nor a list'),
        ({"balance": 3}, ArgumentTypeError, "balance=3 is neither"),
        ({"balance": [1.0, 2]}, ArgumentTypeError, "must be"),
        ({"balance": [1, 2], "num_stages": 3}, ConfigurationError, "for 2 stages, but there are 3"),
        ({"num_microbatches": 0}, ConfigurationError, "num_microbatches=0 must be 1 or more"),
        ({"num_microbatches": 2.5}, ArgumentTypeError, "num_microbatches=2.5 must be a whole number"),
        ({"checkpoint": True}, ConfigurationError, "checkpoint=True is not one of 'always'"),
        ({"checkpoint": "alway"}, ConfigurationError, "is not one of 'always'"),
        ({"start_method": "thread"}, ConfigurationError, "start_method='thread' is unknown. Write one of"),
        (
            {"microbatches": 2},
            ConfigurationError,
            "no keyword 'microbatches'. Did you mean 'num_microbatches'",
        ),
    ],
)
def test_settings_that_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        PipelineStrategy(**settings)


def test_ranks_that_do_not_divide():
    with pytest.raises(ConfigurationError, match="3 ranks cannot be divided into pipelines of 2 stages"):
        Fabric(accelerator="cpu", devices=3, strategy=PipelineStrategy(balance=[1, 2]))
    with pytest.raises(ConfigurationError, match="16-mixed"):
        Fabric(accelerator="cpu", devices=2, strategy="pipeline", precision="16-mixed")


def misuse():
    fabric = start(balance=[2, 2], num_microbatches=2)
    model = deep()
    other = deep()
    with pytest.raises(UsageError, match="LBFGS"):
        fabric.setup(other, torch.optim.LBFGS(other.parameters()))
    model = fabric.setup(model)
    elsewhere = 2 if fabric.global_rank == 0 else 0
    with pytest.raises(UsageError, match=rf"Block {elsewhere} \({elsewhere}\) is on stage"):
        model.module[elsewhere](X)
    assert torch.equal(model.module(X), model(X))  # a method of the model may call self(x)
    with pytest.raises(UsageError, match=r"create_graph=True went through a pipeline"):
        fabric.backward(model(X).sum(), create_graph=True)
    loss = model(X).sum()
    fabric.backward(loss)
    with pytest.raises(UsageError, match="second backward went through one forward of Sequential"):
        fabric.backward(loss)
    with pytest.raises(ConfigurationError, match="reduction='max' is unknown"):
        model.pipeline_step(X, X, nn.functional.mse_loss, reduction="max")
    with pytest.raises(ArgumentTypeError, match="loss_fn=None is not a function"):
        model.pipeline_step(X, X, None)
    last = fabric.strategy.is_last_stage
    with pytest.raises(UsageError if last else RankError, match=r"loss_fn returned shape \[4, 4\]"):
        model.pipeline_step(X, X, lambda out, y: out - y)
    (model(X).sum() * float("nan")).backward()
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="of the whole model is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()


def test_misuse(ranks):
    ranks.run(misuse, world_size=2)


def batch_norm(count):
    fabric = start(balance=[1, 3], num_microbatches=count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric.setup(net())
    return [str(warning.message) for warning in caught]


def test_batch_norm_is_warned_of(ranks):
    (warning,), others = ranks.run(batch_norm, 4, world_size=2)
    assert re.match(
        r"The model has norm \(BatchNorm1d\)\. Batch norm, .* act in training once per micro-batch", warning
    )
    assert others == []
    assert ranks.run(batch_norm, 1, world_size=2) == [[], []]


# What a user may do in his loop


class Counting(nn.Module):
    """Counts rows in a buffer, and makes a constant of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += x.shape[0]
        return self.layer(x + torch.ones(4))


def computed_again(precision):
    fabric = start(balance=[1, 1], num_microbatches=4, checkpoint="always", precision=precision)
    model = fabric.setup(nn.Sequential(Counting(), Counting()))
    fabric.backward(model(X).mean())
    assert model.state_dict()["0.rows"] == 8
    assert model.state_dict()["1.rows"] == 8
    with torch.no_grad():
        model(X)
    return [value.item() for key, value in model.state_dict().items() if "rows" in key]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true", "bf16-mixed"])
def test_a_forward_that_is_computed_again_changes_nothing(ranks, precision):
    assert ranks.run(computed_again, precision, world_size=2) == [[16.0, 16.0]] * 2


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(0, 1)


def row_counts():
    """Flattened outputs of other lengths, batch norm on micro-batches of two rows, empty batches."""
    fabric = start(balance=[1, 2], num_microbatches=4)
    model, plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Flat()), deep(3)
    plain[0], plain[1] = copy.deepcopy(model[0]), copy.deepcopy(model[1])
    model = fabric.setup(model)
    for length in (5, 7, 2):
        x = torch.randn(8, length, 4, generator=torch.Generator().manual_seed(1))
        assert torch.allclose(model(x), plain[1](plain[0](x)).flatten(0, 1), atol=1e-6)
    normed = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    fabric.backward(normed(X).mean())
    assert normed.state_dict()["1.num_batches_tracked"] == 4
    chain = fabric.setup(deep(3))
    assert chain(torch.ones(0, 4)).shape == (0, 4)
    assert chain(X).shape == (8, 4)
    assert chain(torch.ones(0, 4)).shape == (0, 4)


def test_rows(ranks):
    ranks.run(row_counts, world_size=2)


def unfrozen():
    fabric = start(balance=[1, 1], num_microbatches=2)
    models = []
    for _ in range(2):
        model = deep(2)
        model[1].weight = model[0].weight
        models.append(model.requires_grad_(False))
    plain, model = models[0], fabric.setup(models[1])
    for m in (plain, model):
        m.requires_grad_(True)
    fabric.backward(model(X).pow(2).mean())
    plain(X).pow(2).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert not p.numel() or torch.allclose(p.grad, q.grad, atol=1e-6)


def test_tied_weights_that_were_frozen_at_setup(ranks):
    ranks.run(unfrozen, world_size=2)


class Named(nn.Module):
    """Its last layer has two names, one layer is used twice, and a method calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.last = self.layers[-1]

    def pipeline_blocks(self):
        return [*self.layers, self.layers[0]]

    def forward(self, x):
        for block in self.pipeline_blocks():
            x = block(x)
        return x

    def loss(self, x):
        return self(x).pow(2).mean()


def several_names(path):
    fabric = start(balance=[2, 1], num_microbatches=2)
    torch.manual_seed(0)
    plain, model = Named(), Named()
    model.load_state_dict(plain.state_dict())
    model = fabric.setup(model)
    fabric.backward(model.loss(X))
    plain.loss(X).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert not p.numel() or torch.allclose(p.grad, q.grad, atol=1e-6)
    optimizer = fabric.setup_optimizers(torch.optim.Adagrad(model.parameters(), lr=0.1))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    assert_states(model.state_dict(), torch.load(path)["model"])
    assert len(optimizer.state_dict()["state"]) == 4
    fabric.load(path, {"model": model, "optimizer": optimizer})


def test_modules_with_several_names(ranks, tmp_path):
    ranks.run(several_names, str(tmp_path / "saved.pt"), world_size=2)


def resumed(path):
    """Losses with dropout go on after a save as if nothing had been."""
    fabric = start(balance=[1, 2], num_microbatches=4)
    found = []
    for life in range(2):
        torch.manual_seed(life)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = {"model": model, "optimizer": optimizer, "rng": fabric.rng_state()}
        if life:
            fabric.load(path, state)
        for step in range(6):
            if step == 3 and not life:
                fabric.save(path, state)
                found.clear()
            if step < 3 and life:
                continue
            loss = model(X).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[:3] == found[3:]


def test_resuming_with_dropout(ranks, tmp_path):
    ranks.run(resumed, str(tmp_path / "saved.pt"), world_size=2)


def wrong_gradients():
    """Ways to gradients that would be wrong without a word."""
    fabric = start(balance=[2, 2], num_microbatches=2)
    model, before = fabric.setup(deep()), nn.Linear(4, 4)
    with pytest.raises(UsageError, match="An argument of pipeline_step requires a gradient"):
        model.pipeline_step(before(X), X, nn.functional.mse_loss)
    kind = UsageError if fabric.strategy.is_last_stage else RankError
    with pytest.raises(kind, match="a loss that does not require a gradient"):
        model.pipeline_step(X, X, lambda out, y: (out - y).detach().pow(2).mean())
    x = X.clone().requires_grad_()
    with pytest.raises(UsageError, match=r"torch.autograd.grad, or backward\(inputs"):
        torch.autograd.grad(model(x).sum(), x)
    assert all([p.grad is None for p in model.parameters()])


def test_gradients_that_would_be_wrong_are_refused(ranks):
    ranks.run(wrong_gradients, world_size=2)


# A stage fails


def not_pickled():
    """A container of a class that other processes do not know by name."""

    class Pair(NamedTuple):
        one: torch.Tensor

    class Pairs(nn.Linear):
        def forward(self, x):
            return Pair(super().forward(x))

    fabric = start(balance=[1, 1], num_microbatches=2)
    model = fabric.setup(nn.Sequential(Pairs(4, 4), nn.Identity()))
    expected = ArgumentTypeError if fabric.global_rank == 0 else RankError
    with pytest.raises(expected, match="the output for the next stage cannot be pickled"):
        model(X)
    fabric.barrier()


def test_an_output_that_cannot_be_sent_leaves_nobody_waiting(ranks):
    ranks.run(not_pickled, world_size=2)


class Failing(nn.Module):
    """Fails on demand, in the forward or the backward of its n-th micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.when, self.seen = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.seen += self.training  # the trial of the first forward does not count
        if self.training and self.when == ("F", self.seen):
            raise ValueError("boom")
        x = self.layer(x)
        if self.when is not None and self.when[0] == "B" and x.requires_grad:
            x.register_hook(self.back)
        return x

    def back(self, grad):
        self.seen += 1
        if self.seen > self.when[1]:
            raise ValueError("boom")


def fails(stage, when, step, checkpoint):
    world = dist.get_world_size()
    fabric = start(balance=[1] * world, num_microbatches=4, checkpoint=checkpoint)
    torch.manual_seed(0)
    model = nn.Sequential(*[Failing() for _ in range(world)])
    model[-1].layer.weight = model[0].layer.weight  # of which nothing may be left over either
    plain, model = copy.deepcopy(model), fabric.setup(model)
    model.module[stage].when = when

    def run():
        if step:
            model.pipeline_step(X, X, nn.functional.mse_loss)
        else:
            fabric.backward(nn.functional.mse_loss(model(X), X))

    expected = ValueError if fabric.global_rank == stage else RankError
    where = rf"failed on rank {stage}: ValueError: boom \(.*test_pipeline_stages.py:\d+\), in stage {stage}"
    with pytest.raises(expected, match="boom" if expected is ValueError else where):
        run()
    model.module[stage].when = None  # nothing is left on the way: the next step is as ever
    model.zero_grad()
    run()
    nn.functional.mse_loss(plain(X), X).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert not p.numel() or torch.allclose(p.grad, q.grad, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("when", [("F", 1), ("F", 3), ("B", 4), ("B", 6)])
@pytest.mark.parametrize("step", [False, True])
def test_a_stage_that_fails_is_named_and_nobody_waits(ranks, stage, when, step):
    ranks.run(fails, stage, when, step, "never", world_size=3)


@pytest.mark.parametrize("step", [False, True])
def test_a_stage_that_fails_while_it_computes_again(ranks, step):
    ranks.run(fails, 1, ("F", 5), step, "always", world_size=3)
