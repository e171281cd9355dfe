"""Iterable datasets that share themselves out over ranks without a word: found out by what they give."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from data_cases import Numbers, in_workers, launched, rows
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies import ModelParallelStrategy


class Closure(IterableDataset):
    """Every world-th number from the rank on, by a rank that was noted before."""

    def __init__(self, n, rank, world):
        self.n, self.place, self.places = n, rank, world

    def share(self):
        return self.place, self.places

    def __iter__(self):
        place, places = self.share()
        info = get_worker_info()
        if info is not None:
            place, places = place + places * info.id, places * info.num_workers
        return map(self.make, range(place, self.n, places))

    def make(self, item):
        return item


class Asking(Closure):
    def share(self):
        return dist.get_rank(), dist.get_world_size()


class Environment(Closure):
    def share(self):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Blocks(Closure):
    """As Hugging Face does where shards divide by ranks: whole parts one after the other."""

    def __iter__(self):
        place, places = self.share()
        return iter(range(self.n * place // places, self.n * (place + 1) // places))


class PerRankOnly(Closure):
    """Has a share for its rank, which every worker of it reads: torch's loaders repeat it in each worker."""

    def __iter__(self):
        return iter(range(self.place, self.n, self.places))


@dataclass
class Sample:
    text: str
    numbers: list[float]
    hidden: object = None


class Strings(Closure):
    def make(self, item):
        return f"item {item}"


class Dictionaries(Closure):
    def make(self, item):
        return {"x": torch.full((3,), float(item)), "label": item % 2}


class Bfloats(Closure):
    def make(self, item):
        return torch.tensor(item, dtype=torch.bfloat16, requires_grad=True).detach(), "constant"


class Objects(Closure):
    """What cannot be pickled, nor hashed, for a good part."""

    def make(self, item):
        return Sample(f"item {item}", [float(item)], lambda: item)


def numbers_of(batch):
    """The numbers that a batch was made of."""
    if isinstance(batch, list) and isinstance(batch[0], int):
        return batch
    if isinstance(batch, dict):
        return [int(x) for x in batch["x"][:, 0]]
    if isinstance(batch, list | tuple):
        first = batch[0]
        return [int(each.split()[1]) for each in batch] if isinstance(first, str) else first.int().tolist()
    return batch.tolist()


def plain_numbers(samples):
    return [int(sample.numbers[0]) for sample in samples]


def read(kind, n, batch, workers, uneven="exact", epochs=2, **keywords):
    fabric = launched()
    rank, world = fabric.global_rank, fabric.world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        return epochs_of(fabric, kind, n, batch, workers, uneven, epochs, keywords)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def epochs_of(fabric, kind, n, batch, workers, uneven, epochs, keywords):
    rank, world = fabric.global_rank, fabric.world_size
    collate = plain_numbers if kind is Objects else None
    loader = DataLoader(kind(n, rank, world), batch, collate_fn=collate, **in_workers(workers), **keywords)
    ready = fabric.setup_dataloaders(loader, uneven=uneven)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        seen = [[numbers_of(batch) for batch in ready] for _ in range(epochs)]
    plain = [numbers_of(batch) for batch in loader]
    return seen, plain, [str(w.message) for w in caught if "streams of" in str(w.message)]


KINDS = [Closure, Asking, Environment, Strings, Dictionaries, Bfloats, Objects]


@pytest.mark.parametrize(
    ("kind", "workers"), [(Blocks, 0), *[(kind, workers) for kind in KINDS for workers in (0, 2)]]
)
def test_what_shares_itself_out_is_left_alone_and_that_is_said_once(ranks, kind, workers):
    results = ranks.run(read, kind, 21, 3, workers, world_size=2)
    for rank, (seen, plain, told) in enumerate(results):
        assert seen == [plain, plain], "not what torch's own loader gives"
        assert len(told) == (rank == 0)
    both = [x for seen, _, _ in results for batch in seen[0] for x in batch]
    assert sorted(both) == list(range(21))
    text = results[0][2][0]
    assert text.startswith(f"The ranks' streams of {kind.__name__} begin with different samples:\n  rank 0: ")
    assert "shard_iterable=False) if that is right" in text


def test_a_share_that_is_not_split_over_workers_is_as_in_torch(ranks):
    for seen, plain, _ in ranks.run(read, PerRankOnly, 8, 2, 2, world_size=2):
        assert seen == [plain, plain]
        assert set(Counter(x for batch in plain for x in batch).values()) == {2}


@pytest.mark.parametrize("workers", [0, 2])
def test_small_and_empty_shares(ranks, workers):
    for n, world in ((1, 2), (2, 2), (2, 3), (5, 3)):
        results = ranks.run(read, Closure, n, 4, workers, world_size=world)
        assert sorted(x for seen, _, _ in results for batch in seen[1] for x in batch) == list(range(n))
    assert [seen for seen, _, _ in ranks.run(read, Closure, 0, 4, workers, world_size=2)] == [[[], []]] * 2


