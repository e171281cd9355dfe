"""What a set-up loader says of itself: its position, its epoch, how long the loop waited."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.data.loader import _FabricDataLoader, sharded_iterations
from fabric.utilities.warnings import PossibleUserWarning


class Numbers(IterableDataset):
    """Of the user's own, with something to be seen and to be told."""

    def __init__(self, n):
        self.n = n
        self.told = []

    def __iter__(self):
        return iter(range(self.n))

    def set_epoch(self, epoch):
        self.told.append(epoch)


def own_collate(samples):
    return samples


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def ready(fabric, data=10, batch=2, **keywords):
    data = range(data) if isinstance(data, int) else data
    return fabric.setup_dataloaders(DataLoader(data, batch, collate_fn=own_collate, **keywords))


def position(loader):
    state = loader.state_dict()
    if "streams" in state:
        state |= [{"samples": 0}, *state["streams"].values()][-1]
    return state["epoch"], state["samples"]


@pytest.mark.parametrize("data", [range(10), Numbers(10)], ids=["indices", "stream"])
def test_positions_through_two_epochs(fabric, data):
    loader = ready(fabric, data)
    seen = [position(loader)]
    for _ in range(2):
        for _ in loader:
            seen.append(position(loader))
        seen.append(position(loader))
    epoch = [2, 4, 6, 8, 10]
    assert seen == [(0, 0), *[(0, n) for n in epoch], (1, 0), *[(1, n) for n in epoch], (2, 0)]


