"""The parts of a sharded checkpoint: each of its tensors is, byte for byte, what `torch.save` writes."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch

from fabric.checkpoint.formats.sharded.dcp import ShardWriter
from fabric.checkpoint.snapshot import values
from fabric.checkpoint.torch_io import saving

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8),
    *(torch.uint8, torch.int64, torch.uint16, torch.bool, torch.complex64),
]


@pytest.fixture
def written(tmp_path):
    def write(*tensors):
        part = ShardWriter({str(i): tensor for i, tensor in enumerate(tensors)})
        part.plan({})
        part.write(tmp_path)
        return (tmp_path / "__0_0.distcp").read_bytes()

    return write


def saved(tensor):
    stream = BytesIO()
    with saving():
        torch.save(tensor, stream)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (37, 5), (1000, 33)])
def test_bytes_are_those_of_torch(written, dtype, shape):
    first, second = ((torch.rand(shape) * 100).to(dtype) for _ in range(2))
    assert written(first, second) == saved(first) + saved(second)


def test_a_large_tensor_is_written_by_torch(written):
    large = torch.arange(5_000_000.0)
    assert written(large) == saved(large)


def test_only_the_values_of_a_view_are_written(written):
    whole = torch.arange(1000.0).view(10, 100)
    large = torch.zeros(2, 5_000_000)
    one = whole[:1, 3]  # contiguous, whatever its stride
    for view in (one, whole[3], whole[:, 3], whole.t(), large[1], large[1:].t()):
        assert written(view) == saved(view.clone(memory_format=torch.contiguous_format))


def test_lazy_values_are_computed(written):
    number = torch.tensor([1 + 2j, 3 - 4j])
    assert written(number.conj()) == saved(torch.tensor([1 - 2j, 3 + 4j]))
    assert bytes(values(number.conj().imag)) == bytes(values(torch.tensor([-2.0, 4.0])))


def test_archives_of_one_kind_are_made_once(written, monkeypatch):
    calls = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: calls.append(args) or save(*args))
    written(*[torch.rand(7, 3) for _ in range(10)], torch.rand(3, 7))
    assert len(calls) == 2
