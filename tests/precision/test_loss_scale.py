"""The loss scale of "16-mixed": whatever a loop does between its backwards, gradients mean what they meant.

The scaler's scale grows at each update, and nothing runs in half precision: every number is that of a loop
without a scaler.
"""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.plugins.precision import MixedPrecision


class Scaled(MixedPrecision):
    """Float32, and the loss times 8, 16, 32, ..."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))

    def forward_context(self):
        return nullcontext()

    def convert_input(self, data):
        return data


class Loop:
    """Two models in a row; an optimizer of both or of the first, and another one of the second."""

    def __init__(self, precision, **settings):
        self.fabric = Fabric(accelerator="cpu", plugins=precision, **{"devices": 1, **settings})
        self.fabric.launch()
        torch.manual_seed(0)
        self.nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.first, self.second = [self.fabric.setup(net) for net in self.nets]

    def optimizers(self, both):
        held = [p for net in self.nets[: 1 + both] for p in net.parameters()]
        one = torch.optim.SGD(held, lr=0.05, momentum=0.9)
        two = torch.optim.Adam(self.nets[1].parameters(), lr=0.05, eps=1e-3)
        return self.fabric.setup_optimizers(one, two)

    def backward(self, step, through="both"):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        x = x.chunk(self.fabric.world_size)[self.fabric.global_rank]
        out = self.second(x if through == "second" else self.first(x))
        self.fabric.backward(out.square().mean())

    def clip(self, optimizer):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = self.first if id(self.nets[0].weight) in held else self.second
        self.fabric.clip_gradients(model, optimizer, max_norm=0.1)


def steps_left_out(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(4):
        one.zero_grad()
        loop.backward(step)
        loop.clip(one)
        if step % 2:
            one.step()


def beside_no_model(loop):
    """A parameter of no model, whose gradients add up before its first step and after it."""
    one, _ = loop.optimizers(both=True)
    weight = nn.Parameter(torch.ones(4))
    own = loop.fabric.setup_optimizers(torch.optim.SGD([weight], lr=0.1))
    for step in range(4):
        one.zero_grad()
        loop.backward(step)
        loop.fabric.backward((loop.first(torch.ones(4, 4)).detach() @ weight).mean())
        one.step()
        if step > 1:
            own.step()
    loop.nets.append(nn.ParameterList([weight]))


def clipped_in_between(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(3):
        one.zero_grad(set_to_none=False)
        for part in range(3):
            loop.backward(step + part)
            loop.clip(one)
        one.step()


def never_cleared(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(4):
        loop.backward(step)
        one.step()


def stepped_twice(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(3):
        one.zero_grad()
        one.step()
        loop.backward(step)
        one.step()
        one.step()


def two_of_one_model(loop):
    one, two = loop.optimizers(both=True)
    for step in range(3):
        one.zero_grad()
        loop.backward(step)
        loop.clip(two)
        one.step()
        two.step()


def added_up_over_the_steps_of_another(loop):
    one, two = loop.optimizers(both=False)
    for step in range(3):
        one.zero_grad()
        for part in range(3):
            loop.backward(step + part)
            two.zero_grad()
            loop.backward(step, "second")
            two.step()
        one.step()


LOOPS = [
    steps_left_out,
    beside_no_model,
    clipped_in_between,
    never_cleared,
    stepped_twice,
    two_of_one_model,
    added_up_over_the_steps_of_another,
]


def ran(body, precision, **settings):
    loop = Loop(precision, **settings)
    body(loop)
    return [value.clone() for model in (loop.first, loop.second) for value in model.state_dict().values()]


@pytest.mark.parametrize("body", LOOPS, ids=lambda body: body.__name__)
def test_a_loop_gives_what_it_gives_without_a_scaler(body):
    torch.testing.assert_close(ran(body, Scaled()), ran(body, None), rtol=1e-5, atol=1e-6)


def on_ranks(strategy):
    return {body.__name__: ran(body, Scaled(), devices=2, strategy=strategy) for body in LOOPS}


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_on_ranks(ranks, strategy):
    want = {body.__name__: ran(body, None) for body in LOOPS}
    for found in ranks.run(on_ranks, strategy, world_size=2):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_scale_that_is_too_large_shrinks_where_the_loop_leaves_steps_out():
    loop = Loop(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**30)))
    one, _ = loop.optimizers(both=True)
    norms = []
    for step in range(40):
        one.zero_grad()
        loop.backward(step)
        norms.append(float(loop.fabric.clip_gradients(loop.first, one, max_norm=1.0)))
        if math.isfinite(norms[-1]):
            one.step()
    assert not math.isfinite(norms[0])
    assert all(map(math.isfinite, norms[-10:]))


def test_an_optimizer_that_was_forgotten_is_refused():
    loop = Loop(Scaled())
    forgotten = torch.optim.Adam(loop.first.parameters())
    forgotten.step()  # has nothing to step
    loop.backward(0)
    with pytest.raises(UsageError, match=r"Adam.step\(\) is that of an optimizer which was not set up"):
        forgotten.step()
    loop.fabric.setup_optimizers(forgotten).step()
    foreign = nn.Linear(2, 2)
    foreign(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(foreign.parameters(), lr=0.1).step()  # has nothing to do with it


@pytest.mark.parametrize("earlier", [0, 7, 15], ids=["first backward", "eighth", "sixteenth"])
def test_a_model_and_its_optimizer_that_were_forgotten_are_refused(earlier):
    loop = Loop(Scaled())
    other = nn.Linear(2, 2)
    forgotten = torch.optim.Adam(other.parameters())
    for _ in range(earlier):
        loop.backward(0)
    loop.fabric.backward(other(torch.ones(1, 2)).sum())
    with pytest.raises(UsageError, match=r"Adam.step\(\) is that of an optimizer which was not set up"):
        forgotten.step()


def test_a_gradient_in_the_memory_of_a_scaled_one_is_the_loops_own():
    loop = Loop(Scaled())
    own = nn.Linear(2, 2, bias=False)
    assert any(_in_the_memory_of_a_scaled_one(loop, own) for _ in range(20))
    torch.optim.SGD(own.parameters(), lr=0.1).step()


def _in_the_memory_of_a_scaled_one(loop, own):
    """Whether the loop's own gradient has the memory of the object of a scaled one, and its version."""
    own.weight.grad = None
    loop.fabric.backward(own(torch.ones(1, 2)).sum())
    scaled = id(own.weight.grad), own.weight.grad._version
    own.weight.grad = None
    kept = []  # other free memory is used up by them
    while len(kept) < 1000 and id(own.weight.grad) != scaled[0]:
        kept.append(torch.empty(2, 2))
        own.weight.grad = kept[-1]
    return (id(own.weight.grad), own.weight.grad._version) == scaled


