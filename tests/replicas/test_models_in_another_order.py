"""Two models that ranks use in another order: an error that names both, before anything of one is mixed into
the other.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch
from fabric.strategies import FSDPStrategy

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]
ONE_ORDER = "Ranks must use models and optimizers in one order. Loop over a list or a dictionary"


class Actor(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


def started(strategy, sizes=(4, 4)):
    """The two models with their optimizers; rank 1 has the second first."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    pairs = []
    for kind, size in zip((Actor, Critic), sizes, strict=True):
        model = kind(4, size)
        pairs.append(fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    return fabric, pairs[::-1] if fabric.global_rank == 1 else pairs


def step(fabric, model, optimizer):
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()


def error_of(call, *args, **kwargs):
    with pytest.raises(CollectiveMismatch) as error:
        call(*args, **kwargs)
    return str(error.value)


def trained(strategy, sizes):
    fabric, pairs = started(strategy, sizes)
    before = [model.weight.detach().clone() for model, _ in pairs]
    text = error_of(lambda: [step(fabric, *pair) for pair in pairs])
    changed = [
        not torch.equal(weight, model.weight) for weight, (model, _) in zip(before, pairs, strict=True)
    ]
    return text, any(changed)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 7)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_an_error_before_anything_is_mixed(ranks, strategy, sizes, world_size):
    found = ranks.run(trained, strategy, sizes, world_size=world_size)
    for text, changed in found:
        assert not changed
        assert text == found[0][0]
        assert ONE_ORDER in text
        for rank in range(world_size):
            name = r"model 1 \(Critic\)" if rank == 1 else r"model 0 \(Actor\)"
            row = "0, 2" if world_size == 3 and rank != 1 else rank
            assert re.search(rf"\n  {row} .*of {name}.* \S+test_models_in_another_order\.py:\d+", text), text


def test_rows_of_a_mesh_compare_first_calls(ranks):
    """gloo would end the processes: ranks of a row gather layers of other sizes."""
    rows = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    for text, changed in ranks.run(trained, rows, (4, 7), world_size=4):
        assert not changed
        assert ONE_ORDER in text


def trained_later(strategy, steps):
    """The order differs after some steps only; the next step is an error."""
    fabric, pairs = started(strategy)
    usual = pairs[::-1] if fabric.global_rank == 1 else pairs
    for _ in range(steps):
        for pair in usual:
            step(fabric, *pair)
    before = [model.weight.detach().clone() for model, _ in pairs]
    text = error_of(lambda: [step(fabric, *pair) for pair in pairs])
    same = [torch.equal(weight, model.weight) for weight, (model, _) in zip(before, pairs, strict=True)]
    return text, all(same)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_an_order_that_differs_later_is_an_error_of_the_step(ranks, strategy):
    for text, same in ranks.run(trained_later, strategy, 2, world_size=2):
        assert "step of model 0 (Actor)" in text or "of model 0 (Actor): " in text
        assert "model 1 (Critic)" in text
        assert ONE_ORDER in text
        assert same or strategy == "zero1"  # whose ranks step their shares, and meet then


def backward_order(strategy):
    """Forwards in one order, and backwards in another."""
    fabric, pairs = started(strategy)
    usual = pairs[::-1] if fabric.global_rank == 1 else pairs
    losses = {id(model): model(torch.ones(2, 4)).square().mean() for model, _ in usual}
    for model, _ in pairs:
        fabric.backward(losses[id(model)])
    return error_of(usual[0][1].step)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_backwards_in_another_order_are_an_error_of_the_step(ranks, strategy):
    for text in ranks.run(backward_order, strategy, world_size=2):
        assert "layers were called in the order" in text


def verbs(strategy, path):
    fabric, pairs = started(strategy)
    for model, optimizer in pairs[::-1] if fabric.global_rank == 1 else pairs:
        step(fabric, model, optimizer)
    model, optimizer = pairs[0]
    here = path / f"{'critic' if fabric.global_rank == 1 else 'actor'}.pt"
    texts = {
        "optimizer": error_of(optimizer.state_dict),
        "save": error_of(fabric.save, here, {"model": model, "optimizer": optimizer}, format="full"),
        "whole": error_of(fabric.whole(model).__enter__),
        "normalize_gradients": error_of(fabric.normalize_gradients, model, 2),
    }
    if strategy != "zero1":
        texts["model"] = error_of(model.state_dict)
        texts["models"] = error_of(fabric.save, here, {"model": model}, format="full")
    fabric.save(path / f"of-{fabric.global_rank}.pt", {"step": 1}, format="full")
    if strategy != "zero1":  # last: the limit of each optimizer is compared in every call after it
        texts["clip"] = error_of(fabric.clip_gradients, model, optimizer, max_norm=1.0)
    return texts


@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 2), ("fsdp", 2), ("fsdp", 3)])
def test_verbs_name_the_models(ranks, strategy, world_size, tmp_path):
    for texts in ranks.run(verbs, strategy, tmp_path, world_size=world_size):
        for verb, text in texts.items():
            assert "of model 0 (Actor)" in text or ": model 0 (Actor)" in text, (verb, text)
            assert "of model 1 (Critic)" in text or ": model 1 (Critic)" in text, (verb, text)
            assert ONE_ORDER in text, verb
        for verb in texts.keys() & {"save", "models"}:
            assert "actor.pt: " in texts[verb]
            assert "critic.pt: " in texts[verb]
    assert [path.name for path in tmp_path.iterdir()] == [
        "of-0.pt"
    ]  # of paths that differ rank zero's counts


def accumulated():
    fabric, pairs = started("ddp")
    for model, _ in pairs:
        with fabric.no_backward_sync(model):
            fabric.backward(model(torch.ones(2, 4) * fabric.global_rank).sum())
    return error_of(pairs[0][1].step)


def test_unsynchronised_gradients_of_two_models_are_not_compared_with_each_other(ranks):
    for text in ranks.run(accumulated, world_size=2):
        assert "of model 0 (Actor), with gradients that no backward has averaged" in text
        assert "of model 1 (Critic), with gradients" in text


def alike(strategy):
    """One order on all ranks, of two forwards and one backward, or of a backward each: no error, no word."""
    fabric, pairs = started(strategy, (4, 4))
    usual = pairs[::-1] if fabric.global_rank == 1 else pairs
    for _ in range(9):
        for _, optimizer in usual:
            optimizer.zero_grad()
        with torch.no_grad():
            usual[1][0](torch.ones(1, 4))
        fabric.backward(usual[1][0](usual[0][0](torch.ones(2, 4))).square().mean())
        for _, optimizer in usual:
            optimizer.step()
    for pair in usual:
        step(fabric, *pair)
    return [model.state_dict()["weight"] for model, _ in usual]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_order_is_what_it_was(ranks, strategy):
    wanted = ranks.run(alike, "ddp", world_size=2)[0]
    for weights in ranks.run(alike, strategy, world_size=2):
        torch.testing.assert_close(weights, wanted)
