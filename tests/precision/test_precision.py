"""Each precision against plain torch doing the same by hand: equal to the bit on one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.plugins.precision import MixedPrecision

STEPS = 6


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def make_data(step):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def make_fabric(precision, scaler=None, **kwargs):
    chosen = (
        {"precision": precision} if scaler is None else {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    )
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **kwargs}, **chosen)
    fabric.launch()
    return fabric


def same(ours, theirs):
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


# whole runs


KINDS = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam foreach": lambda p: Adam(p, lr=0.01, eps=1e-3, foreach=True),
}


def clip(parameters, limits):
    if "norm" in limits:
        nn.utils.clip_grad_norm_(parameters, 0.05)
    if "value" in limits:
        nn.utils.clip_grad_value_(parameters, 0.01)


def by_hand(precision, kind, limits, scaler=None, micro=1):
    """The loop that a careful user writes without us."""
    net = make_net()
    dtype = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision)
    net = net.to(dtype) if dtype else net
    mixed = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    optimizer = KINDS[kind](net.parameters())
    losses = []
    for step in range(STEPS):
        for part in range(micro):
            x, y = make_data(step * micro + part)
            with torch.autocast("cpu", mixed, enabled=mixed is not None):
                out = net(x.to(dtype) if dtype else x)
            loss = nn.functional.cross_entropy(out.float(), y) / micro
            (scaler.scale(loss) if scaler else loss).backward()
            losses.append(loss.item())
        if scaler and limits:
            scaler.unscale_(optimizer)
        clip([*net.parameters()], limits)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in net.parameters()]


def with_fabric(precision, kind, limits, scaler=None, micro=1):
    fabric = make_fabric(precision, scaler)
    net = make_net()
    model, optimizer = fabric.setup(net, KINDS[kind](net.parameters()))
    losses = []
    for step in range(STEPS):
        for part in range(micro):
            x, y = make_data(step * micro + part)
            with fabric.no_backward_sync(model, enabled=part < micro - 1):
                loss = nn.functional.cross_entropy(model(x), y) / micro
                fabric.backward(loss)
            losses.append(loss.item())
        if "norm" in limits:
            fabric.clip_gradients(model, optimizer, max_norm=0.05, error_if_nonfinite=False)
        if "value" in limits:
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in net.parameters()], fabric.strategy.precision


@pytest.mark.parametrize("precision", ["64-true", "32-true", "16-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [(), ("norm",), ("value",)], ids=["", "norm", "value"])
def test_runs_are_equal(precision, kind, limits):
    expected, weights = by_hand(precision, kind, limits)
    losses, ours, plugin = with_fabric(precision, kind, limits)
    assert losses == expected
    same(ours, weights)
    assert getattr(plugin, "scaler", None) is None


@pytest.mark.parametrize("kind", ["SGD", "Adam foreach"])
@pytest.mark.parametrize(
    "limits", [(), ("norm",), ("value",), ("norm", "value")], ids=["", "norm", "value", "both"]
)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("start", [1024.0, 2.0**24], ids=["steady", "first steps skipped"])
def test_runs_with_a_scaler_are_equal(kind, limits, micro, start):
    settings = {"init_scale": start, "growth_interval": 2}
    theirs = torch.amp.GradScaler("cpu", **settings)
    expected, weights = by_hand("16-mixed", kind, limits, theirs, micro)
    mine = torch.amp.GradScaler("cpu", **settings)
    losses, ours, plugin = with_fabric("16-mixed", kind, limits, mine, micro)
    assert losses == expected
    same(ours, weights)
    assert plugin.state_dict() == theirs.state_dict()
    assert plugin.scaler is mine
    if start > 1e6:
        assert theirs.get_scale() < start  # the case is what it says


def test_the_default_scaler_is_torchs():
    expected, weights = by_hand("16-mixed", "SGD", (), torch.amp.GradScaler("cpu"))
    losses, ours, _ = with_fabric("16-mixed", "SGD", ())
    assert losses == expected
    same(ours, weights)


# the scaler


def ready(scaler=None, **kwargs):
    fabric = make_fabric("16-mixed", scaler or torch.amp.GradScaler("cpu", init_scale=8.0), **kwargs)
    net = make_net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    return fabric, model, optimizer, fabric.strategy.precision


def loss_of(model, step=0):
    x, y = make_data(step)
    return nn.functional.cross_entropy(model(x), y)


def poison(model):
    next(model.parameters()).grad[0, 0] = float("inf")


@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_with_an_infinite_gradient_is_skipped(clipped):
    fabric, model, optimizer, plugin = ready()
    before = copy.deepcopy([*model.parameters()])
    fabric.backward(loss_of(model))
    poison(model)
    if clipped:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    same(model.parameters(), before)
    optimizer.zero_grad()
    fabric.backward(loss_of(model))
    assert plugin.scaler.get_scale() == 4.0
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before[0])


def test_clipping_twice_unscales_once():
    fabric, model, optimizer, _ = ready()
    fabric.backward(loss_of(model))
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e9)
    again = fabric.clip_gradients(model, optimizer, max_norm=1e9)
    plain = make_net()
    loss_of(plain).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(norm, again, rtol=0, atol=0)
    torch.testing.assert_close(norm, expected, rtol=2e-2, atol=0)


def test_two_optimizers_step_by_the_scale_that_their_gradients_carry():
    """One loss through two models, each with its own optimizer; the second one's gradient overflows."""
    fabric = make_fabric(None, torch.amp.GradScaler("cpu", init_scale=8.0))
    one, two = make_net(), nn.Linear(3, 3)
    first, first_optimizer = fabric.setup(one, SGD(one.parameters(), lr=0.1))
    second, second_optimizer = fabric.setup(two, SGD(two.parameters(), lr=0.1))
    before = copy.deepcopy([*one.parameters()])
    x, y = make_data(0)
    fabric.backward(nn.functional.cross_entropy(second(first(x)), y))
    scaled = [p.grad.clone() for p in one.parameters()]
    poison(second)
    second_optimizer.step()
    scale_seen = fabric.strategy.precision.scaler.get_scale()
    first_optimizer.step()
    for parameter, old, grad in zip(one.parameters(), before, scaled, strict=True):
        torch.testing.assert_close(parameter, old - 0.1 * grad / 8.0)
    assert scale_seen == 8.0
    fabric.backward(nn.functional.cross_entropy(second(first(x)), y))
    assert fabric.strategy.precision.scaler.get_scale() == 4.0


