"""The diff of "Convert your script": a loop with DeepSpeed by hand, and the same with Fabric."""

from __future__ import annotations

import pytest
from pages import ROOT, blocks, lives_of, sides

# DeepSpeed by hand would compile its collectives in shared memory, for minutes.
NOTHING_COMPILED = """
from deepspeed.ops import __compatible_ops__
__compatible_ops__["deepspeed_shm_comm"] = False
"""


def test_both_sides_print_the_same_numbers_interrupted_and_resumed(tmp_path, monkeypatch):
    """So does the right side without DeepSpeed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (block,) = [b for b in blocks() if b.language == "diff" and "deepspeed.initialize" in b.code]
    left, right = sides(block.code).values()
    assert '"deepspeed_stage_2"' in right
    ours = lives_of(right, tmp_path / "right")
    assert len(ours) == 4
    assert lives_of(NOTHING_COMPILED + left, tmp_path / "left") == pytest.approx(ours, abs=0.004)
    without = right.replace('"deepspeed_stage_2"', '"zero2"')
    assert lives_of(without, tmp_path / "zero2") == pytest.approx(ours, abs=0.004)
