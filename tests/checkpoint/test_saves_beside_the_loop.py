"""`fabric.save(..., wait=False)`: the copy that is written, errors that surface, one at a time."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.checkpoint.formats.sharded.dcp import ShardWriter
from fabric.core.errors import ConfigurationError
from fabric.plugins.io import TorchCheckpointIO


class Slow(TorchCheckpointIO):
    """Writes when it is let."""

    def __init__(self):
        super().__init__()
        self.let = threading.Event()
        self.began = threading.Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.began.set()
        assert self.let.wait(60)
        super().save_checkpoint(checkpoint, path, storage_options)


class Full(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise OSError(28, "No space left on device", str(path))


def launched(strategy="ddp", **kwargs):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **kwargs)
    fabric.launch()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    return fabric, model, optimizer


def step(fabric, model, optimizer):
    optimizer.zero_grad()
    fabric.backward(model(torch.randn(4, 4)).pow(2).sum())
    optimizer.step()


def values(model):
    return {key: value.tolist() for key, value in model.state_dict().items()}


def changed_meanwhile(strategy, path):
    storage = Slow()
    fabric, model, optimizer = launched(strategy, plugins=storage)
    step(fabric, model, optimizer)
    ema = torch.ones(3)
    then = values(model), ema.tolist()
    moments = fabric.strategy.get_optimizer_state(optimizer)["state"][0]["exp_avg"].tolist()
    saving = fabric.save(
        path, {"model": model, "optimizer": optimizer, "ema": ema, "tied": [ema, ema[1:]]}, wait=False
    )
    if fabric.is_global_zero:
        assert storage.began.wait(60)
        assert not saving.done()
    for _ in range(3):
        step(fabric, model, optimizer)
    ema.add_(1)
    assert not Path(path).exists()
    fabric.barrier()
    storage.let.set()
    saving.wait()
    assert Path(path).is_file(), "wait returned on a rank before the file was there"
    assert saving.done()
    saving.wait()
    held = fabric.load(path)
    assert held["tied"][1].data_ptr() is not None
    return then == ({k: v.tolist() for k, v in held["model"].items()}, held["ema"].tolist()), (
        moments == held["optimizer"]["state"][0]["exp_avg"].tolist()
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_what_changes_after_the_call_does_not_reach_the_file(ranks, tmp_path, strategy):
    assert ranks.run(changed_meanwhile, strategy, str(tmp_path / "a.pt"), world_size=2) == [(True, True)] * 2


def test_on_one_rank(ranks, tmp_path):
    assert ranks.run(changed_meanwhile, "auto", str(tmp_path / "a.pt"), world_size=1) == [(True, True)]


def one_after_the_other(folder):
    storage = Slow()
    fabric, model, _ = launched(plugins=storage)
    first = fabric.save(f"{folder}/0.pt", {"model": model, "n": 0}, wait=False)
    threading.Timer(0.2, storage.let.set).start()
    second = fabric.save(f"{folder}/1.pt", {"model": model, "n": 1}, wait=False)
    assert Path(f"{folder}/0.pt").is_file(), "two were under way"
    assert first.done()
    rest = fabric.load(f"{folder}/1.pt")  # waits, too
    assert second.done()
    return rest["n"]


def test_one_is_under_way_at_a_time_and_a_load_waits(ranks, tmp_path):
    assert ranks.run(one_after_the_other, str(tmp_path), world_size=2) == [1, 1]


def error_surfaces(how, path):
    fabric, model, _ = launched(plugins=Full())
    saving = fabric.save(path, {"model": model}, wait=False)
    try:
        if how == "wait":
            saving.wait()
        elif how == "save":
            fabric.save(path, {"model": model}, wait=False)
        else:
            fabric.load(path, {"model": model})
    except Exception as error:
        told = type(error).__name__, str(error)
    saving.wait()  # said once
    assert fabric.all_reduce(torch.tensor(1.0), reduce_op="sum") == fabric.world_size
    return told


@pytest.mark.parametrize("how", ["wait", "save", "load"])
def test_an_error_surfaces_at_the_next_call_on_all_ranks(ranks, tmp_path, how):
    path = str(tmp_path / "a.pt")
    first, second = ranks.run(error_surfaces, how, path, world_size=2)
    assert first == ("OSError", f"[Errno 28] No space left on device: '{path}'")
    assert second == (
        "RankError",
        f"rank 0 failed while saving {path}: OSError: [Errno 28] No space left on device: '{path}'",
    )


def bad_value(path):
    fabric, model, _ = launched()
    fabric.save(path, {"model": model, "bad": object()}, wait=False)


def test_what_cannot_be_saved_is_refused_at_the_call(ranks, tmp_path):
    for error in ranks.run_expecting_errors(bad_value, str(tmp_path / "a.pt"), world_size=2):
        assert "state['bad'] is a builtins.object" in str(error)
    assert not list(tmp_path.iterdir())


def shards_changed_meanwhile(strategy, path):
    fabric, model, optimizer = launched(strategy)
    step(fabric, model, optimizer)
    module = copy.deepcopy(fabric.strategy.get_module_state_dict(model))
    opt = copy.deepcopy(fabric.strategy.get_optimizer_state(optimizer))
    lists = [1, 2]
    state = {"model": model, "optimizer": optimizer, "lists": lists}
    write, let = ShardWriter.write, threading.Event()

    def later(*args):
        assert let.wait(60)
        return write(*args)

    with mock.patch.object(ShardWriter, "write", later):
        saving = fabric.save(path, state, wait=False, format="sharded")
        lists.append(3)
        for _ in range(2):
            step(fabric, model, optimizer)
        assert not saving.done() or strategy == "ddp"  # where rank zero writes all
        assert not Path(path).exists()
        fabric.barrier()
        let.set()
        saving.wait()
    assert (Path(path) / "fabric.json").is_file()
    held = fabric.load(path)
    torch.testing.assert_close(dict(held["model"]), dict(module), rtol=0, atol=0)
    torch.testing.assert_close(held["optimizer"]["state"], opt["state"], rtol=0, atol=0)
    return held["lists"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_parts_are_written_beside_the_loop_too(ranks, tmp_path, strategy):
    assert ranks.run(shards_changed_meanwhile, strategy, str(tmp_path / "a"), world_size=2) == [[1, 2]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not list((tmp_path / "a").glob("told*"))


def a_rank_cannot_write(path, bad):
    fabric, model, _ = launched("fsdp")
    fabric.save(path, {"model": model, "n": 1})

    def full(*args):
        raise OSError(28, "No space left on device")

    with mock.patch.object(ShardWriter, "write", full if fabric.global_rank in bad else ShardWriter.write):
        saving = fabric.save(path, {"model": model, "n": 2}, wait=False)
        try:
            saving.wait()
        except Exception as error:
            told = str(error)
    assert fabric.load(path)["n"] == 1
    return told


@pytest.mark.parametrize("bad", [[0], [1], [0, 1]])
def test_a_part_that_cannot_be_written_is_an_error_on_all_ranks(ranks, tmp_path, bad):
    told = ranks.run(a_rank_cannot_write, str(tmp_path / "a"), bad, world_size=2)
    for text in told:
        assert "No space left on device" in text
    for rank in {0, 1} - {*bad}:
        assert f"rank {bad[0]} failed while saving {tmp_path / 'a'}: OSError: " in told[rank]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


class Keeps(TorchCheckpointIO):
    """Holds on to what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.given.append([value.numpy() for value in checkpoint["ema"]])


