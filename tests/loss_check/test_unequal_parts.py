"""Parts of unequal size, means over unequal numbers of labels and summed losses are warned of once."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric.loss_check.terms import terms_of
from fabric.strategies import DDPStrategy
from fabric.utilities.warnings import RanksDifferWarning

ROWS = 5


class Keyed(nn.Module):
    """Called with keywords."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, *, scale, x):
        return scale * self.linear(x)


def parts(rank, world_size):
    return torch.arange(4.0 * ROWS).view(ROWS, 4).chunk(world_size)[rank]


def trained(how="by hand", strategy="ddp", steps=3):
    """What a rank hears of a loop in which each has a chunk of 5 rows."""
    fabric = launched(DDPStrategy(find_unused_parameters=True) if strategy == "unused" else strategy)
    model = Keyed() if how == "keywords" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    x = parts(fabric.global_rank, fabric.world_size)
    if how == "equal":
        x = x[:1]
    if how == "own loader":
        x = DataLoader(TensorDataset(x), batch_size=len(x))
        batches = fabric.setup_dataloaders(x, use_distributed_sampler=False)
    elif how == "loader":
        batches = fabric.setup_dataloaders(DataLoader(TensorDataset(x.new_ones(5, 4)), 9), uneven="exact")
    else:
        batches = [(x,)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for (x,) in batches:
                optimizer.zero_grad()
                if how == "evaluated first":
                    with torch.no_grad():
                        model(x[:1])
                out = model(scale=2.0, x=x) if how == "keywords" else model(x)
                fabric.backward(out.sum() if how == "normalised" else out.mean())
                if how == "normalised":
                    fabric.normalize_gradients(model, len(x))
                optimizer.step()
    hooks = sum(len(part._forward_pre_hooks) for part in model.module.modules() if strategy == "ddp")
    return [str(w.message) for w in caught if w.category is RanksDifferWarning], hooks


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_unequal_size_are_said_once(ranks, strategy, world_size):
    (told, hooks), *others = ranks.run(trained, "by hand", strategy, world_size=world_size)
    shown = "3 on rank 0, 2 on rank 1" if world_size == 2 else "2 on rank 0, 2 on rank 1, 1 on rank 2"
    assert told == [
        f"Ranks were given unequal numbers of rows: {shown}. Gradients are averaged over ranks, so a row of "
        "a smaller batch has more weight. Shard with fabric.setup_dataloaders(loader); or sum the losses of "
        "rows, and write fabric.normalize_gradients(model, num_rows) before each step."
    ]
    assert others == [([], 0)] * (world_size - 1)
    assert hooks == 0, "nothing is left in the forward"


@pytest.mark.parametrize("how", ["keywords", "evaluated first", "own loader"])
def test_it_is_the_first_tensor_of_a_forward_in_training(ranks, how):
    (told, _), _ = ranks.run(trained, how, world_size=2)
    assert [text.partition(". ")[0] for text in told] == [
        "Ranks were given unequal numbers of rows: 3 on rank 0, 2 on rank 1"
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["equal", "normalised", "loader"])
def test_loops_whose_rows_count_alike_hear_nothing(ranks, how, strategy):
    assert ranks.run(trained, how, strategy, world_size=2) == [([], 0)] * 2


def test_ranks_that_may_skip_layers_are_compared(ranks):
    assert len(ranks.run(trained, "by hand", "unused", world_size=2)[0][0]) == 1


def counted(steps):
    """How many messages about rows each step of a loop of equal parts sends."""
    from fabric.collectives.channel import Channel

    fabric = launched()
    model, optimizer = fabric.setup(m := nn.Linear(4, 1), torch.optim.SGD(m.parameters(), lr=0.1))
    calls, met = [], Channel.check_call
    Channel.check_call = lambda *args: calls.append(args[1].verb) or met(*args)
    try:
        found = []
        for _ in range(steps):
            fabric.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            found.append(calls.count("loss check"))
            calls.clear()
    finally:
        Channel.check_call = met
    return found


def test_a_loop_sends_one_message_in_all(ranks):
    assert ranks.run(counted, 4, world_size=2) == [[0, 1, 0, 0]] * 2


# Items of a loss: tokens, labels


def with_labels(how):
    """What a rank warns of in a loop with equal rows and unequal numbers of labels."""
    fabric = launched()
    torch.manual_seed(0)
    model, optimizer = fabric.setup(m := nn.Linear(4, 3), torch.optim.SGD(m.parameters(), lr=0.1))
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    y[::2, 2:] = -100
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), 8 // fabric.world_size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                out, kept = model(x), y != -100
                losses = nn.functional.cross_entropy(out.mT, y, reduction="none")
                fabric.backward(LOSSES[how](fabric, out, y, losses, kept))
                if how == "normalised":
                    fabric.normalize_gradients(model, kept.sum())
                optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def mean(out, y):
    return nn.functional.cross_entropy(out.mT, y)


