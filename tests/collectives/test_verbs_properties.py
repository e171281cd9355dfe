"""Random trees, shapes, dtypes and sizes through every verb, against plain single-process references.

Hypothesis draws a *plan*: plain data that every rank can grow into the tree of any rank. So each rank
computes by itself what a verb must give, without a word of the package.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import contextmanager
from functools import reduce
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from collective_cases import launched
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fabric.collectives.frames import FRAME_BYTES, PACK_LIMIT, PAYLOAD_BYTES
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch, ConfigurationError, UsageError

OPS = ("mean", "sum", "min", "max", "product")
EXACT = ("float32", "float64", "bfloat16", "float16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32")
DTYPES = (*EXACT, *COMPLEX, *INTEGERS, "bool", "uint64", "float8_e4m3fn", "float8_e5m2")
LAYOUTS = ("plain", "transposed", "strided", "expanded", "offset", "conj", "neg", "grad", "inference")
NUMBERS = ("bool", "int", "float", "complex", "np.float32", "np.int16", "np.bool_", "np.array")
NODES = ("dict", "list", "tuple", "Pair", "Batch", "OrderedDict", "defaultdict")
FEW = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
"""The same examples on every run. A failure names verb and plan; it does not shrink: that costs new ranks."""

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    y: Any


# Plans: ("node", kind, children), ("tensor", dtype, shape, layout) or ("number", kind).

SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([(), (0,), (1,), (0, 3), (3, 0), (1, 1)]),
)
TENSORS = st.tuples(st.just("tensor"), st.sampled_from(DTYPES), SHAPES, st.sampled_from(LAYOUTS))


@st.composite
def sized(draw):
    """A leaf at one side of the limit up to which data ride in the frame, or travel packed."""
    dtype = draw(st.sampled_from(DTYPES))
    limit = draw(st.sampled_from([PAYLOAD_BYTES, FRAME_BYTES, PAYLOAD_BYTES, PACK_LIMIT]))
    count = limit // getattr(torch, dtype).itemsize + draw(st.integers(-1, 1))
    return "tensor", dtype, (count,), draw(st.sampled_from(LAYOUTS))


LEAVES = st.one_of(TENSORS, TENSORS, TENSORS, sized(), st.tuples(st.just("number"), st.sampled_from(NUMBERS)))
PLANS = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.just("node"), st.sampled_from(NODES), st.lists(inner, max_size=4)),
    max_leaves=8,
)


def leaf_plans(plan):
    return [plan] if plan[0] != "node" else [leaf for child in plan[2] for leaf in leaf_plans(child)]


def grow(plan, leaves):
    """The tree of a plan, around the leaves that an iterator gives."""
    if plan[0] != "node":
        return next(leaves)
    _, kind, children = plan
    grown = [grow(child, leaves) for child in children]
    if kind in ("Pair", "Batch"):
        return {"Pair": Pair, "Batch": Batch}[kind](*[*grown, [], ()][:2])
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](grown)
    keys = [key for key, _ in zip([1, "a", (2, None), "b"], grown, strict=False)]
    pairs = zip(keys, grown, strict=True)
    return {"dict": dict, "OrderedDict": OrderedDict, "defaultdict": lambda p: defaultdict(list, p)}[kind](
        pairs
    )


def pruned(plan):
    """The plan as `grow` sees it: a pair has two children."""
    if plan[0] != "node":
        return plan
    children = [pruned(child) for child in plan[2]]
    return ("node", plan[1], children[:2] if plan[1] in ("Pair", "Batch") else children)


def tree_of(plan, leaves):
    return grow(plan, iter(leaves))


def split(plan, world):
    """A plan whose leaves have a first dimension that `world` ranks can share."""
    if plan[0] == "node":
        return ("node", plan[1], [split(child, world) for child in plan[2]])
    if plan[0] == "number":
        return ("tensor", "float32", (world,), "plain")
    _, dtype, shape, layout = plan
    return ("tensor", dtype, (world * shape[0], *shape[1:]) if shape else (2 * world,), layout)


def lengthened(plan, rank, how):
    """A plan whose shapes differ between ranks: in dim 0, or ("list") in any, and in their number."""
    if plan[0] == "node":
        return ("node", plan[1], [lengthened(child, rank, how) for child in plan[2]])
    if plan[0] == "number":
        return plan
    _, dtype, shape, layout = plan
    seed = blake2b(repr((dtype, shape)).encode()).digest()[rank] % 3
    if how == "list" and seed == 2:
        return ("tensor", dtype, (seed, *shape, seed), layout) if math.prod(shape) < 100 else plan
    return ("tensor", dtype, (shape[0] + seed, *shape[1:]), layout) if shape else plan


def values_of(plan, seed, rank, any_bits=True):
    """The leaf values of a rank as plain tensors: small numbers, or (`any_bits`) any bits at all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [_value(leaf, generator, any_bits) for leaf in leaf_plans(plan)]


