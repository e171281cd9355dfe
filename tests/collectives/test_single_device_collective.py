"""`SingleDeviceCollective`: every operation for a world of one, and the base class's account of groups."""

from __future__ import annotations

import inspect

import pytest
import torch

from fabric.core.errors import UsageError
from fabric.plugins.collectives import Collective, SingleDeviceCollective, TorchCollective


@pytest.fixture
def alone():
    return SingleDeviceCollective()


def test_a_world_of_one(alone):
    assert (alone.rank, alone.world_size) == (0, 1)
    assert alone.group is not None
    assert SingleDeviceCollective.is_available()
    assert SingleDeviceCollective.is_initialized()


@pytest.mark.parametrize("operation", ["broadcast", "all_reduce", "reduce"])
def test_what_one_rank_reduces_is_its_own(alone, operation):
    tensor = torch.tensor([1.0, 2.0])
    more = {"broadcast": (0,), "all_reduce": ("mean",), "reduce": (0, "sum")}[operation]
    assert getattr(alone, operation)(tensor, *more) is tensor
    assert getattr(alone, operation)(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("operation", ["all_gather", "gather"])
def test_gathering_copies(alone, operation):
    tensor, out = torch.tensor([1.0, 2.0]), [torch.zeros(2)]
    given = (out, tensor) if operation == "all_gather" else (tensor, out)
    assert getattr(alone, operation)(*given) is out
    assert out[0].tolist() == [1.0, 2.0]
    assert out[0] is not tensor


def test_scattering_copies(alone):
    part = torch.tensor([1.0])
    assert alone.scatter(torch.zeros(1), [part]).item() == 1.0
    assert alone.reduce_scatter(torch.zeros(1), [part]).item() == 1.0
    out = [torch.zeros(1)]
    assert alone.all_to_all(out, [part]) is out
    assert out[0].item() == 1.0


def test_there_is_nobody_to_talk_to(alone):
    with pytest.raises(UsageError, match=r"send\(dst=1\).*Start more processes"):
        alone.send(torch.ones(1), 1)
    with pytest.raises(UsageError, match=r"recv\(src=None\)"):
        alone.recv(torch.ones(1))
    assert alone.barrier() is None


def test_groups_are_accounted_for(alone):
    assert alone.setup() is alone
    assert alone.create_group() is alone
    assert alone.teardown() is alone
    with pytest.raises(UsageError, match=r"no process group.*create_group"):
        _ = alone.group
    with pytest.raises(UsageError, match="no process group: none was made yet, or it was destroyed"):
        alone.teardown()
    assert alone.create_group() is alone
    assert alone.group is not None


@pytest.mark.parametrize("kind", [SingleDeviceCollective, TorchCollective])
def test_both_have_every_operation_of_the_base(kind):
    assert not inspect.isabstract(kind)
    for name in Collective.__abstractmethods__:
        own = inspect.getattr_static(kind, name)
        base = inspect.getattr_static(Collective, name)
        if isinstance(base, property):
            assert isinstance(own, property)
            continue
        unwrap = lambda f: getattr(f, "__func__", f)  # noqa: E731
        names = list(inspect.signature(unwrap(base)).parameters)
        assert list(inspect.signature(unwrap(own)).parameters)[: len(names)] == names