def test_workers_that_live_on(ranks):
    for seen, plain, _ in ranks.run(read, Closure, 21, 3, 2, persistent_workers=True, epochs=3, world_size=2):
        assert seen == [plain] * 3


class WithLength(Closure):
    """Tells how many there are on all ranks together, as is common."""

    def __len__(self):
        return self.n


def trained(n, batch, uneven, kind=Closure):
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(kind(n, fabric.global_rank, 2), batch), uneven=uneven)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = rows(ready)
        except ConfigurationError as error:
            found = str(error)
    return found, len(caught), float(fabric.all_reduce(1.0, reduce_op="sum"))


def test_ranks_that_train_on_their_own_shares_stop_together(ranks):
    first, second = ranks.run(trained, 5, 1, None, world_size=2)
    assert first == ([[0], [2]], 2, 2.0)
    assert second == ([[1], [3]], 0, 2.0)
    first, second = ranks.run(trained, 5, 1, None, WithLength, world_size=2)
    assert (first[0], second[0]) == ([[0], [2]], [[1], [3]]), (
        "a length that is that of all ranks was believed"
    )
    text = ranks.run(trained, 5, 1, "error", world_size=2)[1][0]
    assert text.startswith("The ranks' data are of different lengths")
    for text, _, _ in ranks.run(trained, 4, 1, "pad", world_size=2):
        assert text.startswith('uneven="pad" repeats samples, but Closure shards its data itself.')


def endless():
    fabric = launched()

    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count(fabric.global_rank * 1000)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = fabric.setup_dataloaders(DataLoader(Endless(), 2))
        return [batch.tolist() for batch in itertools.islice(ready, 3)]


def test_endless_shares(ranks):
    assert ranks.run(endless, world_size=2) == [
        [[0, 1], [2, 3], [4, 5]],
        [[1000, 1001], [1002, 1003], [1004, 1005]],
    ]


# read once, asked once


class OneShot(IterableDataset):
    """A source that can be read only once, such as a connection."""

    def __init__(self, items):
        self.items, self.begun = iter(items), 0

    def __iter__(self):
        self.begun += 1
        return self.items


def one_shot(own):
    fabric = launched()
    data = OneShot(range(fabric.global_rank, 20, 2) if own else range(20))
    ready = fabric.setup_dataloaders(DataLoader(data, 3), uneven="exact")
    asked = count_messages(ready)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = rows(ready)
        begun = data.begun
        data.items = iter(range(12))
        rows(ready)
        with torch.no_grad():
            rows(ready)
    return seen, begun, asked


def count_messages(ready):
    asked = []
    exchange = ready._rank_group.exchange
    ready._rank_group = ready._rank_group._replace(exchange=lambda value: asked.append(1) or exchange(value))
    return asked


@pytest.mark.parametrize("own", [True, False])
def test_nothing_is_read_twice_and_one_message_settles_it(ranks, own):
    results = ranks.run(one_shot, own, world_size=2)
    assert sorted(x for seen, _, _ in results for batch in seen for x in batch) == list(range(20))
    for _, begun, asked in results:
        assert begun == 1
        assert len(asked) == (1 if own else 3), "beside it, only the message per epoch of training"


# neither one stream nor shares


class ByHash(Numbers):
    """The order of a set of strings, which differs by process."""

    def __init__(self, n, rank):
        super().__init__(n)
        self.rng = random.Random(rank)

    def __iter__(self):
        items = list(range(self.n))
        self.rng.shuffle(items)
        return iter(items)


class Noisy(ByHash):
    """The same samples in the same order, with noise of each rank's own."""

    def __iter__(self):
        return iter([{"clean": x, "noisy": x + self.rng.random()} for x in range(self.n)])


class LaterByHash(ByHash):
    """In order in its first epoch."""

    def __init__(self, n, rank):
        super().__init__(n, rank)
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        return super().__iter__() if self.epochs > 1 else iter(range(self.n))


def refused(kind, workers, shard_iterable=None):
    fabric = launched()
    loader = DataLoader(kind(24, fabric.global_rank), 4, **in_workers(workers))
    ready = fabric.setup_dataloaders(loader, shard_iterable=shard_iterable, uneven="exact")
    try:
        if kind is LaterByHash:
            rows(ready)
        found = [x for batch in ready for x in (batch["clean"] if kind is Noisy else batch).tolist()]
    except (ConfigurationError, UsageError) as error:
        found = str(error)
    return found, float(fabric.all_reduce(1.0, reduce_op="sum"))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_that_differs_by_rank_is_an_error_that_names_it(ranks, workers):
    first, second = ranks.run(refused, ByHash, workers, world_size=2)
    assert first == second
    text = first[0]
    assert "streams of ByHash are neither one stream nor disjoint shards: some of their samples, or" in text
    assert "  rank 0: " in text
    assert "sort items of a set or a directory" in text
    for shard_iterable in (False, True):
        first, second = ranks.run(refused, ByHash, workers, shard_iterable, world_size=2)
        assert len(first[0]) == len(second[0]) == (12 if shard_iterable else 24 * max(1, workers))