class Fetched:
    """Of a million samples, those that were asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 1_000_002

    def __getitem__(self, index):
        self.asked.append(index)
        return index


def test_samples_that_are_passed_over_are_not_fetched(fabric):
    loader = ready(fabric, Fetched(), shuffle=True)
    expected = list(fabric.setup_dataloaders(DataLoader(range(1_000_002), 1000, shuffle=True)))[-1][-2:]
    loader.load_state_dict({**loader.state_dict(), "samples": 1_000_000})
    assert list(loader) == [expected.tolist()]
    assert loader.dataset.asked == expected.tolist()


def test_the_last_iteration_is_the_one_that_counts(fabric):
    loader = ready(fabric)
    first = iter(loader)
    next(first), next(first)
    assert position(loader) == (0, 4)
    second = iter(loader)
    assert position(loader) == (1, 0)
    with pytest.warns(PossibleUserWarning, match="has returned the position of another"):
        next(first)
    with pytest.raises(UsageError, match="was iterated again"):  # the order of the first one is not kept
        loader.state_dict()
    next(second)
    assert position(loader) == (1, 2)


def test_after_a_break_the_position_is_kept_and_the_next_iteration_is_a_new_epoch(fabric):
    loader = ready(fabric, shuffle=True)
    whole = [list(loader), list(loader)]
    again = ready(fabric, shuffle=True)
    again.load_state_dict(ready(fabric, shuffle=True).state_dict() | {"seed": loader.state_dict()["seed"]})
    for batch in again:
        assert batch == whole[0][0]
        break
    assert position(again) == (0, 2)
    assert list(again) == whole[1]


def test_set_epoch_keeps_a_loaded_position_in_that_epoch_only(fabric):
    loader = ready(fabric)
    next(iter(loader))
    state = loader.state_dict()
    for epoch, expected in (
        (0, [[2, 3], [4, 5], [6, 7], [8, 9]]),
        (1, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
    ):
        again = ready(fabric)
        again.load_state_dict(state)
        again.set_epoch(epoch)
        assert position(again) == ((0, 2) if epoch == 0 else (1, 0))
        assert list(again) == expected


def test_a_loaded_position_is_given_back_until_it_is_used(fabric):
    loader = ready(fabric)
    next(iter(loader))
    state = loader.state_dict()
    again = ready(fabric)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert len(again) == 5, "the length is that of the epoch"
    assert [len(list(again)) for _ in range(2)] == [4, 5]


@pytest.mark.filterwarnings("ignore:Numbers is read again")  # whether it had ended it did not say
def test_a_finished_epoch_that_is_resumed_has_no_batches_left(fabric):
    for data in (10, Numbers(10)):
        loader = ready(fabric, data)
        for _ in loader:
            state = loader.state_dict()
        again = ready(fabric, data)
        again.load_state_dict(state)
        assert [len(list(again)) for _ in range(2)] == [0, 5]


def test_reading_again_is_said(fabric):
    loader = ready(fabric, Numbers(10))
    batches = iter(loader)
    next(batches), next(batches)
    again = ready(fabric, Numbers(10))
    again.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="read again") as caught:
        assert list(again) == [[4, 5], [6, 7], [8, 9]]
    assert [str(warning.message) for warning in caught] == [
        "Numbers is read again from the epoch's beginning up to the saved position. Add state_dict() and "
        "load_state_dict() to it to resume without rereading."
    ]


class Shuffled(IterableDataset):
    """Another order in each epoch, by an epoch that it counts itself, or by Fabric's."""

    def __init__(self, counts):
        self.counts, self.epoch = counts, 0
        if not counts:
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += self.counts
        yield from order


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize("counts", [True, False])
def test_a_stream_in_another_order_after_a_resume(fabric, counts, taken, workers):
    loader, again = [
        fabric.setup_dataloaders(DataLoader(Shuffled(counts), 2, num_workers=workers)) for _ in range(2)
    ]
    list(loader)
    for _, _ in zip(range(taken), loader, strict=False):
        pass
    again.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(again)
    texts = [str(warning.message) for warning in caught if "other samples" in str(warning.message)]
    differs = counts and not workers  # each worker has a new copy of the dataset in each epoch
    assert [text[:56] for text in texts] == differs * [
        "Shuffled has begun with other samples than in the run th"
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_seconds_that_the_loop_waited(fabric, workers):
    opened = threading.Event() if workers == 0 else None

    class Slow:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if opened is not None:
                opened.wait(0.02)
            else:
                threading.Event().wait(0.02)
            return index

    keywords = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = ready(fabric, Slow(), 1, **keywords)
    assert loader.wait_seconds == 0.0
    list(loader)
    first = loader.wait_seconds
    assert first >= 0.02
    list(loader)
    assert loader.wait_seconds >= first + 0.02


@pytest.mark.parametrize("data", [range(6), Numbers(6)], ids=["indices", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_user_gave_is_in_reach(fabric, data, workers):
    keywords = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    given = DataLoader(data, 2, collate_fn=own_collate, **keywords)
    loader = fabric.setup_dataloaders(given)
    assert loader.dataset is data
    assert loader.collate_fn is own_collate
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (2, workers, False)
    assert list(loader) == [[0, 1], [2, 3], [4, 5]]
    assert list(given) == [[0, 1], [2, 3], [4, 5]], "the user's own loader is as it was"


def test_a_stream_is_told_its_epochs(fabric):
    data = Numbers(4)
    loader = ready(fabric, data)
    list(loader), list(loader)
    loader.set_epoch(5)
    list(loader)
    assert sorted(set(data.told)) == [0, 1, 5]


class Told(Numbers):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch])


def test_a_stream_in_workers_that_live_on_is_told_its_epochs(fabric):
    keywords = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = ready(fabric, Told(1), 1, **keywords)
    assert [list(loader) for _ in range(3)] == [[[0]], [[1]], [[2]]]


class Drawn(Sampler):
    """Draws as soon as it is asked for its iterator, from a generator of its own."""

    def __init__(self, n):
        self.n, self.generator = n, torch.Generator().manual_seed(5)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Reversed(Sampler):
    """Wraps a sampler that has the generator."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return reversed(list(self.inner))


class Joined(Sampler):
    """Wraps samplers in a list."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return sum(map(len, self.inner))

    def __iter__(self):
        return itertools.chain.from_iterable(self.inner)


def of_a_generator(kind, workers):
    how = {"collate_fn": own_collate}
    if workers != "none":
        how |= {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": workers == "kept"}
    if kind == "drawn":
        return DataLoader(range(6), 2, sampler=Drawn(6), **how)
    if kind == "joined":
        return DataLoader(range(6), 2, sampler=Joined([Drawn(3), Reversed(Drawn(3))]), **how)
    if kind == "wrapped":
        return DataLoader(range(6), 2, sampler=Reversed(Reversed(Drawn(6))), **how)
    return DataLoader(range(6), 2, shuffle=True, generator=torch.Generator().manual_seed(5), **how)


@pytest.mark.parametrize("kind", ["drawn", "wrapped", "joined", "given"])
@pytest.mark.parametrize("workers", ["none", "new", "kept"])
def test_an_order_of_a_generator_is_that_of_torch_and_goes_on_in_other_workers(fabric, kind, workers):
    """torch draws the seed of new workers from the generator; a sampler that draws at once draws once."""
    loader, states, seen = fabric.setup_dataloaders(of_a_generator(kind, workers)), [], []
    for epoch in range(3):
        states.append(((epoch, 0), loader.state_dict()))
        for i, batch in enumerate(loader):
            seen.append(batch)
            states.append(((epoch, i + 1), loader.state_dict()))
    plain = of_a_generator(kind, workers if kind == "given" else "none")
    assert seen == [batch for _ in range(3) for batch in plain]
    alive = fabric.setup_dataloaders(of_a_generator(kind, workers))
    list(alive)
    for (epoch, done), state in states:
        for again in (fabric.setup_dataloaders(of_a_generator(kind, workers)), alive):
            again.load_state_dict(state)
            found = [batch for _ in range(3 - epoch) for batch in again]
            assert found == seen[3 * epoch + done :], (epoch, done, again is alive)


class Counted(Sampler):
    """Counts its epochs in an attribute, which no checkpoint has."""

    def __init__(self, n, orders=3):
        self.n, self.orders, self.count = n, orders, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.count % self.orders))
        self.count += 1
        return iter(order.tolist())


