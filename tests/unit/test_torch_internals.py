"""Private names of torch: each is there and does what is needed of it; the docstring says what breaks."""

from __future__ import annotations

from pathlib import Path

import torch

from fabric.core import torch_internals as internals


def test_each_name_has_a_test() -> None:
    """A name that nobody looks at would break in a user's run."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in internals.__all__ if f"internals.{name}" not in text] == []


def test_batch_norm_is_the_class_of_all_batch_norms() -> None:
    """Warnings of statistics that differ between ranks, and what FSDP keeps in single precision."""
    for kind in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm):
        assert issubclass(kind, internals.BatchNorm)
    assert not issubclass(torch.nn.LayerNorm, internals.BatchNorm)


def test_passes_have_numbers_that_grow_and_calls_run_at_their_end() -> None:
    """Gradients and buffers are synchronised at the end of the outermost pass, once."""
    seen: list[object] = []

    def hook(grad: torch.Tensor) -> None:
        seen.append(internals.backward_pass())
        internals.call_after_backward(lambda: seen.append(weight.grad is not None))

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    assert internals.backward_pass() == -1
    (weight * 2).sum().backward()
    (weight * 2).sum().backward()
    first, ended, second, ended_too = seen
    assert ended is ended_too is True
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert 0 <= first < second
    assert internals.backward_pass() == -1


def test_operations_on_lists_are_those_of_their_names() -> None:
    """Clipping, packing of gradients and their means: one kernel for many tensors."""
    lists = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in internals.foreach_norm(lists, 2.0)] == [5.0, 2.0]
    internals.foreach_mul_(lists, 2.0)
    internals.foreach_div_(lists, 4.0)
    assert [t.tolist() for t in lists] == [[1.5, 2.0], [1.0]]
    internals.foreach_copy_(lists, [torch.zeros(2), torch.ones(1)])
    assert [t.tolist() for t in lists] == [[0.0, 0.0], [1.0]]


def test_function_transforms_say_that_they_run() -> None:
    """Strategy "dp" does not split what vmap has made of a batch; FSDP2 hangs its own hooks on outputs."""
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(internals.in_function_transform())
        return x.sum()

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True, True]


def test_values_are_clamped_in_lists() -> None:
    """Clipping by value of parameters that are split."""
    values = [torch.tensor([-3.0, 3.0])]
    internals.foreach_clamp_min_(values, -1.0)
    internals.foreach_clamp_max_(values, 2.0)
    assert values[0].tolist() == [-1.0, 2.0]


def test_views_have_the_number_of_their_memory() -> None:
    """Tied weights are gathered once; parts on the meta device find the tensor that they are parts of."""
    for device in ("cpu", "meta"):
        one, other = torch.ones(4, device=device), torch.ones(4, device=device)
        assert internals.memory_of(one[2:]) == internals.memory_of(one) != internals.memory_of(other)


def _look_into_fsdp() -> list[bool]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.ones(1, 2))
        states = internals.fsdp_states(model)
        groups = internals.fsdp_groups(states)
        weight: torch.Tensor = model[0].weight
        return [
            internals.is_fsdp(model) and not internals.is_fsdp(model[1]),
            internals.fsdp_state(model) in states,
            len(states) == 2 and [len(group.fsdp_params) for group in groups] == [2, 2],
            isinstance(weight, DTensor)
            and internals.memory_of(weight) == internals.memory_of(weight.to_local()),
            torch.ops.aten.is_same_size.default in internals.dtensor_handlers(),
        ]
    finally:
        dist.destroy_process_group()


def test_fsdp_and_dtensors_show_what_they_are_made_of() -> None:
    """Parts are those of the optimizer between calls; numbers and draws of DTensors are those of one rank."""
    assert _look_into_fsdp() == [True] * 5
