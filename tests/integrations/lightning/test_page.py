"""The diff of the page on migrating: Lightning Fabric, the same with its import replaced, and Fabric."""

from __future__ import annotations

import pytest
from pages import blocks, lives_of, sides


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_all_sides_print_the_same_numbers_interrupted_and_resumed(processes, tmp_path):
    (block,) = [one for one in blocks() if one.language == "diff" and "lightning.fabric" in one.code]
    left, right = sides(block.code).values()
    ours = lives_of(right, tmp_path / "right", processes)
    assert len(ours) == 4
    assert lives_of(left, tmp_path / "left", processes) == ours
    replaced = left.replace("lightning.fabric", "fabric")
    assert lives_of(replaced, tmp_path / "replaced", processes) == ours
