"""`fabric.find_batch_size` on devices with a limit: the largest size that fits on each rank."""

import gc

import pytest
import sim
import torch
import torch.distributed as dist
from counting import fabric_of, net

from fabric.core.errors import CollectiveMismatch, ConfigurationError, UsageError
from fabric.strategies import PipelineStrategy

WIDTH = 512


@pytest.fixture(autouse=True)
def _no_limit_is_left(ranks):
    yield
    ranks.run(limit, 0, world_size=4)


def limit(size):
    gc.collect()
    sim._sim.set_capacity(torch.sim.memory_allocated() + size if size else 0)


class Loop:
    """A model, and a step of it that records the sizes."""

    def __init__(self, strategy):
        self.fabric = fabric_of(strategy)
        model = net(3)
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        self.sizes = []

    def step(self, size):
        self.sizes.append(size)
        rows = torch.randn(size, WIDTH, device=self.fabric.device)
        loss = self.model(rows).pow(2).mean()
        self.fabric.backward(loss)
        self.fabric.all_reduce(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fits(self, size):
        """Whether two real steps fit, one rank after the other: nothing is restored."""
        try:
            self.step(size), self.step(size)
        except torch.OutOfMemoryError:
            return False
        return True


def found(strategy, room, rooms):
    loop = Loop(strategy)
    limit(rooms.get(loop.fabric.global_rank, room))
    before = torch.sim.memory_allocated()
    result = loop.fabric.find_batch_size(loop.step, start=16, global_batch=3072 * dist.get_world_size())
    gc.collect()
    assert torch.sim.memory_allocated() == before
    sizes = loop.sizes[::2] if loop.fabric.global_rank else loop.sizes
    return result, sizes, loop.fits(result.batch_size)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_largest_size_that_fits(ranks, strategy, world):
    room = 26 * 2**20
    results = ranks.run(found, strategy, room, {}, world_size=world)
    ((batch_size, accumulation),) = {result for result, *_ in results}
    assert 16 < batch_size < 3072
    assert batch_size * accumulation == 3072
    assert all([fits for *_, fits in results])
    less = {world - 1: room - 12 * 2**20}  # of one rank
    ((smaller, _),) = {result for result, *_ in ranks.run(found, strategy, room, less, world_size=world)}
    assert smaller < batch_size


def mistakes():
    loop = Loop("ddp")
    fabric, rank = loop.fabric, loop.fabric.global_rank
    text = (
        "global_batch=15 on 2 ranks that read different data. Each rank needs the same number of rows. Write "
    )
    with pytest.raises(ConfigurationError, match=f"{text}global_batch=14 or global_batch=16."):
        fabric.find_batch_size(loop.step, global_batch=15)
    with pytest.raises(CollectiveMismatch, match="global_batch=8"):
        fabric.find_batch_size(loop.step, global_batch=8 * rank + 8)
    limit(2**20 if rank else 2**30)
    with pytest.raises(UsageError, match="A step with a batch size of 1 does not fit on rank 1: ") as raised:
        fabric.find_batch_size(loop.step, global_batch=16)
    assert loop.sizes[-1] == 1
    limit(0)
    assert fabric.find_batch_size(loop.step, global_batch=16) == (8, 1)
    return str(raised.value)


def test_mistakes(ranks):
    one, other = ranks.run(mistakes, world_size=2)
    assert one == other
    assert "Split the model over more devices with strategy=" in one


def pipeline():
    fabric = fabric_of(PipelineStrategy(num_microbatches=2))
    with pytest.raises(ConfigurationError, match=r"with PipelineStrategy\. Its steps wait for data"):
        fabric.find_batch_size(print, global_batch=16)


def test_pipelines_are_refused(ranks):
    ranks.run(pipeline, world_size=2)
