"""A model in stages trains as plain torch does in one process: losses, gradients, weights, states."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from machine import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, UsageError
from fabric.plugins.precision import DoublePrecision
from fabric.strategies import PipelineStrategy

ROWS, STEPS = 8, 4


class Block(nn.Module):
    """A residual block, with a norm so that rows do not mix, but features do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Words(nn.Module):
    """(rows, words) of numbers to (rows, words, 11); the embedding is the head's weight, too."""

    def __init__(self, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_blocks(self):
        return [self.embedding, *self.layers, self.head]

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pairs(nn.Module):
    """A block that takes and gives a dictionary with a mask of bools, a None and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, given):
        if isinstance(given, torch.Tensor):
            given = {"x": given, "mask": given > 0, "nothing": None}
        x = torch.where(given["mask"], self.layer(given["x"]), given["x"])
        return {**given, "x": x}


class Out(nn.Module):
    def forward(self, given):
        return given["x"], given["x"].sum(-1), given["mask"]


def words(seed=0, **settings):
    torch.manual_seed(seed)
    return Words(**settings)


def plain_sequential(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), Block(), nn.ReLU(inplace=True), nn.Linear(6, 6)
    )


def data(count, rows=ROWS):
    source = torch.Generator().manual_seed(5)
    both = [torch.randint(11, (2, rows, 3), generator=source) for _ in range(count)]
    return [tuple(pair.to(ACCELERATOR)) for pair in both]


def loss_of(out, target):
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def start(precision=None, devices=None, plugins=None, **settings):
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=devices or dist.get_world_size(),
        strategy=PipelineStrategy(**settings),
        precision=precision,
        plugins=plugins,
    )
    fabric.launch()
    return fabric


def balance_of(stages):
    return {1: [6], 2: [2, 4], 4: [1, 2, 2, 1]}[stages]


def assert_alike(got, expected, atol=1e-6):
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(got[key].cpu(), value.cpu(), atol=atol), key


def train_plain(batches, accumulate=1, clip=None, optimizer=torch.optim.AdamW, model=None):
    model = (model or words()).to(ACCELERATOR)
    stepper = optimizer(model.parameters(), lr=0.05)
    losses, norms = [], []
    for number, (x, target) in enumerate(batches):
        loss = loss_of(model(x), target) / accumulate
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), **clip).item())
            stepper.step()
            stepper.zero_grad()
    return model, stepper, losses, norms


def train(fabric, batches, accumulate=1, clip=None, step=False, model=None):
    """The same loop under fabric."""
    model = model or words()
    model, stepper = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    losses, norms = [], []
    for number, (x, target) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=(number + 1) % accumulate != 0):
            if step:
                loss = model.pipeline_step(x, target, lambda out, y: loss_of(out, y) / accumulate)
            else:
                loss = loss_of(model(x), target) / accumulate
                fabric.backward(loss)
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip:
                settings = {"max_norm": clip["max_norm"], "norm_type": clip.get("norm_type", 2.0)}
                norms.append(fabric.clip_gradients(model, stepper, **settings).item())
            stepper.step()
            stepper.zero_grad()
    return model, stepper, losses, norms


def same_as_plain(microbatches, checkpoint, step, accumulate, clip, stages=None):
    stages = stages or dist.get_world_size()
    batches = data(STEPS)
    expected, expected_stepper, losses, norms = train_plain(batches, accumulate, clip)
    settings = {"balance": balance_of(stages), "num_microbatches": microbatches, "checkpoint": checkpoint}
    fabric = start(**settings)
    model, stepper, found, found_norms = train(fabric, batches, accumulate, clip, step=step)
    assert found == pytest.approx(losses, abs=1e-6)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    assert_alike(model.state_dict(), expected.state_dict())
    state, wanted = stepper.state_dict(), expected_stepper.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert list(state["state"]) == list(wanted["state"])
    for number, entries in wanted["state"].items():
        assert_alike(state["state"][number], entries)
    fabric.strategy.teardown()


TWO_OR_FOUR = [pytest.param(2, marks=pytest.mark.device), 4]


@pytest.mark.parametrize("world_size", TWO_OR_FOUR)
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_losses_weights_and_states(ranks, world_size, step, microbatches):
    checkpoint = {1: "never", 2: "always", 4: "except_last", 8: "never"}[microbatches]
    ranks.run(same_as_plain, microbatches, checkpoint, step, 1, None, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_accumulation_and_clipping(ranks, world_size, step, checkpoint):
    clip = {"max_norm": 0.1}
    ranks.run(same_as_plain, 4, checkpoint, step, 2, clip, world_size=world_size)


@pytest.mark.device
@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_clipping_by_other_norms(ranks, norm_type):
    clip = {"max_norm": 0.05, "norm_type": norm_type}
    ranks.run(same_as_plain, 4, "never", False, 1, clip, world_size=2)


@pytest.mark.parametrize("step", [False, True])
def test_one_stage(ranks, step):
    ranks.run(same_as_plain, 4, "except_last", step, 2, {"max_norm": 0.1}, world_size=1)


def uneven_batches(step, reduction):
    """Batches whose rows do not divide by micro-batches, fewer than micro-batches, and of other lengths."""
    sizes = [8, 7, 3, 1, 5, 8]
    source = torch.Generator().manual_seed(1)
    batches = [(torch.randint(11, (rows, 2 + rows % 3), generator=source),) * 2 for rows in sizes]
    fabric = start(balance=balance_of(dist.get_world_size()), num_microbatches=4)
    plain, model = words(), words()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, own = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def loss(out, y):
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction=reduction)

    for x, target in batches:
        expected = loss(plain(x), target)
        expected.backward()
        if step:
            found = model.pipeline_step(x, target, loss, reduction=reduction)
        else:
            found = loss(model(x), target)
            fabric.backward(found)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        for o in (stepper, own):
            o.step()
            o.zero_grad()
    assert_alike(model.state_dict(), plain.state_dict(), atol=1e-5)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_batches_of_any_shape(ranks, world_size, step, reduction):
    ranks.run(uneven_batches, step, reduction, world_size=world_size)


def trees_and_places(checkpoint):
    """Dictionaries between stages, tuples at the end, blocks that change their input in place."""
    torch.manual_seed(2)
    plain = nn.Sequential(Pairs(), Pairs(), nn.Sequential(Pairs(), Pairs()), Out())
    torch.manual_seed(2)
    model = nn.Sequential(Pairs(), Pairs(), nn.Sequential(Pairs(), Pairs()), Out())
    fabric = start(balance=[1, 3], num_microbatches=3, checkpoint=checkpoint)
    model = fabric.setup(model)
    x = torch.randn(7, 6)
    with torch.no_grad():
        for got, expected in zip(model(x), plain(x), strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
    one, two, mask = model(x)
    assert type(model(x)) is tuple
    fabric.backward(one.pow(2).mean() + two.sin().sum())
    a, b, other = plain(x)
    (a.pow(2).mean() + b.sin().sum()).backward()
    assert torch.equal(mask, other)
    assert not mask.requires_grad
    assert_gradients(model, plain)
    plain, model = plain_sequential(), start(balance=[1, 4], checkpoint=checkpoint).setup(plain_sequential())
    fabric.backward(model(x).pow(2).mean())
    plain(x).pow(2).mean().backward()
    assert_gradients(model, plain)


class Both(nn.Module):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x), x * self.layer.weight[0]


class Changing(nn.Module):
    """Changes one of two tensors after the other one was saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, both):
        one, other = both
        product = one.sin() * (one * self.scale)
        other.add_(1)
        return product * other


