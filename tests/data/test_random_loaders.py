"""Random programs with loaders: what each rank gets, against the rule that the README states.

The order of an epoch is what one rank sees by itself; the rule is written here once more, by itself.
"""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from data_cases import Indices, in_workers, launched
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2


class Stream(IterableDataset):
    """Numbers, perhaps in an order that the global streams decide."""

    def __init__(self, n, shuffled):
        self.n, self.shuffled = n, shuffled

    def numbers(self):
        items = list(self.share())
        if self.shuffled:
            random.shuffle(items)
        return items

    def share(self):
        return range(self.n)

    def __iter__(self):
        return iter(self.numbers())


class Stateful(Stream):
    """The same, able to say where it is."""

    at, items = 0, None

    def __iter__(self):
        if self.items is None:
            self.items, self.at = self.numbers(), 0
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.items = None

    def state_dict(self):
        return {"at": self.at, "items": self.items}

    def load_state_dict(self, state):
        self.at, self.items = state["at"], state["items"]


class OwnShare(Stream):
    """Shares itself out over ranks and workers."""

    def __init__(self, n, shuffled, rank, world):
        super().__init__(n, shuffled)
        self.place, self.places = rank, world

    def share(self):
        info = get_worker_info()
        if info is None:
            return range(self.place, self.n, self.places)
        return range(self.place + self.places * info.id, self.n, self.places * info.num_workers)


class Drawn(Sampler):
    """Draws at once, from a generator of its own."""

    def __init__(self, n):
        self.n, self.generator = n, torch.Generator().manual_seed(5)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Buckets:
    """A batch sampler in an order that the global streams decide."""

    def __init__(self, n, batch):
        self.n, self.batch = n, batch

    def __len__(self):
        return (self.n + self.batch - 1) // self.batch

    def __iter__(self):
        items = random.sample(range(self.n), self.n)
        return iter([items[at : at + self.batch] for at in range(0, self.n, self.batch)])


def made(program, batch, rank, world):
    """The user's loader."""
    n, kind, shuffled = program["n"], program["kind"], program["shuffled"]
    keywords = {"collate_fn": list, **in_workers(program["workers"])}
    if program["workers"]:
        keywords["persistent_workers"] = program["persistent"]
    if kind == "buckets":
        return DataLoader(Indices(n), batch_sampler=Buckets(n, batch), **keywords)
    keywords |= {"batch_size": batch, "drop_last": program["drop_last"]}
    if kind == "map":
        return DataLoader(Indices(n), shuffle=shuffled, **keywords)
    if kind == "given":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Indices(n), shuffle=True, generator=generator, **keywords)
    if kind == "drawn":
        return DataLoader(Indices(n), sampler=Drawn(n), **keywords)
    if kind == "weighted":
        return DataLoader(Indices(n), sampler=WeightedRandomSampler([1.0] * n, n), **keywords)
    if kind == "distributed":
        sampler = DistributedSampler(Indices(n), world, rank, shuffle=shuffled)
        return DataLoader(Indices(n), sampler=sampler, **keywords)
    if kind == "own":
        return DataLoader(OwnShare(n, shuffled, rank, world), **keywords)
    return DataLoader((Stream if kind == "stream" else Stateful)(n, shuffled), **keywords)


def run(program, batch, state=None, stop=None, leave=None, beside=False):
    """([(epoch, batch), ...], position, length) of a run that ends after `stop` steps, and leaves each epoch
    after `leave` batches; `beside`: another loader is iterated meanwhile.
    """
    fabric = launched()
    with warnings.catch_warnings(), torch.set_grad_enabled(program["train"]):
        warnings.simplefilter("ignore")
        other = iter(fabric.setup_dataloaders(DataLoader(Indices(200), 1, shuffle=True)) if beside else ())
        loader = made(program, batch, fabric.global_rank, fabric.world_size)
        ready = fabric.setup_dataloaders(loader, uneven=program["uneven"])
        if state is not None:
            ready.load_state_dict(copy.deepcopy(state))
        seen = []
        for epoch in range(0 if state is None else state["epoch"], EPOCHS):
            for number, items in enumerate(ready, 1):
                random.random(), torch.rand(3), next(other, None)
                seen.append((epoch, items))
                if number == leave or len(seen) == stop:
                    break
            if len(seen) == stop:
                break
        length = len(ready) if not isinstance(loader.dataset, IterableDataset) else None
        return seen, ready.state_dict(), length


