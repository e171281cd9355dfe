import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric.core.cores import usable_cores
from fabric.core.errors import ConfigurationError
from fabric.utilities.data import (
    AttributeDict,
    has_iterable_dataset,
    has_len,
    sized_len,
    suggested_max_num_workers,
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self):
        return 3


class Unfinished:
    def __len__(self):
        raise NotImplementedError


def test_attributes_are_entries():
    state = AttributeDict(step=1)
    state.step += 1
    state.model = "m"
    assert state == {"step": 2, "model": "m"}
    del state.model
    assert "model" not in state
    with pytest.raises(AttributeError, match="'nothing'; existing: 'step'"):
        state.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="nothing"):
        del state.nothing
    assert not hasattr(state, "model")


def test_attribute_dict_copies_and_pickles_as_itself():
    state = AttributeDict(a=[1])
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert type(other) is AttributeDict
        assert other.a == [1]
        assert other.a is not state.a


def test_attribute_dict_prints_aligned():
    assert repr(AttributeDict(long_name=1, a="x")) == '"a":         x\n"long_name": 1'
    assert repr(AttributeDict()) == ""


def test_iterable_datasets_are_recognised():
    assert has_iterable_dataset(DataLoader(Stream()))
    assert not has_iterable_dataset(DataLoader(range(3)))
    assert not has_iterable_dataset([1, 2])


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (DataLoader(range(3)), 3),
        ([1, 2], 2),
        (DataLoader(Stream()), None),
        (Unfinished(), None),
        (iter([1]), None),
        (DataLoader(SizedStream()), 3),
    ],
)
def test_length(loader, length):
    assert sized_len(loader) == length
    assert has_len(loader) is (length is not None)


def test_length_zero_warns():
    with pytest.warns(UserWarning, match="`DataLoader` has length 0"):
        assert has_len(DataLoader(torch.empty(0, 2)))


def test_sized_stream_with_workers_warns():
    with pytest.warns(UserWarning, match="get_worker_info"):
        assert has_len(DataLoader(SizedStream(), num_workers=2))


def test_workers_share_the_cores():
    assert suggested_max_num_workers(1) == usable_cores()
    assert suggested_max_num_workers(10**6) == 1
    with pytest.raises(ConfigurationError, match="local_world_size=0"):
        suggested_max_num_workers(0)
