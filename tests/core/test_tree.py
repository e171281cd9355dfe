"""Random nestings survive flatten and unflatten; users' containers keep class, attributes and order."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.core.tree import LEAF, flatten, is_node, iter_paths, map_tree, unflatten

Point = namedtuple("Point", ["x", "y"])


class Checked(namedtuple("Checked", ["low", "high"])):
    """A namedtuple whose constructor looks at its values."""

    def __new__(cls, low: Any, high: Any) -> Checked:
        if not low < high:
            raise ValueError("low must be below high")
        return super().__new__(cls, low, high)


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = 0
    late: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.made = "by __post_init__"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = dataclasses.field(default=None, compare=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any


class Record(dict):
    """A dict whose constructor means something else than items."""

    def __init__(self, first: Any, second: Any = None) -> None:
        super().__init__(first=first, second=second)
        self.note = "kept"


class Names(list):
    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner


class Pair(tuple):
    def __new__(cls, left: Any, right: Any) -> Pair:
        return super().__new__(cls, (left, right))


def record(first: Any, second: Any) -> Record:
    return Record(first, second)


def names(values: list[Any]) -> Names:
    made = Names("me")
    made.extend(values)
    return made


keys = st.one_of(st.text(max_size=3), st.integers(-3, 3))
trees = st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=3), st.none(), st.booleans(), st.sets(st.integers(), max_size=2)
    ),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(keys, child, max_size=3),
        st.dictionaries(keys, child, max_size=3).map(OrderedDict),
        st.dictionaries(keys, child, max_size=3).map(lambda d: defaultdict(list, d)),
        st.builds(Point, child, child),
        st.builds(Plain, child, child),
        st.builds(Frozen, child, child),
        st.builds(Slotted, child, child),
        st.builds(record, child, child),
        st.lists(child, max_size=3).map(names),
        st.builds(Pair, child, child),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, of equal types and in equal order, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_flatten_and_unflatten_are_inverse(tree):
    leaves, spec = flatten(tree)
    assert same(unflatten(leaves, spec, tree), tree)
    assert same(unflatten(leaves, spec), tree), "also without the original at hand"
    assert flatten(unflatten(leaves, spec, tree)) == (leaves, spec)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_leaves_and_paths_come_in_the_same_order(tree):
    leaves, _ = flatten(tree)
    paths = list(iter_paths(tree))
    assert [leaf for _, leaf in paths] == leaves
    assert not any(is_node(leaf) for leaf in leaves)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_map_tree_leaves_the_original_alone(tree):
    before = flatten(tree)
    mapped = map_tree(lambda leaf: ("was", leaf), tree)
    assert flatten(tree) == before
    if before[0]:
        assert mapped is not tree
        assert not same(mapped, tree)


@pytest.mark.parametrize(
    "leaf", [1, "ab", None, {1, 2}, torch.ones(2), b"x", range(3), Plain, torch.device("cpu")]
)
def test_what_is_no_container_is_one_leaf(leaf):
    leaves, spec = flatten(leaf)
    assert spec == LEAF
    assert leaves[0] is leaf
    assert map_tree(lambda x: x, leaf) is leaf


def test_the_constructors_of_users_are_not_called():
    assert type(map_tree(lambda x: -x, Checked(1, 2))) is Checked
    assert map_tree(lambda x: -x, Checked(1, 2)) == (-1, -2), "its __new__ would refuse these"
    assert map_tree(lambda x: x + 1, Counter(a=1, b=2)) == Counter(a=2, b=3)
    assert map_tree(lambda x: x + 1, Pair(1, 2)) == (2, 3)


def test_what_containers_carry_beside_their_items_is_kept():
    mapped = map_tree(lambda x: x + 1, Record(1, 2))
    assert mapped == {"first": 2, "second": 3}
    assert mapped.note == "kept"
    assert map_tree(lambda x: x, names([1])).owner == "me"
    assert map_tree(lambda x: x, defaultdict(list, a=1))["missing"] == []
    assert map_tree(lambda x: x, [{"deep": defaultdict(list, a=1)}])[0]["deep"]["missing"] == []
    assert map_tree(lambda x: x, Plain(1)).made == "by __post_init__"


def test_dataclass_fields_that_init_does_not_set():
    tree = Plain(1)
    tree.late = 5
    assert map_tree(lambda x: x * 2, tree).late == 10
    unset = dataclasses.make_dataclass("Unset", [("a", int), ("b", int, dataclasses.field(init=False))])(1)
    mapped = map_tree(lambda x: x + 1, unset)
    assert mapped.a == 2
    assert not hasattr(mapped, "b")


def test_torchs_own_tuples():
    values, indices = map_tree(lambda x: x + 1, torch.tensor([1.0, 3.0]).max(0))
    assert (values.item(), indices.item()) == (4.0, 2)
    assert map_tree(lambda x: x, torch.ones(2, 3).shape) == torch.Size([2, 3])


def test_paths_read_as_code():
    class Inner(NamedTuple):
        weight: int

    tree = {"a": [1, Frozen(2, (3,))], 7: Inner(4)}
    assert dict(iter_paths(tree, "state")) == {
        "state['a'][0]": 1,
        "state['a'][1].a": 2,
        "state['a'][1].b[0]": 3,
        "state[7][0]": 4,
    }
    assert list(iter_paths(5, "x")) == [("x", 5)]


def test_specs_compare_by_value():
    assert flatten({"a": [1, 2]})[1] == flatten({"a": ["x", None]})[1]
    assert flatten({"a": [1, 2]})[1] != flatten({"a": (1, 2)})[1]
    assert flatten({"a": 1})[1] != flatten({"b": 1})[1]


def test_map_tree_can_be_compiled():
    def double(tree):
        return map_tree(lambda leaf: leaf * 2, tree)

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    result = compiled({"a": [torch.ones(2), (torch.ones(1),)], "b": torch.zeros(1)})
    assert result["a"][0].tolist() == [2.0, 2.0]
    assert result["a"][1][0].tolist() == [2.0]
