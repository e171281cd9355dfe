"""Loops with several models are compared after two backwards for each of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn

from fabric.utilities.warnings import RanksDifferWarning


def warned(draws_alike, weighted=False, steps=4):
    """The warnings of a loop in which two models have a loss each in a step."""
    fabric = launched("ddp")
    torch.manual_seed(0)
    nets = [nn.Linear(4, 3), nn.Linear(4, 3)]
    made = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    generator = torch.Generator().manual_seed(0 if draws_alike else fabric.global_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            for number, (model, optimizer) in enumerate(made):
                optimizer.zero_grad()
                out = model(torch.randn(4, 4, generator=generator))
                loss = out.square().mean()
                if weighted and number == 0:
                    # Equal sums of weights in the first step only.
                    y = torch.tensor([0, 1, 1, 2] if step == 0 or fabric.global_rank else [0, 0, 0, 1])
                    loss = nn.functional.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0]))
                fabric.backward(loss)
                optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def test_equal_batches_of_two_models_are_warned_of(ranks):
    first, second = ranks.run(warned, True, world_size=2)
    assert [text.partition(" with")[0] for text in first] == ["All ranks called Linear"] * 2
    assert second == []


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_one_of_two_models_is_compared_in_two_steps(ranks, weighted):
    first, second = ranks.run(warned, False, weighted, world_size=2)
    assert [text.partition(" by")[0] for text in first] == ["The loss of a backward divides"] * weighted
    assert second == []


def warned_of_own_backward(places, weighted):
    """The warnings of a loop in which rank zero also runs a backward of a tensor of its own."""
    fabric = launched("ddp")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = torch.ones(7, 3, requires_grad=True)

    def probe(place):
        if place in places and fabric.global_rank == 0:
            nn.functional.cross_entropy(own, torch.zeros(7, dtype=torch.long)).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 4) + fabric.global_rank
            y = torch.tensor([0, 1, 2, -100 if weighted and fabric.global_rank else 0])
            optimizer.zero_grad()
            probe("before the forward")
            out = model(x)
            probe("between forward and backward")
            fabric.backward(nn.functional.cross_entropy(out, y))
            probe("after the backward")
            optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "places",
    [("before the forward",), ("between forward and backward",), ("after the backward",)],
)
def test_a_backward_of_one_rank_is_no_loss_of_the_model(ranks, places, weighted):
    first, second = ranks.run(warned_of_own_backward, places, weighted, world_size=2)
    text = "The loss of a backward divides by 4 on rank 0, 3 on rank 1, as"
    assert [told[: len(text)] for told in first] == [text] * weighted
    assert second == []
