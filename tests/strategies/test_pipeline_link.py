"""`Link` between two ranks: trees of any shapes and sizes, one after the other, and word of failures."""

import torch
import torch.distributed as dist

from fabric.collectives.channel import Transport
from fabric.core.tree import flatten
from fabric.strategies.pipeline import link as links
from fabric.strategies.pipeline.link import Link, StageFailure


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
    failed = StageFailure(1, "ValueError: boom" * 100)
    one = [small, small + 1, small[:2], [small] * 200, failed, small, failed, failed, small[:, :0], small]
    several = [mixed, mixed, large, large + 1, failed, large, mixed, (large, small), (large, small), []]
    return [*one, *several, [], torch.tensor(2.0), torch.tensor(4.0), {}, small.double()]


def exchange(ahead):
    """Rank 0 sends all; rank 1 takes them, the next one asked for before or not."""
    wire = Transport(torch.device("cpu"), ("cpu",), torch.device("cpu"))
    rank, sent = dist.get_rank(), trees()
    link = Link(1 - rank, dist.group.WORLD, wire, 5)
    for number, tree in enumerate(sent):
        if rank == 0:
            link.send(tree if isinstance(tree, StageFailure) else link.message(tree), flag=number % 3 == 0)
            assert len(link._sent) <= links._MAX_IN_FLIGHT
            continue
        got = link.recv()
        assert link.flag == (number % 3 == 0)
        if ahead and number + 1 < len(sent):
            link.post_recv()
        assert type(got) is type(tree)
        if isinstance(tree, StageFailure):
            assert got == tree
            continue
        (leaves, spec), (expected, other) = flatten(got), flatten(tree)
        assert spec == other
        for one, two in zip(leaves, expected, strict=True):
            assert (one is None) == (two is None)
            assert one is None or (one.dtype == two.dtype and torch.equal(one, two))
    link.flush()


def test_trees_and_failures_arrive_in_order(ranks):
    for ahead in (False, True):
        ranks.run(exchange, ahead, world_size=2)


def messages():
    """How many rank 0 sends for the second of two trees of one form, whatever their sizes."""
    counts, wire = [], Transport(torch.device("cpu"), ("cpu",), torch.device("cpu"))
    pair = {"a": torch.ones(3, dtype=torch.bool), "b": None, "c": torch.ones(2)}
    link = Link(1 - dist.get_rank(), dist.group.WORLD, wire, 5)
    for tree in (pair, (torch.ones(1 << 16), torch.ones(3)), [], {}):
        for _ in range(2):
            if dist.get_rank():
                got = link.recv()
                continue
            link.send(link.message(tree))
            count = len(link._sent[-1])
        if dist.get_rank():
            assert all(
                [
                    torch.equal(a, b)
                    for a, b in zip(flatten(got)[0], flatten(tree)[0], strict=True)
                    if b is not None
                ]
            )
        else:
            counts.append(count)
    link.flush()
    return counts


def test_a_tree_is_one_message(ranks):
    assert ranks.run(messages, world_size=2)[0] == [1, 1, 1, 1]
