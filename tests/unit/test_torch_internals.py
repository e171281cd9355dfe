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


def test_tensor_classes_are_not_asked() -> None:
    """Parameters without memory would be asked about the operations that record them, without end."""

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    tensor = torch.ones(2).as_subclass(Asked)
    with internals.no_subclass_functions():
        assert (tensor + 1).sum().item() == 4


def test_running_iterations_are_known_and_workers_are_dropped() -> None:
    """Loaders that yield from an old iterator are refused; positions reach workers that live on."""
    loader = torch.utils.data.DataLoader(range(3))  # type: ignore[arg-type]
    assert isinstance(iter(loader), internals.loader_iterator())
    assert loader._iterator is None
    loader._iterator = iter(loader)
    internals.drop_workers(loader)
    assert loader._iterator is None


def test_batches_of_unknown_classes_are_pinned_by_their_own_method() -> None:
    """Batches of iterable datasets come with a note, in a class of our own."""
    assert internals.pin_memory({"a": [1, "b"]}) == {"a": [1, "b"]}

    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    assert internals.pin_memory([Pinned()]) == ["pinned"]


def test_a_worker_may_take_itself_for_the_only_process() -> None:
    """A dataset that splits itself by worker would be split twice."""
    from torch.utils.data._utils import worker

    before, worker._worker_info = worker._worker_info, "info"  # type: ignore[assignment]
    try:
        with internals.without_worker_info():
            assert torch.utils.data.get_worker_info() is None
        assert torch.utils.data.get_worker_info() == "info"
    finally:
        worker._worker_info = before
