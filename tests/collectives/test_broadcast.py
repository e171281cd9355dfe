"""broadcast: any object from any rank, its tensors never pickled, its refusals on every rank."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from unittest import mock

import pytest
import torch
from collective_cases import GATHERED, Batch, Pair, alike, launched, random_tensor, random_tree

from fabric.core.errors import CollectiveMismatch, ConfigurationError


class Holder:
    """An object of a user's class with tensors inside."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.again = tensor


def sent(src):
    """One of everything; only `src` is asked for it."""
    shared = torch.arange(3.0)
    every_dtype = {
        str(dtype): random_tensor((2, 3), dtype, torch.Generator().manual_seed(src)) for dtype in GATHERED
    }
    return {
        "from": src,
        "dtypes": every_dtype,
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "large": torch.arange(2_500_000, dtype=torch.float32),
        "text": "x" * 5000,
        "objects": [None, {1, 2}, b"bytes", Pair(1, Batch("a", torch.ones(1))), range(3), torch.float16],
        "nesting": defaultdict(list, a=OrderedDict(z=1, y=torch.zeros(1))),
        "holder": Holder(shared),
        "shared": shared,
        "module": torch.nn.Linear(2, 2),
    }


def receive(src):
    fabric = launched()
    mine = sent(src) if fabric.global_rank == src else "ignored"
    forbidden = mock.Mock(side_effect=AssertionError("a tensor was pickled"))
    with (
        mock.patch.object(torch.Tensor, "__reduce_ex__", forbidden),
        mock.patch.object(torch.nn.Parameter, "__reduce_ex__", forbidden),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch, "save", forbidden)
        got = fabric.broadcast(mine, src)
    if fabric.global_rank == src:
        assert got is mine
    else:
        torch.manual_seed(0)
    assert got["from"] == src
    alike(
        got["dtypes"],
        {str(d): random_tensor((2, 3), d, torch.Generator().manual_seed(src)) for d in GATHERED},
    )
    assert (got["leaf"].requires_grad, got["leaf"].is_leaf) == (True, True)
    assert got["result"].tolist() == [2.0, 2.0]
    assert type(got["parameter"]) is torch.nn.Parameter
    assert not got["parameter"].requires_grad
    assert got["empty"].shape == (0, 3)
    assert got["scalar"].item() == 4
    assert torch.equal(got["strided"], torch.arange(6.0).view(2, 3).t())
    assert got["expanded"].tolist() == [1.0] * 4
    assert got["conjugate"].tolist() == [1 - 2j]
    assert torch.equal(got["large"], torch.arange(2_500_000, dtype=torch.float32))
    assert got["text"] == "x" * 5000
    objects = got["objects"]
    assert objects[:3] == [None, {1, 2}, b"bytes"]
    assert (type(objects[3]), type(objects[3].right)) == (Pair, Batch)
    assert objects[4:] == [range(3), torch.float16]
    assert got["nesting"]["missing"] == []
    assert list(got["nesting"]["a"]) == ["z", "y"]
    assert got["holder"].tensor is got["holder"].again is got["shared"], "one tensor stays one tensor"
    got["large"].add_(1)  # what arrives can be written to
    return {name: p.detach().clone() for name, p in got["module"].named_parameters()}


@pytest.mark.parametrize(("world_size", "src"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_broadcast_of_everything(ranks, world_size, src):
    modules = ranks.run(receive, src, world_size=world_size)
    for module in modules[1:]:
        alike(module, modules[0])


def broadcast_random_trees(seeds):
    fabric = launched()
    for seed in seeds:
        src = seed % fabric.world_size
        expected = random_tree(seed, src, GATHERED)
        got = fabric.broadcast(expected if fabric.global_rank == src else None, src)
        alike(got, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_broadcast_of_random_trees(ranks, world_size):
    ranks.run(broadcast_random_trees, range(40), world_size=world_size)


def broadcast_what_does_not_pickle(long):
    fabric = launched()
    bad = {"x" * 5000 if long else "key": lambda: None, "tensor": torch.ones(3)}
    with pytest.raises(CollectiveMismatch, match=r"refused: .*rank 1's object cannot be pickled") as caught:
        fabric.broadcast(bad if fabric.global_rank == 1 else None, src=1)
    assert str(caught.value).startswith("Rank 1 refused the arguments of broadcast(src=1)")
    return fabric.broadcast(fabric.global_rank, src=1)


@pytest.mark.parametrize("long", [False, True])
def test_what_does_not_pickle_is_refused_on_every_rank(ranks, long):
    assert ranks.run(broadcast_what_does_not_pickle, long, world_size=3) == [1, 1, 1]


class Unreadable:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        raise pickle.PicklingError(self.text)


def broadcast_a_long_refusal():
    fabric = launched()
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.broadcast(Unreadable("ä" * 4000) if fabric.global_rank == 0 else None)
    return str(caught.value)


def test_a_long_refusal_arrives_in_full(ranks):
    first, second = ranks.run(broadcast_a_long_refusal, world_size=2)
    assert first == second
    assert "ä" * 4000 in first


def broadcast_out_of_range():
    fabric = launched()
    for src in (2, -1):
        with pytest.raises(ConfigurationError, match=f"src={src}.*from 0 to 1"):
            fabric.broadcast(1, src=src)
    return fabric.broadcast("fine", src=1)


def test_src_must_be_a_rank(ranks):
    assert ranks.run(broadcast_out_of_range, world_size=2) == ["fine", "fine"]
