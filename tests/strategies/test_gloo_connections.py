"""Connections of gloo: many ranks open those that they use, and children of a rank inherit none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import fcntl, json, os, stat, sys
import torch, torch.distributed as dist
from fabric import Fabric
from fabric.strategies import parallel


def counts():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
        except OSError:
            pass
    return len(found), found.count(0)


def work(fabric):
    made = counts()
    model, optimizer = fabric.setup(*parts())
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.full((2, 4), 1.0 + fabric.global_rank)).sum())
        optimizer.step()
    total = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
    fabric.barrier()
    gathered = fabric.all_gather(torch.ones(100))
    row = dist.new_group([*range(6)])
    if fabric.global_rank < 6:
        total = total + fabric.all_reduce(torch.ones(()), group=row, reduce_op="sum")
    facts = made, counts(), float(total), tuple(gathered.shape), float(model.module.weight.sum())
    every = fabric.all_gather_object(facts)
    if fabric.is_global_zero:
        print("FOUND", json.dumps(every))


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


parallel.EAGER_RANKS = int(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=12, strategy="ddp_fork")
fabric.launch(work)
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(eager_ranks: int) -> list:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(eager_ranks)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("FOUND")[2])


@LINUX
@pytest.mark.slow
def test_many_ranks_connect_with_few_others_and_compute_the_same():
    eager, lazy = run(32), run(4)
    for one, other in zip(eager, lazy, strict=True):
        assert one[2:] == other[2:], "the same numbers"
        (all_made, shared), (some_made, hidden) = one[0], other[0]
        assert all_made - some_made >= 4, "12 ranks: 11 connections of each, or 7"
        assert (shared, hidden) == (0, 0), "children inherit none"
    assert sum(facts[1][0] for facts in lazy) < sum(facts[1][0] for facts in eager)
    assert [facts[1][1] for facts in lazy[6:]] == [0] * 6, "steps and verbs of all ranks open no others"
