"""`Link` between two ranks: trees of any shapes and sizes, one after the other, and word of failures."""

import torch
import torch.distributed as dist

from fabric.core.tree import flatten
from fabric.plugins.collectives.channel import Channel, Wire
from fabric.plugins.collectives.objects import Dumped
from fabric.plugins.collectives.torch_collective import TorchCollective
from fabric.strategies.layouts.pipeline import run
from fabric.strategies.layouts.pipeline.run import Failed, Link


def trees():
    source = torch.Generator().manual_seed(0)
    small = torch.randn(3, 5, generator=source)
    large = torch.randn(300, 1000, generator=source)
    mixed = {
        "half": small.bfloat16(),
        "mask": small > 0,
        "none": None,
        "number": torch.tensor(3),
        "pair": (small.to(torch.complex64), torch.empty(0, 4)),
        "turned": small.t(),
        "spread": torch.ones(1, 4).expand(3, 4),
    }
    failed = Failed(1, "ValueError: boom" * 100)
    one = [small, small + 1, small[:2], [small] * 200, failed, small, failed, failed, small[:, :0], small]
    several = [mixed, mixed, large, large + 1, failed, large, mixed, (large, small), (large, small), []]
    return [*one, *several, [], torch.tensor(2.0), torch.tensor(4.0), {}, small.double()]


def exchange():
    """Rank 0 sends all; rank 1 takes them."""
    channel = Channel(TorchCollective(), Wire(torch.device("cpu"), ("cpu",), torch.device("cpu")))
    rank, sent = dist.get_rank(), trees()
    link = Link(1 - rank, dist.group.WORLD, channel, 5)
    for tree in sent:
        if rank == 0:
            link.send(Dumped(tree, "send"))
            assert len(link._sent) <= run._ON_THE_WAY
            continue
        got = link.take()
        assert type(got) is type(tree)
        if isinstance(tree, Failed):
            assert got == tree
            continue
        (leaves, spec), (expected, other) = flatten(got), flatten(tree)
        assert spec == other
        for one, two in zip(leaves, expected, strict=True):
            assert (one is None) == (two is None)
            assert one is None or (one.dtype == two.dtype and torch.equal(one, two))
    link.flush()


def test_trees_and_failures_arrive_in_order(ranks):
    ranks.run(exchange, world_size=2)
