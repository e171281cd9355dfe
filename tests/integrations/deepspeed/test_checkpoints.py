"""Directories of DeepSpeed's, files of ours, and one made of the other; each goes on as if never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_deepspeed import (
    WAYS,
    WORLD,
    Net,
    Plain,
    Split,
    assert_same,
    batch,
    launched,
    loss_of,
    trained,
    values,
)
from torch.optim import Adam

from fabric import Fabric
from fabric.core.errors import DamagedCheckpointError, RankError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own
SHORT = {name: WAYS[name] for name in ("1", "2", "3", "3 offloaded")}


def steps(on, model, optimizer, *numbers):
    for step in numbers:
        optimizer.zero_grad()
        on.backward(loss_of(model, on.part(batch(step)), aside=True))
        optimizer.step()


def in_groups(model, lr):
    own = trained(model)
    return Adam([{"params": own[:1]}, {"params": own[1:], "lr": lr / 2}], lr=lr)


def fresh(on):
    model = Net()
    return on.setup(model, in_groups(model, 0.05))


def never_stopped():
    on = Plain()
    model, optimizer = fresh(on)
    steps(on, model, optimizer, *range(6))
    return [model]


def other(on):
    """Of other weights and another rate, both of which a checkpoint overwrites."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return on.setup(model, in_groups(model, 0.9))


def saved_and_loaded(way, folder, format):
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = fresh(on)
    steps(on, model, optimizer, 0, 1)
    fabric.save(folder, {"model": model, "optimizer": optimizer}, format=format)
    steps(on, model, optimizer, 2)
    fabric.save(  # in its place
        folder, {"model": model, "optimizer": optimizer, "step": 3, "rng": torch.arange(3)}, format=format
    )
    fabric.strategy.teardown()
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = other(on)
    steps(on, model, optimizer, 7)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(folder, state)
    assert state["step"] == 3
    assert torch.equal(rest["rng"], torch.arange(3))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025]
    steps(on, model, optimizer, 3, 4, 5)
    found = values(fabric, [model])
    fabric.strategy.teardown()
    return found


