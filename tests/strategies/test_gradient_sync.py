"""Gradients on N ranks equal plain torch on the joined batch, in every order of forwards and backwards."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import DDPStrategy

STEPS, BATCH = 4, 6


class Net(nn.Module):
    """Two layers and a second way through them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def loss(self, x):
        return self.head(torch.sin(self.body(x))).pow(2).mean()

    def nested_loss(self, x):
        return self.loss(x) + self.forward(x).mean()


def batches(world_size: int, count: int = STEPS) -> torch.Tensor:
    """(count, world_size, BATCH, 5): the same on every rank."""
    return torch.randn(count, world_size, BATCH, 5, generator=torch.Generator().manual_seed(11))


def start(strategy="ddp", **settings):
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(**settings) if settings else strategy,
    )
    fabric.launch()
    return fabric


def joined(model: nn.Module, data: torch.Tensor, loss) -> list[torch.Tensor]:
    """The oracle: gradients of the mean over ranks of each rank's loss, in one process."""
    model.zero_grad()
    torch.stack([loss(model, part) for part in data]).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_same(model: nn.Module, expected: list[torch.Tensor], atol: float = 1e-6) -> None:
    for (name, p), want in zip(model.named_parameters(), expected, strict=True):
        assert torch.allclose(p.grad, want, atol=atol), (name, p.grad, want)


# The whole loop


def train(accumulate: int, clip: str | None, compiled: bool = False, **settings) -> list[torch.Tensor]:
    fabric = start(**settings)
    world, rank = fabric.world_size, fabric.global_rank
    model = Net()
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    data = batches(world, STEPS * accumulate)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                fabric.backward(model(data[step * accumulate + micro, rank]).pow(2).mean() / accumulate)
        clip_with(fabric.clip_gradients, model, optimizer, clip)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def clip_with(clip_gradients, model, optimizer, clip: str | None) -> None:
    if clip == "norm":
        clip_gradients(model, optimizer, max_norm=0.01)
    if clip == "value":
        clip_gradients(model, optimizer, clip_val=0.002)


def train_joined(world: int, accumulate: int, clip: str | None) -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = batches(world, STEPS * accumulate)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x = data[step * accumulate + micro].reshape(world * BATCH, 5)
            (model(x).pow(2).mean() / accumulate).backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.002)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_training_equals_plain_torch_on_the_joined_batch(ranks, world_size, accumulate, clip):
    results = ranks.run(train, accumulate, clip, world_size=world_size)
    expected = train_joined(world_size, accumulate, clip)
    for weights in results:
        for got, want in zip(weights, expected, strict=True):
            if world_size == 1:
                assert torch.equal(got, want)
            else:
                assert torch.allclose(got, want, atol=2e-5)
            assert torch.equal(got, results[0][0]) or got.shape != results[0][0].shape


@pytest.mark.parametrize(
    "settings",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 1},
    ],
    ids=str,
)
def test_ddp_settings_do_not_change_the_numbers(ranks, settings):
    expected = train_joined(2, 1, "norm")
    for weights in ranks.run(train, 1, "norm", world_size=2, **settings):
        assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(weights, expected, strict=True))


def test_a_compiled_model_trains_to_the_same_numbers(ranks):
    expected = train_joined(2, 1, None)
    for weights in ranks.run(train, 1, None, compiled=True, world_size=2):
        assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(weights, expected, strict=True))


# Orders of forwards and backwards that plain DDP gets wrong without a word


def two_forwards_two_backwards(**settings) -> None:
    fabric = start(**settings)
    reference = Net()
    model = fabric.setup(Net())
    for real, fake in batches(fabric.world_size, 6).split(2)[:3]:
        model.zero_grad()
        first, second = model(real[fabric.global_rank]), model(fake[fabric.global_rank])
        fabric.backward(first.pow(2).mean())
        fabric.backward(second.sin().mean())
        both = torch.cat([real, fake], dim=1)
        want = joined(reference, both, lambda m, x: m(x[:BATCH]).pow(2).mean() + m(x[BATCH:]).sin().mean())
        assert_same(model, want)


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
def test_two_forwards_then_two_backwards(ranks, settings):
    ranks.run(two_forwards_two_backwards, world_size=2, **settings)