def _value(leaf, generator, any_bits):
    if leaf[0] == "number":
        return torch.randint(0, 4, (), generator=generator).double()
    _, name, shape, layout = leaf
    dtype = getattr(torch, name)
    if layout == "expanded" and shape:
        return _value((*leaf[:2], (1, *shape[1:]), "plain"), generator, any_bits).expand(shape)
    if dtype is torch.bool:
        return _random(0, 2, shape, generator).bool()
    if any_bits:
        raw = _random(0, 256, (math.prod(shape) * dtype.itemsize,), generator).to(torch.uint8)
        return raw.view(dtype).view(shape)
    values = _random(0 if name.startswith("uint") else -3, 4, shape, generator)
    if name in COMPLEX:
        return torch.complex(values.double(), 2.0 - values.double()).to(dtype)
    return values.float().to(dtype) if dtype.is_floating_point else values.to(dtype)


def _random(low, high, shape, generator):
    """Random integers; large tensors repeat a block of them, since they would take long to draw."""
    count, block = math.prod(shape), 4099
    values = torch.randint(low, high, (min(count, block),), generator=generator)
    return values.repeat(-(-count // block))[:count].view(shape) if count else values.view(shape)


def leaf_of(leaf, value):
    """What the user passes: a number, or a tensor of these values in the layout of the plan."""
    if leaf[0] == "number":
        number = float(value)
        return {
            "bool": lambda: number > 1,
            "int": lambda: int(number),
            "float": lambda: number / 2,
            "complex": lambda: complex(number, -1),
            "np.float32": lambda: np.float32(number),
            "np.int16": lambda: np.int16(number),
            "np.bool_": lambda: np.bool_(number > 1),
            "np.array": lambda: np.array([[number], [1.0]], dtype=np.float32),
        }[leaf[1]]()
    layout = leaf[3]
    if layout == "transposed" and value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and value.dim():
        wide = torch.zeros(*value.shape[:-1], 2 * value.shape[-1], dtype=value.dtype)
        wide[..., ::2] = value
        return wide[..., ::2]
    if layout == "expanded" and value.dim():
        return value[:1].clone().expand(value.shape) if len(value) else value.clone()
    if layout == "offset":
        room = torch.zeros(value.numel() + 3, dtype=value.dtype)
        room[3:] = value.flatten()
        return room[3:].view(value.shape)
    if layout == "conj" and value.is_complex():
        return value.conj().resolve_conj().conj()
    if layout == "neg" and value.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(value), -value).conj().imag
    if layout == "grad" and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1:
        return value.clone().requires_grad_()
    if layout == "inference":
        with torch.inference_mode():
            return value.clone()
    return value.clone()


def inputs(plan, seed, rank, any_bits=True):
    """The tree of a rank, and its leaves."""
    values = values_of(plan, seed, rank, any_bits)
    leaves = [leaf_of(leaf, value) for leaf, value in zip(leaf_plans(plan), values, strict=True)]
    return tree_of(plan, leaves), leaves


def plain(leaf):
    """A leaf as an ordinary contiguous tensor: what its values are."""
    tensor = leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def bits(leaf):
    tensor = plain(leaf)
    return tensor.dtype, tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes()


def check(result, expected, close=False):
    """The same types all the way down, and leaves alike to the last bit (or `close`)."""
    assert type(result) is type(expected), (type(result), type(expected))
    if isinstance(expected, dict):
        assert list(result) == list(expected)
        result, expected = list(result.values()), list(expected.values())
    if isinstance(expected, Batch):
        result, expected = [result.x, result.y], [expected.x, expected.y]
    if isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            check(one, other, close)
    elif close:
        torch.testing.assert_close(result, expected)
    else:
        assert bits(result) == bits(expected), (result, expected)


@contextmanager
def untouched(leaves):
    before = [(leaf, bits(leaf)) for leaf in leaves]
    yield
    for leaf, old in before:
        assert bits(leaf) == old, "an input was written to"


# References: what a verb must give for everyone's leaves.


def refusal(leaves, op):
    """What `all_reduce` must raise for these leaves; None: nothing."""
    for leaf in map(plain, leaves):
        if str(leaf.dtype).removeprefix("torch.") in ("uint64", "float8_e4m3fn", "float8_e5m2"):
            return ArgumentTypeError
        if op == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            return ArgumentTypeError
        if op not in ("mean", "sum") and leaf.is_complex():
            return ArgumentTypeError
    return None


def reduced(column, op):
    """The reduction of one leaf over ranks, in a dtype that holds every intermediate result."""
    dtype = column[0].dtype
    if dtype is torch.bool:
        return reduce(torch.logical_or if op in ("sum", "max") else torch.logical_and, column)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    steps = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}
    total = reduce(steps.get(op, torch.add), [leaf.to(wide) for leaf in column])
    return (total / len(column) if op == "mean" else total).to(dtype)