def rule(order, world, batch, drop_last, uneven):
    """Each rank's batches; `batch` None: what is ordered are whole batches."""
    size = world * (batch or 1)
    full = len(order) // size
    parts = [[order[at * size : (at + 1) * size][rank::world] for at in range(full)] for rank in range(world)]
    rest = [] if drop_last else order[full * size :]
    if uneven == "pad":
        rest = rest + (order * world)[: -len(rest) % world]
    elif uneven == "drop":
        rest = rest[: len(rest) // world * world]
    for rank, mine in enumerate(parts):
        if uneven == "exact" and batch and full and len(rest) < world:
            mine[-1] = mine[-1] + rest[rank::world]
        elif rest[rank::world]:
            mine.append(rest[rank::world])
    return parts if batch else [[items[0] for items in mine] for mine in parts]


def of_epoch(seen, epoch):
    return [items for each, items in seen if each == epoch]


def drawn(seed):
    """A program, its number of ranks and its batch size."""
    rng = random.Random(seed)
    kinds = (
        "map",
        "map",
        "weighted",
        "given",
        "drawn",
        "buckets",
        "stream",
        "stateful",
        "own",
        "distributed",
    )
    program = {
        "kind": rng.choice(kinds),
        "n": rng.choice([1, 2, 3, 5, 7, 8, 12, 13, 17, 24]),
        "shuffled": rng.random() < 0.6,
        "workers": rng.choice([0, 0, 0, 1, 2]),
        "persistent": rng.random() < 0.4,
        "drop_last": rng.random() < 0.25,
        "train": rng.random() < 0.6,
        "uneven": rng.choice([None, None, "exact", "pad", "drop"]),
    }
    if program["kind"] in ("own", "distributed") and program["uneven"] == "pad":
        program["uneven"] = None
    return program, rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 3, 4]), rng


def check_shares(ranks, program, batch, world, full):
    kind = program["kind"]
    if kind == "distributed":
        return
    if kind == "own":
        items = sorted(x for seen, _, _ in full for part in of_epoch(seen, 0) for x in part)
        steps = {len(seen) for seen, _, _ in full}
        together = program["uneven"] == "drop" or (program["train"] and program["uneven"] is None)
        assert len(set(items)) == len(items)
        assert len(steps) == 1 if together else program["drop_last"] or items == list(range(program["n"]))
        return
    alone = {**program, "drop_last": False, "uneven": "exact"}
    alone["workers"] *= kind == "given"  # torch draws their seed from the generator
    whole = kind == "buckets"
    ((seen, _, _),) = ranks.run(run, alone, batch if whole else 1, world_size=1)
    default = (
        "exact" if kind in ("stream", "stateful") or (kind == "map" and not program["shuffled"]) else "pad"
    )
    for epoch in range(EPOCHS):
        order = [items if whole else items[0] for items in of_epoch(seen, epoch)]
        drops = program["drop_last"] and not whole
        expected = rule(order, world, None if whole else batch, drops, program["uneven"] or default)
        assert [of_epoch(mine, epoch) for mine, _, _ in full] == expected
        assert all([length in (None, len(mine)) for (_, _, length), mine in zip(full, expected, strict=True)])


def check(ranks, seed):
    program, world, batch, rng = drawn(seed)
    full = ranks.run(run, program, batch, world_size=world)
    check_shares(ranks, program, batch, world, full)
    per_rank = [seen for seen, _, _ in full]
    if len({len(seen) for seen in per_rank}) > 1:
        return
    beside = ranks.run(run, program, batch, None, None, None, True, world_size=world)
    assert [seen for seen, _, _ in beside] == per_rank, "another loader made a difference"
    if program["kind"] not in ("stateful", "given"):  # which go on where they were left
        left = ranks.run(run, program, batch, None, None, 1, world_size=world)
        firsts = [[(e, items) for e in range(EPOCHS) for items in of_epoch(s, e)[:1]] for s in per_rank]
        assert [seen for seen, _, _ in left] == firsts, "leaving an epoch made a difference"
    stop = rng.randrange(1, len(per_rank[0]) + 1) if per_rank[0] else None
    first = ranks.run(run, program, batch, None, stop, world_size=world)
    rest = ranks.run(run, program, batch, first[0][1], world_size=world)
    assert [a[0] + b[0] for a, b in zip(first, rest, strict=True)] == (per_rank if stop else [[]] * world)
    if (
        program["kind"] in ("map", "weighted", "given", "drawn", "stream", "stateful")
        and program["n"] % (world * batch) == 0
    ):
        ((alone, _, _),) = ranks.run(run, program, world * batch, first[0][1], world_size=1)
        joined = [
            sorted(x for _, part in step for x in part) for step in zip(*[r[0] for r in rest], strict=True)
        ]
        assert [sorted(items) for _, items in alone] == joined, "going on on one rank made a difference"


@pytest.mark.parametrize("seed", range(12))
def test_random_loaders_keep_to_the_rule(ranks, seed):
    check(ranks, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_many_random_loaders_keep_to_the_rule(ranks, block):
    for seed in range(100 + 10 * block, 110 + 10 * block):
        try:
            check(ranks, seed)
        except BaseException:
            print(f"seed {seed}: {drawn(seed)[:3]}")
            raise
