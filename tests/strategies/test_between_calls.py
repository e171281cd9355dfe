"""What users do between forward, backward and step, beside plain torch on the joined batch."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.strategies import FSDPStrategy, PipelineStrategy


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 4)).double()


STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "one-group": FSDPStrategy,
    "checkpointed": lambda: FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}),
    "offload": lambda: FSDPStrategy(auto_wrap_policy={Block}, cpu_offload=True),
}
SPLIT = ("zero2", "zero3", "one-group", "checkpointed", "offload")


class Loop:
    """One or two models with their optimizers, set up or plain, and the batches of a rank or of all."""

    def __init__(self, strategy: str | None) -> None:
        self.fabric = None
        if strategy is not None:
            self.fabric = Fabric(
                accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]()
            )
            self.fabric.launch()
        self.models = [net(1), net(2)]
        self._random = torch.Generator().manual_seed(3)
        if self.fabric is not None:
            self.models = [self.fabric.setup_module(m) for m in self.models]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.5) for m in self.models]
        if self.fabric is not None:
            self.optimizers = self.fabric.setup_optimizers(*self.optimizers)

    def batch(self):
        rows = torch.randn(4, 4, generator=self._random, dtype=torch.float64)
        return rows if self.fabric is None else rows[self.fabric.global_rank :: self.fabric.world_size]

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs) if self.fabric is None else self.fabric.backward(loss, **kwargs)

    def no_sync(self, model):
        return torch.enable_grad() if self.fabric is None else self.fabric.no_backward_sync(model)


def zero(how: str, model, optimizer) -> None:
    if how == "model":
        model.zero_grad()
    elif how == "model in place":
        model.zero_grad(set_to_none=False)
    elif how == "optimizer":
        optimizer.zero_grad()
    elif how == "parameters":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        model.requires_grad_(True)
        for module in model.modules():
            module.zero_grad()


def loss_of(model, x):
    return model(x).pow(2).mean()


def zero_after_forward(loop: Loop, how: str) -> None:
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    for _ in range(3):
        loss = loss_of(model, loop.batch())
        zero(how, model, optimizer)
        loop.backward(loss)
        optimizer.step()


def gan_without_sync(loop: Loop, how: str) -> None:
    (generator, critic), (g_step, c_step) = loop.models, loop.optimizers
    for _ in range(3):
        with loop.no_sync(critic):
            loop.backward(loss_of(critic, generator(loop.batch())))
        g_step.step()
        zero(how, generator, g_step)
        zero(how, critic, c_step)
        loop.backward(
            (critic(loop.batch()) - 1).pow(2).mean() + loss_of(critic, generator(loop.batch()).detach())
        )
        c_step.step()
        zero(how, critic, c_step)
        zero(how, generator, g_step)


def gan_with_old_graph(loop: Loop, how: str) -> None:
    (generator, critic), (g_step, c_step) = loop.models, loop.optimizers
    for _ in range(3):
        zero(how, critic, c_step)
        loop.backward((critic(loop.batch()) - 1).pow(2).mean())
        fake = generator(loop.batch())
        loop.backward(loss_of(critic, fake.detach()))
        c_step.step()
        zero(how, generator, g_step)
        loop.backward((critic(fake) - 1).pow(2).mean())
        g_step.step()


def dropped_forwards(loop: Loop, how: str) -> None:
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    for _ in range(3):
        zero(how, model, optimizer)
        loop.backward(loss_of(model, loop.batch()))
        loss_of(model, loop.batch())
        model[0](loop.batch()) if loop.fabric is None else model.module[0](loop.batch())
        optimizer.step()
        with torch.no_grad():
            model(loop.batch())


def weights_in_between(loop: Loop, how: str) -> None:
    """An average of weights, and gradients scaled by hand, between forward and step."""
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(3):
        loss = loss_of(model, loop.batch())
        with torch.no_grad():
            for kept, p in zip(mean, model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
        zero(how, model, optimizer)
        loop.backward(loss)
        for p, kept in zip(model.parameters(), mean, strict=True):
            p.grad.mul_(0.5).add_(kept, alpha=0.1)
        optimizer.step()
    with torch.no_grad():
        for kept, p in zip(mean, model.parameters(), strict=True):
            p.add_(kept)


def penalty(loop: Loop, how: str) -> None:
    """Of the weights, beside the forward and after it; in two backwards, the last forward first."""
    (model, _), (optimizer, _) = loop.models, loop.optimizers

    def squares():
        each = [p.pow(2).sum() for p in model.parameters()]
        return sum([e.full_tensor() if hasattr(e, "full_tensor") else e for e in each])

    for _ in range(2):
        zero(how, model, optimizer)
        first = loss_of(model, loop.batch()) + 0.1 * squares()
        second = loss_of(model, loop.batch())
        loop.backward(second)
        loop.backward(first)
        optimizer.step()


def accumulation(loop: Loop, how: str) -> None:
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    for _ in range(2):
        zero(how, model, optimizer)
        with loop.no_sync(model):
            loop.backward(loss_of(model, loop.batch()))
            with loop.no_sync(model):
                loop.backward(loss_of(model, loop.batch()))
            loss = loss_of(model, loop.batch())
            loop.backward(loss, retain_graph=True)
        loop.backward(loss)
        optimizer.step()


def forwards_outside(loop: Loop, how: str) -> None:
    """Forwards outside of no_backward_sync with their backwards inside, of the whole model and of a part."""
    (model, other), (optimizer, _) = loop.models, loop.optimizers
    for _ in range(3):
        zero(how, model, optimizer)
        loss = loss_of(model, loop.batch())
        with loop.no_sync(model):
            loop.backward(loss)
        inner = model if loop.fabric is None else model.module
        part = loss_of(inner[1], loop.batch())
        loss_of(model, loop.batch())
        with loop.no_sync(model):
            loop.backward(part)
        loop.backward(loss_of(other, loop.batch()))
        with loop.no_sync(model):
            loop.backward(loss_of(model, loop.batch()))
        loop.backward(loss_of(model, loop.batch()))
        optimizer.step()


def failures(loop: Loop, how: str) -> None:
    """A forward that fails, and is caught, in the middle of an accumulation; and one in the backward."""
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    for _ in range(2):
        with loop.no_sync(model):
            loop.backward(loss_of(model, loop.batch()))
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.zeros(2, 3, dtype=torch.float64))
        loop.backward(loss_of(model, loop.batch()))
        optimizer.step()
        loss = loss_of(model, loop.batch())
        loss.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.backward(loss)
        zero(how, model, optimizer)


PROGRAMS = (
    zero_after_forward,
    gan_without_sync,
    gan_with_old_graph,
    dropped_forwards,
    weights_in_between,
    penalty,
    accumulation,
    forwards_outside,
    failures,
)
ZEROS = ("model", "model in place", "optimizer", "parameters", "modules")


def differences(strategy: str) -> list[str]:
    found = []
    for place, program in enumerate(PROGRAMS):
        for how in (ZEROS[(place + turn) % len(ZEROS)] for turn in (0, 2)):
            ours, plain = Loop(strategy), Loop(None)
            program(ours, how)
            program(plain, how)
            for number in range(2):
                expected = plain.models[number].state_dict()
                for name, value in ours.models[number].state_dict().items():
                    off = (value - expected[name]).abs().max().item()
                    if not off < 1e-12:
                        found.append(f"{program.__name__}, {how}: model {number} {name} is off by {off:.2e}")
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_equal_plain_torch(ranks, strategy):
    for found in ranks.run(differences, strategy, world_size=2):
        assert not found, "\n".join(found)


# Gradients that no backward has averaged


def steps_alone(strategy: str, how: str) -> None:
    loop = Loop(strategy)
    (model, other), (optimizer, other_optimizer) = loop.models, loop.optimizers
    with loop.no_sync(model):
        loop.backward(loss_of(model, loop.batch()))
        loop.backward(loss_of(other, loop.batch()))  # another model is averaged
        if how == "inside":
            optimizer.step()
    other_optimizer.step()
    if how == "dropped":
        model.zero_grad(set_to_none=False)
    elif how == "averaged by hand":
        for p in model.parameters():
            loop.fabric.all_reduce(p.grad)
    elif how == "clipped":
        loop.fabric.clip_gradients(model, optimizer, max_norm=1.0)
    elif how == "clamped":
        loop.fabric.clip_gradients(model, optimizer, clip_val=1.0)
    elif how == "an optimizer that was not set up":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()


@pytest.mark.parametrize("how", ["after", "inside", "clipped", "clamped", "an optimizer that was not set up"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_step_with_gradients_of_this_rank_alone_is_refused(ranks, strategy, how):
    for error in ranks.run_expecting_errors(steps_alone, strategy, how, world_size=2):
        assert isinstance(error, UsageError)
        words = "clip_gradients" if how.startswith("cl") else r"SGD.step()"
        assert f"{words} was called with gradients that were never synchronised" in str(error)


def step_with_gradients(kind: str) -> None:
    """Gradients of a rank alone that have the same sums on all ranks, or are zeros on one and not on the
    other, or differ in their imaginary parts.
    """
    fabric = Loop("ddp").fabric
    rank, layer = fabric.global_rank, nn.Linear(2, 2)
    if kind == "imaginary":
        layer = nn.Linear(2, 2, dtype=torch.complex64)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.3, weight_decay=0.5))
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    if kind == "elsewhere":
        with fabric.no_backward_sync(model):
            fabric.backward(nn.functional.cross_entropy(model(torch.ones(1, 2)), torch.tensor([rank])))
    elif kind == "imaginary":
        layer.weight.grad = torch.full_like(layer.weight, 1 + rank * 1j)
    elif rank:
        layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()


@pytest.mark.parametrize("kind", ["elsewhere", "zeros", "imaginary"])
def test_gradients_of_this_rank_alone_are_told_apart(ranks, kind):
    for error in ranks.run_expecting_errors(step_with_gradients, kind, world_size=2):
        assert isinstance(error, UsageError)
        assert "gradients that were never synchronised" in str(error)


def step_beside_an_older_fabric() -> None:
    """A strategy that is not collected yet, or of another part of the program, has checked first."""
    older = Loop("ddp").fabric
    model = net(0)
    model, _ = older.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
    older.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
    step_with_gradients("imaginary")


def test_an_older_fabric_does_not_check_optimizers_of_a_newer_one(ranks):
    for error in ranks.run_expecting_errors(step_beside_an_older_fabric, world_size=2):
        assert isinstance(error, UsageError)
        assert "gradients that were never synchronised" in str(error)


def step_of_a_dropped_model_of_a_second_fabric() -> None:
    """The optimizer was set up by a `Fabric` that is gone, and its model by one that is not."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    older = Loop("ddp").fabric
    older.setup(model, optimizer)
    del older
    fabric = Loop("ddp").fabric
    fabric.setup_module(model)
    fabric.backward(model(torch.ones(2, 4, dtype=torch.float64) * fabric.global_rank).sum())
    optimizer.step()


