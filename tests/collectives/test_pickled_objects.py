"""Objects in checkpoints: `save(..., allow_pickle=True)` and `load(..., weights_only=False)`."""

from __future__ import annotations

import argparse
import enum
import threading
from collections import deque

import pytest
import torch
from checkpoint_cases import launched, net, same

from fabric.core.errors import ArgumentTypeError, ConfigurationError, RankError, UsageError


class Color(enum.Enum):
    RED = 1


class Buffer:
    """Of a reinforcement learner."""

    def __init__(self, size):
        self.seen = deque([torch.full((2,), float(i)) for i in range(size)], maxlen=size)
        self.kind = Color.RED


def state_of(model, size=3):
    args = argparse.Namespace(lr=0.1, colors={Color.RED: torch.ones(2)})
    return {"model": model, "run": {"buffers": [Buffer(size)], "args": args}, "step": 4}


def assert_objects(run, size=3):
    (buffer,) = run["buffers"]
    assert type(buffer) is Buffer
    assert buffer.kind is Color.RED
    assert [entry.tolist() for entry in buffer.seen] == [[i, i] for i in range(size)]
    assert run["args"].lr == 0.1
    assert torch.equal(run["args"].colors[Color.RED], torch.ones(2))


def saves_objects(name, folder, format, wait):
    fabric = launched(name)
    model, path = fabric.setup(net()), folder / "c"
    state = state_of(model)
    errors = (ArgumentTypeError, RankError)
    both = r"state\['run'\].*Buffer.*allow_pickle=True\); loading it then needs weights_only=False"
    with pytest.raises(errors, match=both):
        fabric.save(path, state, format=format)
    saving = fabric.save(path, state, format=format, wait=wait, allow_pickle=True)
    state["run"]["buffers"][0].seen.append(torch.zeros(2))  # after the save: not in the file
    if saving is not None:
        saving.wait()
    with pytest.raises((UsageError, RankError), match="weights_only=False"):
        fabric.load(path, {"model": model})
    fresh = fabric.setup(net(1))
    rest = fabric.load(path, {"model": fresh, "step": 0}, weights_only=False)
    assert_objects(rest["run"])
    same(*[dict(fabric.strategy.get_module_state_dict(m)) for m in (fresh, model)])
    locked = {"model": model, "run": {"a": [Buffer(1)]}}
    locked["run"]["a"][0].lock = threading.Lock()
    with pytest.raises(
        errors, match=r"state\['run'\]\['a'\]\[0\] cannot be pickled .*, at .*\['a'\]\[0\]\.lock\)"
    ):
        fabric.save(path, locked, format=format, allow_pickle=True)
    assert_objects(fabric.load(path, weights_only=False)["run"])  # as it was


@pytest.mark.parametrize(
    ("name", "size", "format", "wait"),
    [
        ("single", 1, "full", True),
        ("single", 1, "full", False),
        ("ddp", 2, "full", False),
        ("ddp", 3, "sharded", True),
        ("zero1", 2, "full", True),
        ("zero3", 2, "sharded", False),
        ("zero3", 3, "full", True),
        ("pipeline", 2, "sharded", True),
    ],
)
def test_objects_are_saved_and_loaded(ranks, tmp_path, name, size, format, wait):
    ranks.run(saves_objects, name, tmp_path, format, wait, world_size=size)


def test_plain_torch_reads_them(ranks, tmp_path):
    ranks.run(saves_objects, "single", tmp_path, "full", True, world_size=1)
    read = torch.load(tmp_path / "c", weights_only=False)
    assert_objects(read["run"])
    assert torch.equal(read["model"]["0.weight"], net()[0].weight)


def refusals(folder):
    fabric = launched("zero3")
    model = fabric.setup(net())
    holder = Buffer(1)
    holder.weight = model.module[0].weight
    text = r"state\['buffer'\] cannot be pickled \(TypeError: it holds a tensor that is sharded over ranks"
    with pytest.raises((ArgumentTypeError, RankError), match=text):
        fabric.save(folder / "c", {"model": model, "buffer": holder}, allow_pickle=True)
    with pytest.raises((ConfigurationError, RankError), match=r"'buffer' \(Buffer\).*and the rest to a file"):
        fabric.save(folder / "c.safetensors", {"model": model, "buffer": Buffer(1)}, allow_pickle=True)
    with pytest.raises((ArgumentTypeError, RankError), match="on the meta device"):
        fabric.save(folder / "c", {"a": torch.empty(1, device="meta")}, allow_pickle=True)
    assert not [*folder.iterdir()]


def test_what_allow_pickle_does_not_save(ranks, tmp_path):
    pytest.importorskip("safetensors")
    ranks.run(refusals, tmp_path, world_size=2)
