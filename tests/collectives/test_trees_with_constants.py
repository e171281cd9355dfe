"""Strings, bytes and None in the trees that verbs take: returned where they are equal on all ranks."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoint_cases import launched

from fabric.core.errors import CollectiveMismatch

Pair = namedtuple("Pair", "x name")


@dataclass
class Batch:
    images: Any
    names: Any
    mask: Any = None


VERBS = {
    "all_reduce": lambda f, tree: f.all_reduce(tree, reduce_op="sum"),
    "all_reduce copy": lambda f, tree: f.all_reduce(tree, inplace=False),
    "all_reduce grads": lambda f, tree: f.all_reduce(tree, sync_grads=True),
    "all_reduce async": lambda f, tree: f.all_reduce(tree, async_op=True).wait(),
    "all_gather": lambda f, tree: f.all_gather(tree),
    "all_gather grads": lambda f, tree: f.all_gather(tree, sync_grads=True),
    "all_gather async": lambda f, tree: f.all_gather(tree, async_op=True).wait(),
    "all_gather list": lambda f, tree: f.all_gather(tree, uneven="list"),
    "all_gather cat": lambda f, tree: f.all_gather(tree, uneven="cat"),
    "gather": lambda f, tree: f.gather(tree, dst=f.world_size - 1),
    "reduce_scatter": lambda f, tree: f.reduce_scatter(tree, "sum"),
    "reduce_scatter grads": lambda f, tree: f.reduce_scatter(tree, "sum", sync_grads=True),
    "all_to_all": lambda f, tree: f.all_to_all(tree),
    "all_to_all grads": lambda f, tree: f.all_to_all(tree, sync_grads=True),
    "scatter": lambda f, tree: f.scatter(tree),
}


def tensors(rank):
    torch.manual_seed(rank)
    return [torch.randn(6, size, dtype=torch.float64, requires_grad=True) for size in (1, 400, 2)]


def same(got, expected):
    if isinstance(expected, list):
        for pair in zip(got, expected, strict=True):
            same(*pair)
    else:
        assert torch.equal(got, expected)


def keeps_constants():
    fabric = launched("ddp" if torch.distributed.get_world_size() > 1 else "auto")
    long = "ä" * 5000
    for name, verb in VERBS.items():
        plain = verb(fabric, [t.detach() if "grads" not in name else t for t in tensors(fabric.global_rank)])
        a, b, c = [t.detach() if "grads" not in name else t for t in tensors(fabric.global_rank)]
        batch = Batch(a, ["x", long, "\udc80"])
        found = verb(
            fabric, {"config": {"name": "adam", "none": None}, "batch": batch, "z": (Pair(b, b"n"), c)}
        )
        assert verb(fabric, {"only": "text"}) == ({"only": "text"} if plain else None)
        if plain is None:
            assert found is None
            continue
        assert found["config"] == {"name": "adam", "none": None}
        assert (type(found["batch"]), found["batch"].names, found["batch"].mask) == (
            *(Batch, ["x", long, "\udc80"]),
            None,
        )
        assert found["z"][0].name == b"n"
        same([found["batch"].images, found["z"][0].x, found["z"][1]], plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_constants_are_returned_as_they_are(ranks, world_size):
    ranks.run(keeps_constants, world_size=world_size)


def differs():
    fabric = launched("ddp")
    rank, texts = fabric.global_rank, []
    for verb in VERBS.values():
        if verb is VERBS["scatter"]:
            continue  # the other ranks' data are ignored
        for pair in (("adam", "sgd"), (None, "sgd"), (b"n", "n"), ("x" * 200, "x" * 199 + "y"), ("1", 1)):
            tree = {"loss": torch.ones(6), "name": pair[rank == 1]}
            with pytest.raises(CollectiveMismatch) as caught:
                verb(fabric, tree)
            texts.append(str(caught.value))
            assert torch.equal(tree["loss"], torch.ones(6)), "as it was"
    assert fabric.all_gather(rank).tolist() == list(range(fabric.world_size))
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_constants_that_differ_are_refused_on_all_ranks(ranks, world_size):
    first, *others = ranks.run(differs, world_size=world_size)
    assert others == [first] * (world_size - 1)
    head, _, *rows = first[0].splitlines()
    zero, one = sorted(rows[:2])  # the rank that differs from most is the first row
    assert head == "Ranks called all_reduce(sum) #1 with different data."
    assert "{'loss': float32[6], 'name': the constant 'adam'}" in zero
    assert "{'loss': float32[6], 'name': the constant 'sgd'}" in one
    assert "Strings must be equal, too: fabric.all_gather_object gathers those that differ." in first[0]
    assert "'name': None}" in first[1]