def test_noise_of_each_ranks_own_is_asked_about(ranks):
    for text, _ in ranks.run(refused, Noisy, 0, world_size=2):
        assert "some of their samples, or parts of them, are equal" in text
    results = ranks.run(refused, Noisy, 0, True, world_size=2)
    assert sorted(x for found, _ in results for x in found) == list(range(24))


def test_an_order_that_differs_in_a_later_epoch_is_told_at_the_second_batch(ranks):
    first, second = ranks.run(refused, LaterByHash, 0, world_size=2)
    assert first == second
    assert first[0].startswith("The ranks iterate this loader differently")


def rows_of_one_model(by_rank, data):
    strategy = ModelParallelStrategy(lambda model, mesh: model, data, tensor_parallel_size=2)
    fabric = launched(strategy)
    place = (fabric.global_rank, 4) if by_rank else fabric.strategy.data_rank
    ready = fabric.setup_dataloaders(DataLoader(Closure(8, *place), 2))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rows(ready)
    except ConfigurationError as error:
        return str(error)


def test_ranks_that_hold_parts_of_one_model_must_read_the_same_share(ranks):
    first, second = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    assert ranks.run(rows_of_one_model, False, 2, world_size=4) == [first, first, second, second]
    one = ranks.run(rows_of_one_model, True, 1, world_size=2)
    for text in [*one, *ranks.run(rows_of_one_model, True, 2, world_size=4)]:
        assert "ranks that must read the same data (of one pipeline, sequence or model) do not" in text


# positions


class Shuffled(Closure):
    """Its share, in an order that the global streams decide, with a draw for each sample."""

    def __iter__(self):
        items = list(super().__iter__())
        random.shuffle(items)
        for item in items:
            yield torch.tensor([item, random.random()])


class Stateful(Shuffled):
    """The same, able to say where it is."""

    at = 0
    items = None

    def __iter__(self):
        if self.items is None:
            self.items, self.at = list(Closure.__iter__(self)), 0
            random.shuffle(self.items)
        while self.at < len(self.items):
            self.at += 1
            yield torch.tensor([self.items[self.at - 1], random.random()])
        self.items = None

    def state_dict(self):
        return {"at": self.at, "items": self.items}

    def load_state_dict(self, state):
        self.at, self.items = state["at"], state["items"]


def resumed(kind, workers, stop):
    fabric = launched()

    def make():
        loader = DataLoader(kind(22, fabric.global_rank, fabric.world_size), 2, **in_workers(workers))
        return fabric.setup_dataloaders(loader, uneven="exact")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = make()
        expected = rows(whole) + rows(whole)
        first, seen = make(), []
        for _ in range(2):
            for batch in first:
                seen.append(batch.tolist())
                torch.rand(3), random.random()
                if len(seen) == stop:
                    break
            if len(seen) == stop:
                break
        again = make()
        again.load_state_dict(first.state_dict())
        seen += rows(again)
        if len(seen) < len(expected):
            seen += rows(again)
    return seen == expected, sorted({int(row[0]) for batch in expected for row in batch})


@pytest.mark.parametrize("kind", [Shuffled, Stateful])
@pytest.mark.parametrize("workers", [0, 2])
def test_own_shares_go_on_where_they_were(ranks, kind, workers):
    for stop in (1, 2, 3, 5, 6, 8):
        results = ranks.run(resumed, kind, workers, stop, world_size=2)
        assert [same for same, _ in results] == [True, True], stop
        assert sorted(x for _, numbers in results for x in numbers) == list(range(22))


def saved(path):
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(Closure(12, fabric.global_rank, fabric.world_size), 2))
    if fabric.world_size == 1:
        next(iter(ready))
        fabric.save(path, {"loader": ready})
        return ""
    fabric.load(path, {"loader": ready})
    try:
        rows(ready)
    except UsageError as error:
        return str(error)
    return ""


def test_a_position_in_the_stream_of_one_rank_is_refused_where_ranks_have_shares(ranks, tmp_path):
    ranks.run(saved, tmp_path / "one.pt", world_size=1)
    for text in ranks.run(saved, tmp_path / "one.pt", world_size=2):
        assert text.startswith("The loader's position was saved when all ranks read one stream of Closure")