def backward_after_leaving_no_sync() -> None:
    fabric = start()
    reference = Net()
    model = fabric.setup(Net())
    for pair in batches(fabric.world_size, 6).split(2):
        model.zero_grad()
        for micro, x in enumerate(pair):
            with fabric.no_backward_sync(model, enabled=True):
                loss = model(x[fabric.global_rank]).pow(2).mean()
                if micro == 0:
                    fabric.backward(loss)
        fabric.backward(loss)  # the loop left the context before its last backward
        want = joined(
            reference, pair.transpose(0, 1), lambda m, x: m(x[0]).pow(2).mean() + m(x[1]).pow(2).mean()
        )
        assert_same(model, want)


def test_sync_is_right_when_the_loop_leaves_the_context_before_its_last_backward(ranks):
    ranks.run(backward_after_leaving_no_sync, world_size=2)


def gradients_inside_no_sync() -> list[torch.Tensor]:
    fabric = start()
    model = fabric.setup(Net())
    x = batches(fabric.world_size, 1)[0, fabric.global_rank]
    with fabric.no_backward_sync(model):
        fabric.backward(model(x).pow(2).mean())
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_inside_no_sync_are_local(ranks):
    results = ranks.run(gradients_inside_no_sync, world_size=2)
    for rank, gradients in enumerate(results):
        model = Net()
        model(batches(2, 1)[0, rank]).pow(2).mean().backward()
        assert all(torch.allclose(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def count_reductions() -> tuple[int, int]:
    fabric = start()
    model = fabric.setup(Net())
    calls = []
    model._forward_module.register_comm_hook(calls, count_and_reduce)
    data = batches(fabric.world_size, 3)
    for micro in range(3):
        with fabric.no_backward_sync(model, enabled=micro < 2):
            fabric.backward(model(data[micro, fabric.global_rank]).mean())
        inside = len(calls) if micro == 1 else 0
    return inside, len(calls)


def count_and_reduce(calls: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def test_accumulation_makes_one_reduction_per_step(ranks):
    assert ranks.run(count_reductions, world_size=2) == [(0, 1), (0, 1)]


def reductions_of_a_copy() -> int:
    fabric = start()
    model = fabric.setup(Net())
    model._forward_module.register_comm_hook([], count_and_reduce)
    other = copy.deepcopy(model)
    fabric.backward(other(batches(fabric.world_size, 1)[0, fabric.global_rank]).mean())
    ((_, calls),) = other._forward_module._comm_hooks
    return len(calls)


def test_a_copy_reduces_by_the_hook_of_its_original(ranks):
    assert ranks.run(reductions_of_a_copy, world_size=2) == [1, 1]


# Methods other than forward


def backward_through_method(method: str, plain: bool, mark: bool) -> None:
    fabric = start()
    reference = Net()
    model = fabric.setup(Net())
    if mark:
        model.mark_forward_method(method)
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        loss = getattr(model, method)(data[fabric.global_rank])
        loss.backward() if plain else fabric.backward(loss)
        assert_same(model, joined(reference, data, lambda m, x: getattr(m, method)(x)))


@pytest.mark.parametrize("mark", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("plain", [False, True], ids=["fabric.backward", "loss.backward"])
@pytest.mark.parametrize("method", ["loss", "nested_loss"])
def test_methods_other_than_forward_keep_the_gradient_sync(ranks, method, plain, mark):
    ranks.run(backward_through_method, method, plain, mark, world_size=2)


def forward_and_method_in_one_loss(plain: bool) -> None:
    fabric = start()
    reference = Net()
    model = fabric.setup(Net())
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        x = data[fabric.global_rank]
        loss = model(x).pow(2).mean() + model.loss(x)
        loss.backward() if plain else fabric.backward(loss)
        assert_same(model, joined(reference, data, lambda m, x: m(x).pow(2).mean() + m.loss(x)))


@pytest.mark.parametrize("plain", [False, True])
def test_forward_and_another_method_in_one_loss(ranks, plain):
    ranks.run(forward_and_method_in_one_loss, plain, world_size=2)


def submodule_called_directly() -> None:
    fabric = start(find_unused_parameters=True)
    reference = Net()
    model = fabric.setup(Net())
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        fabric.backward(model.body(data[fabric.global_rank]).pow(2).mean())
        reference.zero_grad()
        torch.stack([reference.body(x).pow(2).mean() for x in data]).mean().backward()
        assert torch.allclose(model.body.weight.grad, reference.body.weight.grad, atol=1e-6)


def test_a_submodule_called_directly_keeps_the_gradient_sync(ranks):
    ranks.run(submodule_called_directly, world_size=2)


def rank_dependent_no_grad_calls() -> float:
    fabric = start()
    model = fabric.setup(Net())
    x = batches(fabric.world_size, 1)[0, fabric.global_rank]
    for _ in range(3):
        fabric.backward(model(x).mean())
    model.eval()
    with torch.no_grad():
        for _ in range(1 + 3 * fabric.global_rank):
            model.loss(x)
            model(x)
    return float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum"))


def test_inference_makes_no_collective(ranks):
    assert ranks.run(rank_dependent_no_grad_calls, world_size=2) == [2.0, 2.0]


# Unused, frozen and partial


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(5, 1)
        self.right = nn.Linear(5, 1)

    def forward(self, x):
        return self.left(x), self.right(x)


def backward_through_one_branch(strategy: str) -> list[str]:
    fabric = start(strategy)
    model = fabric.setup(Branches())
    left, _ = model(batches(fabric.world_size, 1)[0, fabric.global_rank])
    fabric.backward(left.mean())
    return [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]


def test_unused_parameters_are_named_at_once(ranks):
    for rank, error in enumerate(
        ranks.run_expecting_errors(backward_through_one_branch, "ddp", world_size=2)
    ):
        assert isinstance(error, UsageError)
        assert f"Rank {rank}" in str(error)
        assert "right.weight, right.bias" in str(error)
        assert "ddp_find_unused_parameters_true" in str(error)


def test_find_unused_parameters_lets_a_branch_rest(ranks):
    used = ranks.run(backward_through_one_branch, "ddp_find_unused_parameters_true", world_size=2)
    assert used == [["left.weight", "left.bias"]] * 2


def one_backward_per_head() -> None:
    fabric = start("ddp_find_unused_parameters_true")
    reference = Branches()
    model = fabric.setup(Branches())
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        left, right = model(data[fabric.global_rank])
        # torch ties the outputs of a forward together under find_unused_parameters, hence retain_graph.
        fabric.backward(left.pow(2).mean(), retain_graph=True)
        fabric.backward(right.sin().mean())
        assert_same(model, joined(reference, data, lambda m, x: m(x)[0].pow(2).mean() + m(x)[1].sin().mean()))


def test_a_backward_per_head(ranks):
    ranks.run(one_backward_per_head, world_size=2)


def frozen_parts() -> list[torch.Tensor]:
    fabric = start()
    torch.manual_seed(fabric.global_rank)  # ranks begin apart
    teacher = nn.Linear(5, 2)
    student = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    teacher.requires_grad_(False)
    student[0].requires_grad_(False)
    teacher, student = fabric.setup(teacher), fabric.setup(student)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(student.module[1].parameters(), lr=0.1))
    x = batches(fabric.world_size, 1)[0, fabric.global_rank]
    fabric.backward((student(x) - teacher(x)).pow(2).mean())
    optimizer.step()
    return [p.detach() for p in [*teacher.parameters(), *student.parameters()]]


def test_frozen_models_and_layers_are_alike_on_all_ranks(ranks):
    first, second = ranks.run(frozen_parts, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, x):
        return self.net(x)


def train_with_batch_norm(**settings) -> dict[str, torch.Tensor]:
    fabric = start(**settings)
    model = Normed()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for data in batches(fabric.world_size):
        optimizer.zero_grad()
        fabric.backward(model(data[fabric.global_rank]).pow(2).mean())
        optimizer.step()
    model.eval()
    x = batches(1, 1)[0, 0]
    with torch.no_grad():
        for _ in range(1 + fabric.global_rank):
            out = model(x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with_grad = [model(x).sum() for _ in range(1 + 2 * fabric.global_rank)]  # eval with grad mode on
    fabric.barrier()
    return {**state, "out": out, "graph": with_grad[0].detach()}


def test_buffers_agree_on_all_ranks_and_equal_plain_ddp(ranks):
    first, second = ranks.run(train_with_batch_norm, world_size=2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    # Rank zero's statistics, as DDP does it: those of its own part of each batch.
    model = Normed()
    parts = batches(2)[:, 0]
    body = copy.deepcopy(model.net[0])
    assert first["net.1.num_batches_tracked"] == len(parts)
    running = torch.zeros(6)
    running = 0.9 * running + 0.1 * body(parts[0]).mean(0)
    assert torch.isfinite(first["net.1.running_mean"]).all()
    assert not torch.equal(running, first["net.1.running_mean"])


def test_broadcast_buffers_can_be_switched_off(ranks):
    first, second = ranks.run(train_with_batch_norm, world_size=2, broadcast_buffers=False)
    assert not torch.equal(first["net.1.running_mean"], second["net.1.running_mean"])
    assert torch.equal(first["net.0.weight"], second["net.0.weight"])


def gan_with_batch_norm() -> None:
    fabric = start()
    discriminator = Normed()
    discriminator, optimizer = fabric.setup(
        discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1)
    )
    for real, fake in batches(fabric.world_size, 4).split(2):
        optimizer.zero_grad()
        loss = discriminator(real[fabric.global_rank]).mean() - discriminator(fake[fabric.global_rank]).mean()
        fabric.backward(loss)  # plain DDP: "modified by an inplace operation"
        optimizer.step()


def test_two_forwards_of_a_batch_norm_discriminator(ranks):
    ranks.run(gan_with_batch_norm, world_size=2)


# Two models


class Generator(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(8)
        super().__init__(5, 5)


def gan_steps(rank: int, world: int, fabric: Fabric | None) -> list[torch.Tensor]:
    """One GAN, by fabric on this rank's part or by plain torch on the joined batch."""
    g, d = Generator(), Net()
    g_opt, d_opt = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
    if fabric is not None:
        g, g_opt = fabric.setup(g, g_opt)
        d, d_opt = fabric.setup(d, d_opt)
    backward = fabric.backward if fabric is not None else torch.Tensor.backward
    for real, noise in batches(world, 6).split(2):
        if fabric is None:
            real, noise = real.reshape(-1, 5), noise.reshape(-1, 5)
        else:
            real, noise = real[rank], noise[rank]
        fake = g(noise)
        d_opt.zero_grad()
        real_loss, fake_loss = d(real).sigmoid().mean(), -d(fake.detach()).sigmoid().mean()
        backward(real_loss)
        backward(fake_loss)
        d_opt.step()
        g_opt.zero_grad()
        backward(d(fake).sigmoid().mean())
        g_opt.step()
    return [p.detach().clone() for p in [*g.parameters(), *d.parameters()]]


def gan_on_rank() -> list[torch.Tensor]:
    fabric = start()
    return gan_steps(fabric.global_rank, fabric.world_size, fabric)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gan_equals_plain_torch(ranks, world_size):
    expected = gan_steps(0, world_size, None)
    for weights in ranks.run(gan_on_rank, world_size=world_size):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights, expected, strict=True))


def copies_take_part(plain: bool) -> None:
    fabric = start()
    reference = Normed()
    model = copy.deepcopy(fabric.setup(Normed()))
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        loss = model(data[fabric.global_rank]).pow(2).mean()
        loss.backward() if plain else fabric.backward(loss)
        assert_same(model, joined(reference, data, lambda m, x: m(x).pow(2).mean()), atol=1e-5)
    running = fabric.all_gather(model.net[1].running_mean)
    assert torch.equal(running[0], running[1])
    before = [p.grad.clone() for p in model.parameters()]
    with fabric.no_backward_sync(model):
        fabric.backward(model(batches(2, 1)[0, fabric.global_rank]).pow(2).mean())
    local = fabric.all_gather(model.net[0].weight.grad - before[0])
    assert not torch.equal(local[0], local[1])


@pytest.mark.parametrize("plain", [False, True])
def test_a_deep_copy_of_a_model_is_synchronised_too(ranks, plain):
    ranks.run(copies_take_part, plain, world_size=2)


def models_let_go() -> int:
    import gc

    fabric = start()
    for _ in range(3):
        model = fabric.setup(Net())
        fabric.backward(model(batches(1, 1)[0, 0]).mean())
        del model
    gc.collect()
    return len(fabric.strategy.modules)


def test_models_that_the_user_forgot_are_let_go(ranks):
    assert ranks.run(models_let_go, world_size=2) == [0, 0]


# A plain loss.backward() is as right as fabric.backward(loss)


def plain_backward(case: str, settings: dict) -> None:
    fabric = start(**settings)
    model, reference = fabric.setup(Net()), Net()
    data = batches(fabric.world_size, 1)[0]
    x = data[fabric.global_rank]
    losses = 1
    if case == "twice":
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        losses = 2
    if case == "two forwards":
        first, second = model(x).mean(), model(x).mean()
        first.backward()
        torch.autograd.backward([second])
        losses = 2
    if case == "after a forward without gradients":
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(x)
        loss.backward()
        losses = 2
    if case == "parts":
        model.head(model.body(x)).mean().backward()
    if case == "module":
        model.module(x).mean().backward()
    if case == "method":
        model.loss(x).backward()
    if case == "left no_sync":
        with fabric.no_backward_sync(model):
            loss = model(x).mean()
        loss.backward()
    if case == "beside another model":
        other = fabric.setup(Net())
        other(x).mean().backward()
        fabric.backward(model(x).mean())
        other(x).mean().backward()
    mean = {
        "method": reference.loss,
        "parts": lambda x: reference.head(reference.body(x)).mean(),
    }.get(case, lambda x: reference(x).mean())
    (losses * sum([mean(x) for x in data]) / len(data)).backward()
    for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=["all used", "unused"])
@pytest.mark.parametrize(
    "case",
    [
        "twice",
        "two forwards",
        "after a forward without gradients",
        "parts",
        "module",
        "method",
        "left no_sync",
        "beside another model",
    ],
)
def test_a_plain_backward_is_right(ranks, case, settings):
    ranks.run(plain_backward, case, settings, world_size=2)


def ordinary_plain_backward() -> None:
    fabric = start()
    reference = Net()
    model = fabric.setup(Net())
    other = fabric.setup(Net())
    for data in batches(fabric.world_size, 4):
        model.zero_grad()
        loss = model(data[fabric.global_rank]).pow(2).mean()
        fabric.backward(other(data[fabric.global_rank]).mean())  # between the two
        loss.backward()
        assert_same(model, joined(reference, data, lambda m, x: m(x).pow(2).mean()))
        with fabric.no_backward_sync(model):
            model(data[0]).mean().backward()


def test_an_ordinary_plain_backward_is_left_alone(ranks):
    ranks.run(ordinary_plain_backward, world_size=2)


# Several models, and ranks whose memory looks different


def many_models(kind: str) -> list[torch.Tensor]:
    junk = [object() for _ in range(997 * (1 + dist.get_rank()))]
    fabric = start()
    models = []
    for width in (3, 4, 5, 6):
        junk.append(torch.zeros(10 * (1 + dist.get_rank())))
        torch.manual_seed(width)
        size = width if kind == "sizes" else 4
        models.append(
            fabric.setup(nn.Sequential(nn.Linear(5, size), nn.BatchNorm1d(size), nn.Linear(size, 1)))
        )
    copied = copy.deepcopy(models[0]) if fabric.is_global_zero else None
    for data in batches(fabric.world_size, 3):
        x = data[fabric.global_rank]
        fabric.backward(torch.stack([m(x).pow(2).mean() for m in models]).sum())
    del copied
    return [b.clone() for m in models for b in m.buffers()]


@pytest.mark.parametrize("kind", ["sizes", "alike"])
def test_buffers_of_several_models_do_not_mix(ranks, kind):
    first, second = ranks.run(many_models, kind, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[3])


# Parameters that change their mind after setup


def thaw_or_freeze(case: str) -> None:
    fabric = start()
    net = Net()
    if case != "freeze":
        net.body.requires_grad_(False)
    if case == "thaw all":
        net.requires_grad_(False)
    model = fabric.setup(net)
    net.body.requires_grad_(case != "freeze")
    fabric.backward(model(batches(fabric.world_size, 1)[0, fabric.global_rank]).mean())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("thaw", "Parameter body.weight was frozen at fabric.setup"),
        ("thaw all", "Parameter body.weight was frozen at fabric.setup"),
        ("freeze", "body.weight, body.bias. They were frozen after fabric.setup"),
    ],
)
def test_parameters_frozen_or_thawed_after_setup_are_named(ranks, case, words):
    for error in ranks.run_expecting_errors(thaw_or_freeze, case, world_size=2):
        assert isinstance(error, UsageError)
        assert words in str(error)