class CountedByFabric(Counted):
    """Fabric tells it the epoch."""

    def set_epoch(self, epoch):
        self.count = epoch


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_that_begins_again_between_epochs_is_warned_of(fabric, batches):
    def load(sampler):
        how = (
            {"batch_sampler": BatchSampler(sampler, 4, False)}
            if batches
            else {"sampler": sampler, "batch_size": 4}
        )
        return fabric.setup_dataloaders(DataLoader(range(12), **how))

    def resumed(kind, epochs, **how):
        loader = load(kind(12, **how))
        for _ in range(epochs):
            list(loader)
        again, last = load(kind(12, **how)), load(kind(12, **how))
        again.load_state_dict(loader.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(again)
            list(again)
            last.load_state_dict(again.state_dict())  # a second resume
            list(last)
        return [str(one.message) for one in caught]

    found = resumed(Counted, 2)
    assert len(found) == 2
    assert found[0].startswith(
        "Counted begins this epoch, the first after a resume, with the order of the first"
    )
    assert "give it a method set_epoch(epoch), which Fabric calls." in found[0]
    assert resumed(CountedByFabric, 2) == []
    assert resumed(Counted, 2, orders=1) == []  # the same order in each epoch
    assert len(resumed(Counted, 0)) == 1  # of the second resume


@pytest.mark.parametrize("data", [range(10), Numbers(10)], ids=["indices", "stream"])
@pytest.mark.parametrize("whole", [False, True], ids=["a batch", "an epoch"])
def test_the_position_of_a_loop_inside_of_which_the_loader_was_iterated_again(fabric, data, whole):
    loader = ready(fabric, data)
    read = []
    for number, batch in enumerate(loader):
        read.append(batch)
        if number == 1:
            inner = iter(loader)
            assert [next(inner), *(inner if whole else [])][0] == [0, 1]
        elif number > 1:
            with pytest.raises(
                UsageError, match=r"iterated again, as by next\(iter\(loader\)\)\. Make a second"
            ):
                loader.state_dict()
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert position(loader) == (2, 0)


def test_a_state_of_another_iteration_is_warned_of_once_that_is_sure(fabric):
    loader = ready(fabric)
    kept = iter(loader)  # never used again
    next(kept)
    loop = iter(loader)
    next(loop)
    list(loader)
    assert position(loader) == (3, 0)
    with pytest.warns(
        PossibleUserWarning, match="has returned the position of another iteration than the one"
    ):
        next(loop)
    next(loop)
    for _ in loader:
        loader.state_dict()
    assert position(loader) == (4, 0)


def test_set_epoch_inside_of_a_loop_holds(fabric):
    loader = ready(fabric)
    for number, _ in enumerate(loader):
        if number == 1:
            loader.set_epoch(7)
    assert position(loader) == (7, 0)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(9)
    next(batches)
    assert position(loader) == (9, 0)
    for number, _ in enumerate(loader):
        if number == 1:
            list(loader)
            loader.set_epoch(7)
        if number >= 1:
            assert position(loader) == (7, 0), "also after another iteration"
    state = loader.state_dict()
    for number, _ in enumerate(loader):
        if number == 1:
            loader.load_state_dict(state)
        if number >= 1:
            assert position(loader) == (7, 0), "as loaded"


def test_an_iteration_that_has_ended_is_not_kept(fabric):
    gc.collect()  # those of other tests
    before = len(sharded_iterations)
    loader = ready(fabric)
    list(loader)
    gc.collect()
    assert len(sharded_iterations) <= before


class CountedBatches(Counted):
    """A batch sampler of the same kind."""

    def __iter__(self):
        yield from torch.tensor([*super().__iter__()]).view(-1, 4).tolist()


class TensorBatches(Counted):
    """Another one, whose batches are tensors."""

    def __iter__(self):
        yield from torch.tensor([*super().__iter__()]).view(-1, 4)


class Parts(CountedByFabric):
    """One part of the data in each epoch, in turn."""

    def __iter__(self):
        return iter(range(self.count % 2, self.n, 2))


class Backwards(Counted):
    """The same order in each epoch."""

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))


