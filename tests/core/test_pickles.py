from __future__ import annotations

import pickle
import re
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError
from fabric.core.pickles import pickling_error


class Model:
    def __init__(self):
        self.width, self.lock = 3, threading.Lock()


class Slots:
    __slots__ = ("lock", "width")

    def __init__(self):
        self.width, self.lock = 3, threading.Lock()


@dataclass
class Config:
    model: Any


class Refuses:
    def __reduce__(self):
        raise ValueError("not me")


class Around:
    """An object that leaves a lock out of its state, and has another fault."""

    def __init__(self):
        self.lock, self.bad = threading.Lock(), [1, Refuses()]

    def __getstate__(self):
        return {"bad": self.bad}


def endless():
    thing = []
    thing.append([threading.Lock(), thing])
    return thing


LOCK = "TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ({"model": Model()}, rf"{LOCK}.*, at cfg\['model'\]\.lock"),
        ([0, (Config(Model()),)], rf"{LOCK}.*, at cfg\[1\]\[0\]\.model\.lock"),
        (Slots(), rf"{LOCK}.*, at cfg\.lock"),
        (Around(), r"ValueError: not me.*, at cfg\.bad\[1\]"),
        (endless(), rf"{LOCK}.*, at cfg\[0\]\[0\]"),
        (threading.Lock(), f"{LOCK}[^,]*"),
    ],
)
def test_the_path_to_what_does_not_pickle(obj, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        pickle.dumps(obj)
    assert re.fullmatch(text, pickling_error(caught.value, obj, "cfg"))


def test_verbs_name_it():
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(
        ArgumentTypeError, match=r"a dict cannot be pickled \(.*, at obj\['m'\]\.lock\)\. Pass"
    ):
        fabric.all_gather_object({"m": Model()})
