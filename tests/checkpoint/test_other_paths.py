"""Loads of another checkpoint on a rank: an error where shards would be joined, else one warning."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from checkpoint_cases import launched, net

from fabric.checkpoint.same_content import content_of
from fabric.core.errors import UsageError


def loads_another(name, folder, format, suffix):
    fabric = launched(name)
    model = fabric.setup_module(net(1))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(step)
        fabric.save(
            folder / f"{step}{suffix}", {"model": model, "optimizer": optimizer, "step": step}, format=format
        )
    mine = folder / f"{1 + (fabric.global_rank == 1)}{suffix}"
    state = {"model": model, "optimizer": optimizer, "step": 0}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    text = (
        rf"Ranks load different checkpoints \(0(, 2)?: .*/1{suffix} \(CRC-32 \w+\) \| 1: .*/2{suffix} \(CRC"
    )
    warns = pytest.warns(match=text) if fabric.is_global_zero else nullcontext()
    if name == "ddp":
        with warns:
            fabric.load(mine, state)
        assert state["step"] == 1 + (fabric.global_rank == 1)
    else:
        with pytest.raises(
            UsageError, match=text + r".*would be joined from shards.*fabric\.broadcast\(path\)"
        ):
            fabric.load(mine, state)
        assert state["step"] == 0
        assert all(map(torch.equal, model.parameters(), before))
    with pytest.warns(match=text) if fabric.is_global_zero else nullcontext():
        fabric.load(mine, {"step": 0}, strict=False)
    fabric.load(mine)  # without state nothing is restored
    fabric.load(fabric.broadcast(mine), state)
    assert state["step"] == 1


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize(("name", "size"), [("ddp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2)])
def test_another_path_on_a_rank(ranks, tmp_path, name, size, format):
    ranks.run(loads_another, name, tmp_path, format, ".pt" if format == "full" else "", world_size=size)


def loads_other_files_of_torch(folder):
    """Of equal size; then one that each rank has downloaded, under a name of its own."""
    fabric = launched("zero3")
    model = fabric.setup(net(1))
    mine = folder / f"{fabric.global_rank}.pt"
    torch.save(net(fabric.global_rank).state_dict(), mine)
    fabric.barrier()
    text = r"0: .*/0\.pt \(CRC-32 \w+\) \| 1: .*/1\.pt \(CRC-32 \w+\)\), so model 0 \(Sequential\) would"
    with pytest.raises(UsageError, match=text):
        fabric.load_raw(mine, model)
    copy = folder / f"copy{fabric.global_rank}.pt"
    copy.write_bytes((folder / "0.pt").read_bytes())
    fabric.load_raw(copy, model)


def test_files_without_a_digest_are_compared_by_their_ends(ranks, tmp_path):
    ranks.run(loads_other_files_of_torch, tmp_path, world_size=2)


def test_directories_without_a_digest_are_compared_by_their_files(tmp_path):
    for name, weight in (("a/ckpt", 1.0), ("b/ckpt", 2.0), ("c/other", 1.0)):
        (tmp_path / name).mkdir(parents=True)
        torch.save({"w": torch.full((9,), weight)}, tmp_path / name / "part.pt")
    (tmp_path / "c/other/.cache").mkdir()
    (tmp_path / "c/other/.cache/a.lock").write_text("of a download")
    first, second, copy = [content_of(tmp_path / name) for name in ("a/ckpt", "b/ckpt", "c/other")]
    assert (first == copy, first == second) == (True, False)


def copies_with_one_content(folder):
    """As on hosts without a shared directory."""
    fabric = launched("zero3")
    model = fabric.setup(net(1))
    fabric.save(folder / "a.pt", {"model": model}, format="full")
    mine = folder / f"host{fabric.global_rank}.pt"
    mine.write_bytes((folder / "a.pt").read_bytes())
    fabric.barrier()
    fabric.load(mine, {"model": model})


def test_copies_of_one_checkpoint_are_one(ranks, tmp_path):
    ranks.run(copies_with_one_content, tmp_path, world_size=2)


def warned_as_error(folder):
    fabric = launched("ddp")
    fabric.save(folder / "0.pt", {"step": 1})
    fabric.save(folder / "1.pt", {"step": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.load(folder / f"{fabric.global_rank}.pt", {"step": 0})


def test_a_warning_that_is_an_error_ends_the_load_on_all_ranks(ranks, tmp_path):
    first, other = ranks.run_expecting_errors(warned_as_error, tmp_path, world_size=2)
    assert str(first).startswith("Ranks load different checkpoints (0: ")
    assert str(other).startswith("rank 0 failed while loading")
