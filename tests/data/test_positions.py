"""A run that is interrupted, anywhere and any number of times, sees what an uninterrupted one sees."""

from __future__ import annotations

import itertools
import pickle
import random
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fabric.data.loader import _FabricDataLoader
from fabric.data.rules import Shard
from fabric.data.sharding import shard_loader
from fabric.utilities.seed import collect_rng_states, set_rng_states

EPOCHS = 2


class Indices(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Drawing(Indices):
    """What each library draws for a sample."""

    def __getitem__(self, index):
        return index, random.random(), float(torch.rand(()))


class Stream(IterableDataset):
    """n numbers, shuffled by the global streams at the start, and with one draw each."""

    def __init__(self, n, shuffle=False):
        self.n = n
        self.shuffle = shuffle

    def items(self):
        items = list(range(self.n))
        if self.shuffle:
            random.shuffle(items)
        return items

    def __iter__(self):
        for item in self.items():
            yield (item, random.random()) if self.shuffle else item


class Stateful(Stream):
    """Says where it is, and goes there."""

    at = 0
    order: list[int] | None = None

    def __iter__(self):
        if self.order is None:
            self.order, self.at = self.items(), 0
        while self.at < len(self.order):
            self.at += 1
            item = self.order[self.at - 1]
            yield (item, random.random()) if self.shuffle else item
        self.order = None

    def state_dict(self):
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]


class Parts(IterableDataset):
    """Takes the part of its rank and worker itself; parts are of different lengths."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world_size = n, rank, world

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = list(range(self.n))
        random.Random(4).shuffle(order)
        place = self.rank * workers + worker
        yield from (x for x in order if x % (self.world_size * workers) == place)


class StatefulParts(Parts):
    at = 0

    def __iter__(self):
        items = list(super().__iter__())
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Bucketed:
    """A batch sampler with required arguments, shuffled by Python's generator."""

    def __init__(self, n, size):
        self.n, self.size = n, size

    def __iter__(self):
        chunks = [list(range(i, min(i + self.size, self.n))) for i in range(0, self.n, self.size)]
        random.shuffle(chunks)
        return iter(chunks)

    def __len__(self):
        return (self.n + self.size - 1) // self.size


def collate(samples):
    return samples


def generator():
    return torch.Generator().manual_seed(7)


KINDS = {
    "order": lambda n, b, r, w, k: DataLoader(Indices(n), b, **k),
    "shuffled": lambda n, b, r, w, k: DataLoader(Indices(n), b, shuffle=True, **k),
    "generator": lambda n, b, r, w, k: DataLoader(Indices(n), b, shuffle=True, generator=generator(), **k),
    "drop-last": lambda n, b, r, w, k: DataLoader(Indices(n), b, shuffle=True, drop_last=True, **k),
    "weighted": lambda n, b, r, w, k: DataLoader(
        Indices(n), b, sampler=WeightedRandomSampler([1.0] * n, 2 * n), **k
    ),
    "weighted-generator": lambda n, b, r, w, k: DataLoader(
        Indices(n), b, sampler=WeightedRandomSampler([1.0] * n, n, generator=generator()), **k
    ),
    "repeated": lambda n, b, r, w, k: DataLoader(
        Indices(n), b, sampler=RandomSampler(range(n), num_samples=2 * n + 1), **k
    ),
    "bucketed": lambda n, b, r, w, k: DataLoader(Indices(n), batch_sampler=Bucketed(n, b), **k),
    "single": lambda n, b, r, w, k: DataLoader(Indices(n), batch_size=None, shuffle=True, **k),
    "stream": lambda n, b, r, w, k: DataLoader(Stream(n), b, **k),
    "shuffled-stream": lambda n, b, r, w, k: DataLoader(Stream(n, True), b, **k),
    "single-stream": lambda n, b, r, w, k: DataLoader(Stream(n), None, **k),
    "stateful": lambda n, b, r, w, k: DataLoader(Stateful(n), b, **k),
    "shuffled-stateful": lambda n, b, r, w, k: DataLoader(Stateful(n, True), b, **k),
    "parts": lambda n, b, r, w, k: DataLoader(Parts(n, r, w), b, **k),
    "stateful-parts": lambda n, b, r, w, k: DataLoader(StatefulParts(n, r, w), b, **k),
    "distributed": lambda n, b, r, w, k: DataLoader(
        Indices(n), b, sampler=DistributedSampler(Indices(n), w, r, seed=3), **k
    ),
}
OF_ONE_WORLD = ("repeated", "bucketed", "single", "single-stream", "parts", "stateful-parts", "distributed")


def make(kind, n, batch, rank=0, world=1, workers=0, seed=5, **keywords):
    keywords = {"num_workers": workers, "collate_fn": collate, **keywords}
    if workers:
        keywords["multiprocessing_context"] = "fork"
    loader = KINDS[kind](n, batch, rank, world, keywords)
    source = shard_loader(loader, Shard(rank, world), seed, None)
    return _FabricDataLoader(source.loader, user_loader=loader, adapter=source)


