"""Loads in which no name, or only a part of them, is found: one warning, on rank zero, in each strategy."""

from __future__ import annotations

import warnings
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


def loads_a_part(name, folder):
    """The warnings of loads with `strict=False`, by case."""
    fabric, found = launched(name), {}
    saved = net()
    saved[0].weight.requires_grad_(False)
    names = {"head": "4.weight", "frozen": "0.weight"}
    for case, left_out in names.items():
        state = {key: value for key, value in saved.state_dict().items() if key != left_out}
        if fabric.is_global_zero:
            torch.save(state, folder / f"{case}.pt")
            torch.save({"model": {**state, "old": torch.ones(1)}}, folder / f"more-{case}.pt")
    fabric.barrier()
    model = fabric.setup(saved)
    for case in names:
        for path, load in (
            (f"{case}.pt", lambda path: fabric.load_raw(path, model, strict=False)),
            (f"more-{case}.pt", lambda path: fabric.load(path, {"model": model, "step": 0}, strict=False)),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load(folder / path)
            found[path] = [str(warning.message) for warning in caught]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(torch.load(folder / "head.pt"), strict=False)  # returns the names itself
    return found


@pytest.mark.parametrize(
    ("name", "size"), [("single", 1), ("ddp", 2), ("zero1", 3), ("zero2", 2), ("zero3", 2), ("pipeline", 2)]
)
def test_loads_that_match_in_part_are_told(ranks, tmp_path, name, size):
    counted = "of 9 tensors of model 0 (Sequential) loaded (strict=False)."
    lacks, more = " The checkpoint has no {!r}: unchanged.", " The model has no 'old': not loaded."
    step = f"1 of 2 entries of state loaded (strict=False).{lacks.format('step')}"
    first, *others = ranks.run(loads_a_part, name, tmp_path, world_size=size)
    assert first == {
        "head.pt": [f"8 {counted}{lacks.format('4.weight')}"],
        "more-head.pt": [step, f"8 {counted}{lacks.format('4.weight')}{more}"],
        "frozen.pt": [],
        "more-frozen.pt": [step, f"8 {counted}{lacks.format('0.weight')}{more}"],
    }
    assert not any(texts for told in others for texts in told.values())