def test_a_model_of_the_loops_own_steps_by_its_own_gradients():
    """As a discriminator that is not set up: the generator's scaled backward passes through it."""
    loop = Loop(Scaled())
    own = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(2):
        loop.fabric.backward(own(torch.ones(1, 2)).sum())
        optimizer.zero_grad()
        own(torch.ones(1, 2)).sum().backward()
        assert own.weight.grad.tolist() == [[1.0, 1.0]] * 2
        optimizer.step()


CLIPS = {
    "norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "value": lambda net: nn.utils.clip_grad_value_([*net.parameters()], 0.1),
    "one": lambda net: nn.utils.clip_grad_norm_(net.weight, 0.1, foreach=False),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_torchs_clip_of_scaled_gradients_is_refused(clip):
    loop = Loop(Scaled())
    one, _ = loop.optimizers(both=True)
    for step in range(3):
        one.zero_grad()
        loop.backward(step)
        with pytest.raises(
            UsageError, match=r"Write fabric.clip_gradients\(model, optimizer, max_norm=1.0\)"
        ):
            clip(loop.nets[0])
        loop.clip(one)
        clip(loop.nets[0])  # of their true size
        one.step()
        clip(loop.nets[0])  # by now they are not used
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    clip(other)


def clipped_on_ranks(strategy):
    loop = Loop(MixedPrecision("16-mixed", "cpu"), devices="auto", strategy=strategy)
    loop.backward(0)
    CLIPS["norm"](loop.first)


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("ddp", 2), ("ddp", 3), ("zero1", 3), ("zero2", 2), ("fsdp", 3)]
)
def test_torchs_clip_is_refused_on_all_ranks(ranks, strategy, world_size):
    for error in ranks.run_expecting_errors(clipped_on_ranks, strategy, world_size=world_size):
        assert "carry the loss scale" in str(error)


def test_without_a_scale_torchs_clip_is_the_users():
    for precision in (Scaled(), MixedPrecision("bf16-mixed", "cpu")):
        if precision.scaler is not None:
            precision.scaler = torch.amp.GradScaler("cpu", enabled=False)
        loop = Loop(precision)
        loop.backward(0)
        assert float(CLIPS["norm"](loop.first)) > 0.1
        assert float(CLIPS["norm"](loop.first)) < 0.11


def unscaled_by_the_loop(precision, of=lambda optimizer: optimizer.optimizer):
    """The first model after steps of two optimizers, clipped by torch's own function."""
    loop = Loop(precision)
    optimizers = [
        loop.fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1)) for net in loop.nets
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loop.backward(step)
        for optimizer, net in zip(optimizers, loop.nets, strict=True):
            if precision is not None:
                precision.scaler.unscale_(of(optimizer))
            CLIPS["norm"](net)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for net in loop.nets for p in net.parameters()]