def columns(everyone):
    """Every rank's leaves -> every leaf's ranks, as plain tensors."""
    return [[plain(leaf) for leaf in column] for column in zip(*everyone, strict=True)]


def shares_memory(leaf):
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))


# The verbs, each once on one plan. `members` are the global ranks of the group.


class Case:
    def __init__(self, fabric, plan, seed, group=None, members=None):
        self.fabric, self.seed, self.group = fabric, seed, group
        self.members = members if members is not None else list(range(fabric.world_size))
        self.world, self.me = len(self.members), self.members.index(fabric.global_rank)
        self.plan = pruned(plan)
        self.op = OPS[seed % len(OPS)]
        self.root = self.members[seed % self.world]

    def everyone(self, plan, any_bits=True):
        return [inputs(plan, self.seed, rank, any_bits)[1] for rank in self.members]

    def mine(self, plan, any_bits=True):
        return inputs(plan, self.seed, self.fabric.global_rank, any_bits)

    def all_reduce(self):
        column_wise = columns(self.everyone(self.plan, any_bits=False))
        data, leaves = self.mine(self.plan, any_bits=False)
        kwargs = {"group": self.group, "reduce_op": self.op}
        error = refusal(leaves, self.op)
        expected = None if error else tree_of(self.plan, [reduced(column, self.op) for column in column_wise])
        close = self.op == "mean"
        with untouched(leaves):
            if error:
                for more in ({}, {"inplace": False}, {"sync_grads": True}, {"async_op": True}):
                    with pytest.raises(error):
                        self.fabric.all_reduce(data, **kwargs, **more)
                return
            check(self.fabric.all_reduce(data, inplace=False, **kwargs), expected, close)
            handle = self.fabric.all_reduce(data, inplace=False, async_op=True, **kwargs)
            check(handle.wait(), expected, close)
            check(self.fabric.all_reduce(data, sync_grads=True, **kwargs), expected, close)
        if any(map(shares_memory, leaves)):
            with pytest.raises(ArgumentTypeError, match="share memory"):
                self.fabric.all_reduce(data, **kwargs)
            return
        with untouched([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]):
            written = self.fabric.all_reduce(data, **kwargs)
        check(written, expected, close)
        found = []
        collect(written, found)
        for leaf, result in zip(leaves, found, strict=True):
            assert result is leaf or not isinstance(leaf, torch.Tensor), "in place gives the same objects"

    def all_gather(self):
        everyone = self.everyone(self.plan)
        data, leaves = self.mine(self.plan)
        expected = tree_of(self.plan, [torch.stack(column) for column in columns(everyone)])
        with untouched(leaves):
            check(self.fabric.all_gather(data, self.group), expected)
            check(self.fabric.all_gather(data, self.group, async_op=True).wait(), expected)
            check(self.fabric.all_gather(data, self.group, sync_grads=True), expected)

    def all_gather_uneven(self):
        for how in ("list", "cat"):
            plans = {rank: lengthened(self.plan, rank, how) for rank in self.members}
            everyone = [inputs(plans[rank], self.seed, rank)[1] for rank in self.members]
            data, leaves = inputs(plans[self.fabric.global_rank], self.seed, self.fabric.global_rank)
            with untouched(leaves):
                if how == "cat" and not all(plain(leaf).dim() for leaf in leaves):
                    with pytest.raises(ConfigurationError, match="concatenates along dim 0"):
                        self.fabric.all_gather(data, self.group, uneven="cat")
                    continue
                join = list if how == "list" else torch.cat
                expected = tree_of(self.plan, [join(column) for column in columns(everyone)])
                check(self.fabric.all_gather(data, self.group, uneven=how), expected)
                check(self.fabric.all_gather(data, self.group, True, uneven=how), expected)

    def reduce_scatter(self):
        plan = split(self.plan, self.world)
        everyone = self.everyone(plan, any_bits=False)
        data, leaves = self.mine(plan, any_bits=False)
        error = refusal(leaves, self.op)
        with untouched(leaves):
            if error:
                for grads in (False, True):
                    with pytest.raises(error):
                        self.fabric.reduce_scatter(data, self.op, self.group, sync_grads=grads)
                return
            whole = [reduced(column, self.op) for column in columns(everyone)]
            expected = tree_of(plan, [leaf.chunk(self.world)[self.me] for leaf in whole])
            close = self.op == "mean"
            check(self.fabric.reduce_scatter(data, self.op, self.group), expected, close)
            check(self.fabric.reduce_scatter(data, self.op, self.group, sync_grads=True), expected, close)

    def all_to_all(self):
        plan = split(self.plan, self.world)
        data, leaves = self.mine(plan)
        parts = [
            torch.cat([leaf.chunk(self.world)[self.me] for leaf in column])
            for column in columns(self.everyone(plan))
        ]
        with untouched(leaves):
            check(self.fabric.all_to_all(data, self.group), tree_of(plan, parts))
            check(self.fabric.all_to_all(data, self.group, sync_grads=True), tree_of(plan, parts))

    def gather(self):
        data, leaves = self.mine(self.plan)
        with untouched(leaves):
            result = self.fabric.gather(data, self.root, self.group)
        if self.fabric.global_rank != self.root:
            assert result is None
            return
        check(result, tree_of(self.plan, [torch.stack(c) for c in columns(self.everyone(self.plan))]))

    def scatter(self):
        plan = split(self.plan, self.world)
        data, leaves = inputs(plan, self.seed, self.root)
        given = data if self.fabric.global_rank == self.root else {"ignored": "by the sender"}
        with untouched(leaves):
            result = self.fabric.scatter(given, self.root, self.group)
        check(result, tree_of(plan, [plain(leaf).chunk(self.world)[self.me] for leaf in leaves]))

    def broadcast(self):
        data, leaves = inputs(self.plan, self.seed, self.root)
        more = {"text": "abc", "none": None, "set": {1, 2}, "big": b"x" * (self.seed % 2 * FRAME_BYTES)}
        sent = {"data": data, **more}
        given = sent if self.fabric.global_rank == self.root else "ignored"
        with untouched(leaves):
            result = self.fabric.broadcast(given, self.root, group=self.group)
        assert list(result) == list(sent)
        assert {key: result[key] for key in more} == more
        check(result["data"], data)
        found = []
        collect(result["data"], found)
        for got, leaf in zip(found, leaves, strict=True):
            assert type(got) is type(leaf)
            if isinstance(leaf, torch.Tensor):
                assert got.requires_grad == leaf.requires_grad

    def objects(self):
        mine = {"rank": self.fabric.global_rank, "set": {self.seed}, "tree": self.mine(self.plan)[0]}
        everyone = self.fabric.all_gather_object(mine, self.group)
        assert [each["rank"] for each in everyone] == self.members
        for rank, each in zip(self.members, everyone, strict=True):
            assert each["set"] == {self.seed}
            check(each["tree"], inputs(self.plan, self.seed, rank)[0])

    def decisions(self):
        """These verbs are for all ranks only."""
        truths = [bool(self.seed >> rank & 1) for rank in self.members]
        mine = truths[self.me]
        assert self.fabric.any(mine) is any(truths)
        assert self.fabric.all(mine) is all(truths)
        self.fabric.barrier(f"seed {self.seed}")
        held = (
            self.mine(self.plan, any_bits=False)[0]
            if self.seed % 2
            else inputs(self.plan, self.seed, 0, False)[0]
        )
        alike = len({tuple(map(bits, leaves)) for leaves in self.everyone(self.plan, any_bits=False)}) == 1
        if self.seed % 2 and not alike:
            with pytest.raises(CollectiveMismatch, match="ranks hold different values"):
                self.fabric.agree(held)
        else:
            assert self.fabric.agree(held) is held


