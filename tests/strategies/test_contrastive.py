"""Losses that see all ranks' rows: gradients under DDP equal plain torch's on the joined batch, to 1e-6.

Rank r's loss L_r is over its own rows, against what came from everybody. DDP averages over ranks, and the
verbs sum gradients over ranks on their way back: what each test's joined loss must be is the mean of the L_r.
"""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fabric import Fabric
from fabric.strategies import DDPStrategy
from fabric.utilities.warnings import RanksDifferWarning

EVEN, UNEVEN = [4, 4, 4], [5, 2, 3]
WORLDS = pytest.mark.parametrize("world_size", [2, 3])


def net() -> nn.Module:
    """Rows (n, 5) to embeddings (n, 4) in float64, the same on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def pairs(sizes: list[int]) -> list[torch.Tensor]:
    """For each rank (2, n, 5): its rows in two views."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(2, n, 5, dtype=torch.float64, generator=generator) for n in sizes]


def start(**settings):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy(**settings))
    fabric.launch()
    return fabric


def embed(model, x):
    """Both views by one forward, each row of length 1."""
    return F.normalize(model(x.flatten(0, 1)), dim=1).chunk(2)


def info_nce(a, b, all_a, all_b, first=0):
    """Mean over the rows of `a` and `b`; row i belongs to column `first` + i."""
    partners = first + torch.arange(len(a))
    return F.cross_entropy(a @ all_b.T / 0.2, partners) + F.cross_entropy(b @ all_a.T / 0.2, partners)


def assert_same(model, expected) -> None:
    assert max(want.abs().max() for want in expected) > 1e-2, "no gradient at all would pass"
    for (name, p), want in zip(model.named_parameters(), expected, strict=True):
        assert p.grad.dtype is torch.float64, name
        torch.testing.assert_close(p.grad, want, rtol=0, atol=1e-6)


def grads(model, loss) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# The contrastive loss