def static_graph_out_of_step(case: str) -> None:
    """What torch's own static graphs leave unsynchronised, most of it without a word."""
    fabric = start(static_graph=True)
    reference = Net()
    model = fabric.setup(Net())
    if case == "a look at gradients first":
        x = batches(fabric.world_size)[0, fabric.global_rank]
        torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()))
    for data in batches(fabric.world_size, 3):
        model.zero_grad()
        loss_of = FORMS.get(case, lambda m, x: m(x).pow(2).mean())
        with fabric.no_backward_sync(model, enabled=case == "accumulation"):
            loss = loss_of(model, data[fabric.global_rank])
            fabric.backward(loss, retain_graph=True)
        if case in ("accumulation", "two backwards after one forward"):
            fabric.backward(loss)
        reference.zero_grad()
        for _ in range(2 if case in ("accumulation", "two backwards after one forward") else 1):
            torch.stack([loss_of(reference, part) for part in data]).mean().backward()
        torch.testing.assert_close(*[[p.grad for p in each.parameters()] for each in (model, reference)])


FORMS = {
    "another method": lambda m, x: m.loss(x),
    "a part of the model": lambda m, x: m.head(torch.tanh(m.body(x))).pow(2).mean(),
    "two forwards": lambda m, x: m(x).pow(2).mean() + m(2 * x).mean(),
}


