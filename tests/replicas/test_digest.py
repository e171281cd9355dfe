"""Digests: equal bits give equal digests, and others do not, whatever shape and dtype."""

from __future__ import annotations

import pytest
import torch

from fabric.replicas.digest import digest_of

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.complex64,
]
SHAPES = [(), (1,), (3,), (7, 5), (1000, 70), (70_001, 3)]


def made(shape, dtype):
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_changed_element_changes_the_digest(shape, dtype):
    tensor = made(shape, dtype)
    before = digest_of([tensor]).item()
    assert digest_of([tensor.clone()]).item() == before
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        assert digest_of([changed]).item() != before, place


@pytest.mark.parametrize("shape", [(4,), (70_001, 3)])
def test_two_swapped_rows_change_the_digest(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    swapped = tensor.clone()
    swapped[[0, -1]] = tensor[[-1, 0]]
    assert digest_of([swapped]).item() != digest_of([tensor]).item()


def test_tensors_count_in_their_order():
    first, second = torch.ones(3), torch.zeros(3)
    assert digest_of([first, second]).item() != digest_of([second, first]).item()
    assert digest_of([]).item() == digest_of([torch.ones(0)]).item() == 0


@pytest.mark.parametrize("numel", [5, 100_001])
def test_views_have_the_digest_of_their_elements(numel):
    flat = torch.randn(2 * numel + 1, generator=torch.Generator().manual_seed(0))
    shifted, strided = flat[1 : numel + 1], flat[::2][:numel]
    for view in (shifted, strided, flat[: 4 * (numel // 4)].view(2, -1).T):
        assert digest_of([view]).item() == digest_of([view.clone()]).item()


def test_nan_has_a_digest():
    tensor = torch.tensor([1.0, torch.nan])
    assert digest_of([tensor]).item() == digest_of([tensor.clone()]).item()
    assert digest_of([tensor]).item() != digest_of([torch.tensor([1.0, 2.0])]).item()
