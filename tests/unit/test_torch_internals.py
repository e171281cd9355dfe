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


def test_what_waits_for_cuda_is_called_by_the_line_that_initialises_it() -> None:
    """A fork after CUDA was used is refused; the error could not name the line that used it."""
    called: list[int] = []
    internals.call_when_cuda_starts(lambda: called.append(1))
    assert called == [1] * torch.cuda.is_initialized()
    if not called:
        assert torch.cuda._queued_calls.pop()[0]() is None
        assert called == [1]
