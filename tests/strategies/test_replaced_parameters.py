"""Parameters that a loop kept from before setup, which replaced them by shards."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError

USES = {
    "clip": lambda p, name: nn.utils.clip_grad_norm_(p.values(), 0.1),
    "clip by value": lambda p, name: nn.utils.clip_grad_value_(list(p.values()), 0.1),
    "decay": lambda p, name: p[name].data.mul_(0.9),
    "decay in place": lambda p, name: torch.no_grad()(p[name].mul_)(0.9),
    "average": lambda p, name: torch.zeros(8, 4).lerp_(p[name], 0.1),
    "gradient": lambda p, name: p[name].grad,
    "write a gradient": lambda p, name: setattr(p[name], "grad", None),
    "write": lambda p, name: setattr(p[name], "data", torch.zeros(8, 4)),
    "hook": lambda p, name: p[name].register_hook(print),
    "freeze": lambda p, name: p[name].requires_grad_(False),
    "attribute": lambda p, name: setattr(p[name], "requires_grad", False),
    "copy": lambda p, name: copy.deepcopy(p[name]),
}
TEXT = (
    "0.weight from before fabric.setup was used. setup replaced it by its shard, so nothing that is done "
    "with it changes the model. Write params = list(model.parameters()) after setup, and for an optimizer "
    "model, optimizer = fabric.setup(model, optimizer)."
)


def fabric_of(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def parts():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def errors(strategy: str) -> dict[str, str]:
    fabric = fabric_of(strategy)
    model = parts()
    kept = dict(model.named_parameters())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).sum())
    found = {}
    for what, use in USES.items():
        with pytest.raises(UsageError) as caught:
            use(kept, "0.weight")
        found[what] = str(caught.value)
    optimizer.step()
    return found


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_what_is_done_with_them_is_an_error(ranks, strategy):
    for found in ranks.run(errors, strategy, world_size=2):
        assert found == dict.fromkeys(USES, TEXT)


def kept_and_right(strategy: str) -> None:
    """Uses that read nothing of the values, and those of strategies that replace nothing."""
    fabric = fabric_of(strategy)
    model = parts()
    kept, head = dict(model.named_parameters()), model[2]
    weights = [p for name, p in kept.items() if "weight" in name]
    groups = [{"params": weights, "lr": 0.2}, {"params": [kept["0.bias"], kept["2.bias"]]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    before = head.weight.detach().clone()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(optimizer)
    assert repr(kept["0.weight"])
    assert sum(p.numel() for p in kept.values()) == 58
    assert {p.shape: p.requires_grad for p in kept.values()}
    assert len({*kept.values()}) == 4
    fabric.backward(model(torch.ones(2, 4)).sum())
    if strategy == "ddp":
        assert nn.utils.clip_grad_norm_(kept.values(), 0.1) > 0.1
    optimizer.step()
    now = head.weight.detach()
    assert not torch.equal(getattr(now, "full_tensor", lambda: now)(), before)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_modules_sizes_and_optimizers_from_before_setup(ranks, strategy):
    ranks.run(kept_and_right, strategy, world_size=2)


def copied(strategy: str) -> set[str]:
    fabric = fabric_of(strategy)
    model = fabric.setup_module(parts())
    found = set()
    for one in (model, model.module, nn.ModuleList([model])):
        with pytest.raises(UsageError) as caught:
            copy.deepcopy(one)
        found.add(str(caught.value))
    with fabric.whole(model) as plain:
        if plain is not None:
            assert copy.deepcopy(plain)(torch.ones(2, 4)).shape == (2, 2)
    return found


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_copy_after_setup_names_the_copy_before_it(ranks, strategy):
    text = (
        "model 0 (Sequential) was copied after fabric.setup, and is split over ranks: a copy would share its "
        "groups. Write average = copy.deepcopy(model) before setup, and average = "
        "fabric.setup_module(average) after it."
    )
    assert ranks.run(copied, strategy, world_size=2) == [{text}] * 2


def pickled(strategy: str) -> set[str]:
    fabric = fabric_of(strategy)
    model = fabric.setup_module(parts())
    found = set()
    for one in (model, model.module, {"model": model}):
        with pytest.raises(UsageError) as caught:
            torch.save(one, io.BytesIO())
        found.add(str(caught.value))
    with fabric.whole(model) as plain:
        if plain is not None:
            assert pickle.loads(pickle.dumps(plain))(torch.ones(2, 4)).shape == (2, 2)
    return found


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_pickle_of_a_sharded_model_names_the_save(ranks, strategy):
    text = (
        "model 0 (Sequential) was pickled after fabric.setup, and is split over ranks: a file would have one "
        'rank\'s part. Write fabric.save(path, {"model": model}) on all ranks, or `with fabric.whole(model) '
        "as plain`, and pickle plain on rank zero, where it is not None."
    )
    assert ranks.run(pickled, strategy, world_size=2) == [{text}] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x))


def untied(half: str) -> None:
    """Untie the weights after setup: the gathered weight would silently take the place of the new one."""
    fabric = fabric_of("fsdp")
    model = fabric.setup_module(Tied())
    getattr(model.module, half).weight = nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(UsageError, match=r"weight of (Embedding|Linear) was replaced after fabric\.setup"):
        model(torch.tensor([1, 2]))


@pytest.mark.parametrize("half", ["words", "head"])
def test_each_half_of_a_tie_that_is_replaced_after_setup_is_refused(ranks, half):
    ranks.run(untied, half, world_size=2)


def replaced(strategy: str, how: str) -> None:
    """New parameters in the model and in its optimizer, as a loop that grows its model makes them."""
    fabric = fabric_of(strategy)
    model, optimizer = fabric.setup(m := parts(), torch.optim.SGD(m.parameters(), lr=0.1))
    x = torch.arange(16.0).view(4, 4).sin()[fabric.global_rank :: 2]

    def step():
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()

    for _ in range(2):
        step()
    text = "got no gradient.*2.weight, 2.bias. They were replaced in the model after fabric.setup"
    if how == "head":
        model[2] = nn.Linear(8, 3)
    else:
        for index in (0, 2):
            model[index].weight = nn.Parameter(model[index].weight.detach().clone())
            model[index].bias = nn.Parameter(model[index].bias.detach().clone())
        text = "trains 0.weight, 0.bias, 2.weight, 2.bias of Sequential, .* replaced after fabric.setup"
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    with pytest.raises(UsageError, match=text):
        step()


@pytest.mark.parametrize("how", ["all", "head"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_those_of_a_replicated_model_that_are_replaced_later_are_named(ranks, strategy, how):
    ranks.run(replaced, strategy, how, world_size=2)


def head_in_the_groups() -> None:
    """FSDP computes with the new head, whose gradients nobody averages."""
    fabric = fabric_of("fsdp")
    model, optimizer = fabric.setup(m := parts(), torch.optim.SGD(m.parameters(), lr=0.1))
    x = torch.arange(16.0).view(4, 4).sin()[fabric.global_rank :: 2]
    fabric.backward(model(x).square().mean())
    optimizer.step()
    model[2] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    fabric.backward(model(x).square().mean())
    with pytest.raises(UsageError, match=r"trains 2.weight, 2.bias of .*replaced after fabric.setup"):
        optimizer.step()


def test_a_new_head_in_the_groups_of_a_sharded_model_is_named(ranks):
    ranks.run(head_in_the_groups, world_size=2)
