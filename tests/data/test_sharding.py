from __future__ import annotations

import itertools
import random
import warnings

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from fabric.core.errors import ConfigurationError
from fabric.data.rules import Shard
from fabric.data.sharding import shard_loader
from fabric.utilities.warnings import PossibleUserWarning
from fabric.wrappers import _FabricDataLoader


class Indices(Dataset):
    """Gives the index that it is asked for."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Bucketed:
    """A batch sampler with required arguments, of no base class, shuffled by Python's generator."""

    def __init__(self, lengths, size):
        self.lengths = lengths
        self.size = size
        self.told = []

    def __iter__(self):
        ranked = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        chunks = [ranked[i : i + self.size] for i in range(0, len(ranked), self.size)]
        random.shuffle(chunks)
        return iter(chunks)

    def __len__(self):
        return (len(self.lengths) + self.size - 1) // self.size

    def set_epoch(self, epoch):
        self.told.append(epoch)


class ForeignLoader(DataLoader):
    """Its constructor has nothing in common with DataLoader's, and may run once only."""

    built = 0

    def __init__(self, vocabulary, *, tokens_per_batch):
        type(self).built += 1
        self.vocabulary = vocabulary
        super().__init__(Indices(len(vocabulary)), batch_size=tokens_per_batch)

    def words(self):
        return len(self.vocabulary)


def shard(loader, rank=0, world=2, seed=0, uneven=None):
    source = shard_loader(loader, Shard(rank, world), seed, uneven)
    return _FabricDataLoader(source.loader, user_loader=loader, adapter=source)


