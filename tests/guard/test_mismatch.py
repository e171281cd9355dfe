"""Ranks that make different calls: the same error on all of them at once, and groups that work afterwards."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from collective_cases import counted, launched

from fabric import Fabric
from fabric.collectives.frames import FRAME_BYTES
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, RankError
from fabric.guard import call_checker as control
from fabric.guard.call_checker import guard_of
from fabric.guard.control_connections import Listener
from fabric.testing import RankFailure

HERE = Path(__file__).name
HANG = 5.0
"""Seconds within which every rank must have its error: issue 3."""

Pair = namedtuple("Pair", ["left", "right"])


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment `mark`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def guarded_by(mode: str) -> Fabric:
    """A Fabric whose groups are guarded in this way; `unguard` afterwards."""
    os.environ["FABRIC_GUARD"] = mode
    return launched()


def mismatch(call) -> str:
    """The text of the CollectiveMismatch that the call must raise."""
    started = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        call()
    assert time.monotonic() - started < HANG
    return str(caught.value)


def still_works(fabric: Fabric, group=None, members=None) -> None:
    """The next calls of the group are right, small and large."""
    members = members or list(range(fabric.world_size))
    total = sum(members) + len(members)
    rank = fabric.global_rank
    assert fabric.all_reduce(rank + 1, group, "sum").item() == total
    assert fabric.all_gather(torch.full((FRAME_BYTES,), rank), group)[:, -1].tolist() == members


# Two hundred random mismatches. A call is plain data: verb, arguments, and the leaves of its tree.

SHAPES = [(), (6, 1), (6,), (12,), (6, 2), (12, 2), (6000,), (12000,), (6, 500)]
DTYPES = ["float32", "float64", "bfloat16", "float16"]
OPS = ["sum", "mean", "min", "max", "product"]
TREE_VERBS = [
    *(
        "all_reduce",
        "all_reduce async",
        "all_reduce copy",
        "all_reduce grads",
        "all_gather",
        "all_gather async",
    ),
    *("all_gather grads", "list", "cat", "reduce_scatter", "reduce_scatter grads", "all_to_all"),
    *("all_to_all grads", "gather"),
]
OTHER_VERBS = [
    "scatter",
    "broadcast",
    "all_gather_object",
    "any",
    "all",
    "agree",
    "barrier",
    "save",
    "load",
    "refused",
]


def random_call(random_: random.Random, world: int) -> dict:
    return {
        "verb": random_.choice(TREE_VERBS * 2 + OTHER_VERBS),
        "op": random_.choice(OPS),
        "rank": random_.randrange(world),
        "name": random_.choice([None, "start", "end"]),
        "kind": random_.choice(["dict", "list", "tuple", "Pair"]),
        "leaves": [(random_.choice(DTYPES), random_.choice(SHAPES)) for _ in range(2)],
    }


def changed(call: dict, random_: random.Random, world: int) -> dict:
    """A call that differs in one respect."""
    other = random_call(random_, world)
    part = random_.choice(
        ["verb", "op", "rank", "name", "kind", "leaves", "shape", "dtype", "order", "fewer", "all"]
    )
    leaves = list(call["leaves"])
    (dtype, shape), (new_dtype, new_shape) = leaves[0], other["leaves"][0]
    if part == "all":
        return other
    if part in other:
        return {**call, part: other[part]}
    if part == "fewer":
        return {**call, "kind": "list", "leaves": leaves[:1]}
    leaves = {
        "shape": [(dtype, new_shape), *leaves[1:]],
        "dtype": [(new_dtype, shape), *leaves[1:]],
        "order": leaves[::-1],
    }[part]
    return {**call, "leaves": leaves}


def identity(call: dict) -> tuple:
    """What other ranks must do alike."""
    verb = call["verb"]
    if verb == "refused":
        return ("refused",)
    if verb in ("all_gather_object", "any", "all", "agree", "save", "load"):
        return (verb,)
    if verb == "barrier":
        return verb, call["name"]
    if verb in ("scatter", "broadcast"):
        return verb, call["rank"]
    name = {
        "all_reduce async": "all_reduce",
        "all_reduce copy": "all_reduce",
        "all_gather async": "all_gather",
    }
    kinds = [dtype if verb == "list" else (dtype, cut(verb, shape)) for dtype, shape in call["leaves"]]
    extra = {"gather": call["rank"]}.get(verb) or (call["op"] if "reduce" in verb else None)
    return name.get(verb, verb), extra, call["kind"], str(kinds)


def cut(verb: str, shape: tuple) -> tuple:
    """What of a shape must be alike: for "cat" all but the first dimension."""
    splits = verb.startswith(("reduce_scatter", "all_to_all")) or verb == "cat"
    shape = (shape or (6,)) if splits else shape
    return ("*", *shape[1:]) if verb == "cat" else shape


def data_of(call: dict):
    verb = call["verb"]
    leaves = []
    for dtype, shape in call["leaves"]:
        full = (
            (shape or (6,)) if verb == "cat" or verb.startswith(("reduce_scatter", "all_to_all")) else shape
        )
        leaves.append(torch.ones(full, dtype=getattr(torch, dtype)))
    if call["kind"] == "dict":
        return {str(place): leaf for place, leaf in enumerate(leaves)}
    if call["kind"] == "Pair" and len(leaves) == 2:
        return Pair(*leaves)
    return leaves if call["kind"] == "list" else tuple(leaves)


def make(fabric: Fabric, call: dict, path: str):
    data, op, rank = data_of(call), call["op"], call["rank"]
    verbs = {
        "all_reduce": lambda: fabric.all_reduce(data, None, op),
        "all_reduce async": lambda: fabric.all_reduce(data, None, op, async_op=True),
        "all_reduce copy": lambda: fabric.all_reduce(data, None, op, inplace=False),
        "all_reduce grads": lambda: fabric.all_reduce(data, None, op, sync_grads=True),
        "all_gather": lambda: fabric.all_gather(data),
        "all_gather async": lambda: fabric.all_gather(data, async_op=True),
        "all_gather grads": lambda: fabric.all_gather(data, sync_grads=True),
        "list": lambda: fabric.all_gather(data, uneven="list"),
        "cat": lambda: fabric.all_gather(data, uneven="cat"),
        "reduce_scatter": lambda: fabric.reduce_scatter(data, op),
        "reduce_scatter grads": lambda: fabric.reduce_scatter(data, op, sync_grads=True),
        "all_to_all": lambda: fabric.all_to_all(data),
        "all_to_all grads": lambda: fabric.all_to_all(data, sync_grads=True),
        "gather": lambda: fabric.gather(data, rank),
        "scatter": lambda: fabric.scatter(torch.ones(6), rank),
        "broadcast": lambda: fabric.broadcast(data, rank),
        "all_gather_object": lambda: fabric.all_gather_object(data),
        "any": lambda: fabric.any(True),
        "all": lambda: fabric.all(True),
        "agree": lambda: fabric.agree(op),
        "barrier": lambda: fabric.barrier(call["name"]),
        "save": lambda: fabric.save(path, {"step": 1}),
        "load": lambda: fabric.load(path),
        "refused": lambda: fabric.all_reduce([data, "text"]),
    }
    return verbs[call["verb"]]()


def random_mismatches(seed: int, world: int, count: int) -> list[list[dict]]:
    """For each case what every rank calls: not all alike."""
    random_ = random.Random(seed)
    cases = []
    while len(cases) < count:
        base = random_call(random_, world)
        other = changed(base, random_, world)
        odd = random_.sample(range(world), random_.randrange(1, world))
        calls = [other if rank in odd else base for rank in range(world)]
        if len({identity(call) for call in calls}) > 1:
            cases.append(calls)
    return cases


def make_mismatches(cases, mode, path):
    fabric = guarded_by(mode)
    texts = []
    for number, calls in enumerate(cases):
        try:
            texts.append(mismatch(lambda mine=calls[fabric.global_rank]: make(fabric, mine, path)))
            still_works(fabric)
        except BaseException as error:
            error.add_note(f"case {number}: {calls}")
            raise
    del os.environ["FABRIC_GUARD"]
    return texts


@pytest.mark.parametrize("mode", ["full", "light"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_hundred_random_mismatches(ranks, tmp_path, world_size, mode):
    cases = random_mismatches(world_size, world_size, 200)
    path = tmp_path / "never.ckpt"
    first, *others = ranks.run(make_mismatches, cases, mode, str(path), world_size=world_size)
    for number, texts in enumerate(zip(first, *others, strict=True)):
        assert len(set(texts)) == 1, f"case {number}: {texts}"
        rows = re.findall(rf"^ +(\d+(?:(?:, |-)\d+)*) .*{re.escape(HERE)}:\d+$", texts[0], re.MULTILINE)
        spans = [tuple(map(int, span.split("-"))) for span in ", ".join(rows).split(", ")]
        shown = [rank for span in spans for rank in range(span[0], span[-1] + 1)]
        assert sorted(shown) == [*range(world_size)], texts[0]
    assert not path.exists()


# What the error says


def save_on_rank_zero_only(path):
    fabric = launched()
    if fabric.global_rank == 0:
        text = mismatch(lambda: fabric.save(path, {"step": 1}))  # saves alone
    else:
        text = mismatch(lambda: fabric.all_reduce(torch.ones(3)))  # reduces alone
    still_works(fabric)
    fabric.save(path, {"step": 2})
    return text


def test_save_on_one_rank_and_all_reduce_on_the_other(ranks, tmp_path):
    first, second = ranks.run(save_on_rank_zero_only, str(tmp_path / "a.ckpt"), world_size=2)
    assert first == second
    head, titles, zero, one, remedy = first.splitlines()
    assert head == "Ranks made different calls where all must make the same."
    assert titles.split() == ["rank", "call", "data", "at"]
    assert re.fullmatch(rf"  0 +save #1 +\S*{HERE}:{line_of('saves alone')}", zero)
    assert re.fullmatch(
        rf"  1 +all_reduce\(mean\) #1 +float32\[3\] +\S*{HERE}:{line_of('reduces alone')}", one
    )
    assert "if rank == 0:" in remedy
    assert torch.load(tmp_path / "a.ckpt") == {"step": 2}


def refuse_to_write(path):
    fabric = launched()
    calls = [lambda: fabric.save(path, {"step": 1}), lambda: fabric.all_reduce(1.0)]
    return mismatch(calls[fabric.global_rank])


def test_a_file_that_not_all_ranks_save_is_not_written(ranks, tmp_path):
    ranks.run(refuse_to_write, str(tmp_path / "a.ckpt"), world_size=2)
    assert list(tmp_path.iterdir()) == []


def reduce_other_data(mode):
    fabric = guarded_by(mode)
    fabric.barrier()
    x = [torch.ones(3), torch.ones(3), torch.ones(4, dtype=torch.float64)][fabric.global_rank]
    text = mismatch(lambda: fabric.all_reduce({"loss": x, "hits": 1}, None, "sum"))  # other data
    still_works(fabric)
    del os.environ["FABRIC_GUARD"]
    return text


@pytest.mark.parametrize("mode", ["full", "light"])
def test_the_table_has_a_row_for_ranks_that_are_alike(ranks, mode):
    texts = ranks.run(reduce_other_data, mode, world_size=3)
    assert len(set(texts)) == 1
    head, _, *rows, remedy = texts[0].splitlines()
    assert head == "Ranks called all_reduce(sum) #2 with different data."
    for rank, row, loss in zip(["2", "0-1"], rows, ["float64[4]", "float32[3]"], strict=True):
        what = re.escape(f"{{'loss': {loss}, 'hits': int64[]}}")
        assert re.fullmatch(
            rf"  {rank}  +all_reduce\(sum\) #2 +{what} +\S*{HERE}:{line_of('other data')}", row
        ), row
    assert "same structure, shapes and dtypes" in remedy


def name_barriers():
    fabric = launched()
    if fabric.global_rank == 0:
        return mismatch(lambda: fabric.barrier("before"))
    return mismatch(lambda: fabric.barrier("after"))


def test_barriers_of_different_names(ranks):
    first, second = ranks.run(name_barriers, world_size=2)
    assert first == second
    assert "barrier('before')" in first
    assert "barrier('after')" in first


def meet_setup(what):
    fabric = launched()
    if fabric.global_rank == 0:
        return mismatch(fabric.barrier)
    loader = torch.utils.data.DataLoader(range(4))
    net = torch.nn.Linear(2, 2)
    calls = {"loader": lambda: fabric.setup_dataloaders(loader), "module": lambda: fabric.setup(net)}
    return mismatch(calls[what])


@pytest.mark.parametrize("what", ["loader", "module"])
def test_a_barrier_and_setup(ranks, what):
    first, second = ranks.run(meet_setup, what, world_size=2)
    assert first == second
    assert "setup" in first


# Groups that share some ranks


def circle(mode, warm, fail_in):
    """Rank 0 waits in group (0, 1), rank 1 in (1, 2), rank 2 in (0, 2)."""
    fabric = guarded_by(mode)
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    rank = fabric.global_rank
    mine = [place for place, pair in enumerate(pairs) if rank in pair]
    if warm:
        for place in mine:
            still_works(fabric, groups[place], list(pairs[place]))
    if fail_in == "circle":
        text = mismatch(lambda: fabric.all_reduce(1.0, groups[rank]))
    elif rank == 0:
        text = mismatch(lambda: fabric.all_gather(torch.ones(2), groups[0]))
    else:
        text = mismatch(lambda: fabric.barrier("world"))
    for group in (groups[mine[0]], None):  # each of them, from now on
        assert mismatch(lambda group=group: fabric.all_reduce(1.0, group)) == text
    del os.environ["FABRIC_GUARD"]
    return text


@pytest.mark.parametrize("mode", ["full", "light"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fail_in", ["circle", "world"])
def test_ranks_in_different_groups(ranks, fail_in, warm, mode):
    texts = ranks.run(circle, mode, warm, fail_in, world_size=3)
    assert len(set(texts)) == 1
    assert "wait for each other in different groups" in texts[0]
    if fail_in == "circle":
        for members in ("ranks 0-1", "ranks 1-2", "ranks 0, 2"):
            assert re.search(rf"all_reduce\(mean\) #\d+ of {members} +float32\[\] +\S*{HERE}:\d+", texts[0])
    else:
        assert re.search(r"  0 +all_gather #\d+ of ranks 0-1 +float32\[2\]", texts[0])
        # Ranks 0 and 1 are enough for the verdict: rank 2 may come after it.
        assert re.search(r"  1(-2)? +barrier\('world'\) #\d+ of ranks 0-2", texts[0])


# Arguments that a rank does not accept


def lambda_():
    return lambda: None


REFUSED = {
    "set": (lambda f, bad: f.all_reduce([{1}] if bad else [1.0]), ArgumentTypeError, "a leaf is set"),
    "int mean": (
        lambda f, bad: f.all_reduce(torch.tensor(1) if bad else torch.tensor(1.0)),
        ArgumentTypeError,
        "int64 would round",
    ),
    "cat": (
        lambda f, bad: f.all_gather(torch.ones(() if bad else 2), uneven="cat"),
        ConfigurationError,
        "concatenates along dim 0",
    ),
    "parts": (
        lambda f, bad: f.reduce_scatter(torch.ones(7 if bad else 6), "sum"),
        ConfigurationError,
        r"of shape \[7\] does not divide by . ranks",
    ),
    "routes": (lambda f, bad: f.all_to_all(torch.ones(7 if bad else 6)), ConfigurationError, r"\[7\]"),
    "object": (
        lambda f, bad: f.all_gather_object(lambda_() if bad else 1),
        ArgumentTypeError,
        "cannot be pickled",
    ),
    "agree": (lambda f, bad: f.agree(lambda_() if bad else 1), ArgumentTypeError, "cannot be pickled"),
    "op": (lambda f, bad: f.all_reduce(1.0, None, "summ" if bad else "sum"), ConfigurationError, "'sum'"),
    "sparse": (
        lambda f, bad: f.all_gather(torch.eye(2).to_sparse() if bad else torch.eye(2)),
        ArgumentTypeError,
        "to_dense",
    ),
    "gather": (lambda f, bad: f.gather("text" if bad else 1), ArgumentTypeError, "a leaf is str"),
    "shared": (
        lambda f, bad: f.all_reduce(torch.ones(1).expand(3) if bad else torch.ones(3)),
        ArgumentTypeError,
        "share memory",
    ),
    "no gradient": (
        lambda f, bad: f.all_reduce(
            torch.ones(2, dtype=torch.int), None, "bor" if bad else "sum", sync_grads=True
        ),
        ConfigurationError,
        "has no gradient",
    ),
    "huge": (lambda f, bad: f.all_reduce(2**70 if bad else 1, None, "sum"), ArgumentTypeError, str(2**70)),
    "array": (
        lambda f, bad: f.all_gather(torch.ones(2).numpy().astype("U" if bad else "f8")),
        ArgumentTypeError,
        "numpy.str_",
    ),
}


def refuse_on_one_rank(mode):
    fabric = guarded_by(mode)
    texts = {}
    for name, (call, _, _) in REFUSED.items():
        try:
            texts[name] = mismatch(lambda call=call: call(fabric, fabric.global_rank == 1))
            still_works(fabric)
        except BaseException as error:
            error.add_note(name)
            raise
    del os.environ["FABRIC_GUARD"]
    return texts


@pytest.mark.parametrize("mode", ["full", "light"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_refuses_its_arguments(ranks, world_size, mode):
    first, *others = ranks.run(refuse_on_one_rank, mode, world_size=world_size)
    assert others == [first] * (world_size - 1)
    for name, (_, kind, message) in REFUSED.items():
        assert first[name].startswith("Rank 1 refused the arguments of "), name
        assert re.search(rf"refused: {kind.__name__}: .*{message}", first[name]), first[name]


def refuse_on_all_ranks(mode):
    fabric = guarded_by(mode)
    for name, (call, kind, message) in REFUSED.items():
        try:
            with pytest.raises(kind, match=message) as caught:
                call(fabric, True)
            assert not isinstance(caught.value, CollectiveMismatch)
            still_works(fabric)
        except BaseException as error:
            error.add_note(name)
            raise
    del os.environ["FABRIC_GUARD"]


@pytest.mark.parametrize("mode", ["full", "light", "off"])
def test_all_ranks_refuse_their_arguments(ranks, mode):
    ranks.run(refuse_on_all_ranks, mode, world_size=2)


def refuse_other_values():
    """The same mistake on every rank, with other values in it."""
    fabric = launched()
    with pytest.raises(TypeError, match=f"text of rank {fabric.global_rank}"):
        fabric.all_reduce([{f"text of rank {fabric.global_rank}"}])
    still_works(fabric)


def test_the_same_mistake_with_other_values_is_each_ranks_own_error(ranks):
    ranks.run(refuse_other_values, world_size=2)


# Uneven shapes (pain 6)


def gather_unequal():
    fabric = launched()
    rank = fabric.global_rank
    x = torch.arange(10.0)[: 3 if rank == 0 else 5] + 10 * rank
    with pytest.raises(ValueError, match="all_gather") as caught:
        fabric.all_gather(x)
    still_works(fabric)
    y = torch.full((0 if rank == 0 else 2, 4), 7.0)
    mixed = {"x": x, "y": [y, x.long()]}
    return str(caught.value), fabric.all_gather(mixed, uneven="list"), fabric.all_gather(mixed, uneven="cat")


def test_unequal_shapes_are_an_error_or_exact(ranks):
    results = ranks.run(gather_unequal, world_size=2)
    zero, one = torch.tensor([0.0, 1, 2]), torch.tensor([10.0, 11, 12, 13, 14])
    empty, full = torch.empty(0, 4), torch.full((2, 4), 7.0)
    for text, listed, joined in results:
        assert text == results[0][0]
        assert re.search(r"  0 +all_gather #1 +float32\[3\]", text)
        assert re.search(r"  1 +all_gather #1 +float32\[5\]", text)
        assert "uneven='list' or 'cat'" in text
        expected = {"x": [zero, one], "y": [[empty, full], [zero.long(), one.long()]]}
        for got, want in (
            (listed["x"], expected["x"]),
            (listed["y"][0], expected["y"][0]),
            (listed["y"][1], expected["y"][1]),
            ([joined["x"]], [torch.cat(expected["x"])]),
            (joined["y"], [torch.cat(pair) for pair in expected["y"]]),
        ):
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert torch.equal(a, b)


UNEQUAL = {
    "dims": ((2, 2), (2,), "float32", "float32", "cat"),
    "columns": ((2, 2), (2, 3), "float32", "float32", "cat"),
    "dtypes": ((2,), (3,), "float32", "float64", "list"),
    "dtypes of cat": ((2,), (3,), "float32", "int64", "cat"),
}


def gather_incompatible(how_many):
    fabric = launched()
    rank, texts = fabric.global_rank, []
    for shape, other_shape, dtype, other_dtype, how in list(UNEQUAL.values())[:how_many]:
        x = torch.ones(other_shape if rank else shape, dtype=getattr(torch, other_dtype if rank else dtype))
        texts.append(mismatch(lambda x=x, how=how: fabric.all_gather(x, uneven=how)))
        still_works(fabric)
    text = mismatch(lambda: fabric.all_gather(torch.ones(2), uneven="list" if rank else "cat"))
    still_works(fabric)
    return [*texts, text]


def test_what_cannot_be_gathered_is_the_same_error_on_every_rank(ranks):
    first, second = ranks.run(gather_incompatible, len(UNEQUAL), world_size=2)
    assert first == second
    assert "float32[*, 2]" in first[1]
    assert "float32[*, 3]" in first[1]
    assert "float64" in first[2]
    assert "uneven='list'" in first[4]
    assert "uneven='cat'" in first[4]


def flow_through_uneven(how):
    fabric = launched()
    rank = fabric.global_rank
    x = torch.arange(3.0 + 2 * rank, dtype=torch.float64, requires_grad=True)
    gathered = fabric.all_gather(x, sync_grads=True, uneven=how)
    joined = torch.cat(gathered) if how == "list" else gathered
    (joined**2 * (rank + 1)).sum().backward()
    return x.grad.tolist()


@pytest.mark.parametrize("how", ["list", "cat"])
def test_gradients_flow_through_unequal_shapes(ranks, how):
    # d/dx of (1 + 2) * x**2, the losses of both ranks.
    assert ranks.run(flow_through_uneven, how, world_size=2) == [
        [0.0, 6.0, 12.0],
        [0.0, 6.0, 12.0, 18.0, 24.0],
    ]


# agree


def agree_on_values():
    fabric = launched()
    rank = fabric.global_rank
    nan = float("nan")
    for value in (
        *(1, "text", None, nan, 1j, True, (), {}, {"lr": [0.1, nan], "name": "adam"}, {1, 2}),
        torch.tensor([1.0, nan]),
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        np.array([1.0, nan]),
        {"steps": [torch.ones(2, dtype=torch.bfloat16)], "pair": Pair(1, 2)},
    ):
        assert fabric.agree(value) is value
    texts = []
    for zero, other in (
        (0.1, 0.2),
        (1, 1.0),
        (1, True),
        (0.0, nan),
        ({"lr": 0.1}, {"lr": 0.2}),
        ({"lr": 0.1}, {"rate": 0.1}),
        (torch.tensor([1.0]), torch.tensor([nan])),
        (torch.ones(2), torch.ones(1, 2)),
        (np.ones(1), np.ones(3)),
        (np.ones(2), np.ones(2, dtype="f4")),
        (nan, complex(nan, 1)),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([1, 2], dtype=torch.uint16), torch.tensor([1, 3], dtype=torch.uint16)),
        ("a" * 200, "b" * 20_000),
    ):
        texts.append(mismatch(lambda value=other if rank == 1 else zero: fabric.agree(value)))
        still_works(fabric)
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_agree(ranks, world_size):
    first, *others = ranks.run(agree_on_values, world_size=world_size)
    assert others == [first] * (world_size - 1)
    lines = first[0].splitlines()
    assert lines[0] == "fabric.agree: ranks hold different values."
    place = rf"  at {re.escape(__file__)}:\d+"
    for line, row in zip(lines[1:-1], ["  rank 0: 0.1", "  rank 1: 0.2", "  rank 2: 0.1"], strict=False):
        assert re.fullmatch(row + place, line)
    assert len(lines[1:-1]) == world_size
    assert "  rank 1: {'rate': 0.1}  at " in first[5]
    assert "  rank 1: tensor([nan])  at " in first[6]
    assert all(["a" * 81 not in line and "b" * 81 not in line for line in first[-1].splitlines()])


def agree_on_reordered_dict():
    fabric = launched()
    value = {"a": 1, "b": 2} if fabric.global_rank else {"b": 2, "a": 1}
    return fabric.agree(value) is value


def test_dicts_agree_in_any_order(ranks):
    assert ranks.run(agree_on_reordered_dict, world_size=2) == [True, True]


# Decisions of one rank (pain 12)


def stop_together():
    fabric = launched()
    steps = 0
    while True:
        steps += 1
        loss = float("nan") if (fabric.global_rank, steps) == (1, 4) else 1.0
        if fabric.any(loss != loss):
            break
        fabric.all_reduce(loss)
    assert fabric.all(steps == 4)
    assert not fabric.all(fabric.global_rank == 0)
    return steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_decision_of_one_rank_stops_all_at_the_same_step(ranks, world_size):
    assert ranks.run(stop_together, world_size=world_size) == [4] * world_size


# all_reduce (pain 16)


def reduce_a_dict():
    fabric = launched()
    rank = fabric.global_rank
    data = {f"metric {i}": float(i + rank) for i in range(10)}
    with counted() as calls:
        result = fabric.all_reduce(data)
    with pytest.raises(TypeError, match=r"mean.*int64 would round"):
        fabric.all_reduce(torch.tensor(rank + 1))
    x = torch.tensor([1.0 + rank])
    copy = fabric.all_reduce(x, inplace=False)
    assert x.item() == 1.0 + rank
    return {name: value.item() for name, value in result.items()}, dict(calls), copy.item()


def test_all_reduce_of_a_dict_of_numbers(ranks):
    expected = {f"metric {i}": i + 0.5 for i in range(10)}
    assert ranks.run(reduce_a_dict, world_size=2) == [(expected, {"frame": 1}, 1.5)] * 2


# FABRIC_GUARD


def guard_by(modes):
    fabric = launched()
    os.environ["FABRIC_GUARD"] = modes[fabric.global_rank]
    with pytest.raises(ConfigurationError) as caught:
        fabric.barrier()
    del os.environ["FABRIC_GUARD"]
    return str(caught.value)


def test_an_unknown_guard_is_refused(ranks):
    texts = ranks.run(guard_by, ["bogus", "bogus"], world_size=2)
    must = "FABRIC_GUARD must be one of full, light, off and the same on all ranks, but is"
    assert texts == [f"{must} bogus on rank 0, bogus on rank 1."] * 2


def test_guards_must_be_the_same_on_all_ranks(ranks):
    texts = ranks.run(guard_by, ["full", "light", "full"], world_size=3)
    must = "FABRIC_GUARD must be one of full, light, off and the same on all ranks, but is"
    assert texts == [f"{must} full on rank 0, light on rank 1, full on rank 2."] * 3
    texts = ranks.run(guard_by, ["off", "full"], world_size=2)
    assert texts == [f"{must} off on rank 0, full on rank 1."] * 2


# Handles

FORGETFUL = """
import torch
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
waited = fabric.all_reduce(torch.ones(3), async_op=True)
waited.wait()
handle = fabric.all_gather(torch.ones(5000), async_op=True)  # forgotten
if fabric.global_rank == 0:
    print("done")