@pytest.mark.parametrize("way", SHORT)
@pytest.mark.parametrize("format", [None, "full", "sharded"])
def test_a_run_goes_on(ranks, tmp_path, way, format):
    folder = tmp_path / "checkpoint"
    found = ranks.run(saved_and_loaded, way, str(folder), format, world_size=WORLD)
    assert_same(found, never_stopped(), rtol=1e-5, atol=1e-5)
    assert (folder / "latest").is_file() == (format is None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def latest(way, folder):
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = fresh(on)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load_latest(folder, state) is None
    for step in range(4):
        steps(on, model, optimizer, step)
        state["step"] = step
        fabric.save_latest(folder, state, step=step, keep=2)
    fabric.barrier()
    if fabric.is_global_zero:
        newest = Path(folder, "step-00000003")
        part = next(newest.rglob("*optim_states.pt"))
        part.write_bytes(part.read_bytes()[:-7])
    fabric.barrier()
    fabric.strategy.teardown()
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = other(on)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load_latest(folder, state) == state["step"] == 2
    with pytest.raises((DamagedCheckpointError, RankError), match=r"is damaged: .*optim_states\.pt"):
        fabric.load(Path(folder, "step-00000003"), state)
    steps(on, model, optimizer, 3, 4, 5)
    found = values(fabric, [model])
    fabric.strategy.teardown()
    return found


@pytest.mark.parametrize("way", ["2", "3"])
def test_the_newest_that_is_whole(ranks, tmp_path, way):
    found = ranks.run(latest, way, str(tmp_path / "run"), world_size=WORLD)
    assert_same(found, never_stopped(), rtol=1e-5, atol=1e-5)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-00000002", "step-00000003"]


def begun(way, folder, strategy, format):
    """Three steps under one strategy, saved; then three under another one."""
    there = launched(way) if strategy == "deepspeed" else launched(way, strategy)
    on = Split(there)
    model, optimizer = fresh(on)
    steps(on, model, optimizer, 0, 1, 2)
    there.save(folder, {"model": model, "optimizer": optimizer}, format=format)
    there.strategy.teardown()
    here = launched(way) if strategy != "deepspeed" else launched(way, "ddp")
    on = Split(here)
    model, optimizer = other(on)
    here.load(folder, {"model": model, "optimizer": optimizer})
    steps(on, model, optimizer, 3, 4, 5)
    found = values(here, [model])
    here.strategy.teardown()
    return found


@pytest.mark.parametrize("way", ["1", "3", "2 offloaded"])
@pytest.mark.parametrize(
    ("strategy", "format"), [("deepspeed", "full"), ("ddp", "full"), ("fsdp", "sharded"), ("zero1", "full")]
)
def test_files_of_ours_are_for_every_strategy(ranks, tmp_path, way, strategy, format):
    found = ranks.run(begun, way, str(tmp_path / "checkpoint"), strategy, format, world_size=WORLD)
    assert_same(found, never_stopped(), rtol=1e-4, atol=1e-4)


def made_plain(way, folder, precision):
    fabric = launched(way, precision=precision)
    on = Split(fabric)
    model, optimizer = fresh(on)
    steps(on, model, optimizer, 0, 1, 2)
    fabric.save(f"{folder}/deepspeed", {"model": model, "optimizer": optimizer})
    found = values(fabric, [model])
    fabric.barrier()
    if fabric.is_global_zero:
        command = [sys.executable, "-m", "fabric.integrations.deepspeed"]
        command += [f"{folder}/deepspeed", f"{folder}/plain.pt"]
        subprocess.run(command, check=True, capture_output=True, timeout=400)
    fabric.barrier()
    fabric.strategy.teardown()
    fabric = launched(way, precision=precision)
    model, _ = other(Split(fabric))
    fabric.load_raw(f"{folder}/plain.pt", model)
    found += values(fabric, [model])
    fabric.load_raw(f"{folder}/deepspeed", model)
    found += values(fabric, [model])
    fabric.strategy.teardown()
    return found


@pytest.mark.parametrize("way", ["1", "2", "3"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_plain_file(ranks, tmp_path, way, precision):
    first, again, direct = ranks.run(made_plain, way, str(tmp_path), precision, world_size=WORLD)[0]
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert set(plain) == set(first)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(value, direct[name], rtol=0, atol=1e-2 * (precision != "32-true"))
        assert torch.equal(plain[name].float(), value.float()), name
    net = Net()
    net.load_state_dict(plain)
    assert torch.equal(net.last.weight, first["last.weight"])


def by_hand(way, folder):
    """A directory that a loop with DeepSpeed by hand has saved."""
    import deepspeed

    fabric = launched(way)
    model = Net()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=in_groups(model, 0.05), config=fabric.strategy.layout.config
    )
    part = Split(fabric).part
    for step in range(3):
        engine.backward(loss_of(engine, part(batch(step)), aside=True))
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    engine.destroy()
    fabric.strategy.teardown()
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = other(on)
    rest = fabric.load(folder, {"model": model, "optimizer": optimizer})
    steps(on, model, optimizer, 3, 4, 5)
    found = values(fabric, [model])
    fabric.strategy.teardown()
    return found, rest


@pytest.mark.parametrize("way", ["1", "2", "3"])
def test_a_directory_that_was_saved_by_hand(ranks, tmp_path, way):
    told = ranks.run(by_hand, way, str(tmp_path / "own"), world_size=WORLD)
    assert_same([found for found, _ in told], never_stopped(), rtol=1e-5, atol=1e-5)
    assert [rest["epoch"] for _, rest in told] == [4] * WORLD


def refused(way, folder):
    fabric = launched(way)
    on = Split(fabric)
    model, optimizer = fresh(on)
    steps(on, model, optimizer, 0)
    state = {"model": model, "optimizer": optimizer}
    fabric.save(f"{folder}/one", state)
    told = []

    def tell(call):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is compared
            call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    tell(lambda: fabric.save(f"{folder}/a", {**state, "other": fresh(on)[0]}))
    tell(lambda: fabric.save(f"{folder}/b", state, wait=False))
    tell(lambda: fabric.save(f"{folder}/c", state, filter={"model": lambda name, value: True}))
    tell(lambda: fabric.save(f"{folder}/d", {**state, "bad": object()}))
    tell(lambda: fabric.load(f"{folder}/one", {"epoch": 0}))
    tell(lambda: fabric.load(f"{folder}/one", {**state, "epoch": 0}))
    tell(lambda: fabric.save(f"{folder}/e", state, format="deep"))
    fabric.strategy.teardown()
    return told


def test_bad_input(ranks, tmp_path):
    told = ranks.run(refused, "2", str(tmp_path), world_size=WORLD)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    wanted = (
        "UsageError: saving a directory of DeepSpeed's takes one model that was set up with its optimizer, "
        "but state has 2. Save and load each in a directory of its own",
        "UsageError: DeepSpeed writes its directories whole and at once: it has no filter= and no wait=False",
        "UsageError: DeepSpeed writes its directories whole and at once: it has no filter= and no wait=False",
        "ArgumentTypeError: ",
        "UsageError: loading a directory of DeepSpeed's takes one model that was set up with its optimizer, "
        "but state has 0",
        "MissingKeysError: The checkpoint has no 'epoch' for state",
        "ConfigurationError: fabric.save(format='deep'): write ",
    )
    for said, start in zip(told, wanted, strict=True):
        assert said.startswith(start), said


def on_fewer(folder):
    fabric = launched("2")
    model, optimizer = fresh(Split(fabric))
    try:
        fabric.load(folder, {"model": model, "optimizer": optimizer})
    finally:
        fabric.strategy.teardown()


def test_on_another_number_of_ranks(ranks, tmp_path):
    ranks.run(saved_and_loaded, "2", str(tmp_path / "two"), None, world_size=WORLD)
    with pytest.raises(Exception, match="has the parts of 2 ranks, and there are 1: DeepSpeed reads its"):
        ranks.run(on_fewer, str(tmp_path / "two"), world_size=1)


def of_another_step(folder):
    fabric = launched("2")
    on = Split(fabric)
    model, optimizer = fresh(on)
    state = {"model": model, "optimizer": optimizer}
    for step in range(2):
        steps(on, model, optimizer, step)
        fabric.save(f"{folder}/{step}", state)
    with pytest.raises(UsageError, match=r"Ranks load different checkpoints \(0: .*/0 .* \| 1: .*/1 "):
        fabric.load(f"{folder}/{fabric.global_rank}", state)
    fabric.load(f"{folder}/1", state)
    fabric.strategy.teardown()


def test_ranks_that_load_directories_of_other_steps(ranks, tmp_path):
    ranks.run(of_another_step, str(tmp_path), world_size=WORLD)


def test_under_another_strategy(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "latest").write_text("checkpoint")
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(IsADirectoryError, match="is a directory, not a checkpoint file"):
        fabric.load(folder, {})
