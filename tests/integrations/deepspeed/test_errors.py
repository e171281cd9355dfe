"""What DeepSpeed's engine cannot do: one error on all ranks, before any waits."""

from __future__ import annotations

import copy

import pytest
import torch
from test_deepspeed import WORLD, Net, Split, batch, launched, loss_of, trained
from torch import nn
from torch.optim import LBFGS, SGD

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own


class Told(list):
    def __call__(self, call):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is compared
            call()
        self.append(f"{type(caught.value).__name__}: {caught.value}")


def refused(way):
    fabric, told = launched(way, config={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}), Told()
    model = Net()
    told(lambda: fabric.setup(model, SGD(trained(model), lr=0.1)))
    fabric.strategy.teardown()
    fabric = launched(way)
    model = Net()
    told(lambda: fabric.setup(model, SGD(trained(model), lr=0.1), SGD(trained(model), lr=0.1)))
    told(lambda: fabric.setup(model, LBFGS(trained(model))))
    told(lambda: fabric.setup_optimizers(SGD(trained(model), lr=0.1)))
    for odd in (torch.tensor(1.0), torch.ones(2, 3).t()):
        odd_model = nn.ParameterList([nn.Parameter(odd)])
        told(lambda odd_model=odd_model: fabric.setup(odd_model, SGD(odd_model.parameters(), lr=0.1)))
    model, optimizer = fabric.setup(model, SGD(trained(model), lr=0.1))
    told(lambda: copy.deepcopy(model))
    told(lambda: fabric.strategy.optimizer_of(fabric.setup_module(nn.Linear(2, 2))))
    told(lambda: fabric.backward(nn.Linear(3, 1)(torch.ones(3)).sum()))
    x = Split(fabric).part(batch(0))
    told(lambda: loss_of(model, x).backward())
    told(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    loss = loss_of(model, x)
    fabric.backward(loss_of(model, x))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    told(lambda: fabric.backward(loss))
    fabric.strategy.teardown()
    fabric = launched(way)
    model, optimizer = fabric.setup(*with_sgd())
    fabric.backward(loss_of(model, x))
    optimizer.step()
    told(optimizer.step)
    fabric.backward(loss_of(model, x))
    told(optimizer.step)
    told(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    optimizer.zero_grad()
    optimizer.step()
    fabric.strategy.teardown()
    return told


WANTED = (
    "ConfigurationError: fabric.setup got SGD, and DeepSpeed's config has \"optimizer\": 'Adam'. Leave one",
    "ConfigurationError: A DeepSpeed engine has one optimizer, but fabric.setup got 2. Give one with a group",
    "ConfigurationError: LBFGS needs a closure, but DeepSpeed's step calls none. Write another optimizer",
    "ConfigurationError: DeepSpeed makes its engine of a model and its optimizer together. Write model,",
    "ConfigurationError: DeepSpeed takes no parameter of shape [] with strides []: 0. Give it a dimension",
    "ConfigurationError: DeepSpeed takes no parameter of shape [3, 2] with strides [1, 3]: 0. Give it a",
    "UsageError: A model that fabric.setup has made a DeepSpeed engine cannot be copied. Copy it",
    'ConfigurationError: DeepSpeed\'s config has no "optimizer". Write one there, or model, optimizer = ',
    "UsageError: This loss comes from no model that was set up with an optimizer, or from its .module",
    "UsageError: loss.backward() was called where it gives wrong gradients",
    "UsageError: add_param_group() came after setup, and a DeepSpeed engine has the parameters of setup",
    "UsageError: This backward came after gradients were clipped or divided, and before the step",
    *["UsageError: There was no optimizer.zero_grad() since the last optimizer.step(): DeepSpeed drops"] * 3,
)


@pytest.mark.parametrize("way", ["1", "2", "3"])
def test_one_error_on_all_ranks(ranks, way):
    for told in ranks.run(refused, way, world_size=WORLD):
        for said, start in zip(told, WANTED, strict=True):
            assert said.startswith(start), said


def failed_inside(way):
    fabric, told = launched(way), Told()
    model, _ = fabric.setup(*with_sgd())
    x = Split(fabric).part(batch(0))
    out = model(x)
    inner = out * 1
    inner.register_hook(lambda grad: 1 / 0)
    told(lambda: fabric.backward(inner.sum()))
    told(lambda: fabric.backward(loss_of(model, x)))
    fabric.strategy.teardown()
    return told


def with_sgd():
    model = Net()
    return model, SGD(trained(model), lr=0.1)


def test_a_backward_that_failed(ranks):
    for told in ranks.run(failed_inside, "2", world_size=WORLD):
        assert told[0].startswith("ZeroDivisionError"), told
        assert told[1].startswith("UsageError: A backward before this one failed in the middle"), told


def kept():
    fabric, told = launched("3"), Told()
    model, _ = fabric.setup(*with_sgd())
    told(lambda: fabric.backward(model(Split(fabric).part(batch(0))).sum(), retain_graph=True))
    fabric.strategy.teardown()
    return told


def test_a_graph_that_is_to_stay_under_stage_3(ranks):
    for told in ranks.run(kept, world_size=WORLD):
        assert told[0].startswith("UsageError: fabric.backward(loss, retain_graph=True): under stage 3"), told


def evaluated_alone(way):
    fabric, told = launched(way), Told()
    model, _ = fabric.setup(*with_sgd())
    x = Split(fabric).part(batch(0))
    with torch.no_grad():
        model(x)

    def alone():
        if fabric.is_global_zero:
            with torch.no_grad():
                model(x)
        else:
            fabric.barrier()

    told(alone)
    with fabric.whole(model) as plain, torch.no_grad():
        out = plain(x) if plain is not None else None
    fabric.strategy.teardown()
    return [*told, out]


def test_a_rank_that_evaluates_alone(ranks):
    told = ranks.run(evaluated_alone, "3", world_size=WORLD)
    for said, _ in told:
        assert said.startswith("CollectiveMismatch: "), said
        assert "forward without gradients of Net" in said
        assert "fabric.whole" in said
    with torch.no_grad():
        torch.testing.assert_close(told[0][1], Net()(batch(0)[: len(batch(0)) // WORLD]))


def with_and_without(way):
    fabric, told = launched(way), Told()
    model, optimizer = fabric.setup(*with_sgd())
    fabric.backward(loss_of(model, Split(fabric).part(batch(0))))
    if fabric.global_rank == 1:
        optimizer.zero_grad()
    told(optimizer.step)
    fabric.strategy.teardown()
    return told


def test_gradients_on_some_ranks_only(ranks):
    for told in ranks.run(with_and_without, "2", world_size=WORLD):
        assert told[0].startswith("CollectiveMismatch: "), told
        assert "no gradients" in told[0]