def read(loader):
    """The batches of one epoch as lists."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def read_ranks(make, world=2, **kwargs):
    return [read(shard(make(), rank, world, **kwargs)) for rank in range(world)]


def flat(per_rank):
    return sorted(index for batches in per_rank for batch in batches for index in batch)


# which policy


@pytest.mark.parametrize(
    ("make", "counted"),
    [
        (lambda: DataLoader(Indices(9), batch_size=2), 9),
        (
            lambda: DataLoader(
                Indices(9), batch_sampler=BatchSampler(SequentialSampler(Indices(9)), 2, False)
            ),
            9,
        ),
        (lambda: DataLoader(Indices(9), sampler=list(range(9)), batch_size=2), 9),
        (lambda: DataLoader(Indices(9), batch_size=2, shuffle=True), 10),
        (lambda: DataLoader(Indices(9), batch_sampler=BatchSampler(RandomSampler(Indices(9)), 2, False)), 10),
        (lambda: DataLoader(Indices(9), sampler=SubsetRandomSampler(range(9)), batch_size=2), 10),
    ],
)
def test_data_in_order_are_exact_by_default_and_all_others_are_padded(make, counted):
    per_rank = read_ranks(make)
    assert set(flat(per_rank)) == set(range(9))
    assert len(flat(per_rank)) == counted


def test_uneven_is_passed_on_and_checked():
    make = lambda: DataLoader(Indices(9), batch_size=2, shuffle=True)  # noqa: E731
    assert flat(read_ranks(make, uneven="exact")) == list(range(9))
    assert len(flat(read_ranks(make, uneven="drop"))) == 8
    with pytest.raises(ConfigurationError, match="1 are left over"):
        shard(make(), uneven="error")
    with pytest.raises(ConfigurationError) as caught:
        shard(make(), uneven="join")
    assert str(caught.value) == "uneven='join' is unknown. Write one of 'pad', 'exact', 'drop', 'error'."


def test_whole_batches_are_padded_by_default_so_that_ranks_take_equal_numbers_of_steps():
    make = lambda: DataLoader(Indices(10), batch_sampler=Bucketed(list(range(10)), 2))  # noqa: E731
    assert [len(batches) for batches in read_ranks(make)] == [3, 3]
    make = lambda: DataLoader(Indices(5), batch_size=None)  # noqa: E731
    assert [len(batches) for batches in read_ranks(make)] == [3, 3]
    assert [len(batches) for batches in read_ranks(make, uneven="exact")] == [3, 2]


# the user's objects


def test_the_users_loader_and_torch_are_left_as_they_were():
    before = dict(vars(DataLoader)), DataLoader.__init__
    loader = DataLoader(Indices(8), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    state = dict(vars(loader))
    read(shard(loader))
    assert vars(loader) == state
    assert (dict(vars(DataLoader)), DataLoader.__init__) == before


def test_a_running_loaders_workers_are_not_shared():
    loader = DataLoader(Indices(8), batch_size=2, num_workers=1, persistent_workers=True)
    running = iter(loader)
    assert next(running).tolist() == [0, 1]
    assert read(shard(loader)) == [[0, 2], [4, 6]]
    assert [batch.tolist() for batch in running] == [[2, 3], [4, 5], [6, 7]]
    loader._iterator._shutdown_workers()


def test_a_subclass_with_a_foreign_constructor_is_not_built_again():
    ForeignLoader.built = 0
    loader = ForeignLoader("abcdefgh", tokens_per_batch=2)
    ranks = [shard(loader, rank) for rank in (0, 1)]
    assert ForeignLoader.built == 1
    assert all(rank.words() == 8 and isinstance(rank._dataloader, ForeignLoader) for rank in ranks)
    assert flat([read(rank) for rank in ranks]) == list(range(8))


def test_a_subclass_that_yields_from_an_iterator_of_its_own_is_refused():
    class Infinite(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.__dict__["running"] = super().__iter__()

        def __iter__(self):
            return self.running

    with pytest.raises(ConfigurationError) as caught:
        shard(Infinite(Indices(8), batch_size=2))
    assert str(caught.value) == (
        "Infinite keeps a running iterator in .running, so every rank would read all data. Pass a plain "
        "DataLoader, or shard it with a DistributedSampler and write setup_dataloaders(loader, "
        "use_distributed_sampler=False)."
    )
    assert read(shard(Infinite(Indices(4), batch_size=2), world=1)) == [[0, 1], [2, 3]]


def test_attributes_are_in_reach_through_the_loader_and_its_sampler():
    sampler = Bucketed([3, 1, 2, 4], 2)
    loader = DataLoader(Indices(4), batch_sampler=sampler)
    loader.note = "mine"
    ready = shard(loader)
    assert ready.note == "mine"
    assert ready.batch_sampler.size == 2
    assert len(ready.batch_sampler) == 1, "of this rank"
    assert isinstance(ready.batch_sampler, Bucketed)
    ready.batch_sampler.size = 1
    assert sampler.size == 1
    assert len(ready.batch_sampler) == 2
    plain = shard(DataLoader(Indices(8), 2))
    plain.batch_sampler.batch_size = 4
    assert (read(plain), len(plain)) == ([[0, 2, 4, 6]], 1)
    weights = WeightedRandomSampler([1.0] * 4, 4)
    shown = shard(DataLoader(Indices(4), sampler=weights, batch_size=2)).sampler
    assert isinstance(shown, WeightedRandomSampler)
    shown.num_samples = 2
    assert (len(shown), weights.num_samples, sorted(vars(weights)), len(list(shown))) == (
        2,
        2,
        ["generator", "num_samples", "replacement", "weights"],
        2,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucketing_batch_sampler_is_dealt_out_whole(rank):
    lengths = [random.Random(i).randrange(50) for i in range(24)]
    loader = DataLoader(Indices(24), batch_sampler=Bucketed(lengths, 3))
    whole = read(shard(loader, 0, 1))
    assert sorted(map(sorted, whole)) != whole, "this sampler shuffles"
    assert read(shard(loader, rank, 2)) == whole[rank::2]


def test_an_empty_batch_sampler_gives_no_batches():
    assert read(shard(DataLoader(Indices(3), batch_sampler=Bucketed([], 2)))) == []


def test_samplers_of_all_kinds_deal_out_what_one_rank_would_see():
    class Scrambled:
        """Draws from numpy and Python as it goes."""

        def __iter__(self):
            for _ in range(20):
                yield numpy.random.randint(50) + random.randrange(50)

        def __len__(self):
            return 20

    makers = [
        lambda: DataLoader(Indices(100), sampler=Scrambled(), batch_size=2),
        lambda: DataLoader(Indices(20), sampler=WeightedRandomSampler([1.0] * 20, 20), batch_size=2),
        lambda: DataLoader(Indices(40), sampler=SubsetRandomSampler(range(20, 40)), batch_size=2),
        lambda: DataLoader(Indices(20), shuffle=True, batch_size=2),
    ]
    for make in makers:
        one = [index for batch in read(shard(make(), 0, 1)) for index in batch]
        two = read_ranks(make)
        dealt = [pair for step in zip(*two, strict=True) for pair in zip(*step, strict=True)]
        assert [index for pair in dealt for index in pair] == one


def test_an_endless_sampler_stays_endless():
    class Endless:
        def __iter__(self):
            while True:
                yield random.randrange(100)

    one, *two = (
        list(itertools.islice(shard(DataLoader(Indices(100), sampler=Endless(), batch_size=2), r, w), 50))
        for r, w in [(0, 1), (0, 2), (1, 2)]
    )
    dealt = torch.stack([torch.stack(mine) for mine in two], dim=-1)  # (step, position, rank)
    assert dealt.flatten()[:100].tolist() == torch.stack(one).flatten().tolist()


def test_single_items_of_a_loader_without_batches():
    make = lambda: DataLoader(Indices(7), batch_size=None, sampler=RandomSampler(range(7)))  # noqa: E731
    ranks = [shard(make(), rank, uneven="exact") for rank in (0, 1)]
    assert [len(rank) for rank in ranks] == [4, 3]
    seen = [read(rank) for rank in ranks]
    assert sorted(seen[0] + seen[1]) == list(range(7))
    assert seen[0] != sorted(seen[0])


# what is left alone


class KnowsItsRank(SequentialSampler):
    num_replicas, rank = 2, 1

    def __iter__(self):
        return iter(range(1, 8, 2))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Indices(8), sampler=DistributedSampler(Indices(8), 2, 1, shuffle=False), batch_size=2),
        DataLoader(
            Indices(8),
            batch_sampler=BatchSampler(DistributedSampler(Indices(8), 2, 1, shuffle=False), 2, False),
        ),
        DataLoader(Indices(8), sampler=KnowsItsRank(Indices(8)), batch_size=2),
        DataLoader(Indices(8), batch_sampler=BatchSampler(KnowsItsRank(Indices(8)), 2, False)),
    ],
    ids=["distributed", "distributed-in-batches", "ranked", "ranked-in-batches"],
)
def test_a_loader_that_the_user_sharded_is_not_sharded_again(loader):
    assert read(shard(loader, 1)) == [[1, 3], [5, 7]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Doubled(DataLoader):
    """A loader that does something of its own with the batches."""

    def __iter__(self):
        return ([2 * int(x) for x in batch] for batch in super().__iter__())


def test_a_stream_that_cannot_be_shared_out_is_warned_of():
    loader = Doubled(Stream(), batch_size=2)
    with pytest.warns(PossibleUserWarning) as caught:
        ready = shard(loader)
    assert str(caught[0].message) == (
        "Each of the 2 ranks will read all of Stream: it is a data pipe, or its loader overrides __iter__, "
        "so Fabric cannot shard it. Shard in its __iter__, for example `yield from "
        "itertools.islice(items, fabric.global_rank, None, fabric.world_size)`, and write "
        "setup_dataloaders(loader, shard_iterable=False)."
    )
    assert read(ready) == [[0, 2], [4, 6]]
    assert ready.dataset is loader.dataset


def test_one_rank_and_a_dataset_that_knows_its_rank_are_no_reason_to_warn():
    class Ranked(Stream):
        rank, world_size = 1, 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(DataLoader(Stream()), world=1)
        shard(DataLoader(Ranked()))


# epochs


def test_orders_differ_by_epoch_are_equal_across_runs_and_ranks_are_disjoint():
    def run():
        ranks = [shard(DataLoader(Indices(32), batch_size=4, shuffle=True), rank, seed=7) for rank in (0, 1)]
        return [[read(rank) for _ in range(3)] for rank in ranks]

    first, second = run(), run()
    assert first == second
    for epochs in first:
        assert len({str(epoch) for epoch in epochs}) == 3
    for ours, theirs in zip(*first, strict=True):
        assert flat([ours, theirs]) == list(range(32))


def test_a_break_advances_the_epoch():
    broken, whole = (shard(DataLoader(Indices(32), batch_size=4, shuffle=True)) for _ in range(2))
    for _ in broken:
        break
    read(whole)
    assert read(broken) == read(whole)


def test_set_epoch_chooses_the_order():
    loader = shard(DataLoader(Indices(32), batch_size=4, shuffle=True))
    epochs = [read(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert [read(loader), read(loader)] == epochs[1:]


def test_two_passes_at_once_have_their_own_orders():
    loader, alone = (shard(DataLoader(Indices(16), batch_size=4, shuffle=True)) for _ in range(2))
    expected = [read(alone), read(alone)]
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert [list(side) for side in zip(*pairs, strict=True)] == expected


def test_the_users_sampler_batch_sampler_and_dataset_are_told_the_epoch():
    class Told(Indices):
        def __init__(self, n):
            super().__init__(n)
            self.told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    class ToldSampler(SequentialSampler):
        def __init__(self, source):
            super().__init__(source)
            self.told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    dataset = Told(4)
    sampler, inner = ToldSampler(dataset), ToldSampler(dataset)
    batches = Bucketed([1, 2], 1)
    for kwargs in (
        {"sampler": sampler},
        {"batch_sampler": batches},
        {"batch_sampler": BatchSampler(inner, 2, False)},
    ):
        dataset.told.clear()
        loader = shard(DataLoader(dataset, **kwargs))
        read(loader), read(loader)
        assert dataset.told == [0, 1]
    for told in (sampler.told, batches.told, inner.told):
        assert sorted(set(told)) == [0, 1]
        assert told == sorted(told)


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(4)


def test_a_stream_without_a_length_says_what_to_write():
    source = shard_loader(DataLoader(Endless(), 2), Shard(0, 1), 0, None)
    with pytest.raises(TypeError, match=r"^Endless has no length.*`for step, batch in enumerate"):
        source.length()