@pytest.mark.parametrize(
    "case",
    [
        *FORMS,
        "two backwards after one forward",
        "accumulation",
        "a look at gradients first",
    ],
)
def test_what_is_asked_of_a_static_graph_has_the_same_gradients(ranks, case):
    ranks.run(static_graph_out_of_step, case, world_size=2)


def frozen_in_between() -> list[bool]:
    """After a forward, before its backward: torch leaves such a parameter out."""
    fabric, reference = start(), Net()
    model, data = fabric.setup(Net()), batches(fabric.world_size, 1)[0]
    losses = [model(data[fabric.global_rank]).pow(2).mean(), reference(data.flatten(0, 1)).pow(2).mean()]
    for each in (model, reference):
        each.head.bias.requires_grad_(False)
    fabric.backward(losses[0])
    losses[1].backward()
    found, expected = [[p.grad for p in each.parameters()] for each in (model, reference)]
    torch.testing.assert_close(found[:-1], expected[:-1])
    return [grad is None for grad in (*found, *expected)]


def test_what_is_frozen_between_forward_and_backward_has_no_gradient(ranks):
    assert ranks.run(frozen_in_between, world_size=2) == [[False, False, False, True] * 2] * 2


def alone_before_accumulating(case: str) -> None:
    """What rank zero does alone changes nothing for an accumulation, whose ranks must stay in step."""
    fabric = start()
    model, probe, found = fabric.setup(Net()), nn.Linear(5, 1), []
    for data in batches(fabric.world_size, 6):
        x = data[fabric.global_rank]
        model.zero_grad()
        for part, rows in enumerate(x.chunk(2)):
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(model(rows).pow(2).mean() / 2)
        found.append([p.grad.clone() for p in model.parameters()])
        if fabric.is_global_zero:
            model(x) if case == "forward with gradients" else probe(x).sum().backward()
    for data, gradients in zip(batches(fabric.world_size, 6), found, strict=True):
        torch.testing.assert_close(gradients, joined(Net(), data, lambda m, x: m(x).pow(2).mean()))


