"""Which rank writes what of a sharded checkpoint, what ranks send for it, and what rank zero refuses."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import launched
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fabric.checkpoint.formats.sharded.dcp import Checkpoint
from fabric.collectives.torch_collective import TorchCollective
from fabric.core.errors import RankError, UsageError
from fabric.guard.control_connections import _Connection


@contextmanager
def received():
    """The bytes that this rank receives in collectives and in the call check, as the only entry of a list."""
    found, take = [0], _Connection.take

    def counted(name, size_of):
        call = getattr(TorchCollective, name)

        def run(self, *args, **kwargs):
            found[0] += size_of(*args)
            return call(self, *args, **kwargs)

        return mock.patch.object(TorchCollective, name, run)

    def taken(self):
        message = take(self)
        found[0] += 0 if message is None else len(message[1])
        return message

    with (
        counted("start_all_gather_flat", lambda output, tensor: output.nbytes),
        counted("broadcast", lambda tensor, src: tensor.nbytes * (dist.get_rank() != src)),
        counted("gather", lambda tensor, parts, dst=0: sum([part.nbytes for part in parts])),
        mock.patch.object(_Connection, "take", taken),
    ):
        yield found


def bytes_of_a_save(name, folder, layers):
    fabric = launched(name)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / f"{name}-warm", state, format="sharded")
    with received() as found:
        fabric.save(folder / f"{name}-{layers:02}", state, format="sharded")
    return found[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["zero3", "ddp"])
def test_what_a_rank_receives_in_a_save_does_not_depend_on_the_tensors(ranks, tmp_path, name, world_size):
    few, many = (
        ranks.run(bytes_of_a_save, name, tmp_path, layers, world_size=world_size) for layers in (2, 40)
    )
    for rank in range(1, world_size):
        assert many[rank] <= few[rank] + 64, (few, many)
    if name == "zero3":
        assert many[0] > few[0] + 1000
