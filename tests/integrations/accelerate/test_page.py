"""The diff of the page on migrating: a loop with Accelerate, and the same with Fabric."""

from __future__ import annotations

import pytest
from pages import blocks, lives_of, sides


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_both_sides_print_the_same_numbers_interrupted_and_resumed(processes, tmp_path):
    (block,) = [one for one in blocks() if one.language == "diff" and "accelerate" in one.code]
    left, right = sides(block.code).values()
    ours = lives_of(right, tmp_path / "right", processes)
    assert len(ours) == 4
    assert lives_of(left, tmp_path / "left", processes) == ours