def later(fabric, y, losses):
    """A mean whose count is equal on ranks in the first loss only."""
    fabric.losses = getattr(fabric, "losses", 0) + 1
    return losses.mean() if fabric.losses == 1 else losses[y != -100].mean()


def everywhere(fabric, kept):
    return fabric.all_reduce(kept.sum(), reduce_op="sum") / fabric.world_size


LOSSES = {
    "ignore_index": lambda fabric, out, y, losses, kept: mean(out, y),
    "flat": lambda fabric, out, y, losses, kept: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    "scaled": lambda fabric, out, y, losses, kept: 0.5 * mean(out, y) / 4 + 0.1 * out.square().mean(),
    "mask": lambda fabric, out, y, losses, kept: (losses * kept).sum() / kept.sum(),
    "selected": lambda fabric, out, y, losses, kept: losses[kept].mean(),
    "inner": lambda fabric, out, y, losses, kept: (losses * kept / kept.sum()).sum(),
    "nanmean": lambda fabric, out, y, losses, kept: losses.where(kept, torch.nan).nanmean(),
    "dot": lambda fabric, out, y, losses, kept: losses.flatten().dot(kept.float().flatten()) / kept.sum(),
    "margin": lambda fabric, out, y, losses, kept: nn.functional.soft_margin_loss(
        out[kept][:, 0], 1.0 - 2.0 * (y[kept] == 0)
    ),
    "classes": lambda fabric, out, y, losses, kept: nn.functional.multi_margin_loss(out[kept], y[kept]),
    "dims": lambda fabric, out, y, losses, kept: losses[kept].mean(dim=0),
    "later": lambda fabric, out, y, losses, kept: later(fabric, y, losses),
    "mean": lambda fabric, out, y, losses, kept: losses.mean(),
    "inner of all": lambda fabric, out, y, losses, kept: (losses / everywhere(fabric, kept)).sum(),
    "statistic": lambda fabric, out, y, losses, kept: (
        (fabric.all_reduce(out[:, 0].mean(1)) - 1).square().sum()
    ),
    "normalised": lambda fabric, out, y, losses, kept: losses.sum(),
    "of all ranks": lambda fabric, out, y, losses, kept: (losses * kept).sum() / everywhere(fabric, kept),
    "weighted mean": lambda fabric, out, y, losses, kept: (
        mean(out, y) * kept.sum() / everywhere(fabric, kept)
    ),
    "sum": lambda fabric, out, y, losses, kept: losses.sum(),
    "sum of squares": lambda fabric, out, y, losses, kept: out.square().sum() - 0.5 * (out * out).sum(),
    "sum and annealed": lambda fabric, out, y, losses, kept: losses.sum() + 0.0 * (1 - out).square().sum(),
    "sum times ranks": lambda fabric, out, y, losses, kept: losses.sum() * fabric.world_size,
    "sum over rows": lambda fabric, out, y, losses, kept: losses.sum() / len(out) + out.square().sum(),
    "weights": lambda fabric, out, y, losses, kept: (losses * torch.full_like(losses, 0.01)).sum(),
    "tasks": lambda fabric, out, y, losses, kept: torch.stack([each.mean() for each in losses]).sum(),
    "penalty": lambda fabric, out, y, losses, kept: losses.mean() + out.square().sum(),
    "mixed": lambda fabric, out, y, losses, kept: (
        losses.mean() * (0.1 + fabric.global_rank) + losses.mean() * (0.9 - fabric.global_rank)
    ),
}


UNEQUAL = ["ignore_index", "flat", "scaled", "mask", "selected"]


@pytest.mark.parametrize("how", [*UNEQUAL, "inner", "nanmean", "dot", "margin", "classes", "dims"])
def test_a_mean_over_unequal_numbers_of_labels_is_said_once(ranks, how):
    (told,), others = ranks.run(with_labels, how, world_size=2)
    assert told.startswith("The loss of a backward divides by ")
    if how not in ("scaled", "classes"):
        assert "divides by 8 on rank 0, 24 on rank 1, as a mean over the tokens or labels" in told
    assert "write fabric.normalize_gradients(model, num_items) before each step" in told
    assert others == []


