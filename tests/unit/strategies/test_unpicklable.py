"""What pickle refuses is named by its path and by the line that made it so: a row per kind of object."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fabric.strategies.launchers.pickling import explain_unpicklable, interactive_name

SOURCE = Path(__file__).read_text().splitlines()


def line(mark):
    """`test_unpicklable.py:31`: where this file has the comment `# mark`."""
    (number,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Identity())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Head()


class Holder:  # Holder
    def __init__(self, **items):
        self.before = None
        self.thing = None
        self.items = []
        vars(self).update(items)

    def open(self, path):
        self.file = path.open()
        return self

    def work(self):
        return self.thing


class Child(Holder):  # Child
    pass


class Slots:  # Slots
    __slots__ = ("lock", "number")

    def __init__(self):
        self.number, self.lock = 1, threading.Lock()


class SlotsAndDict(Slots):
    def __init__(self):
        super().__init__()
        self.call = lambda: 1  # SlotsAndDict.call
        del self.lock


@dataclasses.dataclass  # Config
class Config:
    name: str = "a"
    guard: object = None


@dataclasses.dataclass(frozen=True, slots=True)  # Frozen
class Frozen:
    guard: object


Pair = collections.namedtuple("Pair", "first second")


class Refuses:
    def __getstate__(self):
        raise RuntimeError("a socket cannot travel")  # Refuses.__getstate__


class RefusesOddly:
    def __reduce__(self):
        raise KeyError("gone")  # RefusesOddly.__reduce__


class ReducesToNonsense:
    def __reduce__(self):
        return 3


class Chooses:
    def __init__(self):
        self.lock = threading.Lock()
        self.rule = lambda: 1  # Chooses.rule

    def __getstate__(self):
        return {"rule": self.rule}


class PairState:
    def __init__(self):
        self.state = ({"a": 1}, {"b": threading.Lock()})

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.state = state


class Maker:
    def __reduce__(self):
        return Maker, ("a", threading.Lock())


class ByNew:
    def __new__(cls, lock=None):
        made = super().__new__(cls)
        made.lock = lock
        return made

    def __getnewargs__(self):
        return (self.lock,)

    def __getstate__(self):
        return None


class ByKeyword(ByNew):
    def __getnewargs_ex__(self):
        return (), {"lock": self.lock}


class Shadowed:  # Shadowed
    pass


ShadowedBefore, Shadowed = Shadowed, None


def shadowed():  # shadowed
    return 1


shadowed_before, shadowed = shadowed, None


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def local_function():
    def inner():  # inner
        return 1

    return inner


def decorated_local_function():
    @torch.no_grad()  # decorated
    def inner():
        return 1

    return inner


def local_class():
    @functools.total_ordering  # Inner
    class Inner:
        def __init__(self):
            self.number = 1

        def __lt__(self, other):
            return True

    return Inner


def local_enum():
    class Color(enum.Enum):
        RED = 1

    return Color.RED


def generator():  # generator
    yield 1


async def coroutine():
    return 1


def nested_lambda():
    model = Net()
    model.head.layers[1].act = lambda x: x  # nested lambda
    return model


def hooked(register):
    module = nn.Linear(1, 1)
    getattr(module, register)(lambda *_: None)  # hook
    return module


def tagged_parameter():
    module = nn.Linear(1, 1)
    module.weight.tag = lambda: 1  # tag
    return module


def loader(**settings):
    return torch.utils.data.DataLoader([1, 2], **settings)


def chain(length, last):
    for _ in range(length):
        last = Holder(thing=last)
    return last


def cyclic():
    holder = Holder(thing=threading.Lock())
    holder.before = holder
    return holder


LOCK = "an object of _thread.lock"
ROWS = {
    "a lambda in a nested module": (
        nested_lambda,
        ["x.head.layers[1].act: <lambda> at ", line("nested lambda")],
    ),
    "a forward hook": (
        lambda: hooked("register_forward_hook"),
        ["x._forward_hooks[", "]: <lambda> at ", line("hook")],
    ),
    "a hook of a state dict": (
        lambda: nn.Sequential(hooked("register_state_dict_post_hook")),
        ["x[0]._state_dict_hooks[", "]: <lambda> at ", line("hook")],
    ),
    "an attribute of a parameter": (tagged_parameter, ["x.weight", ".tag: <lambda> at ", line("tag")]),
    "a local function": (
        lambda: {"a": local_function()},
        ["x['a']: the local function local_function.<locals>.inner at ", line("inner")],
    ),
    "a decorated local function": (
        lambda: [decorated_local_function()],
        ["x[0]: the local function decorated_local_function.<locals>.inner at ", line("decorated")],
    ),
    "an object of a local class": (
        lambda: Holder(thing=local_class()()),
        ["x.thing: an object of the local class local_class.<locals>.Inner at ", line("Inner")],
    ),
    "a local class": (
        lambda: Holder(thing=local_class()),
        ["x.thing: the class test_unpicklable.local_class.<locals>.Inner at ", line("Inner")],
    ),
    "a local enum": (
        lambda: Holder(thing=local_enum()),
        ["x.thing: an object of the local class local_enum.<locals>.Color"],
    ),
    "a lock": (
        lambda: Holder(thing=threading.Lock()),
        [f"x.thing: {LOCK}, in a Holder (class at ", line("Holder")],
    ),
    "a lock of a base class": (
        lambda: Child(thing=threading.Lock()),
        [f"x.thing: {LOCK}, in a Child (class at ", line("Child")],
    ),
    "a lock that no method sets": (
        lambda: Holder(other=threading.Lock()),
        [f"x.other: {LOCK}, in a Holder (class at ", line("Holder")],
    ),
    "a lock inside a thread": (
        lambda: Holder(thing=threading.Thread()),
        ["x.thing._", f": {LOCK}, in a Holder (class at ", line("Holder")],
    ),
    "a dict in a list in an attribute": (
        lambda: Holder(items=[0, {"k": threading.Lock()}]),
        [f"x.items[1]['k']: {LOCK}, in a Holder (class at ", line("Holder")],
    ),
    "a generator": (
        lambda: Holder(thing=generator()),
        ["x.thing: the generator generator at ", line("generator")],
    ),
    "a DataLoader's collate_fn": (
        lambda: loader(collate_fn=lambda items: items),  # collate_fn
        ["x.collate_fn: <lambda> at ", line("collate_fn")],
    ),
    "a partial": (
        lambda: functools.partial(lambda a, b: a, 1),  # partial
        ["x.func: <lambda> at ", line("partial")],
    ),
    "a partial's argument": (lambda: functools.partial(print, 1, threading.Lock()), [f"x.args[1]: {LOCK}"]),
    "a partial's keyword": (
        lambda: functools.partial(print, end=threading.Lock()),
        [f"x.keywords['end']: {LOCK}"],
    ),
    "a bound method": (
        lambda: Holder(thing=threading.Lock()).work,
        [f"x.__self__.thing: {LOCK}, in a Holder (class at ", line("Holder")],
    ),
    "slots": (Slots, [f"x.lock: {LOCK}, in a Slots (class at ", line("Slots")]),
    "slots and a dict": (SlotsAndDict, ["x.call: <lambda> at ", line("SlotsAndDict.call")]),
    "a dataclass": (
        lambda: Config(guard=[threading.Lock()]),
        [f"x.guard[0]: {LOCK}, in a Config (class at ", line("Config")],
    ),
    "a frozen dataclass with slots": (
        lambda: Frozen(threading.Lock()),
        [f"x.guard: {LOCK}, in a Frozen (class at ", line("Frozen")],
    ),
    "a named tuple": (lambda: Pair(1, threading.Lock()), [f"x.second: {LOCK}"]),
    "a set": (lambda: {threading.Lock()}, [f"x[0]: {LOCK}"]),
    "a key": (lambda: {threading.Lock(): 1}, ["x (the key <unlocked _thread.lock", f"): {LOCK}"]),
    "a default factory": (
        lambda: collections.defaultdict(lambda: 1),  # factory
        ["x.default_factory: <lambda> at ", line("factory")],
    ),
    "an ordered dict": (
        lambda: collections.OrderedDict(a=1, b=threading.Lock()),
        [f"x['b']: {LOCK}"],
    ),
    "a deque": (lambda: collections.deque([1, threading.Lock()]), [f"x[1]: {LOCK}"]),
    "an exception": (lambda: ValueError("a", threading.Lock()), [f"x.args[1]: {LOCK}"]),
    "a namespace": (lambda: SimpleNamespace(a=SimpleNamespace(b=threading.Lock())), [f"x.a.b: {LOCK}"]),
    "a __getstate__ that raises": (
        lambda: Holder(thing=[Refuses()]),
        [
            "x.thing[0]: an object of test_unpicklable.Refuses, whose __getstate__ raises "
            "RuntimeError: a socket cannot travel (",
            line("Refuses.__getstate__"),
        ],
    ),
    "a __reduce__ that raises what pickle never would": (
        lambda: Holder(thing=RefusesOddly()),
        [
            "x.thing: an object of test_unpicklable.RefusesOddly, whose __reduce__ raises KeyError: 'gone' (",
            line("RefusesOddly.__reduce__"),
        ],
    ),
    "a __reduce__ that returns nonsense": (
        lambda: Holder(thing=ReducesToNonsense()),
        ["x.thing: an object of test_unpicklable.ReducesToNonsense, in a Holder (class at ", line("Holder")],
    ),
    "a __getstate__ that leaves the lock out": (
        Chooses,
        ["x.rule: <lambda> at ", line("Chooses.rule")],
    ),
    "a state that is a pair of dicts": (PairState, [f"x.state[1]['b']: {LOCK}"]),
    "arguments of __reduce__": (Maker, [f"x (its __reduce__)[1]: {LOCK}"]),
    "arguments of __new__": (lambda: ByNew(threading.Lock()), [f"x.lock: {LOCK}"]),
    "keywords of __new__": (lambda: ByKeyword(threading.Lock()), [f"x.lock: {LOCK}"]),
    "a weak reference": (
        lambda: Holder(thing=weakref.ref(Net)),
        ["x.thing: an object of weakref.ReferenceType, in a Holder (class at ", line("Holder")],
    ),
    "a module": (
        lambda: Holder(thing=sys),
        ["x.thing: an object of builtins.module, in a Holder (class at ", line("Holder")],
    ),
    "a function whose name was bound again": (
        lambda: Holder(thing=shadowed_before),
        [
            "x.thing: the function shadowed at ",
            line("shadowed"),
            ", but test_unpicklable.shadowed is not that function",
        ],
    ),
    "a class whose name was bound again": (
        lambda: [ShadowedBefore],
        ["x[0]: the class test_unpicklable.Shadowed", "which cannot be imported by that name"],
    ),
    "an object of such a class": (
        lambda: [ShadowedBefore()],
        ["x[0]: an object of test_unpicklable.Shadowed, a class", "that cannot be imported by that name"],
    ),
    "a wrapped function": (
        lambda: [passed_on(shadowed_before)],
        ["x[0]: the function shadowed at ", line("shadowed")],
    ),
    "a cycle": (cyclic, [f"x.thing: {LOCK}, in a Holder (class at ", line("Holder")]),
    "a long chain": (
        lambda: chain(200, threading.Lock()),
        [
            "x.thing.thing.thing.thing.thing ... .thing",
            f".thing: {LOCK}, in a Holder (class at ",
            line("Holder"),
        ],
    ),
    "depth without end": (lambda: chain(100_000, 1), ["x: nested too deeply for pickle"]),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_path_and_the_line(row):
    make, parts = ROWS[row]
    obj = make()
    text = explain_unpicklable(obj, "x")
    assert text.startswith(parts[0])
    at = 0
    for part in parts:
        assert part in text[at:], text
        at = text.index(part, at) + len(part)
    assert "\n" not in text


def test_an_open_file(tmp_path):
    (tmp_path / "data.txt").write_text("1")
    holder = Holder().open(tmp_path / "data.txt")
    try:
        text = explain_unpicklable(holder, "x")
    finally:
        holder.file.close()
    assert text == f"x.file: an object of _io.TextIOWrapper, in a Holder (class at {line('Holder')})"


def test_a_coroutine():
    waiting = coroutine()
    text = explain_unpicklable([waiting], "x")
    waiting.close()
    assert text.startswith("x[0]: the coroutine coroutine at test_unpicklable.py:")


def test_a_hook_of_a_tensor_is_named_where_warnings_are_errors():
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda grad: grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = explain_unpicklable({"w": weight}, "x")
    assert text.startswith(
        "x['w']: an object of torch.Tensor, whose __reduce_ex__ raises UserWarning: backward hook"
    )


@pytest.mark.parametrize(
    "obj",
    [
        torch.ones(1, requires_grad=True) * 2,
        nn.Linear(2, 2),
        loader(),
        functools.partial(print, 1),
        Pair(1, [2]),
        Net().forward,
    ],
    ids=["non-leaf tensor", "module", "loader", "partial", "named tuple", "bound method"],
)
def test_what_pickle_takes(obj):
    pickle.dumps(obj)
    assert explain_unpicklable(obj, "x") == ""


def test_the_search_copies_no_tensors(monkeypatch):
    def refuse(*_):
        raise AssertionError("the data of a tensor was pickled")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].act = lambda x: x
    monkeypatch.setattr(torch.storage.TypedStorage, "__reduce__", refuse)
    monkeypatch.setattr(torch.storage.UntypedStorage, "__reduce__", refuse)
    assert explain_unpicklable(model, "model").startswith("model[1].act: <lambda> at ")


def test_the_recursion_limit_is_as_before():
    before = sys.getrecursionlimit()
    explain_unpicklable(chain(100_000, 1), "x")
    assert sys.getrecursionlimit() == before


def in_main(thing):
    thing.__module__ = "__main__"
    return thing


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda cls: [cls()], "Cell"),
        (lambda cls: functools.partial(print, cls), "Cell"),
        (lambda cls: Holder(thing={"model": cls()}), "Cell"),
        (lambda cls: cls().work, "Cell"),
        (lambda cls: Holder(thing=1), None),
        (lambda cls: [cls(), threading.Lock()], "Cell"),
    ],
)
def test_what_a_notebook_defines_is_found(monkeypatch, make, name):
    cell = in_main(type("Cell", (), {"work": Holder.work}))
    monkeypatch.setattr(sys.modules["__main__"], "Cell", cell, raising=False)
    assert interactive_name(make(cell)) == name