def several_snapshots(own):
    storage, places = Keeps(), []
    fabric, _, _ = launched("auto", plugins=storage if own else None)
    ema = [torch.full((size,), 1.0) for size in (300_000, 200_000, 300_000)]

    def note(self, checkpoint, path, storage_options=None):
        places.append([value.data_ptr() for value in checkpoint["ema"]])

    with mock.patch.object(TorchCheckpointIO, "save_checkpoint", note):
        for number in range(3):
            fabric.save("a.pt", {"ema": ema, "n": number}, wait=False).wait()
            for value in ema:
                value.add_(1)
    return [place == places[0] for place in places], [[v.mean() for v in given] for given in storage.given]


def test_the_memory_of_a_snapshot_is_taken_again_unless_somebody_may_hold_it(ranks):
    assert ranks.run(several_snapshots, False, world_size=1) == [([True] * 3, [])]
    assert ranks.run(several_snapshots, True, world_size=1) == [([], [[1.0] * 3, [2.0] * 3, [3.0] * 3])]


def odd_values(path, wait):
    fabric, _, _ = launched("auto")
    z = torch.tensor([1 + 2j, 3 - 1j])
    array = numpy.arange(10.0)
    state = {"conj": z.conj(), "imag": z.clone().conj().imag, "part": torch.from_numpy(array[:5])}
    state |= {
        "all": torch.from_numpy(array),
        "sparse": torch.eye(2).to_sparse(),
        "w": torch.nn.Parameter(z.clone()[:1]),
    }
    saving = fabric.save(path, state, wait=wait)
    if saving is not None:
        saving.wait()
    held = fabric.load(path)
    return {key: (value.to_dense() if value.is_sparse else value).tolist() for key, value in held.items()}


