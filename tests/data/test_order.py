from __future__ import annotations

import random
import sys
from itertools import islice

import numpy
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from fabric.data import order as order_module
from fabric.data.order import EpochOrder


class PythonSampler:
    """Draws for each item; on the way it draws from every library."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            drawn = random.random(), float(numpy.random.rand()), float(torch.rand(()))
            yield int(sum(drawn) * 1000)

    def __len__(self):
        return self.n


class EagerSampler(PythonSampler):
    """Draws everything in `__iter__` itself."""

    def __iter__(self):
        return iter(numpy.random.permutation(self.n).tolist())


SAMPLERS = {
    "random": lambda: RandomSampler(range(100)),
    "replacement": lambda: RandomSampler(range(100), replacement=True, num_samples=100),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50 + [2.0] * 50, 100),
    "subset": lambda: SubsetRandomSampler(range(100)),
    "python": lambda: PythonSampler(100),
    "eager": lambda: EagerSampler(100),
}


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    return SAMPLERS[request.param]()


def draws():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_the_order_is_a_function_of_seed_and_epoch(sampler):
    order = EpochOrder(sampler, 3, 4)
    first = list(order)
    draws()  # the loop's own draws do not matter
    assert list(order) == first
    assert list(EpochOrder(sampler, 3, 4)) == first
    order.epoch = 1
    assert list(order) != first
    order.epoch = 0
    assert list(order) == first
    assert list(EpochOrder(sampler, 4, 4)) != first


def test_the_order_does_not_depend_on_the_chunk(sampler):
    assert list(EpochOrder(sampler, 3, 1)) == list(EpochOrder(sampler, 3, 64))


def test_the_loops_own_draws_are_those_without_a_loader(sampler):
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = [draws() for _ in range(100)]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    seen = [draws() for _ in EpochOrder(sampler, 3, 4)]
    assert seen == expected


def test_the_loops_draws_do_not_reach_the_sampler(sampler):
    undisturbed = list(EpochOrder(sampler, 3, 4))
    disturbed = []
    for item in EpochOrder(sampler, 3, 4):
        draws()
        disturbed.append(item)
    assert disturbed == undisturbed


def test_the_generators_are_put_back_when_the_sampler_fails():
    class Failing:
        def __iter__(self):
            random.random(), torch.rand(())
            raise OSError("no such index")
            yield 0

    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(OSError, match="no such index"):
        list(EpochOrder(Failing(), 0, 4))
    assert random.getstate() == states[0]
    assert torch.get_rng_state().equal(states[1])


def test_a_generator_of_the_users_own_is_used_and_goes_on():
    generator = torch.Generator().manual_seed(5)
    order = EpochOrder(RandomSampler(range(20), generator=generator), 0, 4)
    twin = torch.Generator().manual_seed(5)
    assert list(order) == torch.randperm(20, generator=twin).tolist()
    # torch draws one more, empty permutation at the end of each pass.
    torch.randperm(20, generator=twin)
    assert list(order) == torch.randperm(20, generator=twin).tolist()


@pytest.mark.parametrize("sampler", [SequentialSampler(range(9)), range(9), list(range(9)), tuple(range(9))])
def test_data_in_order_are_passed_through_without_touching_generators(sampler, monkeypatch):
    monkeypatch.setattr(order_module, "host_states", pytest.fail)
    order = EpochOrder(sampler, 0, 2)
    assert order.is_sequential
    assert list(order) == list(range(9))


def test_a_sampler_that_can_be_indexed_or_derives_from_a_sequential_one_may_still_draw():
    class Shuffled(SequentialSampler):
        def __iter__(self):
            return iter(torch.randperm(9).tolist())

        def __getitem__(self, index):
            return index

    order = EpochOrder(Shuffled(range(9)), 0, 2)
    assert not order.is_sequential
    state = torch.get_rng_state()
    assert list(order) == list(order)
    assert torch.get_rng_state().equal(state)


def test_chunks_grow_only_with_what_was_used():
    class Counting:
        asked = 0

        def __iter__(self):
            while True:
                self.asked += 1
                yield self.asked

    sampler = Counting()
    stream = iter(EpochOrder(sampler, 0, 2))
    for used in range(1, 5000):
        next(stream)
        assert sampler.asked <= max(2, 4 * used)
    assert sampler.asked - 5000 <= 512, "a chunk is at most 256 times the first"


def test_generators_are_changed_over_seldom(monkeypatch):
    changes = []
    inner = order_module.host_states
    monkeypatch.setattr(order_module, "host_states", lambda: changes.append(1) or inner())
    assert len(list(EpochOrder(RandomSampler(range(100_000)), 0, 16))) == 100_000
    assert len(changes) == 2, "torch's own samplers draw at the start only"
    changes.clear()
    assert len(list(EpochOrder(PythonSampler(10_000), 0, 16))) == 10_000
    assert len(changes) < 30


def test_numpy_is_not_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    order = EpochOrder(RandomSampler(range(9)), 0, 2)
    assert sorted(order) == list(range(9))


def test_numpy_may_be_imported_by_the_sampler(monkeypatch):
    class Importing:
        def __iter__(self):
            sys.modules["numpy"] = numpy
            yield from numpy.random.permutation(9).tolist()

    monkeypatch.delitem(sys.modules, "numpy")
    assert sorted(islice(EpochOrder(Importing(), 0, 2), 9)) == list(range(9))
