"""Runs on real ranks that end and go on in another set of processes, on as many ranks or on others."""

from __future__ import annotations

import os
import random
import warnings
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, FabricError, UsageError
from fabric.testing import RankPool


class Draws(Dataset):
    """The index, and what each library draws for it."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()])


class Stream(IterableDataset):
    """Numbers in an order that the global streams decide, with a draw each."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        items = list(range(self.n))
        random.shuffle(items)
        for item in items:
            yield torch.tensor([item, random.random(), numpy.random.rand(), torch.rand(()).item()])


class Stateful(Stream):
    """The same, able to say where it is and to go there."""

    at = 0
    items: list[int] | None = None

    def __iter__(self):
        if self.items is None:
            self.items, self.at = list(range(self.n)), 0
            random.shuffle(self.items)
        while self.at < len(self.items):
            self.at += 1
            item = self.items[self.at - 1]
            yield torch.tensor([item, random.random(), numpy.random.rand(), torch.rand(()).item()])
        self.items = None

    def state_dict(self):
        return {"at": self.at, "items": self.items}

    def load_state_dict(self, state):
        self.at, self.items = state["at"], state["items"]


class Parts(Stream):
    """Shares itself out over ranks and workers, unevenly."""

    def __init__(self, n, rank, world):
        super().__init__(n)
        self.rank, self.world = rank, world

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        place, places = self.rank, self.world
        if info is not None:
            place, places = place * info.num_workers + info.id, places * info.num_workers
        for item in range(self.n):
            if item * item % places == place or (item % 3 == 0 and place == 0):
                yield torch.tensor([item, random.random(), numpy.random.rand(), torch.rand(()).item()])