def test_a_gan_equals_the_loop_by_hand():
    """Two backwards and two optimizers per iteration, one scaler, one update at the end of each half."""

    def run(ours):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        torch.manual_seed(0)
        maker, critic = nn.Linear(4, 6), nn.Linear(6, 1)
        if ours:
            fabric = make_fabric(None, scaler)
            maker_model, maker_step = fabric.setup(maker, SGD(maker.parameters(), lr=0.05))
            critic_model, critic_step = fabric.setup(critic, SGD(critic.parameters(), lr=0.05))
        else:
            maker_model = critic_model = None
            maker_step, critic_step = SGD(maker.parameters(), lr=0.05), SGD(critic.parameters(), lr=0.05)

        def call(net, model, x):
            if ours:
                return model(x)
            with torch.autocast("cpu", torch.float16):
                out = net(x)
            return out.float()

        def advance(loss, optimizer):
            if ours:
                fabric.backward(loss)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        losses = []
        for step in range(8):
            x, _ = make_data(step)
            noise = x[:, :4]
            critic_step.zero_grad()
            fake = call(maker, maker_model, noise)
            loss = call(critic, critic_model, fake.detach()).mean() - call(critic, critic_model, x).mean()
            advance(loss, critic_step)
            maker_step.zero_grad()
            loss_maker = -call(critic, critic_model, fake).mean() * 100
            advance(loss_maker, maker_step)
            losses += [loss.item(), loss_maker.item()]
        return losses

    assert run(True) == run(False)


def test_a_step_before_any_backward():
    _, model, optimizer, _ = ready()
    optimizer.step()  # there is nothing to step
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(UsageError, match=r'under precision="16-mixed", before any fabric.backward'):
        optimizer.step()


def test_plain_backward_raises_and_changes_nothing():
    _, model, _, _ = ready()
    with pytest.raises(UsageError, match=r"Write fabric.backward\(loss\) instead"):
        loss_of(model).backward()
    assert next(model.parameters()).grad is None


@pytest.mark.parametrize("how", ["closure", "LBFGS without one"])
def test_closures_are_refused(how):
    fabric = make_fabric("16-mixed")
    net = make_net()
    kind = SGD if how == "closure" else torch.optim.LBFGS
    model, optimizer = fabric.setup(net, kind(net.parameters(), lr=0.1))
    fabric.backward(loss_of(model))
    with pytest.raises(UsageError) as caught:
        optimizer.step(*([lambda: None] if how == "closure" else []))
    assert f"{kind.__name__}.step(closure) cannot be combined with the gradient scaler" in str(caught.value)
    assert 'Write precision="bf16-mixed"' in str(caught.value)


def test_step_returns_what_the_scaler_returns():
    fabric, model, optimizer, _ = ready()
    fabric.backward(loss_of(model))
    assert optimizer.step() is None


# saving