@pytest.mark.parametrize("how", ["sum", "sum of squares", "sum and annealed"])
def test_a_sum_over_items_is_said_once(ranks, how):
    (told,), others = ranks.run(with_labels, how, world_size=2)
    assert told == (
        "The loss of the first backward is a sum over its items. Gradients are averaged over 2 ranks, so "
        "they are 1/2 of those of one process with the whole batch. Use a mean; or write "
        "fabric.normalize_gradients(model, num_items) before each step, also on one process; or multiply the "
        "loss by fabric.world_size."
    )
    assert others == []


def attacked(inputs):
    """The warnings of a loop with a summed loss whose backward computes gradients of `inputs` only."""
    fabric = launched()
    model, optimizer = fabric.setup(m := nn.Linear(4, 1), torch.optim.SGD(m.parameters(), lr=0.1))
    x = parts(fabric.global_rank, fabric.world_size)[:2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            attack = x.clone().requires_grad_()
            chosen = [attack, *model.parameters()] if inputs == "all" else attack
            fabric.backward(model(attack).square().sum(), inputs=chosen)
            optimizer.zero_grad()
            fabric.backward(model(x + 0.1 * attack.grad.sign()).square().mean())
            optimizer.step()
    return [str(w.message)[:47] for w in caught if w.category is RanksDifferWarning]


def test_a_summed_loss_of_gradients_of_inputs_is_not_warned_of(ranks):
    assert ranks.run(attacked, "x", world_size=2) == [[], []]
    warning = "The loss of the first backward is a sum over it"
    assert ranks.run(attacked, "all", world_size=2) == [[warning], []]


def uneven_pairs():
    """Two calls for each loss; the second loss is of the last batch, which does not divide."""
    fabric = launched()
    model, optimizer = fabric.setup(m := nn.Linear(4, 1), torch.optim.SGD(m.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.ones(15, 4)), batch_size=4)
    loader = fabric.setup_dataloaders(loader, uneven="exact")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                fabric.backward((model(x) - model(2 * x)).square().mean())
                optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def test_a_second_loss_of_unequal_rows_that_were_accepted_is_not_warned_of(ranks):
    assert ranks.run(uneven_pairs, world_size=2) == [[], []]


SILENT = [
    "mean",
    "normalised",
    "of all ranks",
    "weighted mean",
    "mixed",
    "sum times ranks",
    "sum over rows",
    "inner of all",
    "statistic",
]


@pytest.mark.parametrize("how", [*SILENT, "weights", "tasks", "penalty"])
def test_losses_whose_labels_count_alike_are_not_warned_of(ranks, how):
    assert ranks.run(with_labels, how, world_size=2) == [[], []]


def drawn(how):
    """What a rank warns of in a loop that draws its own batches."""
    fabric = launched()
    torch.manual_seed(0)
    model, optimizer = fabric.setup(m := nn.Linear(4, 3), torch.optim.SGD(m.parameters(), lr=0.1))
    if how == "seed of its own":
        torch.manual_seed(fabric.global_rank)
    fixed, loader = torch.randn(8, 4), DataLoader(TensorDataset(torch.randn(24, 4)), 4)
    if how == "loader":
        loader = fabric.setup_dataloaders(loader)
    if how == "loader of all":
        loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    batches = [x for (x,) in loader] if "loader" in how else [torch.randn(8, 4) for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in batches:
            x = {"one batch": fixed, "rows": x[fabric.global_rank :: fabric.world_size]}.get(how, x)
            optimizer.zero_grad()
            for part in x.chunk(2) if how == "accumulated" else [x]:
                if how == "other targets":
                    fabric.backward((model(part) - fabric.global_rank).square().mean())
                elif how == "vmap":
                    fabric.backward(torch.vmap(model)(part).square().mean())
                else:
                    fabric.backward(model(part).square().mean())
            optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("how", ["one seed", "accumulated", "loader of all"])
def test_ranks_that_draw_the_same_batches_are_warned_of(ranks, how):
    (told,), others = ranks.run(drawn, how, world_size=2)
    assert told.startswith(
        "All ranks called Linear with the same batches, so 2 ranks train on the data of one."
    )
    assert "fabric.seed_everything(seed, per_rank=True) below the line that makes the model" in told
    assert others == []


@pytest.mark.parametrize("how", ["seed of its own", "one batch", "rows", "loader", "vmap", "other targets"])
def test_ranks_with_batches_of_their_own_are_not_warned_of(ranks, how):
    """So are ranks that all train on one batch: nobody draws there."""
    assert ranks.run(drawn, how, world_size=2) == [[], []]


def test_a_recurrence_of_numbers_is_not_followed_to_its_end():
    """Each of its sums has the one before twice: 2 ** 60 terms."""
    loss = torch.ones(3, requires_grad=True).mean()
    for _ in range(60):
        loss = loss + 0.1 * loss
    assert terms_of(loss.grad_fn) == []