def make(fabric, kind, n, batch, workers, persistent=False):
    """A loader of the whole job's `batch` samples per step."""
    keywords = {"num_workers": workers, "batch_size": batch // fabric.world_size}
    if workers:
        keywords |= {"multiprocessing_context": "fork", "persistent_workers": persistent}
    datasets = {
        "map": lambda: Draws(n),
        "stream": lambda: Stream(n),
        "stateful": lambda: Stateful(n),
        "parts": lambda: Parts(n, fabric.global_rank, fabric.world_size),
    }
    loader = DataLoader(datasets[kind](), shuffle=True if kind == "map" else None, **keywords)
    return fabric.setup_dataloaders(
        loader, shard_iterable=kind != "parts", uneven="exact" if kind == "parts" else None
    )


def launched():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric


@contextmanager
def seeded(fabric, seed, per_rank=True):
    fabric.seed_everything(seed, verbose=False, per_rank=per_rank)
    try:
        yield
    finally:
        del os.environ["FABRIC_GLOBAL_SEED"], os.environ["FABRIC_SEED_WORKERS"]


def train(kind, n, batch, workers, path, start, stop, persistent=False):
    """Batches of steps [start, stop) of a 2-epoch run; loads `path` if `start` is set, and saves at `stop`.

    Each is (what the batch holds, a draw of the loop's own stream).
    """
    fabric = launched()
    with seeded(fabric, 11):
        loader = make(fabric, kind, n, batch, workers, persistent)
    state = {"loader": loader, "rng": fabric.rng_state(), "epoch": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is read again from the epoch's beginning")
        if start is not None:
            fabric.load(path, state)
        seen, step = [], start or 0
        for epoch in range(state["epoch"], 2):
            if stop == step:
                break
            state["epoch"] = epoch
            for rows in loader:
                seen.append((rows.tolist(), torch.rand(()).item()))
                step += 1
                if step == stop:
                    break
    if stop is not None:
        fabric.save(path, state)
    return seen


KINDS = [("map", 0), ("map", 2), ("stream", 0), ("stream", 2), ("stateful", 0), ("stateful", 2), ("parts", 2)]


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_a_run_that_ends_and_goes_on_twice_in_one_epoch(ranks, tmp_path, kind, workers):
    path = tmp_path / "run.pt"
    arguments = (kind, 21, 4, workers, path)
    whole = ranks.run(train, *arguments, None, None, world_size=2)
    steps = len(whole[0]) // 2
    pieces = [(None, 1), (1, 3), (3, steps), (steps, steps + 2), (steps + 2, None)]
    parts = [ranks.run(train, *arguments, *piece, world_size=2) for piece in pieces]
    for rank in range(2):
        assert [seen for part in parts for seen in part[rank]] == whole[rank]


def test_workers_that_live_through_epochs_hear_of_the_position(ranks, tmp_path):
    for kind in ("map", "stream", "stateful", "parts"):
        path = tmp_path / f"{kind}.pt"
        whole = ranks.run(train, kind, 14, 4, 2, path, None, None, True, world_size=2)
        first = ranks.run(train, kind, 14, 4, 2, path, None, 2, True, world_size=2)
        rest = ranks.run(train, kind, 14, 4, 2, path, 2, None, True, world_size=2)
        assert [one + other for one, other in zip(first, rest, strict=True)] == whole, kind


def contents(per_rank):
    """The samples of each global batch, in any order."""
    steps = zip(*per_rank, strict=True)
    return [sorted(int(row[0]) for rows, _ in step for row in rows) for step in steps]


@pytest.mark.parametrize("kind", ["map", "stream", "stateful"])
def test_global_batches_stay_as_ranks_become_fewer(ranks, tmp_path, kind):
    path = tmp_path / "run.pt"
    whole = ranks.run(train, kind, 30, 4, 0, path, None, None, world_size=1)
    steps = [
        (4, None, 3),
        (2, 3, 6),
        (1, 6, 9),
        (4, 9, 12),
        (2, 12, None),
    ]
    found = []
    for world, start, stop in steps:
        found += contents(ranks.run(train, kind, 30, 4, 0, path, start, stop, world_size=world))
    assert found == contents(whole)
    assert all(sorted(x for step in found[i : i + 8] for x in step)[:30] for i in (0, 8))
    assert sorted({x for step in found[:8] for x in step}) == list(range(30))


# random streams


def draw(count=1):
    return [(random.random(), float(numpy.random.rand()), float(torch.rand(()))) for _ in range(count)]


def streams(path, load, seed=3, per_rank=True):
    fabric = launched()
    with seeded(fabric, seed, per_rank):
        draw(5)
    state = {"rng": fabric.rng_state()}
    if load:
        draw(2)
        fabric.load(path, state)
    else:
        fabric.save(path, state)
    return draw(3)


def test_the_next_draw_is_the_one_that_would_have_come(ranks, tmp_path):
    path = tmp_path / "rng.pt"
    saved = ranks.run(streams, path, False, world_size=2)
    assert ranks.run(streams, path, True, 4, world_size=2) == saved
    numbers = [number for rank in saved for row in rank for number in row]
    assert len(set(numbers)) == 2 * 3 * 3


def test_ranks_that_were_not_saved_have_streams_of_their_own_if_the_others_had(ranks, tmp_path):
    path = tmp_path / "rng.pt"
    saved = ranks.run(streams, path, False, world_size=2)
    with_more = ranks.run(warned, path, world_size=4)
    assert [draws for draws, _ in with_more[:2]] == saved
    assert len({str(draws) for draws, _ in with_more}) == 4
    assert "start new random streams" in with_more[0][1] or all(not text for _, text in with_more)


def warned(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = streams(path, True)
    return draws, " ".join(str(warning.message) for warning in caught)


def test_common_streams_stay_common(ranks, tmp_path):
    path = tmp_path / "rng.pt"
    saved = ranks.run(streams, path, False, 3, False, world_size=2)
    assert saved[0] == saved[1]
    assert ranks.run(streams, path, True, 4, world_size=4) == [saved[0]] * 4


# what cannot go on


def refusals(path):
    fabric = launched()
    found = []

    def note(call):
        with pytest.raises(FabricError) as caught:
            call()
        found.append((type(caught.value).__name__, str(caught.value)))

    loader = make(fabric, "map", 8, 4, 0)
    next(iter(loader))
    state = loader.state_dict()
    note(lambda: make(fabric, "stream", 8, 4, 0).load_state_dict(state))
    note(lambda: make(fabric, "map", 8, 4, 0).load_state_dict({"samples": 3}))
    note(lambda: make(fabric, "map", 8, 4, 0).load_state_dict(3))
    longer = make(fabric, "map", 9, 4, 0)
    longer.load_state_dict(state)
    note(lambda: iter(longer))
    parts = make(fabric, "parts", 8, 4, 0)
    own = parts.state_dict()
    note(lambda: make(fabric, "parts", 8, 4, 0).load_state_dict({**own, "ranks": own["ranks"] * 2}))
    workers = make(fabric, "parts", 8, 4, 1)
    workers.load_state_dict(own)
    note(lambda: iter(workers))
    return found


def test_positions_that_do_not_fit_are_refused(ranks, tmp_path):
    first, second = ranks.run(refusals, tmp_path / "x.pt", world_size=2)
    assert first == second
    other_kind, no_state, number, length, worlds, workers = first
    assert "saved in a loader of kind 'samples', but this one is of kind 'stream'" in other_kind[1]
    assert no_state == (
        "ArgumentTypeError",
        "load_state_dict of a loader got {'samples': 3}, which is not a loader's state. Pass the value of "
        "loader.state_dict().",
    )
    assert "got 3, which is not" in number[1]
    assert "was saved in data of length 8, but the length is 9 now" in length[1]
    assert "loader.set_epoch(1)" in length[1]
    assert "was saved on 4 ranks, and there are 2" in worlds[1]
    assert "saved with 0 workers, but the loader has 1" in workers[1]


def position_on_rank_zero():
    fabric = launched()
    parts = make(fabric, "parts", 8, 4, 0)
    try:
        if fabric.global_rank == 0:
            parts.state_dict()
        else:
            fabric.barrier("end")
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_a_position_of_all_ranks_that_one_rank_asks_for(ranks):
    first, second = ranks.run(position_on_rank_zero, world_size=2)
    assert first == second
    assert "loader" in first
    assert "barrier('end')" in first


def unsized_position():
    class Odd(DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    fabric = launched()
    loader = fabric.setup_dataloaders(Odd(Draws(8), batch_size=2))
    rows = [batch[:, 0].tolist() for batch in loader]
    with pytest.raises(UsageError, match="The position of Odd is unknown") as caught:
        loader.state_dict()
    return rows, str(caught.value)


def test_a_loader_with_an_iteration_of_its_own_runs_but_has_no_position(ranks):
    for rank, (rows, text) in enumerate(ranks.run(unsized_position, world_size=2)):
        assert rows == [[rank, rank + 2], [rank + 4, rank + 6]]
        assert "a DataLoader that does not override __iter__." in text


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("map", 0), ("map", 2), ("stateful", 2)])
def test_every_place_to_end_at_in_new_processes(ranks, tmp_path, kind, workers):
    arguments = (kind, 18, 4, workers)
    whole = ranks.run(train, *arguments, tmp_path / "whole.pt", None, None, world_size=2)
    steps = len(whole[0]) // 2
    with RankPool(2) as others:
        for stop in (0, 1, steps // 2, steps - 1, steps, steps + 1, 2 * steps):
            path = tmp_path / f"{stop}.pt"
            first = ranks.run(train, *arguments, path, None, stop, world_size=2)
            rest = others.run(train, *arguments, path, stop, None, world_size=2)
            assert [one + other for one, other in zip(first, rest, strict=True)] == whole, stop


def saved_metric(path, persistent):
    fabric = launched()
    metric = torchmetrics.MeanMetric(sync_on_compute=False)
    metric.persistent(persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.save(path, {"metric": metric})  # no updates
        metric.update(fabric.global_rank)
        metric.reset()
        fabric.save(path, {"metric": metric})
    metric.update(fabric.global_rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fabric.save(path, {"metric": metric})
    return [str(one.message).partition(" for ")[0] for one in said]


@pytest.mark.parametrize(
    ("persistent", "world", "text"),
    [
        (False, 1, ["The checkpoint has none of its updates"]),
        (False, 2, ["The checkpoint has none of its updates"]),
        (True, 1, []),
        (True, 2, ["The checkpoint has the updates of rank 0 of 2 only"]),
    ],
)
def test_updates_of_a_metric_that_a_file_does_not_have(ranks, tmp_path, persistent, world, text):
    found = ranks.run(saved_metric, str(tmp_path / "a"), persistent, world_size=world)
    assert found == [text, *[[]] * (world - 1)]


def overflows(strategy, path, start, stop, precision="16-mixed"):
    """Losses of steps that overflow at scales above 256, and the scale."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    state = {"model": model, "optimizer": optimizer}
    if start:
        fabric.load(path, state)
    losses = []
    for _ in range(start, stop):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * 200
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    fabric.save(path, state)
    return losses, fabric.strategy.precision.state_dict()


@pytest.mark.parametrize(
    ("first", "then"), [("ddp", "ddp"), ("ddp", "fsdp"), ("fsdp", "zero1"), ("zero2", "ddp")]
)
def test_the_loss_scale_continues(ranks, tmp_path, first, then):
    path = str(tmp_path / "a")
    whole, scale = ranks.run(overflows, first, path, 0, 12, world_size=2)[0]
    before, _ = ranks.run(overflows, first, path, 0, 5, world_size=2)[0]
    after, resumed = ranks.run(overflows, then, path, 5, 12, world_size=2)[0]
    assert before + after == pytest.approx(whole)
    assert whole[-1] < whole[0], "no step was made"
    assert resumed == scale
    other, nothing = ranks.run(overflows, then, path, 12, 13, "bf16-mixed", world_size=2)[0]
    assert (len(other), nothing) == (1, {})


def scale_after_two_optimizers(path, saves):
    """The scaler after steps of two optimizers by one backward each, which overflow at first."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="16-mixed")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    one, two = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in net]
    model, one, two = fabric.setup(net, one, two)
    for _ in range(6):
        one.zero_grad()
        two.zero_grad()
        fabric.backward(model(torch.ones(2, 4)).square().mean() * 5000)
        one.step()
        if saves:
            fabric.save(path, {"one": one, "two": two})
        two.step()
    return fabric.strategy.precision.state_dict()


def test_a_save_between_two_steps_does_not_change_the_loss_scale(tmp_path):
    expected = scale_after_two_optimizers(tmp_path / "c", False)
    assert expected["scale"] < 65536.0
    assert scale_after_two_optimizers(tmp_path / "c", True) == expected
