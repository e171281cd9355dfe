"""What pickle refuses is told with pickle's reason; what a notebook defines is found."""

from __future__ import annotations

import functools
import sys
import threading

import pytest
import torch
from torch import nn

from fabric.strategies.launchers.pickling import interactive_name, why_unpicklable


class Holder:
    def __init__(self, **items):
        vars(self).update(items)

    def work(self):
        return self


class Refuses:
    def __reduce__(self):
        raise ValueError("not me")


def nested(levels):
    thing = Holder()
    for _ in range(levels):
        thing = Holder(thing=thing)
    return thing


def local():
    class Net(nn.Module):
        pass

    return Net()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: {"a": [1, threading.Lock()]}, "TypeError: cannot pickle '_thread.lock' object"),
        (lambda: Holder(act=lambda x: x), "<lambda>"),
        (local, "local.<locals>.Net"),
        (lambda: Holder(thing=Refuses()), "ValueError: not me"),
        (lambda: nested(100_000), "RecursionError: "),
    ],
)
def test_the_reason(make, why):
    assert why in why_unpicklable(make())


@pytest.mark.parametrize(
    "obj", [nn.Linear(2, 2), functools.partial(print, 1), Holder().work, torch.ones(1)], ids=str
)
def test_what_pickle_takes(obj):
    assert why_unpicklable(obj) == ""


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