@pytest.mark.parametrize(
    ("kind", "sizes", "warned"),
    [
        (CountedBatches, [1, 1, 1], True),  # few items, each of several indices
        (TensorBatches, [1, 1, 1], True),
        (Counted, [4, 4, 4], True),
        (Counted, [2, 2, 2], False),  # two may be equal by chance
        (Parts, [4, 4, 4], False),  # Fabric gives it the epoch: it repeats the order on purpose
        (Backwards, [4, 8, 4], False),  # a digest of other numbers of items says nothing
        (torch.utils.data.SequentialSampler, [4, 8, 4], False),
        (lambda n: torch.utils.data.WeightedRandomSampler([1.0] + [0.0] * (n - 1), n), [4, 4, 4], False),
    ],
)
def test_only_an_order_that_a_sampler_counted_is_warned_of(fabric, kind, sizes, warned):
    def load(size):
        sampler = range(16) if kind is torch.utils.data.SequentialSampler else 16
        in_batches = kind in (CountedBatches, TensorBatches)
        how = {"batch_sampler": kind(16)} if in_batches else {"sampler": kind(sampler), "batch_size": size}
        return fabric.setup_dataloaders(DataLoader(range(16), **how))

    loader, found = load(sizes[0]), []
    list(loader), list(loader)
    for size in sizes[1:]:
        state, loader = loader.state_dict(), load(size)
        loader.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader), list(loader)
        found += [str(one.message) for one in caught if "begins this epoch" in str(one.message)]
    assert bool(found) == warned


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("data", [range(10), Numbers(10)], ids=["indices", "stream"])
def test_loaders_copy_and_pickle_with_their_position(fabric, duplicate, data):
    loader = ready(fabric, data)
    batches = iter(loader)
    next(batches), next(batches)
    loader.load_state_dict(loader.state_dict())
    twin = duplicate(loader)
    with pytest.warns(UserWarning, match="read again") if isinstance(data, Numbers) else _nothing():
        assert list(twin) == [[4, 5], [6, 7], [8, 9]]
    assert position(loader) == (0, 4)


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def test_an_error_in_the_data_is_the_users_own(fabric):
    class Broken(Numbers):
        def __iter__(self):
            yield 1
            raise KeyError("line 7 of data.csv")

    loader = ready(fabric, Broken(2), 1)
    batches = iter(loader)
    assert next(batches) == [1]
    with pytest.raises(KeyError, match="line 7"):
        next(batches)
    assert position(loader) == (0, 1)