def changed_in_place_beside_another(frozen):
    torch.manual_seed(2)
    plain = nn.Sequential(Both().requires_grad_(not frozen), Changing())
    model = start(balance=[1, 1], num_microbatches=2, checkpoint="never").setup(copy.deepcopy(plain))
    x = torch.randn(8, 6)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert_gradients(model, plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tensor_that_is_changed_in_place_beside_one_that_is_saved(ranks, frozen):
    ranks.run(changed_in_place_beside_another, frozen, world_size=2)


def assert_gradients(model, plain, atol=1e-6):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if p.numel() and p.requires_grad:
            assert torch.allclose(p.grad, q.grad, atol=atol), name


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_trees_between_stages_and_changes_in_place(ranks, checkpoint):
    ranks.run(trees_and_places, checkpoint, world_size=2)


def orders_of_calls():
    """Several forwards before a backward, two backwards, evaluation in between, unused outputs."""
    fabric = start(balance=balance_of(dist.get_world_size()), num_microbatches=2)
    plain, model = words(), fabric.setup(words())
    (x, y), (x2, y2), (x3, _) = data(3)
    one, two = model(x), model(x2)
    model.eval()
    with torch.no_grad():
        assert torch.allclose(model(x3), plain(x3), atol=1e-6)
        assert not model(x3).requires_grad
    with torch.inference_mode():
        assert torch.allclose(model(x3), plain(x3), atol=1e-6)
    model.train()
    model(x3)  # nobody goes back through it
    fabric.backward(loss_of(two, y2))
    fabric.backward(loss_of(one, y))
    fabric.backward(loss_of(model(x), y) + 2 * loss_of(model(x2), y2))  # both in one
    loss_of(model(x), y).backward()  # a plain one does, too
    loss = loss_of(model(x), y)
    fabric.backward(loss, retain_graph=True)
    fabric.backward(loss)
    for other, target, times in ((x, y, 5), (x2, y2, 3)):
        (times * loss_of(plain(other), target)).backward()
    assert_gradients(model, plain, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_order_of_forwards_and_backwards(ranks, world_size):
    ranks.run(orders_of_calls, world_size=world_size)


def input_gradients():
    """Gradients of the input come to all ranks: a module before the pipeline trains alike on all of them."""
    fabric = start(balance=[2, 3], num_microbatches=3)
    x, scale = (
        torch.randn(7, 6, generator=torch.Generator().manual_seed(1)),
        torch.ones(6, requires_grad=True),
    )
    again = scale.detach().clone().requires_grad_()
    model, plain = fabric.setup(plain_sequential()), plain_sequential()
    fabric.backward(model(x * scale).pow(2).mean())
    plain(x * again).pow(2).mean().backward()
    assert torch.allclose(scale.grad, again.grad, atol=1e-6)


def test_gradients_of_the_input(ranks):
    ranks.run(input_gradients, world_size=2)


def frozen_parts(frozen):
    fabric = start(balance=[2, 2, 1, 1] if dist.get_world_size() == 4 else [2, 4], num_microbatches=2)
    models = []
    for _ in range(2):
        model = words(tied=False)
        for place, block in enumerate(model.pipeline_blocks()):
            block.requires_grad_(place not in frozen)
        models.append(model)
    plain, model = models
    model, stepper = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (x, y) = data(1)[0]
    loss_of(plain(x), y).backward()
    fabric.backward(loss_of(model(x), y))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        if p.numel():
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)
    stepper.step()


@pytest.mark.parametrize("frozen", [(0, 1), (5,), (2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_blocks(ranks, frozen, world_size):
    ranks.run(frozen_parts, frozen, world_size=world_size)


def norm_beside_a_frozen_stage(precision):
    """The norm of all gradients, on a rank whose stage has none and on one that has all."""
    fabric = start(precision, num_microbatches=2, balance=[1, 1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    model, stepper = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(4, 4).to(fabric.device)).double().square().mean())
    norm = fabric.clip_gradients(model, stepper, max_norm=1.0)
    assert norm.dtype == model.module[1].weight.dtype
    first = fabric.broadcast(norm)
    assert first.dtype == norm.dtype
    assert torch.equal(first, norm)


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-true"])
def test_ranks_agree_about_a_norm_beside_a_frozen_stage(ranks, precision):
    ranks.run(norm_beside_a_frozen_stage, precision, world_size=2)


def on_one(precision):
    """Losses, weights and the output's dtype of the same loop on one process."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, _, losses, _ = train(fabric, data(STEPS))
    return losses, dict(model.state_dict()), model(data(1)[0][0]).dtype


def mixed(precision, step, losses, weights, dtype):
    fabric = start(precision, balance=balance_of(dist.get_world_size()), num_microbatches=4)
    model, _, found, _ = train(fabric, data(STEPS), step=step)
    exact = precision == "64-true"
    assert found == pytest.approx(losses, abs=1e-6 if exact else 0.05)
    assert model(data(1)[0][0]).dtype == dtype
    tolerance = 1e-6 if exact else 0.08  # how bfloat16 rounds depends on the number of rows
    got = {key: value.float() for key, value in model.state_dict().items()}
    assert_alike(got, {key: value.float() for key, value in weights.items()}, tolerance)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("step", [False, True])
def test_precisions(ranks, precision, step):
    (expected,) = ranks.run(on_one, precision, world_size=1, group=False)
    ranks.run(mixed, precision, step, *expected, world_size=2)


PRECISIONS = {"double": {"plugins": DoublePrecision(output_dtype=torch.float64)}}


def dtypes_of_losses(precision, setup_in=nullcontext, step_in=nullcontext):
    """The dtypes of output, target and a new tensor in `loss_fn`, and those around a forward."""
    fabric = start(num_microbatches=2, **PRECISIONS.get(precision, {"precision": precision}))
    with getattr(fabric, setup_in)() if isinstance(setup_in, str) else setup_in():
        model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, y, found = torch.randn(4, 4), torch.full((4, 1), 1001.0), set()

    def loss(out, target):
        found.add((out.dtype, target.dtype, target[0].item(), torch.ones(1).dtype))
        return (out - target).abs().mean()

    with getattr(fabric, step_in)() if isinstance(step_in, str) else step_in():
        total = model.pipeline_step(x, y, loss)
        out = model(x)
        assert found in ({(out.dtype, y.dtype, 1001.0, torch.ones(1).dtype)}, set())  # of the last stage
        torch.testing.assert_close(total, (out - y).abs().mean().detach())
    return len(found)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed", "double"])
def test_a_loss_of_pipeline_step_gets_what_a_loop_would_give_it(ranks, precision):
    assert ranks.run(dtypes_of_losses, precision, world_size=2) == [0, 1]


@pytest.mark.parametrize(
    ("setup_in", "step_in"), [("init_module", nullcontext), (nullcontext, "init_tensor")]
)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_default_dtype_of_a_loss_is_that_of_the_call(ranks, precision, setup_in, step_in):
    assert ranks.run(dtypes_of_losses, precision, setup_in, step_in, world_size=2) == [0, 1]


def dropout_run(seed, step, checkpoint="except_last"):
    fabric = start(balance=balance_of(dist.get_world_size()), num_microbatches=2, checkpoint=checkpoint)
    model = words(dropout=0.5)
    torch.manual_seed(seed)
    model, _, losses, _ = train(fabric, data(STEPS), model=model, step=step)
    after = torch.rand(3).tolist()
    return losses, {key: value.tolist() for key, value in model.state_dict().items()}, after


@pytest.mark.parametrize("step", [False, True])
def test_dropout_is_a_function_of_the_seed(ranks, step):
    first = ranks.run(dropout_run, 7, step, world_size=2)
    again = ranks.run(dropout_run, 7, step, world_size=2)
    other = ranks.run(dropout_run, 8, step, world_size=2)
    assert first == again
    assert first[0][0] != other[0][0]
    assert first[0][2] == first[1][2]  # ranks draw alike outside of their stages
    kept = ranks.run(dropout_run, 7, step, "never", world_size=2)
    assert kept[0][0] == first[0][0]  # the second forward of a checkpointed part draws what the first did


def draws():
    """What stages draw differs between them, repeats with the seed, and leaves the user's draws alone."""
    fabric = start(balance=[1, 1], num_microbatches=2)
    model = fabric.setup(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    ones = torch.ones(64, 8)
    torch.manual_seed(3)
    first = model(ones)
    second = model(ones)
    following = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(model(ones), first)
    assert not torch.equal(first, second)
    share = (first > 0).float().mean().item()
    assert 0.2 < share < 0.3  # one half of one half: the stages' masks are not the same
    model.eval()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model(ones)
    assert torch.equal(torch.rand(2), expected)  # nobody drew, so nothing moved
    return following.tolist()


def draws_alone():
    fabric = start(num_microbatches=1, checkpoint="always")
    plain, model = nn.Dropout(0.5), fabric.setup(nn.Sequential(nn.Dropout(0.5)))
    torch.manual_seed(3)
    expected = plain(torch.ones(64, 8)), torch.rand(2)
    torch.manual_seed(3)
    for got, wanted in zip((model(torch.ones(64, 8)), torch.rand(2)), expected, strict=True):
        assert torch.equal(got, wanted)


def test_one_stage_draws_as_plain_torch(ranks):
    ranks.run(draws_alone, world_size=1)


def test_random_streams(ranks):
    one, other = ranks.run(draws, world_size=2)
    assert one == other


def two_by_two(step, accumulate, checkpoint):
    """2 stages x 2 rows against plain torch on the joined batch."""
    fabric = start(balance=[2, 4], num_microbatches=2, checkpoint=checkpoint)
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": fabric.global_rank // 2}
    batches = data(STEPS, rows=2 * ROWS)
    expected, _, _, norms = train_plain(batches, accumulate, {"max_norm": 0.1})
    row = fabric.global_rank // 2
    own = [(x[row::2], y[row::2]) for x, y in batches]
    model, _, losses, found = train(fabric, own, accumulate, {"max_norm": 0.1}, step=step)
    assert found == pytest.approx(norms, rel=1e-4)
    assert_alike(model.state_dict(), expected.state_dict(), atol=1e-5)
    return losses


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_two_stages_in_two_rows(ranks, step, accumulate, checkpoint):
    losses = ranks.run(two_by_two, step, accumulate, checkpoint, world_size=4)
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]


class Branching(nn.Module):
    """A layer that is used where the first number is even."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) if x[0, 0] > 0 else x


def unused_in_one_row():
    fabric = start(num_stages=2, balance=[2, 1], num_microbatches=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Branching())
    row = fabric.global_rank // 2
    stepped = fabric.setup(model)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(row))
    fabric.backward(stepped(x).pow(2).mean())
    return [None if not p.numel() or p.grad is None else p.grad.tolist() for p in model.parameters()] + [
        b.tolist() for b in model.buffers() if b.numel()
    ]


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_rows_agree_where_one_did_not_use_a_layer_and_in_buffers(ranks):
    found = ranks.run(unused_in_one_row, world_size=4)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert any([value is not None for value in found[1]])


def loaders():
    fabric = start(num_stages=2, balance=[2, 4], num_microbatches=2)
    dataset = TensorDataset(torch.arange(24))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=3, shuffle=True))
    return torch.cat([batch for (batch,) in loader]).tolist()


def test_loaders_give_all_stages_of_a_row_the_same_batches(ranks):
    found = ranks.run(loaders, world_size=4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(found[0] + found[2]) == list(range(24))


def items():
    fabric = start(num_stages=2, balance=[2, 4], num_microbatches=2)
    plain, model = words(), fabric.setup(words())
    (x, y), row = data(1, rows=6)[0], fabric.global_rank // 2
    own = slice(0, 4) if row == 0 else slice(4, 6)
    fabric.backward(loss_of(model(x[own]), y[own]) * y[own].numel())
    fabric.normalize_gradients(model, y[own].numel())
    loss_of(plain(x), y).backward()
    assert_gradients(model, plain)


def test_normalize_gradients(ranks):
    ranks.run(items, world_size=4)


def mismatched_calls():
    """Ranks of one pipeline that give different batches hear of it, and can go on."""
    fabric = start(balance=[2, 4], num_microbatches=2)
    model, rows = fabric.setup(words()), 4 + fabric.global_rank
    with pytest.raises(CollectiveMismatch, match=r"forward of model 0 \(Words\)"):
        model(torch.zeros(rows, 3, dtype=torch.long))
    out = model(torch.zeros(4, 3, dtype=torch.long))
    with pytest.raises(CollectiveMismatch, match=r"(back|for)ward of Words"):
        fabric.backward(out.sum()) if fabric.global_rank else model(torch.zeros(4, 3, dtype=torch.long))
    model(torch.zeros(4, 3, dtype=torch.long))


def other_data(step):
    """Each rank with a batch of its own, as under DDP: the first stage's input, the last one's target."""
    fabric = start(balance=[2, 4], num_microbatches=2)
    model = fabric.setup(words())
    x, y = torch.full((4, 3), fabric.global_rank), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(CollectiveMismatch, match=r"int64\[4, 3\].*contents"):
        model.pipeline_step(x, y, loss_of) if step else model(x)


def test_ranks_that_differ(ranks):
    ranks.run(mismatched_calls, world_size=2)
    ranks.run(other_data, False, world_size=2)
    ranks.run(other_data, True, world_size=2)


def test_the_order_holds_what_the_paper_says():
    from fabric.strategies.pipeline.run import one_forward_one_backward

    for stages, count in itertools.product((1, 2, 3, 4), (1, 2, 5, 8)):
        for stage in range(stages):
            order, held, most = one_forward_one_backward(stage, stages, count), set(), 0
            for kind, index in order:
                held.add(index) if kind == "F" else held.remove(index)
                most = max(most, len(held))
            assert not held
            assert len(order) == 2 * count
            assert most == min(count, stages - stage)


def clipped_on_one_stage():
    """Two optimizers, each of which has its parameters on one stage only."""
    fabric, plain = start(), plain_sequential()
    expected = plain_sequential()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    steppers = [torch.optim.SGD(plain[at].parameters(), lr=0.1) for at in (0, -1)]
    model, *steppers = fabric.setup(plain, *steppers)
    fabric.backward(model(x).pow(2).sum())
    expected(x).pow(2).sum().backward()
    nn.utils.clip_grad_value_(expected.parameters(), 0.3)
    for stepper in steppers:
        fabric.clip_gradients(model, stepper, clip_val=0.3)
        stepper.step()
    with torch.no_grad():
        for layer in (expected[0], expected[-1]):
            for p in layer.parameters():
                p -= 0.1 * p.grad
    assert_alike(model.state_dict(), expected.state_dict())


def test_clipping_by_value_where_an_optimizer_is_empty_on_a_stage(ranks):
    ranks.run(clipped_on_one_stage, world_size=2)


def frozen_before_the_backward():
    """A layer that is frozen between two backwards of one step: its rows agree all the same."""
    fabric = start(num_stages=2, balance=[2, 3], num_microbatches=2)
    plain, model = plain_sequential(), plain_sequential()
    optimizer, reference = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(3))
    own = x[:, fabric.global_rank // 2 :: 2]
    with fabric.no_backward_sync(model):
        fabric.backward(model(own[0]).pow(2).mean())
    plain(x[0]).pow(2).mean().backward()
    for layers in (plain, model):
        layers[0].requires_grad_(False)
        layers[4].requires_grad_(False)
    fabric.backward(model(own[1]).pow(2).mean())
    plain(x[1]).pow(2).mean().backward()
    for one in (optimizer, reference):
        one.step()
    assert_alike(model.state_dict(), plain.state_dict())


def test_layers_that_are_frozen_between_backwards(ranks):
    ranks.run(frozen_before_the_backward, world_size=4)


def different_evaluations():
    """Later than the first calls: loops of other lengths would pair batches up wrongly."""
    fabric = start(num_microbatches=2)
    model = fabric.setup(words())
    for _ in range(3):
        model(torch.zeros(4, 3, dtype=torch.long))
    with torch.no_grad():
        model(torch.ones(4, 3, dtype=torch.long))
        model(torch.full((4, 3), 2 + fabric.global_rank))


def test_ranks_that_evaluate_different_batches_of_one_shape_are_told(ranks):
    for error in ranks.run_expecting_errors(different_evaluations, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert "forward of model 0 (Words), no_grad" in str(error)


def different_models():
    fabric = start(num_microbatches=2)
    models = [fabric.setup(words(seed)) for seed in range(2)]
    with torch.no_grad():
        models[fabric.global_rank](torch.zeros(4, 3, dtype=torch.long))


def test_ranks_that_call_different_models_of_one_kind_are_told(ranks):
    for error in ranks.run_expecting_errors(different_models, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert "forward of model 0 (Words), no_grad" in str(error)
        assert "forward of model 1 (Words), no_grad" in str(error)


def averaged_in_each_backward():
    """Under no_backward_sync, too: a step right after it takes what all rows have."""
    fabric = start(num_stages=2, num_microbatches=2)
    model, stepper = fabric.setup(model := words(), torch.optim.SGD(model.parameters(), lr=0.05))
    row, batches = fabric.global_rank // 2, data(4)
    for x, target in (batches[row], batches[2 + row]):
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model(x), target) / 2)
    stepper.step()
    return model.state_dict()


def test_rows_average_in_each_backward(ranks):
    plain, _, _, _ = train_plain(data(4), accumulate=4, optimizer=torch.optim.SGD)
    for state in ranks.run(averaged_in_each_backward, world_size=4):
        assert_alike(state, plain.state_dict())


def replacing(size, changes, checkpoint):
    """Gradients of a loop that replaces or changes weights between forward and backward."""
    f = Fabric(accelerator=ACCELERATOR, devices=size, strategy=PipelineStrategy(checkpoint=checkpoint))
    f.launch()
    net = plain_sequential()
    model = f.setup(net)
    loss = model(torch.ones(ROWS, 6, device=f.device)).square().mean()
    CHANGES[changes](net)
    f.backward(loss)
    return {name: p.grad.tolist() for name, p in net.named_parameters() if p.numel()}


def halved(net):
    for p in net.parameters():
        p.data = p.data * 0.5


def halved_in_place(net):
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.startswith("2.norm"):  # torch has not saved it, but what is computed again needs it
                p.mul_(0.5)


CHANGES = {"p.data = ...": halved, "in place": halved_in_place}


def test_weights_that_are_replaced_between_forward_and_backward(ranks):
    net = plain_sequential()
    loss = net(torch.ones(ROWS, 6)).square().mean()
    halved(net)
    loss.backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    found = ranks.run(replacing, 2, "p.data = ...", "never", world_size=2)
    for name, grad in [pair for one in found for pair in one.items()]:
        torch.testing.assert_close(torch.tensor(grad), expected.pop(name))
    assert not expected


@pytest.mark.parametrize(
    ("changes", "checkpoint"),
    [("p.data = ...", "always"), ("p.data = ...", "except_last"), ("in place", "always")],
)
def test_weights_that_are_changed_before_activations_are_computed_again(ranks, changes, checkpoint):
    with pytest.raises(Exception, match=r" was changed between the forward and the .*checkpoint=\"never\""):
        ranks.run(replacing, 2, changes, checkpoint, world_size=2)


def asked_for_gradients(allow_unused):
    """The graph of a loss ends at the stages: there would be None, and a step that does nothing."""
    fabric = start()
    model = fabric.setup(plain_sequential())
    loss = model(torch.ones(4, 6)).pow(2).mean()
    with pytest.raises(UsageError, match=r"gradient of \S+weight, of a model in a pipeline"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_by_torch_autograd_grad_are_refused(ranks, allow_unused):
    ranks.run(asked_for_gradients, allow_unused, world_size=2)


def replace_last(net):
    net[-1] = nn.Sequential(net[-1], nn.Identity())


OTHER_BLOCKS = {
    "Block 4 of Sequential was replaced": replace_last,
    "Sequential has 6 blocks in place of 5": lambda net: net.append(nn.Identity()),
    "Sequential has 4 blocks in place of 5": lambda net: net.pop(-1),
}


def with_other_blocks(text):
    fabric = start()
    model, optimizer = fabric.setup(net := plain_sequential(), torch.optim.SGD(net.parameters(), 0.1))
    fabric.backward(model(torch.ones(ROWS, 6)).sum())
    optimizer.step()
    OTHER_BLOCKS[text](net)
    with pytest.raises(UsageError) as caught:
        model(torch.ones(ROWS, 6))
    assert str(caught.value) == (
        f"{text} after fabric.setup. The stages would run the blocks that it had at fabric.setup. Change the "
        "model before fabric.setup."
    )


@pytest.mark.parametrize("text", OTHER_BLOCKS)
def test_blocks_that_are_replaced_after_setup(ranks, text):
    ranks.run(with_other_blocks, text, world_size=2)
