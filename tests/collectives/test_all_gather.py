"""all_gather on 1 to 3 ranks: shapes, every dtype, gradients, and groups of some ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_cases import GATHERED, alike, counted, launched, random_tree

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.core.tree import flatten


def gather_random_trees(seeds):
    fabric = launched()
    for seed in seeds:
        data = random_tree(seed, fabric.global_rank, GATHERED)
        everyone = [flatten(random_tree(seed, rank, GATHERED))[0] for rank in range(fabric.world_size)]
        before = [leaf.clone() for leaf in flatten(data)[0]]
        result = fabric.all_gather(data)
        leaves, spec = flatten(result)
        assert spec == flatten(data)[1]
        for position, leaf in enumerate(leaves):
            assert leaf.shape == (fabric.world_size, *before[position].shape)
            for rank in range(fabric.world_size):
                alike(leaf[rank].contiguous(), everyone[rank][position].contiguous())
        alike(flatten(data)[0], before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_of_random_trees(ranks, world_size):
    ranks.run(gather_random_trees, range(40), world_size=world_size)


def gather_shapes():
    fabric = launched()
    data = {
        "number": fabric.global_rank,
        "scalar": torch.tensor(1.0),
        "matrix": torch.ones(2, 3),
        "none": torch.empty(0, 4),
    }
    result = fabric.all_gather(data)
    return {key: tuple(value.shape) for key, value in result.items()}, result["number"].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathered_shapes_begin_with_the_world_size(ranks, world_size):
    shapes = {"number": (), "scalar": (), "matrix": (2, 3), "none": (0, 4)}
    expected = {key: (world_size, *shape) for key, shape in shapes.items()}, list(range(world_size))
    assert ranks.run(gather_shapes, world_size=world_size) == [expected] * world_size


def gather_in_one_process_shapes():
    fabric = Fabric(accelerator="cpu")
    result = fabric.all_gather({"number": 3, "matrix": torch.ones(2, 3)})
    return {key: tuple(value.shape) for key, value in result.items()}


def test_gathered_shapes_in_one_process():
    assert gather_in_one_process_shapes() == {"number": (1,), "matrix": (1, 2, 3)}


def test_many_rows_are_joined_in_one_process():
    """More bytes than a frame holds: they follow it, also where there is nobody to send them to."""
    data, fabric = torch.ones(5000, 4), Fabric(accelerator="cpu")
    assert fabric.all_gather(data, uneven="cat").equal(data)
    assert [part.shape for part in fabric.all_gather(data, uneven="list")] == [data.shape]


def contrast(embeddings: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loss in which every sample meets every other one."""
    scores = embeddings @ embeddings.t()
    return (torch.logsumexp(scores, 1) * weight).sum()


def inputs(world_size):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(world_size, 4, 3, generator=generator, dtype=torch.float64)


def gather_with_gradients():
    fabric = launched()
    rank, world = fabric.global_rank, fabric.world_size
    x = inputs(world)[rank].clone().requires_grad_()
    other = torch.ones(world, 4, 3, dtype=torch.float64, requires_grad=True)
    with counted() as calls:
        gathered = fabric.all_gather({"x": x, "label": rank}, sync_grads=True)
        assert gathered["label"].tolist() == list(range(world))
        # This rank's part of the joint loss: the rows of its own samples.
        weight = torch.zeros(world, 4, dtype=torch.float64)
        weight[rank] = 1
        joined = gathered["x"] + 0 * other
        contrast(joined.reshape(-1, 3), weight.reshape(-1)).backward()
    assert calls == ({"frame": 2} if world > 1 else {}), "a frame there and one back"
    detached = fabric.all_gather(x)
    assert not detached.requires_grad, "without sync_grads nothing flows back"
    with torch.no_grad():
        assert not fabric.all_gather(x, sync_grads=True).requires_grad
    return x.grad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_through_all_gather_equal_the_joined_batch(ranks, world_size):
    joined = inputs(world_size).reshape(-1, 3).clone().requires_grad_()
    contrast(joined, torch.ones(4 * world_size, dtype=torch.float64)).backward()
    grads = ranks.run(gather_with_gradients, world_size=world_size)
    torch.testing.assert_close(torch.cat(grads), joined.grad)


def share_a_gradient():
    """Autograd lends one gradient to both terms of a sum; ours must not write into it."""
    fabric = launched()
    x = torch.ones(2, requires_grad=True)
    other = torch.ones(2, 2, requires_grad=True)
    total = fabric.all_gather(x, sync_grads=True) + other
    (total**2).sum().backward()
    return x.grad.tolist(), other.grad.tolist()


def test_the_gradient_of_others_is_left_alone(ranks):
    assert ranks.run(share_a_gradient, world_size=2) == [([8.0, 8.0], [[4.0, 4.0], [4.0, 4.0]])] * 2


def write_into_results():
    """Write a part with a gradient into each verb's result, as a contrastive loss does with its own rows."""
    fabric = launched()
    ones, size = torch.ones(fabric.world_size, 2), 20_000
    verbs = {
        "all_gather": fabric.all_gather,
        "of several": lambda x: fabric.all_gather([x, x])[1],
        "asynchronous": lambda x: fabric.all_gather(x, async_op=True).wait(),
        "with gradients": lambda x: fabric.all_gather(x * 1, sync_grads=True),
        "uneven": lambda x: fabric.all_gather(x, uneven="list")[-1],
        "gather": lambda x: fabric.gather(x, dst=fabric.world_size - 1),
        "all_to_all": fabric.all_to_all,
        "all_to_all with gradients": lambda x: fabric.all_to_all(x * 1, sync_grads=True),
        "scatter": fabric.scatter,
        "broadcast": lambda x: fabric.broadcast(x, src=0),
    }
    for name, verb in verbs.items():
        for x in (ones.clone(), ones.repeat(1, size)):
            part = torch.ones((), requires_grad=True)
            result = verb(x.requires_grad_() if "with gradients" in name else x)
            if result is not None:
                result[0] = part * 3
                result.sum().backward()
                assert part.grad == 3 * result[0].numel(), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loop_may_write_into_results(ranks, world_size):
    ranks.run(write_into_results, world_size=world_size)


# groups


def use_a_subgroup():
    fabric = launched()
    rank = fabric.global_rank
    group = dist.new_group([0, 2])
    if rank == 1:
        for verb in (fabric.all_reduce, fabric.all_gather):
            with pytest.raises(UsageError, match="not in the group"):
                verb(1.0, group=group)
        return None
    summed = fabric.all_reduce({"a": torch.tensor(float(rank)), "n": rank}, group=group, reduce_op="sum")
    gathered = fabric.all_gather(rank, group=group)
    x = torch.tensor([float(rank)], requires_grad=True)
    (fabric.all_gather(x, group=group, sync_grads=True) * torch.tensor([[1.0], [10.0]])).sum().backward()
    whole = fabric.strategy.group_collective(dist.group.WORLD)
    assert whole is fabric.strategy.collective
    return summed["a"].item(), summed["n"].item(), gathered.tolist(), x.grad.item()


def test_a_group_of_some_ranks(ranks):
    expected = [(2.0, 2, [0, 2], 2.0), None, (2.0, 2, [0, 2], 20.0)]
    assert ranks.run(use_a_subgroup, world_size=3) == expected
