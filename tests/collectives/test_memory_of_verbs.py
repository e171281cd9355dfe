"""Memory: verbs ask for it before their first message, take it where the result is, and give it back."""

from __future__ import annotations

import gc
import resource
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch

MIB = 1 << 20
_LARGE = 128 * MIB


@contextmanager
def limited(mib):
    """No more address space than so many MiB on top of what is in use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def joined():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    fabric.barrier()
    return fabric


def caught():
    fabric, data = joined(), torch.ones(_LARGE, dtype=torch.uint8)
    if fabric.global_rank == 0:
        try:
            fabric.all_gather(data)
        except CollectiveMismatch:
            return fabric.all_reduce(1.0, reduce_op="sum").item()
    with limited(192), pytest.raises(RuntimeError, match="allocate"):
        fabric.all_gather(data)
    try:
        fabric.barrier("after the batch that was too large")
    except CollectiveMismatch:
        return fabric.all_reduce(1.0, reduce_op="sum").item()
    return "went on"


def test_a_rank_that_runs_out_of_memory_and_goes_on_is_a_mismatch(ranks):
    assert ranks.run(caught, world_size=2) == [2.0, 2.0]


def gathered():
    fabric, data = joined(), torch.full((_LARGE,), float(dist.get_rank()), dtype=torch.uint8)
    with limited(192) if fabric.global_rank else nullcontext():
        found = fabric.gather(data)
    return None if found is None else [tuple(found.shape), *found[:, 0].tolist()]


def test_only_the_rank_that_gets_the_result_has_room_for_it(ranks):
    assert ranks.run(gathered, world_size=2) == [[(2, _LARGE), 0, 1], None]


def dropped():
    fabric = joined()
    kept = []
    for step in range(4):
        data = torch.full((MIB,), float(step))
        kept.append(weakref.ref(data))
        handle = fabric.all_reduce(data, reduce_op="sum", async_op=True)
        while not handle.done():
            pass
        del data, handle
    gc.collect()
    return [ref() is None for ref in kept]


def test_data_of_handles_that_nobody_holds_are_let_go(ranks):
    for freed in ranks.run(dropped, world_size=2):
        assert freed[:3] == [True] * 3  # the last one goes when the next call comes