@pytest.mark.parametrize("case", ["forward with gradients", "backward of a model that is not set up"])
def test_what_one_rank_does_alone_leaves_accumulation_alone(ranks, case):
    ranks.run(alone_before_accumulating, case, world_size=2)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def failed_backwards(settings: dict, everywhere: bool) -> None:
    """In the middle of a backward, with half of the gradients on their way; the model goes on."""
    fabric = start(**settings)
    model, other, reference = fabric.setup(Net()), fabric.setup(Net()), Net()
    for number, data in enumerate(batches(fabric.world_size, 4)):
        x = data[fabric.global_rank]
        if number == 2:
            fails = everywhere or fabric.is_global_zero
            h = torch.tanh(model.body(x))
            out = Fails.apply(h) if fails else h
            with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
                fabric.backward(model.head(out).pow(2).mean())
        model.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        assert_same(model, joined(reference, data, lambda m, x: m(x).pow(2).mean()))
    other(x)


@pytest.mark.parametrize(
    "settings",
    [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-6}],
    ids=str,
)
def test_a_model_goes_on_after_a_backward_that_failed(ranks, settings):
    ranks.run(failed_backwards, settings, True, world_size=2)


class Breaks(Net):
    """Compiled in two parts, between which a backward may fail."""

    fails = False

    def forward(self, x):
        return self.head(self.between(torch.tanh(self.body(x))))

    @torch.compiler.disable
    def between(self, h):
        return Fails.apply(h) if self.fails else h


