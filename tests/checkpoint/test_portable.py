from __future__ import annotations

import collections
import dataclasses
import enum
import io
import random
import sys
from pathlib import Path, PurePosixPath

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.checkpoint.portable import from_portable, module_entries, to_portable
from fabric.core.errors import ArgumentTypeError
from fabric.utilities.seed import collect_rng_states, set_rng_states


def through_file(data):
    """What comes back from a file that safe loading reads."""
    file = io.BytesIO()
    torch.save(to_portable(data, "state"), file)
    file.seek(0)
    return from_portable(torch.load(file, weights_only=True))


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor | numpy.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tolist() == right.tolist()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_equal(*pair)
    else:
        assert left == right


PLAIN = [
    None, True, 3, 10**60, 2.5, 1 + 2j, "text", b"bytes", b"", bytearray(b"more"), {1, "a"}, set(),
    (1, (2, [])), [[], {}],
    {"a": 1, 2: "b", (1, "c"): None, None: 3}, collections.OrderedDict(b=1, a=2), collections.Counter("aab"),
    torch.float16, torch.device("cpu", 0), torch.Size([2, 3]), torch.strided,
    torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.tensor(1, dtype=torch.uint16),
    torch.empty(0, 3),
    torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True),
    torch.eye(2).to_sparse(),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN[:-1], ids=lambda value: type(value).__name__)
def test_plain_values_come_back_with_their_types(value):
    assert_equal(through_file({"x": [value]})["x"][0], value)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15: it takes time
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_sparse_tensors_come_back():
    assert through_file(PLAIN[-1]).to_dense().equal(torch.eye(2))


def test_parameters_come_back_as_leaves():
    parameter = through_file({"p": torch.nn.Parameter(torch.ones(2), requires_grad=True)})["p"]
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad


NUMPY = [
    numpy.float32(1.5), numpy.float64(2.5), numpy.int8(-3), numpy.uint64(2**63), numpy.bool_(True),
    numpy.complex64(1 + 2j), numpy.arange(6).reshape(2, 3), numpy.arange(6)[::-2], numpy.zeros((0, 2)),
    numpy.array(7), numpy.asfortranarray(numpy.eye(3, dtype=numpy.float16)), numpy.array([True, False]),
    numpy.arange(3, dtype=">i4"), numpy.arange(3, dtype="uint32"),
]  # fmt: skip


@pytest.mark.parametrize("value", NUMPY, ids=lambda value: f"{type(value).__name__}-{value.dtype}")
def test_numpy_values_come_back_with_their_types(value):
    assert_equal(through_file({"x": [value]})["x"][0], value)


def test_numpy_arrays_are_taken_as_they_are_now():
    array = numpy.zeros(2)
    portable = to_portable(array, "state")
    array[:] = 1
    assert from_portable(portable).tolist() == [0, 0]


def test_paths_come_back_as_paths():
    assert_equal(through_file({"p": Path("a/b")})["p"], Path("a/b"))
    assert_equal(through_file([PurePosixPath("/c")])[0], Path("/c"))


def test_random_states_come_back():
    states = collect_rng_states()
    expected = random.random(), float(numpy.random.rand()), float(torch.rand(()))
    set_rng_states(through_file({"rng": states})["rng"])
    assert (random.random(), float(numpy.random.rand()), float(torch.rand(()))) == expected
    generator = numpy.random.default_rng(3)
    state = generator.bit_generator.state
    expected = generator.random()
    generator.bit_generator.state = through_file(state)
    assert generator.random() == expected
    random.setstate(through_file({"python": random.getstate()})["python"])


def test_a_modules_versions_come_back():
    state = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).state_dict()
    assert through_file({"model": state})["model"]._metadata == state._metadata


def test_dictionaries_of_other_kinds_come_back_as_dictionaries():
    class Attributes(dict):
        pass

    assert_equal(through_file(Attributes(a=1)), {"a": 1})
    assert_equal(through_file(collections.defaultdict(list, a=[1])), {"a": [1]})


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_any_nesting_of_plain_data_comes_back(tree):
    assert_equal(through_file(tree), tree)


# what is refused


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


Point = collections.namedtuple("Point", "x y")
Color = enum.Enum("Color", "RED")


class Thing:
    pass


class Odd(torch.Tensor):
    pass


def tagged_tensor():
    tensor = torch.ones(1)
    tensor.owner = Thing()
    return tensor