"""


@pytest.mark.slow
def test_a_handle_that_nobody_waits_for_is_reported_at_exit(tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
    number = next(n for n, line in enumerate(FORGETFUL.splitlines(), 1) if "# forgotten" in line)
    reports = [line for line in done.stderr.splitlines() if "there was no wait()" in line]
    assert reports, done.stderr
    for line in reports:
        assert f"all_gather at {script}:{number}." in line
        assert "all_reduce" not in line


# What a reviewer found


def late_for_the_verdict():
    """Rank 2 comes to a call that ranks 0 and 1 have given up."""
    fabric = launched()
    rank = fabric.global_rank
    pair = dist.new_group([0, 1])
    fabric.barrier()
    store = dist.group.WORLD.get_group_store()
    if rank == 2:
        store.wait(["test/given up"])
    text = mismatch(lambda: fabric.all_reduce(1.0, group=pair if rank == 1 else None))
    store.set("test/given up", "")
    return text


def test_who_comes_late_gets_the_same_table(ranks):
    texts = ranks.run(late_for_the_verdict, world_size=3)
    assert len(set(texts)) == 1
    assert "Later calls of this job raise this error too." in texts[0]


BAD_LEAVES = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "on the meta device": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


def refuse_a_leaf(kind):
    fabric = launched()
    good = torch.ones(3)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its nested and quantised tensors prototypes
        bad = BAD_LEAVES[kind]()
    for verb in (
        fabric.all_gather,
        fabric.all_reduce,
        lambda data: fabric.all_gather(data, uneven="cat"),
        lambda data: fabric.all_gather(data, sync_grads=True),
    ):
        with pytest.raises(CollectiveMismatch) as caught:
            verb(bad if fabric.global_rank == 0 else good)
        found.append(str(caught.value))
    return found, fabric.all_gather(good).tolist()


@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_a_leaf_that_cannot_travel_is_refused_before_anything_is_sent(ranks, kind):
    (zero, usable), (one, _) = ranks.run(refuse_a_leaf, kind, world_size=2)
    assert zero == one
    assert all(kind in text and "Rank 0 refused" in text for text in zero)
    assert usable == [[1.0] * 3] * 2


def flags_of_several_elements():
    fabric = launched()
    found = []
    for verb in (fabric.any, fabric.all):
        with pytest.raises(ArgumentTypeError) as caught:
            verb(torch.tensor([True, False]))
        found.append(str(caught.value))
    return found, fabric.any(torch.tensor(fabric.global_rank == 0))


def test_any_and_all_take_one_truth_value(ranks):
    for (any_text, all_text), usable in ranks.run(flags_of_several_elements, world_size=2):
        assert "fabric.any(flag.any())" in any_text
        assert "fabric.all(flag.all())" in all_text
        assert usable is True


def first_verb_in_evaluation(verb):
    fabric = launched()
    run = {"all_gather": fabric.all_gather, "all_reduce": lambda x: fabric.all_reduce(x, inplace=False)}
    with torch.inference_mode():
        run[verb](torch.ones(2))
        run[verb](torch.ones(2).double())
    return run[verb](torch.ones(2)).shape, run[verb](torch.ones(2).double()).shape


@pytest.mark.parametrize("verb", ["all_gather", "all_reduce"])
def test_verbs_first_used_under_inference_mode_work_outside(ranks, verb):
    shape = (2, 2) if verb == "all_gather" else (2,)
    assert ranks.run(first_verb_in_evaluation, verb, world_size=2) == [(shape, shape)] * 2


def verbs_in_compiled_code():
    fabric = launched()

    @torch.compile(backend="eager")
    def step(x):
        return fabric.all_gather(fabric.all_reduce(x * 2, inplace=False)) + 1

    return [step(torch.full((n,), float(fabric.global_rank))).tolist() for n in (2, 3, 4)]


def test_verbs_may_stand_in_compiled_functions(ranks):
    assert ranks.run(verbs_in_compiled_code, world_size=2) == [[[[2.0] * n] * 2 for n in (2, 3, 4)]] * 2


class Config:
    def __init__(self, rate, rank=None):
        self.rate, self.rank = rate, rank


def agree_on_objects():
    fabric = launched()
    agreed = fabric.agree(Config([0.1, float("nan")]))
    with pytest.raises(CollectiveMismatch):
        fabric.agree(Config(0.1, fabric.global_rank))
    fabric.agree(torch.eye(2).to_sparse())
    return agreed.rate[0]


def test_agree_looks_into_objects_without_equality(ranks):
    assert ranks.run(agree_on_objects, world_size=2) == [0.1, 0.1]


def trees_that_differ_at_the_end():
    fabric = launched()
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.all_gather({f"key{i}": 1.0 for i in range(1000 + fabric.global_rank)})
    return str(caught.value)


def test_the_table_shows_where_long_trees_differ(ranks):
    zero, one = ranks.run(trees_that_differ_at_the_end, world_size=2)
    assert zero == one
    first, second = [line for line in zero.splitlines() if line.startswith(("  0 ", "  1 "))]
    assert "'key999': float32[]}" in first
    assert "'key1000': float32[]}" in second


def many_turns():
    fabric = launched()
    store = dist.group.WORLD.get_group_store()
    with fabric.rank_zero_first():
        pass
    before = store.num_keys()
    for _ in range(10):
        with fabric.rank_zero_first():
            pass
    fabric.barrier()
    return store.num_keys() - before


def test_turns_leave_no_keys_behind(ranks):
    assert max(ranks.run(many_turns, world_size=2)) <= 2


class Alarm(Exception):
    pass


def interrupted_while_waiting():
    """Rank 0 gives up waiting, as by Ctrl+C, and goes on; its call stands, and rank 1 comes to it later."""
    fabric = launched()
    rank, store = fabric.global_rank, dist.group.WORLD.get_group_store()
    fabric.barrier()
    if rank == 0:

        def ring(*_):
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 1.0)  # again: Python loses what is raised in a finalizer
        with pytest.raises(Alarm):
            fabric.barrier("late")
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        store.set("test/interrupted", "")
    else:
        store.wait(["test/interrupted"])
        fabric.barrier("late")
    return [fabric.all_reduce(float(rank + i), reduce_op="sum").item() for i in range(3)]


def test_a_call_that_was_interrupted_leaves_the_group_usable(ranks):
    assert ranks.run(interrupted_while_waiting, world_size=2) == [[1.0, 3.0, 5.0]] * 2


def interrupted_while_opening():
    """Ctrl+C in the first call of a group, for which the other rank has not come; then both make it again."""
    fabric = launched()
    rank, store = fabric.global_rank, dist.group.WORLD.get_group_store()
    group = dist.new_group([0, 1])
    if rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 1.0)  # again: Python loses what is raised in a finalizer
        with pytest.raises(KeyboardInterrupt):
            fabric.all_reduce(1.0, group=group)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        store.set("test/opening", "")
        time.sleep(0.5)  # the other rank comes first, and must not find what this one has left
    else:
        store.wait(["test/opening"])
    return [fabric.all_reduce(float(rank + i), group=group, reduce_op="sum").item() for i in range(3)]


def test_a_first_call_that_was_interrupted_can_be_made_again(ranks):
    assert ranks.run(interrupted_while_opening, world_size=2) == [[1.0, 3.0, 5.0]] * 2


def one_is_gone():
    with mock.patch.dict("os.environ", FABRIC_HANG_REPORT_AFTER="off"):
        fabric, group = launched(), dist.new_group([0, 1, 2])
        fabric.all_reduce(1.0, group=group)
        if fabric.global_rank == 2:
            guard_of(group).connections.drop("as the end of the process does")
            return ""
        with pytest.raises(RankError) as caught:
            fabric.all_reduce(1.0, group=group)
        return str(caught.value)


def test_a_rank_that_ended_is_named_alone_also_without_a_watchdog(ranks):
    for text in ranks.run(one_is_gone, world_size=3)[:2]:
        assert "rank 2 ended, or does not answer (Connection closed by rank 2)" in text
        assert "did not join" not in text


def nobody_listens():
    def leave(listener, key):
        listener.__exit__()
        raise TimeoutError("timed out")

    fabric = launched()
    with (
        mock.patch.object(Listener, "accept", leave),
        mock.patch.object(control, "connect", side_effect=ConnectionRefusedError(111, "Connection refused")),
        pytest.raises(RankError) as caught,
    ):
        fabric.all_reduce(1.0, group=dist.new_group([0, 1]))
    return str(caught.value)


def test_ranks_that_cannot_reach_each_other_say_where_they_tried(ranks):
    first, second = ranks.run(nobody_listens, world_size=2)
    assert re.search(r"the ranks after it did not reach rank 0 at [\w.:-]+:\d+ \(timed out\)", first)
    assert re.search(r"rank 1 did not reach rank 0 at [\w.:-]+:\d+ \(.*Connection refused\)", second)
    for text in (first, second):
        assert "GLOO_SOCKET_IFNAME=eth0" in text
        assert "FABRIC_GUARD=off" in text


def evaluating_other_weights(strategy):
    f = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    f.launch()
    torch.manual_seed(1)
    model = f.setup(torch.nn.Linear(4, 2))
    with torch.no_grad():
        for _ in range(1 + f.global_rank):
            model(torch.ones(2, 4, device=f.device))
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)
        if f.global_rank == 0:
            model(torch.ones(2, 4, device=f.device))


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_evaluations_of_other_weights_are_not_mixed(ranks, strategy):
    """As many calls on each rank, but rank zero has changed the weights before its second one."""
    with pytest.raises(RankFailure, match="weights after 2 changes in place") as caught:
        ranks.run(evaluating_other_weights, strategy, world_size=2)
    assert "weights after 0 changes in place" in str(caught.value)
    assert "Call the model equally often on all ranks" in str(caught.value)