def test_an_optimizer_of_an_older_fabric_is_checked(ranks):
    for error in ranks.run_expecting_errors(step_of_a_dropped_model_of_a_second_fabric, world_size=2):
        assert isinstance(error, UsageError)
        assert "the model that fabric.setup returned was dropped" in str(error)


def steps_by_hand(strategy: str, average: bool) -> list[float]:
    """Gradients that no backward has put there, beside a model that backwards train."""
    loop, model = Loop(strategy), net(1)
    fabric = loop.fabric
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
    loop.backward(loss_of(loop.models[0], loop.batch()))
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = list(model.parameters())
    for p, grad in zip(
        parameters,
        torch.autograd.grad(loss_of(model, rows[fabric.global_rank :: 2]), parameters),
        strict=True,
    ):
        p.grad = fabric.all_reduce(grad) if average else grad
    optimizer.step()
    return [p.sum().item() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_made_by_hand_are_averaged_by_hand(ranks, strategy):
    first, second = ranks.run(steps_by_hand, strategy, True, world_size=2)
    assert first == second
    for error in ranks.run_expecting_errors(steps_by_hand, strategy, False, world_size=2):
        assert isinstance(error, UsageError)
        assert "or the loop has set p.grad (torch.autograd.grad)" in str(error)


def step_beside_a_teacher() -> list[int]:
    loop = Loop("ddp")
    layout = loop.fabric.strategy.layout
    before = sum(known.local for known in layout._replicas.values())
    loop.backward(loss_of(loop.models[0], loop.batch()))
    layout.channel = SimpleNamespace()  # through which it would ask the others
    loop.optimizers[0].step()
    return [before, sum(known.local for known in layout._replicas.values())]


def test_a_teacher_that_is_never_trained_costs_a_step_no_message(ranks):
    assert ranks.run(step_beside_a_teacher, world_size=2) == [[2, 1]] * 2


def backward_with_graph(strategy: str) -> None:
    loop = Loop(strategy)
    loop.fabric.backward(loss_of(loop.models[0], loop.batch()), create_graph=True)


def penalised(strategy: str) -> None:
    loop = Loop(strategy)
    x = loop.batch().requires_grad_()
    torch.autograd.grad(loop.models[0](x).sum(), x, create_graph=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_of_gradients_that_would_be_wrong_are_refused(ranks, strategy):
    for error in ranks.run_expecting_errors(backward_with_graph, strategy, world_size=2):
        assert isinstance(error, UsageError)
        assert "create_graph=True" in str(error)
    if strategy in SPLIT:
        for error in ranks.run_expecting_errors(penalised, strategy, world_size=2):
            assert isinstance(error, UsageError)
            assert 'Use strategy="ddp" or "zero1" for this model' in str(error)
    else:
        ranks.run(penalised, strategy, world_size=2)


class Leaky(nn.Sequential):
    """Ends with an operation that fills what it has saved after it was saved; its slope is no random one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.RReLU(0.25, 0.25))


RECOMPUTING = {
    "pipeline": lambda: PipelineStrategy([1, 1], 2),
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Leaky}, activation_checkpointing_policy={Leaky}),
    None: lambda: "auto",
}


def leaky(strategy: str | None) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=1 if strategy is None else 2, strategy=RECOMPUTING[strategy]())
    fabric.launch()
    torch.manual_seed(1)
    model = nn.Sequential(Leaky(), Leaky()).double()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, rows))
        optimizer.step()
    return [value.sum().item() for value in model.state_dict().values()]


@pytest.mark.parametrize("strategy", ["pipeline", "fsdp"])
def test_what_is_computed_again_is_computed_to_its_end(ranks, strategy):
    (alone,) = ranks.run(leaky, None, world_size=1)
    for weights in ranks.run(leaky, strategy, world_size=2):
        assert weights == pytest.approx(alone, abs=1e-12)


def transformed(strategy: str) -> float:
    fabric = Loop(strategy).fabric
    model = fabric.setup_module(net(1))
    x = torch.ones(2, 4, dtype=torch.float64)
    return (torch.vmap(model)(x) - model(x)).abs().max().item()


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "one-group"])
def test_a_model_under_a_transform_gives_what_it_gives(ranks, strategy):
    assert ranks.run(transformed, strategy, world_size=2) == pytest.approx([0.0, 0.0], abs=1e-12)


def lbfgs(world_size: int, as_number: bool) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    model = net(1)
    made = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
    model, optimizer = fabric.setup(model, made)
    for seed in range(3):
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def closure():
            optimizer.zero_grad()
            loss = (model(rows[fabric.global_rank :: world_size]) - 1).pow(2).mean()  # noqa: B023
            fabric.backward(loss)
            return loss.item() if as_number else loss

        optimizer.step(closure)
    return [p.sum().item() for p in model.parameters()]


@pytest.mark.parametrize("as_number", [False, True])
def test_lbfgs_goes_by_the_loss_of_all_ranks(ranks, as_number):
    (alone,) = ranks.run(lbfgs, 1, as_number, world_size=1)
    for weights in ranks.run(lbfgs, 2, as_number, world_size=2):
        assert weights == pytest.approx(alone, abs=1e-9)


def lbfgs_without_a_closure():
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    model = net(1)
    _, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ArgumentTypeError, match=r"needs a closure.* Write optimizer\.step\(closure\)"):
        optimizer.step()


def test_lbfgs_without_a_closure(ranks):
    ranks.run(lbfgs_without_a_closure, world_size=2)


@pytest.mark.parametrize("how", ["dropped", "averaged by hand"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_that_are_the_same_on_all_ranks_may_step(ranks, strategy, how):
    ranks.run(steps_alone, strategy, how, world_size=2)


# Optimizers that nobody set up


def forgotten(strategy: str, how: str) -> float:
    loop = Loop(strategy)
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if how == "made after":
        model = loop.fabric.setup(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    else:
        model = loop.fabric.setup(model)
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(4, 4, generator=random, dtype=torch.float64)
    fabric = loop.fabric
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, rows[fabric.global_rank :: fabric.world_size]))
        if how == "clipped":
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
    state = model.state_dict()
    return float(sum([value.sum() for value in state.values()]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_was_not_set_up(ranks, strategy):
    plain = net(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain, rows).backward()
        optimizer.step()
    expected = float(sum([value.sum() for value in plain.state_dict().values()]))
    whole = strategy == "ddp"
    if strategy != "zero1":  # zero1 divides an optimizer in its setup
        got = ranks.run(forgotten, strategy, "made after", world_size=2)
        assert got == pytest.approx([expected] * 2, abs=1e-9)
    if whole:
        assert ranks.run(forgotten, strategy, "made before", world_size=2) == pytest.approx(
            [expected] * 2, abs=1e-9
        )
    if strategy in SPLIT:
        for how in ("made before", "clipped"):
            for error in ranks.run_expecting_errors(forgotten, strategy, how, world_size=2):
                assert isinstance(error, UsageError)
                assert "model, optimizer = fabric.setup(model, optimizer)" in str(error)


def frozen_in_between(strategy: str | None) -> dict[str, torch.Tensor]:
    """Parts of the first and of the last layer, frozen between a forward and its backward."""
    loop = Loop(strategy)
    (model, _), (optimizer, _) = loop.models, loop.optimizers
    for step in range(3):
        loss = loss_of(model, loop.batch())
        if step == 1:
            for p in [*list(model.parameters())[:1], *list(model.parameters())[-1:]]:
                p.requires_grad_(False)
        optimizer.zero_grad()
        loop.backward(loss)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "one-group"])
def test_what_is_frozen_between_forward_and_backward_stays_as_it_is(ranks, strategy):
    expected = frozen_in_between(None)
    for got in ranks.run(frozen_in_between, strategy, world_size=2):
        torch.testing.assert_close(dict(got), dict(expected))


def penalty_in_parts(strategy: str) -> None:
    loop = Loop(strategy)
    model = loop.models[0]
    loss = loss_of(model, loop.batch()) + 0.1 * sum([p.pow(2).sum() for p in model.parameters()])
    with pytest.raises(UsageError, match=r"a penalty on weights\), which is a DTensor\. Write p\.pow"):
        loop.backward(loss)
    model.zero_grad()
    loop.backward(loss_of(model, loop.batch()))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_penalty_on_split_weights_is_told_what_to_write(ranks, strategy):
    ranks.run(penalty_in_parts, strategy, world_size=2)


def deep_copies_before_setup(strategy: str) -> None:
    """A copy made before setup is a model of its own."""
    loop = Loop(strategy)
    model = net(1)
    average = copy.deepcopy(model)
    model, _ = loop.fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
    average = loop.fabric.setup(average)
    loop.backward(loss_of(model, loop.batch()))
    assert all([p.grad is None for p in average.parameters()])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_copy_made_before_setup(ranks, strategy):
    ranks.run(deep_copies_before_setup, strategy, world_size=2)


def step_in_a_hook():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 2))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(2):
        fabric.backward(model(torch.ones(4, 2) * (1 + fabric.global_rank)).sum())


def test_a_step_in_a_hook_of_a_backward_is_named(ranks):
    for error in ranks.run_expecting_errors(step_in_a_hook, world_size=2):
        assert str(error) == (
            "SGD.step() was called in a hook of a backward, before gradients were averaged over ranks: "
            "parameters would diverge. Call it after fabric.backward(loss)."
        )
