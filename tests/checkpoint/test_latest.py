"""`save_latest` and `load_latest`: which checkpoints stay, and which one is loaded."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies import DDPStrategy


def launched():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 1))
    return fabric, {"model": model, "epoch": 0}


def put(state, value):
    with torch.no_grad():
        state["model"].weight.fill_(value)
    state["epoch"] = value


def loaded(fabric, folder, state):
    """(step, epoch, weight, warnings of this rank)"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = fabric.load_latest(folder, state)
    return step, state["epoch"], state["model"].weight[0, 0].item(), [str(w.message) for w in said]


def keeps_the_newest(folder, wait):
    fabric, state = launched()
    assert fabric.load_latest(folder, state) is None
    places = []
    for step in (5, 10, 100_000_000, 15, 20):
        put(state, step)
        places.append(str(fabric.save_latest(folder, state, step=step, keep=2, wait=wait)))
    fabric.barrier()
    put(state, 0)
    return places, loaded(fabric, folder, state)


@pytest.mark.parametrize("wait", [True, False])
def test_the_newest_stay_and_the_newest_is_loaded(ranks, tmp_path, wait):
    folder = tmp_path / "deep" / "run"
    for places, found in ranks.run(keeps_the_newest, str(folder), wait, world_size=2):
        assert places[0] == str(folder / "step-00000005.pt")
        assert found == (100_000_000, 100_000_000, 1e8, [])
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00000020.pt", "step-100000000.pt"]


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 4
    path.write_bytes(
        b"" if how == "empty" else bytes(content[: -len(content) // 3] if how == "cut" else content)
    )


def falls_back(folder, hows):
    fabric, state = launched()
    for step in range(1, 4):
        put(state, step)
        fabric.save_latest(folder, state, step=step)
    if fabric.is_global_zero:
        for step, how in hows.items():
            damage(Path(folder, f"step-{step:08d}.pt"), how)
    fabric.barrier()
    put(state, 0)
    return loaded(fabric, folder, state)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_is_loaded(ranks, tmp_path, how):
    first, second = ranks.run(falls_back, str(tmp_path), {3: how}, world_size=2)
    assert first[:3] == second[:3] == (2, 2, 2.0)
    assert len(first[3]) == 1
    assert second[3] == []
    path = tmp_path / "step-00000003.pt"
    assert first[3][0].startswith(
        f"{path} cannot be loaded, and the one before it is tried. DamagedCheckpointError: {path} "
    )


def other_format_of_a_step(folder):
    fabric, state = launched()
    put(state, 1)
    fabric.save_latest(folder, state, step=5)
    fabric.strategy.state_dict_type = "sharded"
    put(state, 2)
    fabric.save_latest(folder, state, step=5)
    put(state, 0)
    return loaded(fabric, folder, state)


def test_one_of_the_same_step_is_replaced_whatever_its_format(ranks, tmp_path):
    assert ranks.run(other_format_of_a_step, str(tmp_path), world_size=2) == [(5, 2, 2.0, [])] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def killed_between_renames(folder):
    fabric, state = launched()
    fabric.strategy.state_dict_type = "sharded"
    for step in (4, 5):
        put(state, step)
        fabric.save_latest(folder, state, step=step, keep=2)
    if fabric.is_global_zero:
        Path(folder, "step-00000005").rename(Path(folder, ".step-00000005.deadbeef.old"))
    fabric.barrier()
    put(state, 0)
    found = [loaded(fabric, folder, state)]
    put(state, 6)
    fabric.save_latest(folder, state, step=6)
    put(state, 0)
    return [*found, loaded(fabric, folder, state)]


def test_what_was_set_aside_for_a_checkpoint_that_never_came_is_loaded(ranks, tmp_path):
    for first, second in ranks.run(killed_between_renames, str(tmp_path), world_size=2):
        assert first == (5, 5, 5.0, [])
        assert second == (6, 6, 6.0, [])
    assert (tmp_path / ".step-00000005.deadbeef.old").is_dir()


class Lightnings(DDPStrategy):
    def save_checkpoint(self, path, state, storage_options=None, filter=None):
        super().save_checkpoint(path, {**state, "more": 1}, storage_options, filter)


def with_a_save_of_ones_own(folder):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=Lightnings())
    fabric.launch()
    state = {"model": fabric.setup(torch.nn.Linear(2, 1)), "epoch": 0}
    for step in range(4):
        fabric.save_latest(folder, state, step=step, keep=2)
    return fabric.load_latest(folder, state), fabric.load(f"{folder}/step-00000003.pt")["more"]


def test_a_strategy_with_a_save_of_its_own(ranks, tmp_path):
    assert ranks.run(with_a_save_of_ones_own, str(tmp_path), world_size=2) == [(3, 1)] * 2
    assert len(list(tmp_path.iterdir())) == 2


def in_a_file(folder):
    fabric, state = launched()
    fabric.load_latest(folder, state)


def test_a_file_is_no_directory_of_checkpoints(ranks, tmp_path):
    (tmp_path / "run").write_text("")
    for error in ranks.run_expecting_errors(in_a_file, str(tmp_path / "run"), world_size=2):
        assert "run is a file. Give load_latest the directory of save_latest" in str(error)


def test_two_damaged_ones(ranks, tmp_path):
    first, _ = ranks.run(falls_back, str(tmp_path), {3: "cut", 2: "flipped"}, world_size=2)
    assert (*first[:3], len(first[3])) == (1, 1, 1.0, 2)


def goes_on_before_a_damaged_one(folder):
    fabric, state = launched()
    for step in (15, 20):
        put(state, step)
        fabric.save_latest(folder, state, step=step)
    if fabric.is_global_zero:
        damage(Path(folder, "step-00000020.pt"), "flipped")
    fabric.barrier()
    first = loaded(fabric, folder, state)
    put(state, 16)
    fabric.save_latest(folder, state, step=16, keep=1)
    put(state, 0)
    return first[0], loaded(fabric, folder, state)


def test_a_new_one_stays_though_a_damaged_one_has_a_later_step(ranks, tmp_path):
    for before, after in ranks.run(goes_on_before_a_damaged_one, str(tmp_path), world_size=2):
        assert (before, after) == (15, (16, 16, 16.0, []))


def test_all_damaged_is_an_error(ranks, tmp_path):
    for error in ranks.run_expecting_errors(
        falls_back, str(tmp_path), dict.fromkeys((1, 2, 3), "cut"), world_size=2
    ):
        assert isinstance(error, UsageError)
        assert f"None of the 3 checkpoints in {tmp_path} can be loaded. The oldest: " in str(error)


def another_model(folder):
    fabric, state = launched()
    fabric.save_latest(folder, state, step=1)
    fabric.save_latest(folder, state, step=2)
    state["model"] = fabric.setup(torch.nn.Linear(3, 1))
    fabric.load_latest(folder, state)


def test_a_checkpoint_of_another_model_is_no_damaged_one(ranks, tmp_path):
    for error in ranks.run_expecting_errors(another_model, str(tmp_path), world_size=2):
        assert "size mismatch for weight" in str(error)


def bad_argument(folder, argument):
    fabric, state = launched()
    fabric.save_latest(folder, state, **{"step": 1, **argument})


@pytest.mark.parametrize(
    "argument", [{"step": -1}, {"step": 1.5}, {"step": True}, {"keep": 0}, {"keep": None}]
)
def test_bad_arguments(ranks, tmp_path, argument):
    ((name, value),) = argument.items()
    for error in ranks.run_expecting_errors(bad_argument, str(tmp_path), argument, world_size=2):
        assert isinstance(error, ConfigurationError)
        assert str(error).startswith(f"save_latest({name}={value!r}) must be an int of at least ")


def leaves_what_is_not_its_own(folder):
    fabric, state = launched()
    for step in range(4):
        fabric.save_latest(folder, state, step=step, keep=1)


def test_only_its_own_files_go(ranks, tmp_path):
    kept = ["best.pt", "step-1.txt", "step-7.pt.bak", ".step-00000001.pt", "notes"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".step-00000009.pt.ab12cd34.part").write_text("of a save that was killed")
    ranks.run(leaves_what_is_not_its_own, str(tmp_path), world_size=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*kept, "step-00000003.pt"])


