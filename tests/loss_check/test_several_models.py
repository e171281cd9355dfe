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


class Drawn(nn.Module):
    """Returns a distribution, which has no tensor that is found."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.layer(x))


class Policy(nn.Linear):
    def logp(self, x, actions):
        return torch.distributions.Categorical(logits=self(x)).log_prob(actions)


def masked_in_place(model, x, actions):
    logits = model(x)
    logits[:, :, 0] = -1e9
    return functional_loss(logits.flatten(0, 1), actions.flatten())


def by_a_method(model, x, actions):
    model(x)  # the rollout
    return -model.logp(x, actions).mean()


def by_a_distribution(model, x, actions):
    return -model(x).log_prob(actions).mean()


def functional_loss(logits, actions):
    return nn.functional.cross_entropy(logits, actions)


OUTPUTS = {
    "written in place": (lambda: nn.Linear(3, 4), masked_in_place),
    "of a method": (lambda: Policy(3, 4), by_a_method),
    "hidden in a distribution": (Drawn, by_a_distribution),
}


def drawn_by_rank(strategy, kind):
    """Warnings of a policy with equal observations on all ranks, and actions that each rank draws."""
    fabric = launched(strategy)
    torch.manual_seed(0)
    make, loss = OUTPUTS[kind]
    model, critic = make(), nn.Linear(3, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    if strategy == "ddp" and hasattr(model, "logp"):
        model.mark_forward_method("logp")
    critic = fabric.setup_module(critic)
    own = torch.Generator().manual_seed(fabric.global_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            x = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(step))
            actions = torch.randint(1, 4, (6, 5), generator=own)
            optimizer.zero_grad()
            value = critic(x).square().mean()  # equal on all ranks: only the other loss differs
            fabric.backward(loss(model, x, actions))
            fabric.backward(value)
            optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_actions_of_each_rank_are_no_equal_batches(ranks, kind):
    assert ranks.run(drawn_by_rank, "ddp", kind, world_size=2) == [[], []]


class Ragged(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return torch.nested.as_nested_tensor([out[:1], out[1:]])


def returns_nested():
    fabric = launched("ddp")
    model = Ragged(3, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            out = model(torch.ones(3, 3))
            fabric.backward(torch.nested.to_padded_tensor(out, 0.0).sum() / 7)
            optimizer.step()


def test_a_model_may_return_a_nested_tensor(ranks):
    ranks.run(returns_nested, world_size=2)


def warned_beside_normalized(weighted, first, compiled):
    """The warnings of a loop that normalises the gradients of one of two models; `first`: it is trained
    first.
    """
    fabric = launched("ddp")
    torch.manual_seed(0)
    nets = [nn.Linear(4, 3), nn.Linear(4, 3)]
    made = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    generator = torch.Generator().manual_seed(fabric.global_rank)
    forward = torch.compile(made[0][0], backend="eager") if compiled else made[0][0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            for number in (0, 1) if first else (1, 0):
                model, optimizer = made[number]
                optimizer.zero_grad()
                if number == 0:
                    x = torch.randn(3 + 2 * fabric.global_rank, 4, generator=generator)
                    fabric.backward(forward(x).square().mean(1).sum())
                    fabric.normalize_gradients(model, len(x))
                else:
                    y = torch.tensor([0, 1, 1, 2] if fabric.global_rank else [0, 0, 0, 1])
                    out = model(torch.randn(4, 4, generator=generator))
                    weight = torch.tensor([1.0, 2.0, 3.0]) if weighted else None
                    fabric.backward(nn.functional.cross_entropy(out, y, weight=weight))
                optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_beside_a_normalized_one_is_compared(ranks, weighted, first, compiled):
    """`normalize_gradients` of one model ended the comparison of all; rows of its own may be unequal."""
    one, other = ranks.run(warned_beside_normalized, weighted, first, compiled, world_size=2)
    assert [text.partition(" by")[0] for text in one] == ["The loss of a backward divides"] * weighted
    assert other == []


def warned_of_weight_of_frozen_model():
    """The warnings of a loop that learns the weight of a frozen model's loss, and another model."""
    fabric = launched("ddp")
    torch.manual_seed(0)
    frozen, net = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)
    frozen = fabric.setup(frozen)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weight = nn.Parameter(torch.ones(3))
    tune = fabric.setup_optimizers(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 4) + fabric.global_rank
            fabric.backward(frozen(x).square().mean() * weight.sigmoid().mean())
            tune.step()
            tune.zero_grad()
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def test_a_factor_of_a_loss_that_no_model_computes_is_not_compared(ranks):
    assert ranks.run(warned_of_weight_of_frozen_model, world_size=2) == [[], []]


class Student(nn.Module):
    """Gives its loss by a method, and keeps its output."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 1), None

    def forward(self, x):
        self.kept = self.layer(x)
        return self.kept.detach().sum() if x.shape[1] == 4 else None

    def loss(self, x, target):
        return (self.layer(x) - target).square().sum()


def warned_of_sums(strategy, case):
    """The warnings of a loss that is summed, and in no output of a call."""
    fabric = launched(strategy)
    torch.manual_seed(0)
    net = Student()
    teacher = fabric.setup(nn.Linear(4, 1).requires_grad_(False))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 4) + fabric.global_rank
            if case == "method":
                loss = model.loss(x, teacher(x))
            else:
                model(x)
                loss = (net.kept - 1).square().sum()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("case", ["method", "stored"])
def test_a_sum_is_found_in_a_loss_that_no_output_leads_to(ranks, strategy, case):
    first, second = ranks.run(warned_of_sums, strategy, case, world_size=2)
    assert ["sum over its items" in text for text in first] == [True]
    assert second == []


def warned_beside_compiled():
    """The warnings of a compiled and an eager model; rank zero alone runs backwards of a model of its own."""
    fabric = launched("ddp")
    torch.manual_seed(0)
    nets, own = [nn.Linear(4, 1), nn.Linear(4, 1)], nn.Linear(4, 1)
    made = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    made[0][0].compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 4) + fabric.global_rank
            for model, optimizer in reversed(made):
                loss = model(x).square().mean()
                if fabric.global_rank == 0:
                    own(x).square().sum().backward()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def test_a_backward_of_one_rank_is_no_loss_of_a_compiled_model(ranks):
    assert ranks.run(warned_beside_compiled, world_size=2) == [[], []]
