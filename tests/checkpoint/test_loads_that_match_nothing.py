"""Loads in which no name is found: one warning, on rank zero, whatever the strategy."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from checkpoint_cases import launched, net


def loads(name, folder):
    fabric = launched(name)

    def told(match):
        return pytest.warns(match=match) if fabric.is_global_zero else nullcontext()

    model, saved = fabric.setup(net(1)), net().state_dict()
    if fabric.is_global_zero:
        torch.save(saved, folder / "bare.pt")
    fabric.barrier()
    with pytest.raises(
        KeyError, match=r"looks like a bare state_dict\. Write fabric\.load_raw\(path, model\)"
    ):
        fabric.load(folder / "bare.pt", {"model": model})
    with told(r"loaded nothing.*looks like a bare state_dict\. Write fabric\.load_raw\(path, model\)"):
        fabric.load(folder / "bare.pt", {"model": model}, strict=False)
    for load in (
        lambda: model.load_state_dict({"other": torch.zeros(1)}, strict=False),
        lambda: fabric.load_raw(folder / "checkpoint", model, strict=False),
    ):
        with told("0 of 9 tensors loaded"):
            fabric.save(folder / "checkpoint", {"net": model})
            load()
    fabric.load_raw(folder / "bare.pt", model)
    for key, value in fabric.strategy.get_module_state_dict(model).items():
        assert torch.equal(value, saved[key]), key


@pytest.mark.parametrize(
    ("name", "size"), [("single", 1), ("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero2", 2), ("zero3", 3)]
)
def test_loads_that_match_nothing_are_told(ranks, tmp_path, name, size):
    ranks.run(loads, name, tmp_path, world_size=size)


def test_loads_into_a_pipeline_that_match_nothing_are_told(ranks, tmp_path):
    ranks.run(loads, "pipeline", tmp_path, world_size=2)
