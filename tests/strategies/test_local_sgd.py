"""strategy="local_sgd" is its definition, computed in one process: steps of each rank, at times a mean."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, UsageError
from fabric.strategies import LocalSGDStrategy
from fabric.wrappers import unwrap

WORLD = 2
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=0.02),
}


def diloco(parameters):
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def adam_outside(parameters):
    return Adam(parameters, lr=0.05)


OUTER = {None: None, "diloco": diloco, "adam": adam_outside}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batch(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, x):
    return model(x).pow(2).mean()


def defined(kind, sync_every, outer, steps, world=WORLD, ends=()):
    """The models of all ranks, in one process; rounds also end after the steps `ends`, with the moments."""
    models = [net() for _ in range(world)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    alike = [p.detach().clone() for p in models[0].parameters()]
    outside = OUTER[outer](alike) if outer else None
    since = 0
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
        since += 1
        if since == sync_every or step + 1 in ends:
            since = 0
            with torch.no_grad():
                meet(models, alike, outside)
                if step + 1 in ends:
                    average_moments(models, optimizers)
    return models, optimizers


def meet(models, alike, outside):
    means = [torch.stack(ps).mean(0) for ps in zip(*[m.parameters() for m in models], strict=True)]
    if outside is not None:
        for before, mean in zip(alike, means, strict=True):
            before.grad = before - mean
        outside.step()
        means = alike
    for model in models:
        for p, mean in zip(model.parameters(), means, strict=True):
            p.copy_(mean)
    for buffers in zip(*[m.buffers() for m in models], strict=True):
        if buffers[0].is_floating_point():
            mean = torch.stack(buffers).mean(0)
            [b.copy_(mean) for b in buffers]


def average_moments(models, optimizers):
    for ps in zip(*[m.parameters() for m in models], strict=True):
        entries = [o.state[p] for o, p in zip(optimizers, ps, strict=True)]
        for name, value in entries[0].items():
            if torch.is_tensor(value) and value.dim():
                mean = torch.stack([entry[name] for entry in entries]).mean(0)
                [entry[name].copy_(mean) for entry in entries]


def launched(sync_every, outer=None, **more):
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LocalSGDStrategy(sync_every, outer_optimizer=OUTER[outer], **more),
    )
    fabric.launch()
    return fabric


def ready(fabric, kind):
    model = net()
    if fabric.global_rank:
        with torch.no_grad():
            [p.add_(1) for p in model.parameters()]  # rank zero's count
    return fabric.setup(model, OPTIMIZERS[kind](model.parameters()))


def train(fabric, model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch(step, fabric.global_rank)))
        optimizer.step()


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_a_rank(kind, sync_every, outer, steps):
    fabric = launched(sync_every, outer)
    model, optimizer = ready(fabric, kind)
    train(fabric, model, optimizer, steps)
    return values(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(("sync_every", "steps"), [(1, 3), (3, 8), (20, 4)])
def test_each_rank_has_the_very_numbers_of_the_definition(ranks, kind, outer, sync_every, steps):
    models, _ = defined(kind, sync_every, outer, steps)
    found = ranks.run(on_a_rank, kind, sync_every, outer, steps, world_size=WORLD)
    for rank, model in enumerate(models):
        assert found[rank].keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(found[rank][name], value), name


def test_on_three_ranks(ranks):
    models, _ = defined("momentum", 2, "diloco", 5, world=3)
    found = ranks.run(on_a_rank, "momentum", 2, "diloco", 5, world_size=3)
    for rank, model in enumerate(models):
        torch.testing.assert_close(found[rank], dict(model.state_dict()))


def on_one(sync_every):
    fabric = launched(sync_every)
    model, optimizer = fabric.setup(model := net(), SGD(model.parameters(), lr=0.1))
    train(fabric, model, optimizer, 4)
    return values(model)


def test_one_rank_is_plain_torch(ranks):
    (found,) = ranks.run(on_one, 2, world_size=1)
    models, _ = defined("sgd", 100, None, 4, world=1)
    torch.testing.assert_close(found, dict(models[0].state_dict()), rtol=0, atol=0)


def counted(sync_every, outer, steps):
    fabric = launched(sync_every, outer)
    model = nn.Linear(500, 500, bias=False)
    model, optimizer = fabric.setup(model, Adam(model.parameters()))
    sent, plain = [0], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent[0] += tensor.nbytes
        return plain(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor"):
            patched.setattr(dist, name, None)
        patched.setattr(dist, "all_reduce", counting)
        for _ in range(steps):
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(2, 500)).sum())
            optimizer.step()
    return sent[0]


@pytest.mark.parametrize("outer", [None, "diloco"])
@pytest.mark.parametrize("sync_every", [1, 4, 8])
def test_bytes_on_the_wire(ranks, sync_every, outer):
    assert ranks.run(counted, sync_every, outer, 8, world_size=WORLD) == [1_000_000 * 8 // sync_every] * 2


def saved_in_a_round(path, kind, outer, format, other):
    fabric = launched(3, outer)
    model, optimizer = ready(fabric, kind)
    train(fabric, model, optimizer, 4)
    fabric.save(path, {"optimizer": optimizer, "model": model}, format=format)
    train(fabric, model, optimizer, 5, first=4)
    went_on = values(model)
    fabric = launched(3, outer) if other is None else Fabric(accelerator="cpu", devices=WORLD, strategy=other)
    fabric.launch()
    model, optimizer = ready(fabric, kind)
    # The optimizer first: what it begins from is of the model that comes after it.
    fabric.load(path, {"optimizer": optimizer, "model": model})
    if other is not None:
        return values(model), len(unwrap(optimizer).state)
    train(fabric, model, optimizer, 5, first=4)
    return went_on, values(model)


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize(
    ("kind", "outer"), [("sgd", "diloco"), ("adam", None), ("adam", "adam"), ("momentum", "diloco")]
)
def test_a_resumed_run_goes_on_as_the_one_that_was_saved(ranks, tmp_path, kind, outer, format):
    models, _ = defined(kind, 3, outer, 9, ends=[4])
    found = ranks.run(saved_in_a_round, tmp_path / "c", kind, outer, format, None, world_size=WORLD)
    for rank, (went_on, resumed) in enumerate(found):
        for name, value in models[rank].state_dict().items():
            assert torch.equal(went_on[name], value), name
            assert torch.equal(resumed[name], value), name


def test_another_strategy_reads_its_checkpoint(ranks, tmp_path):
    models, _ = defined("adam", 3, "diloco", 4, ends=[4])
    found = ranks.run(saved_in_a_round, tmp_path / "c", "adam", "diloco", "full", "ddp", world_size=WORLD)
    for model, states in found:
        torch.testing.assert_close(model, dict(models[0].state_dict()), rtol=0, atol=0)
        assert states == 6


def evaluated_alone():
    fabric = launched(10)
    model, optimizer = ready(fabric, "momentum")
    train(fabric, model, optimizer, 3)
    apart = values(model)
    with fabric.whole(model) as plain:
        alone = None if plain is None else values(plain)
    fabric.strategy.end_round()
    return apart, alone, values(model)


def test_whole_and_end_round_see_one_model(ranks):
    (apart, alone, after), (apart_too, none, after_too) = ranks.run(evaluated_alone, world_size=WORLD)
    assert not torch.equal(apart["0.weight"], apart_too["0.weight"])
    assert none is None
    models, _ = defined("momentum", 10, None, 3, ends=[3])
    for found in (alone, after, after_too):
        torch.testing.assert_close(found, dict(models[0].state_dict()), rtol=0, atol=0)


def two_models():
    fabric = launched(2)
    first, step_first = ready(fabric, "momentum")
    second, step_second = ready(fabric, "adam")
    before = copy.deepcopy(values(second))
    train(fabric, first, step_first, 3)
    assert all(torch.equal(value, before[name]) for name, value in values(second).items())
    train(fabric, second, step_second, 2)
    return values(first), values(second)


def test_steps_count_by_optimizer(ranks):
    found = ranks.run(two_models, world_size=WORLD)
    firsts, seconds = defined("momentum", 2, None, 3)[0], defined("adam", 2, None, 2)[0]
    for rank, (first, second) in enumerate(found):
        torch.testing.assert_close(first, dict(firsts[rank].state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(second, dict(seconds[rank].state_dict()), rtol=0, atol=0)


def groups_added(outer):
    fabric = launched(2, outer)
    module = net()
    model, optimizer = fabric.setup(module, SGD(module[3].parameters(), lr=0.1))
    train(fabric, model, optimizer, 2)
    optimizer.add_param_group({"params": list(module[0].parameters())})
    train(fabric, model, optimizer, 2, first=2)
    return values(model)


def test_groups_that_are_added_are_averaged_too(ranks):
    found = ranks.run(groups_added, None, world_size=WORLD)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0]["0.weight"], net().state_dict()["0.weight"])
    for error in ranks.run_expecting_errors(groups_added, "diloco", world_size=WORLD):
        assert "The outer optimizer has only the parameters of setup. Pass all parameters to" in str(error)


def garbage_of_before(path):
    fabric = launched(10)
    model, optimizer = ready(fabric, "adam")
    train(fabric, model, optimizer, 1)
    optimizer.optimizer.itself = optimizer.optimizer  # a cycle, as some schedulers make
    del model, optimizer
    if fabric.global_rank:
        gc.collect()
    model, optimizer = ready(fabric, "adam")
    train(fabric, model, optimizer, 1)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return values(model)


def test_garbage_that_one_rank_collects_first_is_no_error(ranks, tmp_path):
    found = ranks.run(garbage_of_before, tmp_path / "c", world_size=WORLD)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def another_number_of_steps():
    fabric = launched(2)
    model, optimizer = ready(fabric, "sgd")
    train(fabric, model, optimizer, 4 if fabric.global_rank else 3)
    fabric.barrier()


def test_another_number_of_steps_on_a_rank_is_an_error_on_all(ranks):
    for error in ranks.run_expecting_errors(another_number_of_steps, world_size=WORLD):
        assert isinstance(error, CollectiveMismatch)
        assert "end of a round" in str(error)
        assert "barrier" in str(error)


def not_set_up():
    fabric = launched(2)
    module = net()
    model = fabric.setup_module(module)
    optimizer = SGD(module.parameters(), lr=0.1)
    fabric.backward(loss_of(model, batch(0, 0)))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    SGD(other.parameters(), lr=0.1).step()  # of no model that was set up
    optimizer.step()


def test_an_optimizer_that_was_not_set_up_is_refused(ranks):
    for error in ranks.run_expecting_errors(not_set_up, world_size=WORLD):
        assert isinstance(error, UsageError)
        assert str(error) == (
            "SGD.step() was called on an optimizer that setup did not return, so its parameters would "
            "never be averaged. "
            "Write model, optimizer = fabric.setup(model, optimizer), or optimizer = "
            "fabric.setup_optimizers(optimizer)."
        )


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"sync_every": 0}, ConfigurationError, "sync_every=0 must be 1 or more."),
        ({"sync_every": 2.5}, ArgumentTypeError, "sync_every=2.5 must be a whole number"),
        ({"sync_every": True}, ArgumentTypeError, "sync_every=True must be a whole number"),
        (
            {"outer_optimizer": SGD([torch.ones(1)])},
            ArgumentTypeError,
            "outer_optimizer=SGD(...) must be a function",
        ),
        ({"start_method": "threads"}, ConfigurationError, "start_method='threads' is unknown. Write one of"),
        ({"qqq": 2}, ConfigurationError, "LocalSGDStrategy has no keyword 'qqq'. It takes sync_every, "),
    ],
)
def test_bad_input(given, kind, text):
    with pytest.raises(kind) as caught:
        LocalSGDStrategy(**given)
    assert text in str(caught.value)


def bad_outer():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=LocalSGDStrategy(2, len))
    fabric.launch()
    ready(fabric, "sgd")


def test_an_outer_optimizer_that_is_none(ranks):
    (error,) = ranks.run_expecting_errors(bad_outer, world_size=1)
    assert isinstance(error, ArgumentTypeError)
    assert "outer_optimizer returned a int for a list of parameters, not an optimizer. Write outer" in str(
        error
    )
