"""The diff of the page on migrating: a loop with FairScale's OSS and ShardedDDP, and the same with Fabric."""

from __future__ import annotations

import pytest
from pages import blocks, lives_of, sides


def sides_of_page() -> tuple[str, str]:
    (block,) = [one for one in blocks() if one.language == "diff" and "fairscale" in one.code]
    left, right = sides(block.code).values()
    return left, right


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_both_sides_print_the_number_that_the_page_shows(processes, tmp_path):
    left, right = sides_of_page()
    assert lives_of(right, tmp_path / "right", processes) == [0.3161]
    assert lives_of(left, tmp_path / "left", processes) == [0.3161]


def test_gradients_that_the_optimizer_sets_to_none_are_averaged_wrongly_by_fairscale(tmp_path):
    """As the page says: FairScale 0.4.13 is from before torch 2.0."""
    left, _ = sides_of_page()
    changed = left.replace("model.zero_grad()", "optimizer.zero_grad()")
    assert lives_of(changed, tmp_path / "changed") == [0.6652]
