"""Calls of models that are compiled, before `setup` or after it, are recorded without another compilation."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from data_cases import launched
from torch import nn
from torch._dynamo.utils import counters

from fabric.utilities.warnings import RanksDifferWarning


def trained(strategy, how, step_of_copy=None):
    """Warnings of a loop whose ranks train on equal batches, and the compiled frames after each step."""
    torch._dynamo.reset()
    fabric = launched(strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "before":
        model = torch.compile(model, backend="eager")
    wrapped, optimizer = fabric.setup(model, optimizer)
    called, draw, frames = wrapped, torch.Generator().manual_seed(0), [counters["frames"]["total"]]
    if how == "after":
        called = torch.compile(wrapped, backend="eager")
    if how == "in place":
        wrapped.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            x = torch.randn(4, 4, generator=draw)
            optimizer.zero_grad()
            fabric.backward(called(x).square().mean())
            optimizer.step()
            frames.append(counters["frames"]["total"])
            if step == step_of_copy:
                for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
                    other.compile(backend="eager")
                    torch.testing.assert_close(other(x), wrapped(x))
    texts = [str(warning.message) for warning in caught if warning.category is RanksDifferWarning]
    return texts, frames, "compile" in vars(wrapped)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("how", ["no", "before", "after", "in place"])
def test_equal_batches_of_a_compiled_model_are_warned_of(ranks, strategy, how):
    first, second = ranks.run(trained, strategy, how, world_size=2)
    assert [text.partition(" with")[0] for text in first[0]] == ["All ranks called Sequential"]
    assert second[0] == []
    for _, frames, records_compile in (first, second):
        assert (frames[1] > frames[0]) == (how != "no")
        assert len({*frames[2:]}) == 1, "the end of the record compiles nothing"
        assert not records_compile


@pytest.mark.parametrize("step", [0, 3])
def test_copies_of_recorded_models_compile(ranks, step):
    for texts, *_ in ranks.run(trained, "zero1", "no", step, world_size=2):
        assert len(texts) <= 1
