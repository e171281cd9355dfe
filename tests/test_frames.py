"""Calls of our package per verb, counted with `sys.setprofile`: "The way of the data" in DESIGN.md."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from machine import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader

import fabric
from fabric import Fabric
from fabric.core.backward_listeners import remove_idle_hook
from fabric.guard.control_connections import ControlRound

pytestmark = pytest.mark.device

PACKAGE = str(Path(fabric.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # inlined by newer Pythons


def frames(function, *args, **kwargs):
    """(names of our functions called, deepest nesting). A generator counts once, however often resumed."""
    seen, depth, deepest = [], 0, 0

    def watch(frame, event, _):
        nonlocal depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            if not any(frame is known for known in seen):
                seen.append(frame)
        elif event == "return":
            depth -= 1

    gc.collect()  # else finalizers of earlier tests may run in between
    gc.disable()
    sys.setprofile(watch)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
        gc.enable()
    return [frame.f_code.co_name for frame in seen], deepest


def stack(layers):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def ready(precision="32-true", **kwargs):
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision, **kwargs)
    fabric.launch()
    net = stack(2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = model(X).sum()
    fabric.backward(loss, retain_graph=True)
    return fabric, model, optimizer, loss


X = torch.ones(2, 4, device=ACCELERATOR)


@pytest.mark.parametrize(
    ("precision", "calls", "depth"),
    [
        ("32-true", 0, 0),
        ("bf16-mixed", 1, 1),
        ("16-mixed", 2, 2),  # the guard against loss.backward() is a stage of its own
        ("bf16-true", 3, 2),
        ("64-true", 3, 2),
    ],
)
def test_forward(precision, calls, depth):
    _, model, _, _ = ready(precision)
    names, deepest = frames(model, X)
    assert (len(names), deepest) == (calls, depth), names


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_forward_under_no_grad_and_eval_is_free_too(verb):
    _, model, _, _ = ready()
    getattr(model, verb)()
    with torch.no_grad():
        assert frames(model, X) == ([], 0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_backward(precision):
    fabric, _, _, loss = ready(precision)
    names, deepest = frames(fabric.backward, loss)
    # `backward`, one that keeps torch.compile out, and with listeners two: of backwards, of autograd.grad.
    assert len(names) <= 4, names
    assert deepest <= 4


@pytest.mark.parametrize(
    ("precision", "calls"), [("32-true", 1), ("bf16-mixed", 1), ("bf16-true", 1), ("16-mixed", 5)]
)
def test_optimizer_step(precision, calls):
    gc.collect()  # strategies of earlier tests listen to each step until they are collected
    remove_idle_hook()
    _, _, optimizer, _ = ready(precision)
    names, deepest = frames(optimizer.step)
    assert len(names) == calls, names
    assert deepest <= 5


def normalize_calls(layers):
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    model = fabric.setup(stack(layers))
    fabric.backward(model(X).sum())
    return frames(fabric.normalize_gradients, model, 8)


def test_normalize_gradients_does_not_depend_on_the_number_of_parameters():
    normalize_calls(2)  # imports
    few, many = normalize_calls(2), normalize_calls(50)
    assert few == many
    assert few[1] <= 6
    assert len(few[0]) <= 20, few[0]


def test_zero_grad_is_the_optimizers_own():
    _, _, optimizer, _ = ready()
    names, _ = frames(lambda: [optimizer.zero_grad()])
    assert len(names) == 1, names


def setup_calls(layers):
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    net = stack(layers)
    return frames(fabric.setup, net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_setup_does_not_depend_on_the_number_of_parameters():
    setup_calls(1)  # makes the view type
    (small, deep), (large, deeper) = setup_calls(1), setup_calls(50)
    assert small == large
    assert deep == deeper <= 6
    assert len(small) <= 30, small


def tree(leaves):
    return {f"m{i}": torch.ones(()) for i in range(leaves)}


def test_all_reduce_does_not_depend_on_the_number_of_leaves():
    fabric, *_ = ready()
    fabric.all_reduce(1.0)  # imports
    few, many = frames(fabric.all_reduce, tree(2)), frames(fabric.all_reduce, tree(200))
    assert few == many
    assert few[1] <= 7  # one of them keeps torch.compile out
    assert len(few[0]) <= 20, few[0]


def save_calls(path, layers):
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    net = stack(layers)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return frames(fabric.save, path, {"model": model, "optimizer": optimizer, "step": 1})


def test_save_costs_a_few_calls_per_tensor(tmp_path):
    (few, deep), (many, deeper) = save_calls(tmp_path / "few.pt", 1), save_calls(tmp_path / "many.pt", 50)
    assert deep == deeper
    # Each tensor, its number and its name are checked for what safe loading reads, and torch writes a tensor
    # in five pieces; 98 more parameters may not cost more than that.
    assert len(many) - len(few) <= 9 * 98


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_costs_one_call_of_ours(shuffle):
    fabric, *_ = ready()

    def epoch(batches):
        loader = fabric.setup_dataloaders(DataLoader(range(2 * batches), batch_size=2, shuffle=shuffle))
        return frames(lambda: [None for _ in loader])

    (few, deep), (many, deeper) = epoch(2), epoch(102)
    assert deep == deeper
    each = 1 if ACCELERATOR == "cpu" else 5  # it is brought to the device
    assert len(many) - len(few) <= 100 * each


def replicated(precision, net):
    gc.collect()  # strategies of earlier tests listen to each step until they are collected
    remove_idle_hook()
    quiet = {"replica_check": 1000}  # a step without a check of values
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", precision=precision, **quiet)
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):  # the calls before are recorded
        fabric.backward(model(X).sum())
    loss = model(X).sum()
    for leaves in (2, 200):  # the first call of its kind writes its description
        fabric.all_reduce(tree(leaves))
    found = {
        "forward": frames(model, X),
        "backward": frames(fabric.backward, loss),
        "step": [frames(optimizer.step) for _ in range(2)][1],  # an optimizer is looked at in its first one
    }
    with mock.patch.object(ControlRound.wait, "__defaults__", (60.0,)):  # the other rank may be late
        found["few"], found["many"] = [frames(fabric.all_reduce, tree(leaves)) for leaves in (2, 200)]
    model.eval()
    with torch.no_grad():
        found["evaluation"] = frames(model, X)
    return found


def on_ranks(precision):
    return replicated(precision, stack(2))


def test_ddp(ranks):
    for found in ranks.run(on_ranks, "32-true", world_size=2):
        assert found["forward"] == found["evaluation"] == ([], 0)
        assert len(found["backward"][0]) <= 9, found["backward"]  # nested passes, written gradients, checks
        assert found["step"] == (["step", "_before_step", "before_step", "count"], 3)
        assert found["few"] == found["many"]
        assert found["many"][1] <= 8 + 7  # of these seven are the connections', down to the socket


def test_ddp_bf16_mixed(ranks):
    for found in ranks.run(on_ranks, "bf16-mixed", world_size=2):
        assert found["forward"][0] == ["__call__"]


def with_buffers():
    return replicated("32-true", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def test_ddp_with_buffers_adds_nothing(ranks):
    for found in ranks.run(with_buffers, world_size=2):
        assert found["forward"] == found["evaluation"] == ([], 0)


class Nested(nn.Linear):
    def forward(self, batch):
        return {"out": super().forward(batch["a"][0]), "again": batch}

    def method(self, x):
        return super().forward(x)


def casts(precision, tensors):
    batch = {"a": [X] * tensors, "b": {"c": (X,) * tensors, "d": [X + 1]}, "n": 1}
    model = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision).setup(Nested(4, 4))
    return frames(model, batch)[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_nested_batch_costs_nothing_per_tensor(precision):
    names = casts(precision, 2)
    assert len(names) == len(casts(precision, 20))
    assert names.count("_container") == 11  # five containers, in and out, and one around them
    assert len(names) <= 28, names  # two per container, and of the one other value


def test_a_method_costs_one_call():
    model = Fabric(accelerator=ACCELERATOR, devices=1).setup(Nested(4, 4))
    assert frames(lambda: model.method(X)) == (["__getattr__"], 1)