def test_a_loader_by_itself(tmp_path):
    raw = DataLoader(range(4), 2)
    loader = _FabricDataLoader(raw, torch.device("cpu"))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert loader.device == torch.device("cpu")
    assert len(loader) == 2


def test_a_loader_that_keeps_its_own_position(fabric):
    class Own(DataLoader):
        at = 0

        def __iter__(self):
            start, self.at = self.at, 0
            for index, batch in enumerate(super().__iter__()):
                if index >= start:
                    self.at = index + 1
                    yield batch

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = fabric.setup_dataloaders(Own(range(4), collate_fn=own_collate))
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state["ranks"] == [{"loader": {"at": 2}}]
    again = fabric.setup_dataloaders(Own(range(4), collate_fn=own_collate))
    again.load_state_dict(state)
    assert list(again) == [[2], [3]]


@pytest.mark.parametrize("data", [range(11), Numbers(11)], ids=["indices", "stream"])
@pytest.mark.filterwarnings("ignore:Numbers is read again")
def test_batches_of_the_epoch_are_counted_also_after_a_resume(fabric, data):
    loader = ready(fabric, data)
    assert loader.batches_done == 0
    seen = [loader.batches_done for _ in loader]
    assert seen == [1, 2, 3, 4, 5, 6]
    assert loader.batches_done == 0
    batches = iter(loader)
    next(batches), next(batches)
    again = ready(fabric, data)
    again.load_state_dict(loader.state_dict())
    assert again.batches_done == 2, "enumerate(loader, loader.batches_done) asks before the loop begins"
    assert [again.batches_done for _ in again] == [3, 4, 5, 6]


def test_batches_that_come_in_any_order_have_no_position(fabric):
    keywords = {"num_workers": 2, "in_order": False, "multiprocessing_context": "fork"}
    for data in (range(8), Numbers(8)):
        loader = ready(fabric, data, 1, **keywords)
        loader.state_dict()
        next(iter(loader))
        with pytest.raises(UsageError, match="The position of a loader with in_order=False is unknown"):
            loader.state_dict()


def test_a_batch_sampler_may_use_one_list_for_all(fabric):
    class Reusing:
        def __iter__(self):
            batch = []
            for start in range(0, 8, 2):
                batch[:] = [start, start + 1]
                yield batch

    loader = fabric.setup_dataloaders(DataLoader(range(8), batch_sampler=Reusing(), collate_fn=own_collate))
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_positions_in_batches_and_in_samples_are_told_apart(fabric):
    batches = fabric.setup_dataloaders(DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]]))
    next(iter(batches))
    with pytest.raises(UsageError, match="of kind 'whole batches', but this one is of kind 'samples'"):
        ready(fabric, 2).load_state_dict(batches.state_dict())


def test_the_length_of_a_stream_that_shares_itself_out(fabric):
    class Long(Numbers):
        def __len__(self):
            return self.n

    for batch, drop_last, expected in ((2, False, 4), (2, True, 3), (None, False, 7)):
        raw = DataLoader(Long(7), batch, drop_last=drop_last)
        assert len(fabric.setup_dataloaders(raw, shard_iterable=False)) == expected == len(raw)


def test_data_that_refer_to_themselves_are_not_walked(fabric):
    document = {"text": "a"}
    document["self"] = [document]
    loader = fabric.setup_dataloaders(DataLoader([document] * 4, 2, collate_fn=own_collate))
    assert [len(batch) for batch in loader] == [2, 2]
