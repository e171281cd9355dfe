import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.utilities.distributed import DistributedSamplerWrapper, is_shared_filesystem


def shares(make, world_size=2, epoch=0, **kwargs):
    """What each rank gets of its own sampler, with generators in different states."""
    found = []
    for rank in range(world_size):
        torch.manual_seed(100 + rank)
        sampler = DistributedSamplerWrapper(make(), num_replicas=world_size, rank=rank, **kwargs)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def test_shares_cover_a_random_sampler_without_overlap():
    first, second = shares(lambda: RandomSampler(range(10)))
    assert sorted(first + second) == list(range(10))


def test_shares_of_a_weighted_sampler_are_parts_of_one_draw():
    parts = shares(lambda: WeightedRandomSampler([1.0] * 1000, 8, replacement=False), shuffle=False)
    assert len(set(parts[0] + parts[1])) == 8


def test_order_is_kept_without_shuffle_and_batches_stay_whole():
    batches = shares(lambda: BatchSampler(SequentialSampler(range(8)), 2, drop_last=False), shuffle=False)
    assert batches == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_epochs_differ_and_repeat():
    orders = [shares(lambda: RandomSampler(range(50)), epoch=epoch) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_passes_without_set_epoch_draw_anew():
    sampler = DistributedSamplerWrapper(RandomSampler(range(50)), num_replicas=2, rank=0, shuffle=False)
    assert list(sampler) != list(sampler)


def test_iterating_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    list(DistributedSamplerWrapper(RandomSampler(range(5)), num_replicas=2, rank=0))
    assert torch.equal(torch.get_rng_state(), state)


def test_inner_sampler_hears_of_the_epoch():
    class Inner(SequentialSampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

    inner = Inner(range(4))
    DistributedSamplerWrapper(inner, num_replicas=2, rank=0).set_epoch(3)
    assert inner.epoch == 3


def test_works_in_a_loader_and_pickles():
    sampler = DistributedSamplerWrapper(SequentialSampler(range(6)), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(range(6), sampler=pickle.loads(pickle.dumps(sampler)), batch_size=3)
    assert len(loader) == 1
    assert next(iter(loader)).tolist() == [1, 3, 5]


def test_sampler_without_length_is_refused():
    with pytest.raises(ArgumentTypeError, match="generator has no `__len__`"):
        DistributedSamplerWrapper((i for i in range(3)), num_replicas=2, rank=0)


class GroupStrategy:
    """What is_shared_filesystem needs, over the default group."""

    num_nodes = 2  # several, so that the file is really written and looked for

    @property
    def world_size(self):
        return dist.get_world_size()

    @property
    def is_global_zero(self):
        return dist.get_rank() == 0

    def broadcast(self, obj, src=0):
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision, all=True):
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return votes.item() == self.world_size if all else votes.item() > 0


def check(paths, **kwargs):
    try:
        return is_shared_filesystem(GroupStrategy(), paths[dist.get_rank()], **kwargs)
    except Exception as error:
        return type(error).__name__


def check_rank_one_blind(path):
    """Rank 1 looks at a directory of the same name that is not the same directory."""
    if dist.get_rank() == 1:
        from pathlib import Path

        exists = Path.exists
        Path.exists = lambda self, **kw: not self.name.startswith(".fabric-shared-") and exists(self, **kw)
        try:
            return check([None, path], timeout=0)
        finally:
            Path.exists = exists
    return check([path, None], timeout=0)


def test_ranks_agree_whether_they_share_a_directory(ranks, tmp_path):
    here, other, missing = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    here.mkdir()
    other.mkdir()
    assert ranks.run(check, [here, here], world_size=2) == [True, True]
    assert ranks.run(check, [here, other], world_size=2) == [False, False]
    assert ranks.run(check, [missing, missing], world_size=2) == ["FileNotFoundError"] * 2
    assert ranks.run(check, ["s3://bucket", "s3://bucket"], world_size=2) == [True, True]
    assert ranks.run(check_rank_one_blind, here, world_size=2) == [False, False]
    assert list(here.iterdir()) == []


class Alone:
    world_size = 1


def test_one_process_shares_with_itself():
    assert is_shared_filesystem(Alone(), "anywhere")


class Unwritable:
    """Rank zero of a launched strategy, alone: enough to see it report instead of leaving others waiting."""

    is_global_zero = True

    def broadcast(self, obj, src=0):
        return obj

    def reduce_boolean_decision(self, decision, all=True):
        return decision


def test_unwritable_directory_is_an_error():
    with pytest.raises(ConfigurationError, match="Rank zero cannot write into /proc"):
        is_shared_filesystem(Unwritable(), "/proc")
