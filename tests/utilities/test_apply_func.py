from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fabric.core.errors import ConfigurationError
from fabric.utilities.apply_func import convert_tensors_to_scalars, convert_to_tensors, move_data_to_device

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    parts: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Movable:
    """Has a `to` of its own, as tokenizers' batches do."""

    def __init__(self):
        self.device = "cpu"

    def to(self, device):
        moved = Movable()
        moved.device = device
        return moved


class Forgetful(Movable):
    def to(self, device):
        self.device = device


class MovableDict(dict):
    def to(self, device):
        return MovableDict({"moved": device})


def devices(batch):
    found = []

    def note(value):
        found.append(value.device.type)
        return value

    move_leaves(batch, note)
    return set(found)


def move_leaves(value, note):
    if isinstance(value, torch.Tensor):
        note(value)
    elif isinstance(value, dict | UserDict):
        [move_leaves(item, note) for item in value.values()]
    elif isinstance(value, list | tuple):
        [move_leaves(item, note) for item in value]
    elif isinstance(value, Sample):
        move_leaves([value.image, value.parts], note)
    elif isinstance(value, Frozen):
        move_leaves(value.value, note)


def t():
    return torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        t(),
        [t(), [t()]],
        (t(), "text", None, 3),
        {"a": t(), 1: {"b": (t(),)}},
        Point(t(), [t()]),
        OrderedDict(a=t()),
        defaultdict(list, a=[t()]),
        UserDict(a=t()),
        Sample(t(), 3, [t()]),
        [Frozen(t())],
        nn.Parameter(t()),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_moves_every_tensor_and_keeps_types(batch):
    moved = move_data_to_device(batch, "meta")
    assert type(moved) is type(batch) or isinstance(batch, nn.Parameter)
    assert devices(moved) == {"meta"}
    assert devices(batch) == {"cpu"}  # the user's containers are left alone


def test_other_leaves_and_keys_stay():
    moved = move_data_to_device({"n": 1, "s": "x", "none": None, "set": {1}, "type": torch.Tensor}, "meta")
    assert moved == {"n": 1, "s": "x", "none": None, "set": {1}, "type": torch.Tensor}
    sample = move_data_to_device(Sample(t(), 3, [t(), "a"]), "meta")
    assert (sample.label, sample.parts[1]) == (3, "a")


def test_tensor_on_the_device_already_is_the_same_object():
    tensor = t()
    assert move_data_to_device([tensor], torch.device("cpu"))[0] is tensor


def test_objects_that_can_move_themselves_do():
    device = torch.device("meta")
    assert move_data_to_device([Movable()], device)[0].device == device
    assert move_data_to_device(MovableDict(a=t()), device) == {"moved": device}
    forgetful = Forgetful()
    assert move_data_to_device({"x": forgetful}, device)["x"] is forgetful
    assert forgetful.device == device


def test_packed_sequence_moves_as_a_whole():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_data_to_device([packed], "meta")[0]
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, torch.bool),
        (3, torch.int64),
        (0.5, torch.float32),
        (1j, torch.complex64),
        (np.float64(0.5), torch.float64),
        (np.int16(3), torch.int16),
        (np.bool_(True), torch.bool),
        (np.arange(3, dtype=np.uint8), torch.uint8),
        (np.arange(3, dtype=">i4"), torch.int32),
        (np.arange(4.0)[::-2], torch.float64),
        (torch.ones(2, dtype=torch.int8), torch.int8),
    ],
)
def test_numbers_and_arrays_become_tensors_of_the_same_value(value, dtype):
    tensor = convert_to_tensors({"v": [value]}, "cpu")["v"][0]
    assert tensor.dtype == dtype
    assert tensor.tolist() == (value.tolist() if hasattr(value, "tolist") else value)


def test_converted_arrays_do_not_share_memory_and_may_be_read_only():
    array = np.zeros(2)
    array.flags.writeable = False
    convert_to_tensors(array, "cpu").add_(1)
    assert array.tolist() == [0, 0]


def test_conversion_goes_to_the_device_and_leaves_text_alone():
    converted = convert_to_tensors([1, np.ones(2), t(), "x", None, np.array(["a"])], "meta")
    assert [getattr(value, "device", torch.device("cpu")).type for value in converted[:3]] == ["meta"] * 3
    assert converted[3:5] == ["x", None]
    assert isinstance(converted[5], np.ndarray)


def test_one_element_tensors_become_numbers():
    data = {"a": torch.tensor(1.5), "b": [torch.tensor([2])], "c": "x", "d": torch.tensor(True)}
    assert convert_tensors_to_scalars(data) == {"a": 1.5, "b": [2], "c": "x", "d": True}


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_other_tensors_are_no_scalars(shape):
    with pytest.raises(ConfigurationError, match=rf"shape \({shape[0]},.*mean"):
        convert_tensors_to_scalars([torch.zeros(shape)])


@pytest.mark.gpu
def test_cuda_copies_arrive():
    batch = {"x": torch.arange(1000.0).pin_memory(), "y": [torch.ones(2)]}
    moved = move_data_to_device(batch, "cuda")
    assert devices(moved) == {"cuda"}
    assert torch.equal(moved["x"].cpu(), batch["x"])
