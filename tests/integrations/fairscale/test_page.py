"""The diff of the page on migrating: a loop with OSS, and the same with Fabric."""

from __future__ import annotations

import pytest
from pages import blocks, lives_of, sides


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_both_sides_print_the_same_number(processes, tmp_path):
    (block,) = [one for one in blocks() if one.language == "diff" and "fairscale" in one.code]
    left, right = sides(block.code).values()
    assert lives_of(left, tmp_path / "left", processes) == [0.3161]
    assert lives_of(right, tmp_path / "right", processes) == [0.3161]
    zero2 = right.replace('"zero1"', '"zero2"')
    assert lives_of(zero2, tmp_path / "zero2", processes) == [0.3161]