def failed_compiled(settings: dict) -> None:
    fabric, net, reference = start(**settings), Breaks(), Breaks()
    model = fabric.setup(torch.compile(net, backend="eager"))
    warnings.filterwarnings("ignore", "The .grad attribute")  # of torch.compile, at a break in a graph
    for number, data in enumerate(batches(fabric.world_size, 4)):
        x, net.fails = data[fabric.global_rank], number == 1
        with pytest.raises(MemoryError) if net.fails else contextlib.nullcontext():
            fabric.backward(model(x).pow(2).mean())
        if not net.fails:
            assert_same(net, joined(reference, data, lambda m, x: m(x).pow(2).mean()))
        model.zero_grad()


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_compiled_model_goes_on_after_a_backward_that_failed(ranks, settings):
    ranks.run(failed_compiled, settings, world_size=2)


def grow_after_setup(case: str) -> list[torch.Tensor]:
    fabric = start()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.head.parameters(), lr=0.1))
    if case == "new layer":
        net.extra = nn.Linear(2, 1)
        optimizer.add_param_group({"params": net.extra.parameters()})
    optimizer.add_param_group({"params": net.body.parameters(), "lr": 0.2})
    fabric.backward(model(batches(fabric.world_size, 1)[0, fabric.global_rank]).mean())
    optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_layers_added_after_setup_get_the_values_of_rank_zero(ranks):
    first, second = ranks.run(grow_after_setup, "new layer", world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_param_group_of_the_model_is_added(ranks):
    first, second = ranks.run(grow_after_setup, "known", world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], Net().body.weight)