def test_a_loop_that_unscales_by_the_scaler_itself():
    torch.testing.assert_close(
        unscaled_by_the_loop(Scaled()), unscaled_by_the_loop(None), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(UsageError, match=r"would divide the gradients by the scale again\. Leave it out"):
        unscaled_by_the_loop(Scaled(), of=lambda optimizer: optimizer)


def a_new_group_after_a_clip(loop):
    one, _ = loop.optimizers(both=False)
    loop.backward(0)
    loop.clip(one)
    one.add_param_group({"params": list(loop.nets[1].parameters()), "lr": 0.1})
    one.step()


def a_copy_that_adds_up_over_steps_of_its_model(loop):
    one, _ = loop.optimizers(both=True)
    first, second, two = copy.deepcopy((loop.first, loop.second, one))
    for step in range(3):
        two.zero_grad()
        for part in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loop.fabric.backward(second(first(x)).square().mean())
            one.zero_grad()
            loop.backward(step + part)
            one.step()
        two.step()
    loop.first, loop.second = nn.Sequential(loop.first, first), nn.Sequential(loop.second, second)


def saved_before_its_step(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(3):
        one.zero_grad()
        loop.backward(step)
        loop.clip(one)
        loop.fabric.strategy.precision.state_dict()
        grads = [p.grad.clone() for p in loop.nets[0].parameters()]
        one.step()
        loop.nets[0].register_buffer(f"seen{step}", torch.cat([grad.flatten() for grad in grads]))


def goes_on_with_another_scaler(loop):
    one, _ = loop.optimizers(both=True)
    for step in range(3):
        loop.backward(step)
        if isinstance(precision := loop.fabric.strategy.precision, MixedPrecision):
            precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**step, growth_interval=1)
        loop.backward(step + 1)
        one.step()


ON_ONE_RANK = [
    a_new_group_after_a_clip,
    a_copy_that_adds_up_over_steps_of_its_model,
    saved_before_its_step,
    goes_on_with_another_scaler,
]


@pytest.mark.parametrize("body", ON_ONE_RANK, ids=lambda body: body.__name__)
def test_a_loop_on_one_rank(body):
    torch.testing.assert_close(ran(body, Scaled()), ran(body, None), rtol=1e-5, atol=1e-6)


def test_sparse_and_double_gradients_that_are_kept():
    """Only the first is stepped; the other is brought from scale to scale."""
    found = []
    for precision in (Scaled(), None):
        loop = Loop(precision)
        table, wide = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4).double()
        models = [loop.fabric.setup(table), loop.fabric.setup(wide)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (table, wide)]
        optimizers = loop.fabric.setup_optimizers(*optimizers)
        for step in range(3):
            loop.fabric.backward(models[0](torch.tensor([step, 1])).square().mean())
            loop.fabric.backward(models[1](torch.ones(2, 4).double()).square().mean())
            optimizers[0].step()
        optimizers[1].step()
        found.append([p.detach().clone() for net in (table, wide) for p in net.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_model_that_goes_on_without_a_scaler():
    loop = Loop(Scaled())
    one, _ = loop.optimizers(both=True)
    loop.backward(0)
    one.step()
    one.zero_grad()
    after = torch.optim.SGD([p for net in loop.nets for p in net.parameters()], lr=0.1)
    loop.nets[1](loop.nets[0](torch.ones(2, 4))).sum().backward()  # plain torch, while the Fabric lives on
    before = loop.nets[0].bias.detach().clone()
    after.step()
    torch.testing.assert_close(loop.nets[0].bias, before - 0.1 * loop.nets[0].bias.grad)


def test_a_scaler_that_is_put_in_later_and_one_that_is_off():
    precision = Scaled()
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(precision)
    loop.backward(0)
    assert precision.state_dict()["scale"] == 4.0
    off = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    loop = Loop(off)
    forgotten = torch.optim.SGD(loop.nets[0].parameters(), lr=0.1)
    loop.backward(0)
    forgotten.step()  # nothing is scaled


class Converting(Scaled):
    def convert_module(self, module):
        return module.float()


def test_a_subclass_that_converts_models_is_told_of_them():
    want = ran(added_up_over_the_steps_of_another, None)
    torch.testing.assert_close(
        ran(added_up_over_the_steps_of_another, Converting()), want, rtol=1e-5, atol=1e-6
    )


def test_a_copy_starts_anew():
    precision = pickle.loads(pickle.dumps(Scaled()))
    torch.testing.assert_close(ran(never_cleared, precision), ran(never_cleared, None), rtol=1e-5, atol=1e-6)
