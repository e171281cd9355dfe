from __future__ import annotations

import copy
import pickle
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler

from fabric.core.errors import ConfigurationError
from fabric.data.order import EpochOrder
from fabric.data.rank_batches import RankBatchSampler
from fabric.data.rules import UNEVEN, Shard, ShardingRule

LENGTHS = st.integers(0, 40)
WORLDS = st.integers(1, 4)
SIZES = st.integers(1, 5)


def batches(n, world, size, uneven, drop_last=False, shuffle=False, epoch=0, seed=0):
    """Every rank's batches."""
    result = []
    for rank in range(world):
        sampler = RandomSampler(range(n)) if shuffle and n else SequentialSampler(range(n))
        order = EpochOrder(sampler, seed, size * world)
        stream = RankBatchSampler(order, ShardingRule(Shard(rank, world), size, drop_last, uneven))
        stream.order.epoch = epoch
        mine = list(stream)
        assert len(stream) == len(mine), f"len() is wrong on rank {rank}"
        result.append(mine)
    return result


def items(n, world, uneven):
    """Every rank's items of a stream of n."""
    result = []
    for rank in range(world):
        stream = RankBatchSampler(
            EpochOrder([f"item{i}" for i in range(n)], 0, 2),
            ShardingRule(Shard(rank, world), None, False, uneven),
        )
        mine = list(stream)
        assert len(stream) == len(mine)
        result.append(mine)
    return result


def flat(per_rank):
    return [index for mine in per_rank for batch in mine for index in batch]


# each policy


@settings(deadline=None, max_examples=400)
@given(n=LENGTHS, world=WORLDS, size=SIZES, shuffle=st.booleans())
def test_exact_gives_every_sample_once_and_equal_numbers_of_batches(n, world, size, shuffle):
    per_rank = batches(n, world, size, "exact", shuffle=shuffle)
    assert sorted(flat(per_rank)) == list(range(n))
    counts = {len(mine) for mine in per_rank}
    assert len(counts) == 1 or (n < world and counts == {0, 1})
    assert all(1 <= len(batch) <= size + 1 for mine in per_rank for batch in mine)