VERBS = (
    *("all_reduce", "all_gather", "all_gather_uneven", "reduce_scatter", "all_to_all", "gather", "scatter"),
    *("broadcast", "objects"),
)


def collect(tree, found):
    """The leaves of a tree, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif isinstance(tree, Batch):
        tree = [tree.x, tree.y]
    if isinstance(tree, list | tuple):
        for child in tree:
            collect(child, found)
    else:
        found.append(tree)


@contextmanager
def guarded(mode):
    """FABRIC_GUARD for the process groups of this call."""
    os.environ["FABRIC_GUARD"] = mode
    try:
        yield
    finally:
        del os.environ["FABRIC_GUARD"]


def through_every_verb(plans, seed, mode):
    with guarded(mode):
        fabric = launched()
        for number, plan in enumerate(plans):
            case = Case(fabric, plan, seed + number)
            for verb in (*VERBS, "decisions"):
                run(case, verb)


def run(case, verb):
    try:
        getattr(case, verb)()
    except BaseException as error:
        error.add_note(f"{verb} of plan {case.plan}, seed {case.seed}, op {case.op}, root {case.root}")
        raise


EXAMPLES = {"full": 4, "light": 2, "off": 2}


@pytest.mark.parametrize("mode", EXAMPLES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_verb_on_random_trees(ranks, world_size, mode):
    @settings(max_examples=EXAMPLES[mode], **FEW)
    @given(plans=st.lists(PLANS, min_size=5, max_size=8), seed=st.integers(0, 2**20))
    def examples(plans, seed):
        ranks.run(through_every_verb, plans, seed, mode, world_size=world_size)

    examples()


# Groups

GROUPS = ((0, 1), (1, 2), (0, 2), (2,), (0, 1, 2))


def through_every_group(plans, seed, mode):
    with guarded(mode):
        fabric = launched()
        groups = {members: dist.new_group(list(members)) for members in GROUPS}
        for number, plan in enumerate(plans):
            for members, group in groups.items():
                if fabric.global_rank in members:
                    case = Case(fabric, plan, seed + number, group, list(members))
                    for verb in VERBS:
                        run(case, verb)
                else:
                    refuse_strangers(fabric, group)
        for group in groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def refuse_strangers(fabric, group):
    x = torch.ones(6)
    for call in (
        lambda: fabric.all_reduce(x, group),
        lambda: fabric.all_reduce(x, group, sync_grads=True),
        lambda: fabric.all_gather(x, group),
        lambda: fabric.all_gather(x, group, True),
        lambda: fabric.all_gather(x, group, uneven="cat"),
        lambda: fabric.reduce_scatter(x, "sum", group),
        lambda: fabric.reduce_scatter(x, "sum", group, sync_grads=True),
        lambda: fabric.all_to_all(x, group),
        lambda: fabric.all_to_all(x, group, sync_grads=True),
        lambda: fabric.gather(x, 0, group),
        lambda: fabric.scatter(x, 0, group),
        lambda: fabric.broadcast(x, 0, group=group),
        lambda: fabric.all_gather_object(x, group),
    ):
        with pytest.raises(UsageError, match="not in the group"):
            call()


@pytest.mark.parametrize("mode", ["full", "light", "off"])
def test_every_verb_in_groups_of_some_ranks(ranks, mode):
    @settings(max_examples=2, **FEW)
    @given(plans=st.lists(PLANS, min_size=2, max_size=3), seed=st.integers(0, 2**20))
    def examples(plans, seed):
        ranks.run(through_every_group, plans, seed, mode, world_size=3)

    examples()


def name_strangers():
    """`src` and `dst` that are no members of the group."""
    fabric = launched()
    group = dist.new_group([0, 2])
    if fabric.global_rank == 1:
        return None
    texts = []
    for call in (
        lambda: fabric.gather(1.0, 1, group),
        lambda: fabric.gather(torch.ones(FRAME_BYTES), 1, group),
        lambda: fabric.broadcast(1.0, 1, group=group),
        lambda: fabric.scatter(torch.ones(2), 1, group),
    ):
        with pytest.raises(ConfigurationError, match="Rank 1 is not in the group of ranks 0, 2") as caught:
            call()
        texts.append(str(caught.value))
        assert fabric.all_gather(fabric.global_rank, group).tolist() == [0, 2]
    return texts


def test_a_source_or_destination_outside_of_the_group_is_refused_on_all_ranks(ranks):
    first, _, third = ranks.run(name_strangers, world_size=3)
    assert first == third


# Bits


def sum_rounding_numbers(seed):
    """Hashes of what every rank holds after reductions that must round, small and large."""
    fabric = launched()
    hashes, world = [], fabric.world_size
    sizes = [1, 33, PAYLOAD_BYTES // 4 - 2, PAYLOAD_BYTES // 4 + 1, 50_001, PACK_LIMIT // 4 + 3]
    for op in ("sum", "mean", "product"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            if dtype.is_complex and op == "product":
                continue
            everyone = []
            for rank in range(world):
                generator = torch.Generator().manual_seed(seed * 10 + rank)
                everyone.append([torch.randn(n, generator=generator).to(dtype) for n in sizes])
            results = fabric.all_reduce([leaf.clone() for leaf in everyone[fabric.global_rank]], None, op)
            for result, column in zip(results, zip(*everyone, strict=True), strict=True):
                digits = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, 1e-5)
                torch.testing.assert_close(result, reduced(column, op), rtol=digits, atol=digits)
                hashes.append(blake2b(bits(result)[-1]).hexdigest())
    return hashes


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_reduction_has_the_same_bits_on_every_rank(ranks, world_size):
    first, *others = ranks.run(sum_rounding_numbers, 5, world_size=world_size)
    assert len(set(first)) == len(first)
    assert others == [first] * (world_size - 1)


def reduce_a_tensor_twice():
    """A tensor that stands in a tree at several places is one tensor."""
    fabric = launched()
    found = []
    for count in (3, PAYLOAD_BYTES // 4 + 1, PACK_LIMIT // 4 + 1):
        x = torch.full((count,), fabric.global_rank + 1.0)
        result = fabric.all_reduce({"x": x, "again": x, "other": 1.0}, reduce_op="sum")
        assert result["x"] is x
        assert result["again"] is x
        found.append(sorted(set(x.tolist())))
        twice = fabric.broadcast([x, x])
        assert twice[0] is twice[1]
    return found


def test_a_tensor_that_stands_in_a_tree_twice(ranks):
    assert ranks.run(reduce_a_tensor_twice, world_size=3) == [[[6.0]] * 3] * 3


def reduce_first_in_inference_mode(mode):
    """What a group keeps from its first call serves all later ones."""
    with guarded(mode):
        fabric = launched()
        totals = []
        for inference in (True, False, True, False):
            for dtype in (torch.float32, torch.int64):
                with torch.inference_mode(inference):
                    x = torch.ones(3, dtype=dtype)
                    summed = fabric.all_reduce(x, reduce_op="sum")
                    gathered = fabric.all_gather(x)
                totals.append((summed.tolist(), gathered.tolist()))
                totals.append((fabric.all_reduce(x, None, "sum", inplace=False).tolist(), gathered.tolist()))
        return totals


@pytest.mark.parametrize("mode", ["full", "light", "off"])
def test_a_group_whose_first_call_is_in_inference_mode(ranks, mode):
    totals = [([2] * 3, [[2] * 3] * 2), ([4] * 3, [[2] * 3] * 2)] * 8
    assert ranks.run(reduce_first_in_inference_mode, mode, world_size=2) == [totals] * 2


# Handles


def wait_in_another_order(plans, seed, mode):
    with guarded(mode):
        fabric = launched()
        pending = []
        for number, plan in enumerate(plans):
            case = Case(fabric, plan, seed + number)
            gathered = tree_of(case.plan, [torch.stack(c) for c in columns(case.everyone(case.plan))])
            pending.append((fabric.all_gather(case.mine(case.plan)[0], async_op=True), gathered))
            everyone, (data, leaves) = (
                case.everyone(case.plan, any_bits=False),
                case.mine(case.plan, any_bits=False),
            )
            if refusal(leaves, "sum") is None:
                summed = tree_of(case.plan, [reduced(column, "sum") for column in columns(everyone)])
                inplace = not any(map(shares_memory, leaves))
                handle = fabric.all_reduce(data, None, "sum", async_op=True, inplace=inplace)
                pending.append((handle, summed))
        fabric.barrier("other calls go between")
        order = sorted(pending, key=lambda entry: (hash(id(entry)) + fabric.global_rank) % 7)
        for handle, expected in order:  # another order on each rank
            result = handle.wait()
            check(result, expected)
            assert handle.wait() is result
            assert handle.done()


@pytest.mark.parametrize("mode", ["full", "light", "off"])
def test_handles_are_waited_for_in_any_order(ranks, mode):
    @settings(max_examples=3, **FEW)
    @given(plans=st.lists(PLANS, min_size=6, max_size=8), seed=st.integers(0, 2**20))
    def examples(plans, seed):
        ranks.run(wait_in_another_order, plans, seed, mode, world_size=2)

    examples()


# Gradients: this rank's leaves get what the sum of all ranks' losses gives in one process.

ALONG = {
    "sum": lambda table: table.sum(0),
    "mean": lambda table: table.mean(0),
    "min": lambda table: table.amin(0),
    "max": lambda table: table.amax(0),
    "product": lambda table: table.prod(0),
}
LABELS = ("uint64", "bool", "int16", "float8_e5m2", "uint16")


def with_gradients(verb, op, data):
    fabric = launched()
    if verb == "all_reduce":
        return fabric.all_reduce(data, None, op, sync_grads=True)
    if verb == "reduce_scatter":
        return fabric.reduce_scatter(data, op, sync_grads=True)
    if verb == "all_to_all":
        return fabric.all_to_all(data, sync_grads=True)
    return fabric.all_gather(data, sync_grads=True, uneven=verb)


def in_one_process(verb, op, column, me):
    """What rank `me` gets, of everybody's leaves. A list of tensors."""
    world = len(column)
    if verb == "all_reduce":
        return [ALONG[op](torch.stack(column))]
    if verb == "reduce_scatter":
        return [ALONG[op](torch.stack(column)).chunk(world)[me]]
    if verb == "all_to_all":
        return [torch.cat([leaf.chunk(world)[me] for leaf in column])]
    return {
        "error": lambda: [torch.stack(column)],
        "list": lambda: column,
        "cat": lambda: [torch.cat(column)],
    }[verb]()


