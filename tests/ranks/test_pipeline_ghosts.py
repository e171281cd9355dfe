"""What a pipeline's rank can do with parameters of other stages: compute on shapes, and never on values."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fabric import Fabric
from fabric.core.errors import UsageError
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
    warnings.filterwarnings("ignore", message=".*batch norm in training")
    return fabric


def split(parameters):
    """Own parameters, ghosts."""
    found = list(parameters)
    return [p for p in found if not p.is_meta], [p for p in found if p.is_meta]


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
        e.copy_(b.float())
    next(iter(average.parameters())).add_(split(model.parameters())[1][0])  # stage 1 has the buffers


def summed(model, average):
    total = torch.zeros(())
    for p in model.parameters():
        total += p.detach().pow(2).sum()


def summed_rows(model, average):
    total = torch.zeros(4)
    for p in model.parameters():
        for row in p if p.dim() == 2 else [p]:
            total += row


def summed_to_the_loss(model, average):
    model(X).sum() + 0.1 * sum([p.square().sum() for p in split(model.parameters())[1]])


def averaged_model(model, average):
    AveragedModel(average).update_parameters(model)


def one_vector(model, average):
    parameters_to_vector(model.parameters())


def out_of_one_vector(model, average):
    vector_to_parameters(parameters_to_vector(average.parameters()), model.parameters())


READ = {
    "item": lambda p: p.sum().item(),
    "float": lambda p: float(p.norm()),
    "bool": lambda p: bool((p > 0).all()),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to("cpu"),
    "type_as": lambda p: p.type_as(X),
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, p),
    "format": lambda p: f"{p.norm():.3f}",
    "pickle": pickle.dumps,
    "linear": lambda p: nn.functional.linear(X, p),
    "loss": lambda p: nn.functional.mse_loss(p, torch.zeros(4, 4)),
    "data": lambda p: setattr(p, "data", torch.zeros(4, 4)),
    "nonzero": lambda p: p.nonzero(),
    "cat": lambda p: torch.cat([X, p]),
    "out": lambda p: torch.neg(p, out=torch.zeros(4, 4)),
}
TOGETHER = [
    averaged_by_add,
    averaged_by_data,
    averaged_by_lists,
    averaged_by_lerp,
    averaged_by_lists_of_lerp,
    copied,
    copied_buffers,
    summed,
    summed_rows,
    summed_to_the_loss,
    averaged_model,
    one_vector,
    out_of_one_vector,
]


def refused(output):
    fabric = start(output=output)
    model, average = deep(), deep(1).requires_grad_(False)
    before = copy.deepcopy(average.state_dict())
    model = fabric.setup(model)
    here, there = fabric.global_rank, 1 - fabric.global_rank
    name = ("2.weight", "0.weight")[here]
    words = f"of Sequential, which is on stage {there} of the pipeline; this is stage {here}, where .*"
    for use in TOGETHER:
        with (
            pytest.raises(UsageError, match=f"values of .* {words}set the copy up, too"),
            torch.no_grad(),
        ):
            use(model, average)
    ghost = dict(model.named_parameters())[name]
    for read in READ.values():
        with pytest.raises(UsageError, match=f"needs the values of {name} {words}"):
            read(ghost)
    with pytest.raises(UsageError, match=rf"state\['w'\] is {name} of .*stage {here}\. A raw module"):
        fabric.save("never", {"w": ghost})
    return [torch.equal(value, before[key]) for key, value in average.state_dict().items()]


@pytest.mark.parametrize("output", ["all", "last"])
def test_values_of_other_stages_are_refused(ranks, output):
    ranks.run(refused, output, world_size=2)


def lists_change_nothing_first():
    model, average = deep(), deep(1).requires_grad_(False)
    before = copy.deepcopy(average.state_dict())
    model = start().setup(model)
    with pytest.raises(UsageError, match="_foreach_add_ with a tensor that has values"), torch.no_grad():
        torch._foreach_add_(list(average.parameters()), list(model.parameters()), alpha=0.1)
    return all([torch.equal(value, before[key]) for key, value in average.state_dict().items()])


def test_a_refused_list_is_as_it_was(ranks):
    assert all(ranks.run(lists_change_nothing_first, world_size=2))


def shapes():
    fabric = start()
    model = fabric.setup(deep())
    own, ghosts = split(model.parameters())
    assert len(own) == len(list(model.parameters())) - len(ghosts)
    assert all([p.is_leaf for p in ghosts])
    for p in ghosts:
        assert isinstance(p, nn.Parameter)
        assert (p.requires_grad, p.grad, p.device.type) == (True, None, "meta")
        results = [
            p.detach().pow(2).sum(), p.data, p[0], p == p, torch.zeros_like(p), p.to(torch.bfloat16),
            torch.cat([p, p]), *p.chunk(2), *p, p.max(0), p.view_as(p), copy.deepcopy(p),
        ]  # fmt: skip
        for result in results:
            for part in result if isinstance(result, tuple) else [result]:
                assert part.is_meta
                with pytest.raises(UsageError, match="of Sequential, which is on stage"):
                    part.sum().item()
        assert isinstance(copy.deepcopy(p), nn.Parameter)
        assert not isinstance(p.detach(), nn.Parameter)
        assert "device='meta'" in repr(p)
        assert torch.zeros(p.numel()).view_as(p).shape == p.shape
        with torch.no_grad():
            assert p.zero_() is p
            assert nn.init.normal_(p) is p
            assert p.mul_(torch.tensor(0.5)) is p  # its stage does it
            assert p.copy_(torch.ones(p.shape)) is p
            p[0] = torch.tensor(1.0)
            kept = p
            p += torch.ones(p.shape)
            assert p is kept
        p.requires_grad_(False).requires_grad_(True)
        p.grad = torch.zeros_like(p)
        p.grad = None
        p.register_post_accumulate_grad_hook(lambda _: None)
        assert p.data_ptr() == 0
    with torch.no_grad():
        torch._foreach_mul_([*ghosts, *own], 1.0)
        torch._foreach_copy_(ghosts, [torch.ones(p.shape) for p in ghosts])
        with pytest.raises(UsageError, match="_foreach_copy_ with a tensor that has values"):
            torch._foreach_copy_([ghosts[0], torch.ones(4, 4)], [torch.ones(4, 4), ghosts[0]])
        with pytest.raises(UsageError, match="Setting an attribute to a tensor that has values"):
            ghosts[0].grad = torch.ones(4, 4)
    norms = torch._foreach_norm(list(model.parameters()))
    assert [n.is_meta for n in norms] == [p.is_meta for p in model.parameters()]


def in_place_lists():
    model = start().setup(deep().requires_grad_(False))
    other = deep(1)
    own = {n: p.clone() for n, p in model.named_parameters() if not p.is_meta}
    deltas = list(other.parameters())
    torch._foreach_add_(list(model.parameters()), deltas)
    torch._foreach_mul_(list(model.parameters()), [0.5] * len(deltas))
    torch._foreach_mul_(list(model.parameters()), torch.tensor(2.0))
    for (name, p), delta in zip(model.named_parameters(), deltas, strict=True):
        assert p.is_meta or torch.allclose(p, own[name] + delta)


def test_shapes_of_other_stages(ranks):
    ranks.run(shapes, world_size=2)


def test_lists_of_own_parameters_and_those_of_other_stages(ranks):
    ranks.run(in_place_lists, world_size=2)


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


def steps(name, after):
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
        assert p.is_meta or torch.allclose(p, q, atol=1e-6)
        if p.is_meta:  # a gradient that the user gave it is stepped with, as ever
            p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert not any([v.is_meta for entry in state.values() for v in entry.values()]), "of the whole model"


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_pass_over_other_stages(ranks, name, after):
    ranks.run(steps, name, after, world_size=2)
