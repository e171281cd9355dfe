"""What a rank of a pipeline has of other stages: names of tensors without elements, and no values to meet."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from machine import LAZY_ADAGRAD
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fabric import Fabric
from fabric.strategies import PipelineStrategy

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def deep(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4), nn.LayerNorm(4)
    )


def start(**settings):
    strategy = PipelineStrategy(**{"balance": [2, 2], "num_microbatches": 1, **settings})
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    warnings.filterwarnings("ignore", message=".*batch norm, spectral norm and")
    return fabric


def averaged_by_add(model, average):
    for e, p in zip(average.parameters(), model.parameters(), strict=True):
        e.mul_(0.9).add_(p, alpha=0.1)


def averaged_by_data(model, average):
    for e, p in zip(average.parameters(), model.parameters(), strict=True):
        e.data += 0.1 * (p.data - e.data)


def averaged_by_lists(model, average):
    torch._foreach_add_(list(average.parameters()), list(model.parameters()), alpha=0.1)


def averaged_by_lerp(model, average):
    for e, p in zip(average.parameters(), model.parameters(), strict=True):
        e.lerp_(p, 0.1)


def averaged_by_lists_of_lerp(model, average):
    get_ema_multi_avg_fn(0.9)(list(average.parameters()), list(model.parameters()), 1)


def copied(model, average):
    for e, p in zip(average.parameters(), model.parameters(), strict=True):
        e.copy_(p)


def copied_buffers(model, average):
    for e, b in zip(average.buffers(), model.buffers(), strict=True):
        e.copy_(b)
    next(iter(average.parameters())).add_(
        dict(model.named_parameters())["2.weight"]
    )  # stage 0 has all buffers


def copied_back(model, average):
    for e, p in zip(average.parameters(), model.parameters(), strict=True):
        p.copy_(e)


def summed_rows(model, average):
    total = torch.zeros(4)
    for p in model.parameters():
        total += p.sum(0) if p.dim() == 2 else p


def averaged_model(model, average):
    AveragedModel(average).update_parameters(model)


TOGETHER = [
    averaged_by_add,
    averaged_by_data,
    averaged_by_lists,
    averaged_by_lerp,
    averaged_by_lists_of_lerp,
    copied,
    copied_buffers,
    copied_back,
    summed_rows,
    averaged_model,
]


def met_by_values():
    """A copy that was forgotten in setup: none of it is averaged with parameters of another place."""
    model = start().setup(deep())
    for use in TOGETHER:
        with pytest.raises(RuntimeError, match=r"size|shape|broadcast"), torch.no_grad():
            use(model, deep(1).requires_grad_(False))


def test_values_do_not_meet_what_is_on_other_stages(ranks):
    ranks.run(met_by_values, world_size=2)


def what_there_is():
    fabric = start(balance=[2, 2])
    model = deep()
    held, plain = dict([*model.named_parameters(), *model.named_buffers()]), deep()
    inner = model[2] if fabric.global_rank == 0 else model[1][0]
    model = fabric.setup(model)
    there = dict([*model.named_parameters(), *model.named_buffers()])
    assert list(there) == list(held)
    for name, tensor in there.items():
        assert tensor is held[name]  # whoever holds it: nothing is left of its values
        own = name.startswith(("0.", "1.") if fabric.global_rank == 0 else ("2.", "3."))
        assert tensor.numel() if own else not any(tensor.shape)
        assert not own or torch.equal(tensor, plain.state_dict()[name])
        assert tensor.untyped_storage().nbytes() == (plain.state_dict()[name].nbytes if own else 0)
    with pytest.raises(RuntimeError):
        inner(X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fabric.backward(model(X).square().mean())
    assert all([p.grad is None for p in model.parameters() if not p.numel()])
    optimizer.step()
    nowhere = [p for p in model.parameters() if not p.numel()]
    fabric.setup_optimizers(torch.optim.Adam(nowhere)).step()
    return sum([p.detach().square().sum().item() for p in deep().parameters()]), sum(
        [p.square().sum().item() for p in fabric.setup(deep()).parameters()]
    )


def test_a_rank_has_its_own_stage(ranks):
    (whole, one), (_, other) = ranks.run(what_there_is, world_size=2)
    assert one + other == pytest.approx(whole)  # a norm of weights is that of the stage


def penalised():
    """A penalty on weights (one of them on two stages), a hook, and a constraint after the step."""
    fabric, plain, model, seen, expected = start(), deep(), deep(), [], []
    for one in (plain, model):
        one[2].weight = one[0].weight
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one, mine, backward, hooks in (
        (plain, reference, torch.Tensor.backward, expected),
        (model, optimizer, fabric.backward, seen),
    ):
        for name, p in one.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, hooks=hooks: hooks.append(name))
        for _ in range(3):
            loss = one(X).square().mean() + 0.1 * sum([p.square().sum() for p in one.parameters()])
            backward(loss)
            mine.step()
            mine.zero_grad()
            with torch.no_grad():
                for p in one.parameters():
                    p.clamp_(-0.4, 0.4)
    for key, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[key], atol=1e-6), key
    assert set(seen) == set(expected)  # on tensors without elements, too


def test_penalties_hooks_and_constraints_work_on_the_own_part(ranks):
    ranks.run(penalised, world_size=2)


def loop(model, average, optimizer, fabric=None, by=averaged_by_add):
    for step in range(4):
        loss = (model(X) * X.roll(step)).square().mean()
        fabric.backward(loss) if fabric else loss.backward()
        if fabric is None:
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            by(model, average)


def same_average(by):
    fabric = start(checkpoint="never")
    model = deep()
    average = copy.deepcopy(model).requires_grad_(False)
    # A bias before a batch norm has rounding for a gradient, of which Adam would make steps of full size.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    plain = deep()
    expected = copy.deepcopy(plain).requires_grad_(False)
    loop(plain, expected, torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3), by=by)
    model, optimizer = fabric.setup(model, optimizer)
    average = fabric.setup(average)
    loop(model, average, optimizer, fabric, by=by)
    got = average.state_dict()
    assert list(got) == list(expected.state_dict())
    for key, value in expected.named_parameters():
        assert torch.allclose(got[key], value, atol=1e-6), key
    average.eval(), expected.eval()
    with torch.no_grad():
        assert torch.allclose(average(X), expected(X), atol=1e-5)


@pytest.mark.parametrize(
    "by", [averaged_by_add, averaged_by_data, averaged_by_lists, averaged_by_lerp, averaged_by_lists_of_lerp]
)
def test_an_average_that_is_set_up_too_equals_plain_torch(ranks, by):
    ranks.run(same_average, by, world_size=2)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam, in lists": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adagrad, in lists": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
}


def steps(name, after, given):
    fabric = start()
    model = deep()
    make = OPTIMIZERS[name]
    if after:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(make(model.parameters()))
    else:
        model, optimizer = fabric.setup(model, make(model.parameters()))
    plain = deep()
    reference = make(plain.parameters())
    for step in range(3):
        fabric.backward(model(X).square().mean())
        plain(X).square().mean().backward()
        for one, mine in ((plain, reference), (model, optimizer)):
            clip_grad_norm_(one.parameters(), 1e9)
            mine.step()
            mine.zero_grad(set_to_none=step == 0)
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert not p.numel() or torch.allclose(p, q, atol=1e-6)
        if given and not p.numel():  # a gradient that the user gave it is stepped with, as ever
            p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    for number, q in enumerate(plain.parameters()):
        assert all([v.shape in (q.shape, ()) for v in state[number].values()]) or name == "sgd"


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_pass_over_other_stages(ranks, name, after):
    ranks.run(steps, name, after, False, world_size=2)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[LAZY_ADAGRAD] * name.startswith("adagrad")) for name in OPTIMIZERS]
)
def test_gradients_that_a_user_gives_other_stages_are_stepped_with(ranks, name, after):
    ranks.run(steps, name, after, True, world_size=2)