def loss_of(results, rank):
    """Another loss on every rank, and another weight for every number."""
    total = torch.zeros((), dtype=torch.float64)
    for place, result in enumerate(results):
        weight = torch.linspace(-1, 2 + rank + place, max(1, result.numel()), dtype=torch.float64)
        total = total + (weight[: result.numel()].view(result.shape) * (result + 0.1 * result**2)).sum()
    return total


def gradient_inputs(shapes, verb, seed, rank, world):
    generator = torch.Generator().manual_seed(seed + rank)
    leaves = []
    for place, shape in enumerate(shapes):
        if verb in ("reduce_scatter", "all_to_all"):
            shape = (world * shape[0], *shape[1:]) if shape else (world,)
        if verb in ("list", "cat"):
            shape = (rank * (place + 1), *shape)
        values = (
            torch.randint(-3, 4, shape, generator=generator) / 2
        )  # ties for min and max, zeros for products
        leaves.append(values.double().requires_grad_())
    return leaves


def flow_back(cases):
    fabric = launched()
    for case in cases:
        try:
            flow_back_once(fabric, *case)
        except BaseException as error:
            error.add_note(f"{case}")
            raise


def flow_back_once(fabric, verb, op, shapes, labels, seed):
    me, world = fabric.global_rank, fabric.world_size
    everyone = [gradient_inputs(shapes, verb, seed, rank, world) for rank in range(world)]
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        results = [r for c in zip(*everyone, strict=True) for r in in_one_process(verb, op, list(c), rank)]
        total = total + loss_of(results, rank)
    expected = torch.autograd.grad(total, everyone[me])

    mine = gradient_inputs(shapes, verb, seed, me, world)
    extras = [torch.ones(2 * world).to(getattr(torch, name)) for name in labels]
    result = with_gradients(verb, op, Pair({str(i): leaf for i, leaf in enumerate(mine)}, extras))
    flat = list(result.left.values())
    loss_of([part for leaf in flat for part in leaf] if verb == "list" else flat, me).backward()
    for leaf, grad in zip(mine, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad)
    seen = []
    collect(result.right, seen)
    assert not any(label.requires_grad for label in seen)