UNREAD = "which safe loading would not read back."
REFUSED = {
    "dataclass": (Settings(), f"test_portable.Settings, {UNREAD} Save dataclasses.asdict({{}})."),
    "namedtuple": (Point(1, 2), f"test_portable.Point, {UNREAD} Save {{}}._asdict()."),
    "lambda": (lambda: 0, f"builtins.function, {UNREAD} Save plain data"),
    "object": (Thing(), "or give it state_dict() and load_state_dict()."),
    "class": (Thing, "builtins.type"),
    "enum": (Color.RED, "test_portable.Color"),
    "range": (range(3), "builtins.range"),
    "frozenset": (frozenset([1]), "builtins.frozenset"),
    "generator": (torch.Generator(), "torch._C.Generator"),
    "text array": (numpy.array(["a"]), "numpy value of dtype <U1, which torch has no type for"),
    "long double": (numpy.longdouble(1), "which torch has no type for"),
    "masked array": (numpy.ma.array([1], mask=[True]), "numpy.ma.MaskedArray"),
    "tensor subclass": (torch.ones(1).as_subclass(Odd), "test_portable.Odd, a kind of tensor that"),
    "meta tensor": (torch.ones(1, device="meta"), "is on the meta device and holds no values"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_be_read_back_is_refused_with_its_place(kind):
    value, text = REFUSED[kind]
    with pytest.raises(ArgumentTypeError) as caught:
        to_portable({"config": {"parts": [1, (value,)]}}, "state")
    place = "state['config']['parts'][1][0]"
    assert str(caught.value).startswith(f"{place} is ")
    assert text.format(place) in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_attributes_of_tensors_are_part_of_the_file():
    tensor = torch.ones(1)
    tensor.decays = True
    assert to_portable(tensor, "state") is tensor
    with pytest.raises(ArgumentTypeError, match=r"^state\['t'\]\.owner is a test_portable\.Thing"):
        to_portable({"t": tagged_tensor()}, "state")


@pytest.mark.parametrize("key", [Path("a"), Color.RED, numpy.int64(1), (1, Path("a")), frozenset()])
def test_keys_are_checked(key):
    with pytest.raises(ArgumentTypeError, match=r"^state\['a'\] holds the key .* Use str or int"):
        to_portable({"a": {key: 1}}, "state")


def test_members_of_sets_are_checked():
    with pytest.raises(ArgumentTypeError, match=r"^state\['a'\] holds the key .*Path"):
        to_portable({"a": {Path("b")}}, "state")


def test_registered_tensor_classes_are_accepted():
    with torch.serialization.safe_globals([Odd]):
        assert type(through_file([torch.ones(1).as_subclass(Odd)])[0]) in (Odd, torch.Tensor)


def test_the_input_is_not_changed():
    data = {"a": [Path("b"), {"c": numpy.float32(1)}]}
    portable = to_portable(data, "state")
    assert_equal(data, {"a": [Path("b"), {"c": numpy.float32(1)}]})
    again = from_portable(portable)
    assert portable["a"][0]["value"] == "b", "loading changed what storage holds"
    assert_equal(again, data)


def test_numpy_is_not_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    assert to_portable({"a": 1}, "state") == {"a": 1}
    with pytest.raises(ArgumentTypeError, match="Thing"):
        to_portable(Thing(), "state")


def test_loaded_tensors_own_their_memory_but_those_on_the_way_into_a_module_are_not_copied():
    weight, extra = torch.ones(2), torch.ones(2)
    assert from_portable([weight])[0].data_ptr() != weight.data_ptr()
    module = torch.nn.Linear(1, 2, bias=False)
    module.part = torch.nn.Identity()
    saved = {"weight": weight, "gone.weight": extra}
    saved |= {"part._extra_state": extra, "x_extra_state": {"p": extra}}
    entries = module_entries(saved, module)
    assert entries["weight"] is weight
    assert entries["gone.weight"] is extra
    assert entries["part._extra_state"].data_ptr() != extra.data_ptr()
    assert entries["x_extra_state"]["p"].data_ptr() != extra.data_ptr()


@pytest.mark.parametrize(
    "array",
    [
        numpy.array(["cat", "dog"]),
        numpy.array([[1], None], dtype=object),
        numpy.zeros(2, dtype=[("x", "f4")]),
        numpy.array(["2026-01-01"], dtype="M8[D]"),
        numpy.longdouble(1),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_without_a_dtype_of_torch_are_pickled_where_that_is_allowed(array):
    with pytest.raises(
        ArgumentTypeError, match=r"Save numbers or bools, or pickle it by .*allow_pickle=True"
    ):
        to_portable(array, "state")
    file = io.BytesIO()
    torch.save(to_portable({"a": array}, "state", allow_pickle=True), file)
    file.seek(0)
    assert_equal(from_portable(torch.load(file, weights_only=False)), {"a": array})