def test_odd_tensors_are_copied_as_they_are_saved(ranks, tmp_path):
    (now,) = ranks.run(odd_values, str(tmp_path / "a.pt"), True, world_size=1)
    (later,) = ranks.run(odd_values, str(tmp_path / "b.pt"), False, world_size=1)
    assert later == now
    assert later["conj"] == [1 - 2j, 3 + 1j]
    assert later["all"] == list(range(10))


def full_disk_and_gone(path, how):
    fabric, model, _ = launched("fsdp")
    written = Path.write_bytes

    def full(self, data):
        if how == "all" or fabric.global_rank == 1:
            raise OSError(28, "No space left on device", str(self))
        return written(self, data)

    with mock.patch.object(Path, "write_bytes", full):
        saving = fabric.save(path, {"model": model}, wait=False)
        try:
            saving.wait()
        except Exception as error:
            return str(error)


@pytest.mark.parametrize("how", ["all", "rank 1"])
def test_a_rank_that_cannot_even_say_so_ends_the_save(ranks, tmp_path, how):
    told = ranks.run(full_disk_and_gone, str(tmp_path / "a"), how, world_size=2)
    assert ("rank 1 failed while saving" in told[0]) == (how == "rank 1")
    for text in told:
        assert "No space left on device" in text
    assert not list(tmp_path.iterdir())


def from_another_directory(folder, format):
    os.chdir(folder)
    fabric, model, _ = launched("ddp")
    saving = fabric.save("a", {"model": model}, wait=False, format=format)
    os.chdir("/")
    saving.wait()


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_relative_path_is_that_of_the_call(ranks, tmp_path, format):
    ranks.run(from_another_directory, str(tmp_path), format, world_size=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def a_url_through_pathlib():
    fabric, model, _ = launched()
    fabric.save(Path("memory://bucket/a.pt"), {"model": model}, wait=False)


def test_a_url_that_pathlib_has_broken_is_no_relative_path(ranks):
    first, second = ranks.run_expecting_errors(a_url_through_pathlib, world_size=2)
    assert isinstance(first, ConfigurationError)
    for error in (first, second):
        assert "Pass the string 'memory://bucket/a.pt'" in str(error)


def full_over_sharded(path):
    fabric, model, _ = launched("ddp")
    for number, format in enumerate(["sharded", "full", "sharded", "full"]):
        fabric.save(path, {"model": model, "n": number}, format=format)
        assert fabric.load(path)["n"] == number


def test_either_format_replaces_the_other(ranks, tmp_path):
    ranks.run(full_over_sharded, str(tmp_path / "a"), world_size=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def loaded_by_another_fabric(path):
    storage = Slow()
    fabric, *_ = launched(plugins=storage)
    fabric.save(path, {"n": 1}, wait=False)
    threading.Timer(0.5, storage.let.set).start()
    other, *_ = launched()  # as a function `evaluate` of a script may do
    return other.load(path)["n"]


@pytest.mark.parametrize("world", [1, 2])
def test_another_fabric_of_the_process_waits_for_the_file(ranks, tmp_path, world):
    torch.save({"n": 0}, tmp_path / "a")
    assert ranks.run(loaded_by_another_fabric, str(tmp_path / "a"), world_size=world) == [1] * world