def test_the_scalers_state_goes_through_a_file(tmp_path):
    fabric, model, optimizer, plugin = ready(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    fabric.backward(loss_of(model))
    optimizer.step()  # the update that this step makes due belongs to the file
    fabric.save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer, "precision": plugin})
    raw = torch.load(tmp_path / "x.pt", weights_only=True)["precision"]
    assert raw["scale"] == 16.0

    resumed, again, stepper, other = ready(torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1))
    resumed.load(tmp_path / "x.pt", {"model": again, "optimizer": stepper, "precision": other})
    optimizer.zero_grad()
    for each, net, step in ((fabric, model, optimizer), (resumed, again, stepper)):
        each.backward(loss_of(net, 1))
        step.step()
    same(model.parameters(), again.parameters())
    assert plugin.state_dict() == other.state_dict()


def test_loading_in_the_middle_of_a_run_replaces_what_was_due():
    fabric, model, optimizer, plugin = ready(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    state = plugin.state_dict()
    fabric.backward(loss_of(model))
    optimizer.step()
    plugin.load_state_dict(state)
    optimizer.zero_grad()
    fabric.backward(loss_of(model))
    assert plugin.scaler.get_scale() == 8.0
    optimizer.step()


def test_precisions_without_a_scaler_have_no_state():
    for precision in ("bf16-mixed", "16-true", "bf16-true", "64-true", "32-true"):
        plugin = make_fabric(precision).strategy.precision
        assert plugin.state_dict() == {}
        plugin.load_state_dict({})
        assert not plugin.needs_step
        assert not plugin.needs_backward


# two ranks


def small_scaler(precision):
    """A scale at which halves of a batch overflow no earlier than the batch."""
    return torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None


def on_ranks(precision, overflow):
    fabric = make_fabric(precision, small_scaler(precision), devices=2, strategy="ddp")
    net = make_net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    steps = []
    for step in range(4):
        x, y = make_data(step)
        half = slice(4 * fabric.global_rank, 4 * fabric.global_rank + 4)
        loss = nn.functional.cross_entropy(model(x[half]), y[half])
        if overflow and step == 1 and fabric.global_rank == 1:
            loss = loss * float("inf")
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        before = next(net.parameters()).detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(not torch.equal(before, next(net.parameters())))
    return [p.detach().clone() for p in net.parameters()], steps, fabric.strategy.precision.state_dict()


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    (first, steps, state), (second, other_steps, other_state) = ranks.run(
        on_ranks, "16-mixed", True, world_size=2
    )
    same(first, second)
    assert steps == other_steps
    assert steps == [True, False, True, True]
    assert state == other_state
    assert state["scale"] == 128.0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true", "bf16-true"])
def test_two_ranks_equal_one(ranks, precision):
    (first, *_), (second, *_) = ranks.run(on_ranks, precision, False, world_size=2)
    same(first, second)
    fabric = make_fabric(precision, small_scaler(precision))
    net = make_net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    for step in range(4):
        fabric.backward(loss_of(model, step))
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    tolerance = {"64-true": 1e-12, "bf16-true": 5e-2}.get(precision, 5e-3)
    for ours, theirs in zip(first, net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)


# complex numbers


class Rotary(nn.Module):
    """Complex in its parameters, buffers and inputs, as rotary embeddings and spectral layers are."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        turns = torch.randn(4, 2, generator=generator, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.randn(4, 2, generator=generator, dtype=torch.complex64))
        self.register_buffer("turns", turns)

    def forward(self, x, spectrum):
        pairs = torch.view_as_complex(x.float() if x.itemsize == 2 else x)
        return (pairs * self.turns * self.weight * spectrum["s"]).sum()


@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        ("64-true", torch.complex128),
        ("32-true", torch.complex64),
        ("16-true", torch.complex64),
        ("bf16-true", torch.complex64),
        ("bf16-mixed", torch.complex64),
    ],
)
def test_complex_numbers_keep_their_imaginary_part(precision, inside):
    fabric = make_fabric(precision)
    plain, model = Rotary(), fabric.setup(Rotary())
    assert (model.turns.dtype, model.weight.dtype) == (inside, inside)
    x, s = torch.randn(3, 4, 2, 2), torch.randn(4, 2, dtype=torch.complex64)
    out = model(x, {"s": s})
    assert out.dtype == torch.complex64  # as a real output comes back in the default dtype
    tolerance = {"16-true": 1e-2, "bf16-true": 5e-2}.get(precision, 1e-5)  # of x alone
    torch.testing.assert_close(out, plain(x, {"s": s}), rtol=tolerance, atol=tolerance)
    fabric.backward(out.abs())
    assert model.weight.grad.dtype == inside
    assert model.weight.grad.imag.abs().sum() > 0