def through_memory():
    fabric, state = launched()
    folder = "memory://latest/run"
    for step in range(3):
        put(state, step)
        place = fabric.save_latest(folder, state, step=step, keep=2)
    put(state, 9)
    return place, loaded(fabric, folder, state)


def test_a_url(ranks):
    pytest.importorskip("fsspec")
    assert ranks.run(through_memory, world_size=1) == [
        ("memory://latest/run/step-00000002.pt", (2, 2, 2.0, []))
    ]


def test_old_ones_are_removed_where_they_were_saved(tmp_path, monkeypatch):
    """Also if the loop changes its working directory while a checkpoint is written."""
    for run in "ab":
        (tmp_path / run).mkdir()
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.chdir(tmp_path / "b")
    for step in (1, 2):
        fabric.save_latest("run", {"step": step}, step=step)
    monkeypatch.chdir(tmp_path / "a")
    fabric.save_latest("run", {"step": 1}, step=1)
    write = type(fabric.strategy.checkpoint_io).save_checkpoint

    def write_later(io, *args):
        changed.wait()
        write(io, *args)

    changed = threading.Event()
    monkeypatch.setattr(type(fabric.strategy.checkpoint_io), "save_checkpoint", write_later)
    fabric.save_latest("run", {"step": 9}, step=9, keep=1, wait=False)
    monkeypatch.chdir(tmp_path / "b")
    changed.set()
    fabric.load(tmp_path / "a/run/step-00000009.pt")
    assert [entry.name for entry in (tmp_path / "a/run").iterdir()] == ["step-00000009.pt"]
    assert len(list((tmp_path / "b/run").iterdir())) == 2