def joined_info_nce(sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One process, plain torch, the whole batch: what the loss means."""
    model = net()
    a, b = embed(model, torch.cat(pairs(sizes), dim=1))
    loss = info_nce(a, b, a, b)
    return loss.detach(), grads(model, loss)


def gathered_info_nce(sizes: list[int], how: str, settings: dict) -> None:
    fabric = start(**settings)
    rank, world = fabric.global_rank, fabric.world_size
    sizes = sizes[:world]
    model = fabric.setup(net())
    a, b = embed(model, pairs(sizes)[rank])
    if how == "stacked":
        table = fabric.all_gather({"a": a, "b": b}, sync_grads=True)
        assert table["a"].shape == (world, sizes[rank], 4)
        everyone = {name: part.flatten(0, 1) for name, part in table.items()}
    elif how == "cat":
        everyone = fabric.all_gather({"a": a, "b": b}, sync_grads=True, uneven="cat")
    else:
        lists = fabric.all_gather({"a": a, "b": b}, sync_grads=True, uneven="list")
        everyone = {name: torch.cat(parts) for name, parts in lists.items()}
    loss = info_nce(a, b, everyone["a"], everyone["b"], first=sum(sizes[:rank]))
    # DDP divides the sum over ranks by their number; the batch's mean divides by its rows. Equal parts: 1.
    loss = loss * (world * sizes[rank] / sum(sizes))
    fabric.backward(loss)

    expected_loss, expected = joined_info_nce(sizes)
    torch.testing.assert_close(fabric.all_reduce(loss.detach(), inplace=False), expected_loss)
    assert_same(model, expected)


@WORLDS
@pytest.mark.parametrize("how", ["stacked", "cat", "list"])
def test_info_nce_of_equal_parts(ranks, how, world_size):
    ranks.run(gathered_info_nce, EVEN, how, {}, world_size=world_size)


@WORLDS
@pytest.mark.parametrize("how", ["cat", "list"])
def test_info_nce_of_unequal_parts(ranks, how, world_size):
    ranks.run(gathered_info_nce, UNEVEN, how, {}, world_size=world_size)


@pytest.mark.parametrize(
    "settings", [{"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}]
)
def test_info_nce_under_ddps_settings(ranks, settings):
    ranks.run(gathered_info_nce, EVEN, "stacked", settings, world_size=2)


def wrong_in_other_ways() -> tuple[float, float]:
    """How far the gradient is off without gradients through the gather, and with the own rank's columns."""
    fabric = start()
    sizes = EVEN[: fabric.world_size]
    _, expected = joined_info_nce(sizes)
    off = []
    for kind in ("no gradient", "own columns"):
        model = fabric.setup(net())
        a, b = embed(model, pairs(sizes)[fabric.global_rank])
        everyone = fabric.all_gather({"a": a.detach(), "b": b.detach()})
        columns = [everyone[name].flatten(0, 1) for name in "ab"] if kind == "no gradient" else [a, b]
        first = sum(sizes[: fabric.global_rank]) if kind == "no gradient" else 0
        fabric.backward(info_nce(a, b, *columns, first=first))
        got, want = (
            torch.cat([g.flatten() for g in gs]) for gs in ([p.grad for p in model.parameters()], expected)
        )
        off.append(float((got - want).norm() / want.norm()))
    return tuple(off)


def test_the_comparison_would_notice(ranks):
    """Both usual mistakes give another gradient, so that the tests above mean something."""
    for detached, own in ranks.run(wrong_in_other_ways, world_size=2):
        assert detached > 0.1
        assert own > 0.1


def accumulated_info_nce() -> None:
    fabric = start()
    rank, world = fabric.global_rank, fabric.world_size
    model, reference = fabric.setup(net()), net()
    parts = pairs(EVEN[:world])
    expected = [torch.zeros_like(p) for p in reference.parameters()]
    for micro in range(3):
        with fabric.no_backward_sync(model, enabled=micro < 2):
            a, b = embed(model, parts[rank] + micro)
            everyone = fabric.all_gather({"a": a, "b": b}, sync_grads=True)
            columns = [everyone[name].flatten(0, 1) for name in "ab"]
            fabric.backward(info_nce(a, b, *columns, first=rank * len(a)) / 3)
        a, b = embed(reference, torch.cat(parts, dim=1) + micro)
        for total, grad in zip(expected, grads(reference, info_nce(a, b, a, b) / 3), strict=True):
            total += grad
    assert_same(model, expected)


@WORLDS
def test_info_nce_with_accumulation(ranks, world_size):
    """The gather's own backward is a collective in every micro-batch, also where DDP's is put off."""
    ranks.run(accumulated_info_nce, world_size=world_size)


# Small losses through the other verbs


def rows(world: int) -> torch.Tensor:
    """(world_size, 6, 5): 6 rows for each rank, which divide by 2 and by 3."""
    return torch.randn(world, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def weight(rank: int) -> torch.Tensor:
    """(6, 4): what rank `rank` multiplies with, so that no two ranks' losses are alike."""
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(20 + rank))


def through_verb(verb: str, op: str) -> None:
    fabric = start()
    rank, world = fabric.global_rank, fabric.world_size
    model, reference = fabric.setup(net()), net()
    z = model(rows(world)[rank])
    everyone = torch.stack([reference(part) for part in rows(world)])  # (world_size, 6, 4)
    n = 6 // world
    reduced = {
        "sum": lambda: everyone.sum(0),
        "mean": lambda: everyone.mean(0),
        "min": lambda: everyone.amin(0),
        "max": lambda: everyone.amax(0),
        "product": lambda: everyone.prod(0),
    }[op or "sum"]()
    if verb == "all_reduce":
        out = fabric.all_reduce(z, reduce_op=op, sync_grads=True)
        joined = [reduced for _ in range(world)]
    elif verb == "reduce_scatter":
        out = fabric.reduce_scatter(z, op, sync_grads=True)
        joined = [reduced[n * r : n * (r + 1)] for r in range(world)]
    else:
        out = fabric.all_to_all(z, sync_grads=True)
        joined = [everyone[:, n * r : n * (r + 1)].flatten(0, 1) for r in range(world)]
    torch.testing.assert_close(out, joined[rank].detach())

    def loss(part, r):
        return (part.sin() * weight(r)[: len(part)]).sum() + part.pow(2).mean() * (r + 1)

    # The rank's rows also reach its loss directly: both ways must add up.
    fabric.backward(loss(out, rank) + z.cos().mean())
    total = torch.stack([loss(joined[r], r) + everyone[r].cos().mean() for r in range(world)]).mean()
    assert_same(model, grads(reference, total))


VERBS = [
    *[("all_reduce", op) for op in ("sum", "mean", "min", "max", "product")],
    *[("reduce_scatter", op) for op in ("sum", "mean", "min", "max", "product")],
    ("all_to_all", ""),
]


@WORLDS
@pytest.mark.parametrize(("verb", "op"), VERBS, ids=[" ".join(case).strip() for case in VERBS])
def test_a_loss_through_a_verb(ranks, verb, op, world_size):
    ranks.run(through_verb, verb, op, world_size=world_size)


def statistics_of_the_batch() -> None:
    """Batch normalisation written out: mean and variance of all ranks' rows by all_reduce."""
    fabric = start()
    rank, world = fabric.global_rank, fabric.world_size
    model, reference = fabric.setup(net()), net()
    z = model(rows(world)[rank])
    mean, square = fabric.all_reduce([z.mean(0), z.pow(2).mean(0)], sync_grads=True)
    normed = (z - mean) / (square - mean.pow(2) + 1e-3).sqrt()
    fabric.backward((normed.sin() * weight(rank)).mean())

    joined = reference(rows(world).flatten(0, 1))
    normed = (joined - joined.mean(0)) / (joined.var(0, correction=0) + 1e-3).sqrt()
    weights = torch.cat([weight(r) for r in range(world)])
    assert_same(model, grads(reference, (normed.sin() * weights).mean()))


@WORLDS
def test_batch_statistics_over_ranks(ranks, world_size):
    ranks.run(statistics_of_the_batch, world_size=world_size)


def through_a_reduction_in_place(op: str, sync_grads: bool, what: str) -> tuple[list[str], bool]:
    """The warnings of backwards through a matrix, or of the loss itself; and whether gradients are right."""
    fabric = start()
    world, rank = fabric.world_size, fabric.global_rank
    model, plain = fabric.setup(net()), net()
    x = rows(world).flatten(0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model(x[rank::world])
        if what == "matrix":
            moments = fabric.all_reduce(out.T @ out, reduce_op=op, sync_grads=sync_grads)
            fabric.backward(moments.square().sum())
        elif what == "statistic":  # of which each rank's loss has another gradient
            mean = fabric.all_reduce(out.mean(0), reduce_op=op, sync_grads=sync_grads)
            fabric.backward((out - mean).square().mean(), retain_graph=True)
        elif what == "number":
            total = fabric.all_reduce(out.square().sum(), reduce_op=op, sync_grads=sync_grads)
            fabric.backward((total - 1).square())
        elif what == "loss of accumulation":
            loss = out.square().mean() / 2
            fabric.all_reduce(loss, reduce_op=op)
            fabric.backward(loss + 0 * out.sum())
        elif what == "loss":
            loss = out.square().mean()
            fabric.all_reduce(loss, reduce_op=op)  # for the log
            fabric.backward(loss)
        elif what == "detached":
            fabric.all_reduce(out.detach().clone(), reduce_op=op)
            fabric.backward(out.square().mean())
    out = plain(x)
    scale = world if op == "mean" else 1
    losses = {
        "matrix": lambda: ((out.T @ out) / scale).square().sum(),
        "statistic": lambda: (out - out.mean(0)).square().mean(),
        "number": (out.square().sum() - 1).square,
        "loss of accumulation": lambda: out.square().mean() / 2,
    }
    losses.get(what, lambda: out.square().mean())().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    right = all([torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs])
    return [str(w.message) for w in caught if w.category is RanksDifferWarning], right


@WORLDS
def test_a_gradient_through_a_sum_in_place_is_warned_of(ranks, world_size):
    ((told, *_), right), *others = ranks.run(
        through_a_reduction_in_place, "sum", False, "matrix", world_size=world_size
    )
    assert not right
    assert re.fullmatch(
        r"A gradient passed through all_reduce\(sum\) \(.*test_contrastive.py:\d+\), which is not "
        r"differentiable: each rank gets that of its own part, not that of the result. Write sync_grads=True "
        r"in this call, or reduce x.detach\(\) if no gradient is needed.",
        told,
    )
    assert others == [([], False)] * (world_size - 1)


@WORLDS
def test_a_gradient_through_a_number_that_was_summed_in_place_is_warned_of(ranks, world_size):
    ((told, *_), right), *_ = ranks.run(
        through_a_reduction_in_place, "sum", False, "number", world_size=world_size
    )
    assert not right
    assert told.startswith("A gradient passed through all_reduce(sum) (")


@pytest.mark.parametrize(
    ("op", "sync_grads", "what"),
    [
        ("sum", True, "matrix"),
        ("mean", False, "matrix"),
        ("sum", False, "loss"),
        ("mean", False, "loss"),
        ("sum", False, "loss of accumulation"),
        ("sum", True, "number"),
        ("mean", True, "statistic"),
        ("max", False, "detached"),
    ],
)
def test_right_gradients_beside_a_reduction_are_not_warned_of(ranks, op, sync_grads, what):
    assert ranks.run(through_a_reduction_in_place, op, sync_grads, what, world_size=2) == [([], True)] * 2


def through_a_mean_in_place(strategy: str, what: str, sync_grads: bool) -> tuple[list[str], object]:
    """The warnings of three steps with a mean of all ranks in the loss, and what is recorded at the end."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            out = model(torch.randn(6, 4)[fabric.global_rank :: fabric.world_size])
            mean = fabric.all_reduce(out.mean(0), sync_grads=sync_grads)
            loss = (out - mean).square().mean() if what == "with own rows" else mean.square().sum()
            if what == "on one rank" and fabric.global_rank == 0:
                loss = out.square().sum()
            fabric.backward(loss)
            optimizer.step()
            recorded = fabric.strategy.find_part("loss check")._first
    return [str(w.message) for w in caught if w.category is RanksDifferWarning], recorded


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", ["with own rows", "on one rank"])
def test_gradients_of_a_mean_in_place_that_differ_are_warned_of_once(ranks, strategy, what):
    ((told,), held), *others = ranks.run(through_a_mean_in_place, strategy, what, False, world_size=2)
    assert re.fullmatch(
        r"A gradient passed through all_reduce\(mean\) \(.*test_contrastive.py:\d+\), .*", told
    )
    assert others == [([], None)]
    assert held is None  # recorded no more


@pytest.mark.parametrize(("what", "sync_grads"), [("with own rows", True), ("alone", False)])
def test_gradients_of_a_mean_in_place_that_are_equal_are_not_warned_of(ranks, what, sync_grads):
    assert ranks.run(through_a_mean_in_place, "ddp", what, sync_grads, world_size=2) == [([], None)] * 2