def run(loader, stops=(), remake=None):
    """Two epochs of batches; before those whose numbers are in `stops` the run ends and goes on anew."""
    seen, count = [], 0
    epoch = 0
    while epoch < EPOCHS:
        mine = [] if len(seen) <= epoch else seen.pop()
        interrupted = False
        batches = iter(loader)
        while True:
            if count in stops:
                stops = [stop for stop in stops if stop != count]
                state = pickle.loads(pickle.dumps((loader.state_dict(), collect_rng_states())))
                batches, loader = None, remake()
                loader.load_state_dict(state[0])
                set_rng_states(state[1])
                interrupted = True
                break
            batch = next(batches, None)
            if batch is None:
                break
            mine.append(batch)
            count += 1
        seen.append(mine)
        epoch = loader.state_dict()["epoch"] if interrupted else epoch + 1
    return seen


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(1, 23),
    batch=st.integers(1, 4),
    place=st.sampled_from([(r, w) for w in (1, 2, 3) for r in range(w)]),
    stops=st.lists(st.integers(0, 30), max_size=3, unique=True),
)
@example(kind="generator", n=9, batch=2, place=(0, 1), stops=[7])  # in the second epoch
@example(kind="stateful-parts", n=20, batch=2, place=(1, 2), stops=[7])
def test_an_interrupted_run_equals_an_uninterrupted_one(kind, n, batch, place, stops):
    rank, world = place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is read again from the epoch's beginning")
        warnings.filterwarnings("ignore", message="Some ranks get no batch in the last round")
        random.seed(0)
        torch.manual_seed(0)
        whole = run(make(kind, n, batch, rank, world))
        random.seed(0)
        torch.manual_seed(0)
        assert (
            run(make(kind, n, batch, rank, world), stops, lambda: make(kind, n, batch, rank, world)) == whole
        )


@settings(deadline=None, max_examples=12)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(1, 15),
    batch=st.integers(1, 3),
    place=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    workers=st.integers(1, 2),
    stops=st.lists(st.integers(0, 12), max_size=2, unique=True),
)
def test_an_interrupted_run_with_workers_equals_an_uninterrupted_one(kind, n, batch, place, workers, stops):
    rank, world = place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is read again from the epoch's beginning")
        warnings.filterwarnings("ignore", message="Some ranks get no batch in the last round")
        whole = run(make(kind, n, batch, rank, world, workers))
        again = run(
            make(kind, n, batch, rank, world, workers),
            stops,
            lambda: make(kind, n, batch, rank, world, workers),
        )
    assert again == whole


def global_batches(kind, n, size, world, state, count):
    """The next `count` global batches (None: of the epoch), and the state after, which ranks share."""
    loaders = [make(kind, n, size // world, rank, world) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    per_rank = [list(itertools.islice(loader, count)) for loader in loaders]
    found = [sorted(itertools.chain(*step)) for step in zip(*per_rank, strict=True)]
    states = [loader.state_dict() for loader in loaders]
    assert all(str(other) == str(states[0]) for other in states)
    return found, states[0]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(set(KINDS) - set(OF_ONE_WORLD))),
    rounds=st.integers(1, 6),
    worlds=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)), max_size=4),
)
def test_global_batches_stay_when_the_number_of_ranks_changes(kind, rounds, worlds):
    n, size = 4 * rounds, 4
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is read again from the epoch's beginning")
        random.seed(0)
        torch.manual_seed(0)
        whole, _ = global_batches(kind, n, size, 1, None, None)
        state, found = None, []
        for world, count in worlds:
            more, state = global_batches(kind, n, size, world, state, count)
            found += more
        if state is None or state["epoch"] == 0:
            found += global_batches(kind, n, size, 1, state, None)[0]
        assert found[: len(whole)] == whole


@pytest.mark.parametrize("kind", ["generator", "weighted-generator", "shuffled"])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_zip_that_is_resumed_at_the_end_of_an_epoch(kind, taken):
    """The second loader's iteration is left before its first batch; its generator must draw all the same."""

    def epochs(loaders, count):
        return [list(zip(*loaders, strict=False)) for _ in range(count)]

    loaders = [make(kind, 6, 2) for _ in range(2)]
    whole = epochs(loaders, 3)
    loaders = [make(kind, 6, 2) for _ in range(2)]
    assert list(itertools.islice(zip(*loaders, strict=False), taken)) == whole[0][:taken]
    states = [loader.state_dict() for loader in loaders]
    loaders = [make(kind, 6, 2) for _ in range(2)]
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    assert epochs(loaders, 3) == [whole[0][taken:], *whole[1:]]