GRADIENT_SHAPES = st.lists(
    st.one_of(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.just((PAYLOAD_BYTES // 16 + 1,))),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_one_process(ranks, world_size):
    verbs = [(verb, op) for verb in ("all_reduce", "reduce_scatter") for op in OPS]
    verbs += [("all_to_all", None), ("error", None), ("list", None), ("cat", None)]

    @settings(max_examples=3, **FEW)
    @given(
        shapes=GRADIENT_SHAPES,
        seed=st.integers(0, 2**20),
        labels=st.lists(st.sampled_from(LABELS), max_size=2),
    )
    def examples(shapes, seed, labels):
        reducible = [name for name in labels if name == "int16"]
        cases = []
        for verb, op in verbs:
            allowed = labels if op is None else reducible if op != "mean" else []
            cases.append((verb, op, shapes, allowed, seed))
        ranks.run(flow_back, cases, world_size=world_size)

    examples()


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_a_reduction_without_gradient_is_refused(ranks, op):
    ranks.run(refuse_gradients, op, world_size=2)


def refuse_gradients(op):
    fabric = launched()
    for call in (
        fabric.all_reduce,
        lambda x, **more: fabric.reduce_scatter(x, more["reduce_op"], sync_grads=True),
    ):
        with pytest.raises(ConfigurationError, match=f"{op} has no gradient"):
            call(torch.ones(2, dtype=torch.int64), reduce_op=op, sync_grads=True)