@settings(deadline=None, max_examples=300)
@given(n=LENGTHS, world=WORLDS, size=SIZES, shuffle=st.booleans())
def test_pad_makes_ranks_equal_and_repeats_as_few_as_possible(n, world, size, shuffle):
    per_rank = batches(n, world, size, "pad", shuffle=shuffle)
    assert len({tuple(map(len, mine)) for mine in per_rank}) == 1, "batch sizes differ between ranks"
    seen = Counter(flat(per_rank))
    assert set(seen) == set(range(n))
    assert sum(seen.values()) == -(-n // world) * world
    assert all(len(batch) <= size for mine in per_rank for batch in mine)


@settings(deadline=None, max_examples=300)
@given(n=LENGTHS, world=WORLDS, size=SIZES, shuffle=st.booleans())
def test_drop_makes_ranks_equal_and_repeats_none(n, world, size, shuffle):
    per_rank = batches(n, world, size, "drop", shuffle=shuffle)
    assert len({tuple(map(len, mine)) for mine in per_rank}) == 1
    seen = flat(per_rank)
    assert len(seen) == len(set(seen)) == n // world * world


@settings(deadline=None, max_examples=200)
@given(n=LENGTHS, world=WORLDS, size=SIZES, uneven=st.sampled_from(UNEVEN), shuffle=st.booleans())
def test_drop_last_keeps_full_global_batches_only(n, world, size, uneven, shuffle):
    per_rank = batches(n, world, size, uneven, drop_last=True, shuffle=shuffle)
    assert all([len(batch) for batch in mine] == [size] * (n // (size * world)) for mine in per_rank)
    assert len(set(flat(per_rank))) == n // (size * world) * size * world


@settings(deadline=None, max_examples=100)
@given(n=LENGTHS, world=WORLDS, size=SIZES)
def test_error_raises_before_the_first_batch_or_deals_evenly(n, world, size):
    stream = RankBatchSampler(
        EpochOrder(range(n), 0, size), ShardingRule(Shard(0, world), size, False, "error")
    )
    if n % world:
        with pytest.raises(ConfigurationError, match=f"do not divide by {world} ranks, {n % world} are left"):
            iter(stream)
    else:
        assert sorted(flat(batches(n, world, size, "error"))) == list(range(n))


def test_error_text_names_the_ways_out():
    stream = RankBatchSampler(EpochOrder(range(5), 0, 4), ShardingRule(Shard(0, 2), 2, False, "error"))
    with pytest.raises(ConfigurationError) as caught:
        stream.check_even()
    assert str(caught.value) == (
        'uneven="error": the data do not divide by 2 ranks, 1 are left over. Write setup_dataloaders(loader, '
        'uneven="exact") to use each once, "pad" to repeat some, or "drop" to skip them.'
    )


def test_error_raises_at_the_end_where_no_length_is_known():
    class Unsized:
        def __iter__(self):
            return iter(range(9))

    stream = iter(RankBatchSampler(EpochOrder(Unsized(), 0, 4), ShardingRule(Shard(0, 2), 2, False, "error")))
    assert [next(stream), next(stream)] == [[0, 2], [4, 6]]
    with pytest.raises(ConfigurationError, match="1 are left over"):
        next(stream)


@settings(deadline=None)
@given(n=LENGTHS, world=WORLDS, uneven=st.sampled_from(["pad", "exact", "drop"]))
def test_whole_items_are_dealt_out_in_turns(n, world, uneven):
    per_rank = items(n, world, uneven)
    dealt = [item for mine in per_rank for item in mine]
    whole = [f"item{i}" for i in range(n)]
    if uneven == "exact":
        assert sorted(dealt) == sorted(whole)
    else:
        assert len({len(mine) for mine in per_rank}) == 1
    if uneven == "drop":
        assert len(dealt) == n // world * world
    if uneven == "pad":
        assert set(dealt) == set(whole)
        assert len(dealt) == -(-n // world) * world
    assert [mine[0] for mine in per_rank[: min(n, world)] if mine] == whole[: min(n, world)][: len(dealt)]


def test_padding_repeats_the_first_ones():
    assert items(5, 2, "pad") == [["item0", "item2", "item4"], ["item1", "item3", "item0"]]
    assert items(1, 3, "pad") == [["item0"]] * 3
    assert batches(9, 2, 2, "pad") == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [0]]]


def test_uneven_whole_items_under_error():
    with pytest.raises(ConfigurationError, match="3 ranks, 1 are left over"):
        items(7, 3, "error")
    assert items(6, 3, "error") == [["item0", "item3"], ["item1", "item4"], ["item2", "item5"]]


# the order of global batches


@settings(deadline=None, max_examples=200)
@given(n=LENGTHS, share=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 3))
def test_one_two_and_four_ranks_see_the_same_global_batches(n, share, seed, epoch):
    joined = 4 * share
    seen = []
    for world in (1, 2, 4):
        per_rank = batches(n, world, joined // world, "exact", False, True, epoch, seed)
        steps = max(map(len, per_rank))
        full = n // joined
        seen.append(
            [sorted(flat([mine[k : k + 1] for mine in per_rank])) for k in range(steps)][: max(full - 1, 0)]
        )
        # The last full batch and what is over may share a step; together they are the same samples.
        assert sorted(flat(per_rank)) == list(range(n))
    assert seen[0] == seen[1] == seen[2]


def test_global_batches_hold_consecutive_positions_of_the_order():
    per_rank = batches(16, 2, 2, "exact")
    assert per_rank == [
        [[0, 2], [4, 6], [8, 10], [12, 14]],
        [[1, 3], [5, 7], [9, 11], [13, 15]],
    ]


def test_few_left_over_samples_join_the_batch_before():
    assert batches(9, 2, 2, "exact") == [[[0, 2], [4, 6, 8]], [[1, 3], [5, 7]]]


def test_an_endless_sampler_is_dealt_out_lazily():
    class Endless:
        def __iter__(self):
            i = 0
            while True:
                yield i
                i += 1

    for rank in (0, 1):
        stream = RankBatchSampler(
            EpochOrder(Endless(), 0, 4), ShardingRule(Shard(rank, 2), 2, False, "exact")
        )
        assert list(islice(stream, 3)) == [[rank, rank + 2], [rank + 4, rank + 6], [rank + 8, rank + 10]]
        with pytest.raises(TypeError, match="has no len"):
            len(stream)


# copies


class Bucketed:
    """A batch sampler with required arguments, attributes and methods."""

    def __init__(self, lengths, size):
        self.lengths = lengths
        self.size = size
        self.epochs = []

    def __iter__(self):
        ranked = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        chunks = [ranked[i : i + self.size] for i in range(0, len(ranked), self.size)]
        return iter([chunks[i] for i in torch.randperm(len(chunks)).tolist()])

    def __len__(self):
        return (len(self.lengths) + self.size - 1) // self.size

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def longest(self):
        return max(self.lengths)


def bucketed(rank=0, world=2):
    return RankBatchSampler(
        EpochOrder(Bucketed([5, 1, 4, 2, 3, 9, 8], 2), 0, world),
        ShardingRule(Shard(rank, world), None, False, "pad"),
    )


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_streams_copy_and_pickle(duplicate):
    order = EpochOrder(RandomSampler(range(10)), 7, 4)
    for stream in (bucketed(), RankBatchSampler(order, ShardingRule(Shard(1, 2), 2, False, "pad"))):
        twin = duplicate(stream)
        assert type(twin) is type(stream)
        assert list(twin) == list(stream)
        assert len(twin) == len(stream)


def test_an_iteration_keeps_the_epoch_in_which_it_began():
    order = EpochOrder(RandomSampler(range(20)), 0, 2)
    stream = RankBatchSampler(order, ShardingRule(Shard(0, 1), 2, False, "pad"))
    stream.order.epoch = 0
    alone = list(stream)
    stream.order.epoch = 0
    first = iter(stream)
    stream.order.epoch = 1
    second = iter(stream)
    assert next(first) == alone[0], "asked for late, the first pass took the second one's order"
    assert [alone[0], *first] == alone
    assert list(second) != alone
