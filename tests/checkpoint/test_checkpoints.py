"""Saving and loading by several ranks: whole files, and one failure on all ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_cases import failure
from torch import nn

from fabric import Fabric
from fabric.core.errors import RankError, UsageError
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO


def launched(**kwargs):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", **kwargs)
    fabric.launch()
    return fabric


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def values(module):
    return [entry.tolist() for entry in module.state_dict().values()]


# round trip


def save_and_load(path):
    fabric = launched()
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    fabric.backward(model(torch.ones(4, 2) * (fabric.global_rank + 1)).sum())
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    assert Path(path).is_file(), "save returned on a rank before the file was there"
    fresh = network(1)
    other, second = fabric.setup(fresh, torch.optim.Adam(fresh.parameters()))
    state = {"model": other, "optimizer": second, "step": 0}
    assert fabric.load(path, state) == {}
    assert len(second.state) == len(optimizer.state)
    assert state["step"] == 3
    return values(model), values(other)


def test_all_ranks_read_what_rank_zero_wrote(ranks, tmp_path):
    results = ranks.run(save_and_load, str(tmp_path / "a.pt"), world_size=2)
    saved, loaded = results[0]
    assert loaded == saved == results[1][1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]
    plain = network(2)
    plain.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True)["model"])
    assert values(plain) == saved


def save_raw_ddp(path, compiled):
    """What a hand-written DDP loop leaves behind."""
    module = network(dist.get_rank())
    replica = nn.parallel.DistributedDataParallel(
        torch.compile(module, backend="eager") if compiled else module
    )
    if dist.get_rank() == 0:
        torch.save(replica.state_dict(), path)
        torch.save({"model": replica.state_dict()}, f"{path}.named")
    dist.barrier()
    fabric = launched()
    raw = network(5)
    fabric.load_raw(path, raw)
    ready = fabric.setup(torch.compile(network(6), backend="eager"))
    fabric.load(f"{path}.named", {"model": ready})
    fabric.save(f"{path}.ours", {"model": ready})
    return values(raw), values(ready), values(replica)


def test_files_of_raw_ddp_loops_load_in_all_forms(ranks, tmp_path):
    for compiled in (False, True):
        path = tmp_path / f"raw-{compiled}.pt"
        for raw, ready, replica in ranks.run(save_raw_ddp, str(path), compiled, world_size=2):
            assert raw == ready == replica
        ours = torch.load(f"{path}.ours", weights_only=True)["model"]
        assert list(ours) == list(network().state_dict())


def load_many_times(path):
    fabric = launched()
    return [fabric.load(path)["w"].sum().item() for _ in range(5)]


def test_all_ranks_read_at_once(ranks, tmp_path):
    torch.save({"w": torch.ones(100_000)}, tmp_path / "a.pt")
    assert ranks.run(load_many_times, str(tmp_path / "a.pt"), world_size=4) == [[100_000.0] * 5] * 4


def load_save_use(path):
    fabric = launched()
    fabric.save(path, {"ema": torch.ones(500_000)})
    state = {"ema": None}
    fabric.load(path, state)
    rest = fabric.load(path)
    fabric.save(path, {"ema": torch.zeros(10)})
    if fabric.is_global_zero:
        Path(path).write_bytes(b"")
    fabric.barrier()
    return state["ema"].sum().item() + rest["ema"].sum().item()


def test_loaded_tensors_outlive_their_file(ranks, tmp_path):
    assert ranks.run(load_save_use, str(tmp_path / "a.pt"), world_size=2) == [1_000_000.0] * 2


def load_before_setup(path):
    fabric = launched()
    fabric.save(path, {"model": network()})
    with fabric.init_module(empty_init=True):
        module = network()
    fabric.load(path, {"model": module})
    model = fabric.setup(module)
    return values(model) == values(network())


def test_a_model_loaded_before_setup_keeps_its_weights(ranks, tmp_path):
    assert ranks.run(load_before_setup, str(tmp_path / "a.pt"), world_size=2) == [True, True]


# the user's own storage


class Recorded(CheckpointIO):
    def __init__(self):
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append("save")
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        self.calls.append("load")
        return torch.load(path, weights_only=True)

    def remove_checkpoint(self, path):
        Path(path).unlink()


def use_own_storage(path):
    storage = Recorded()
    fabric = launched(plugins=[storage])
    fabric.save(path, {"step": 2})
    return fabric.load(path), storage.calls


def test_the_users_storage_writes_on_rank_zero_and_reads_everywhere(ranks, tmp_path):
    first, second = ranks.run(use_own_storage, str(tmp_path / "a.pt"), world_size=2)
    assert first == ({"step": 2}, ["save", "load"])
    assert second == ({"step": 2}, ["load"])


# one failure on all ranks


class Thing:
    pass


def save_things(path):
    fabric = launched()
    everywhere = failure(fabric, "save", path, {"config": {"parts": [Thing()]}})
    only_rank_one = failure(fabric, "save", path, {"config": Thing() if fabric.global_rank == 1 else 1})
    return everywhere, only_rank_one


def test_what_cannot_be_saved_is_an_error_on_all_ranks(ranks, tmp_path):
    results = ranks.run(save_things, str(tmp_path / "a.pt"), world_size=2)
    place = "state['config']['parts'][0] is a test_checkpoints.Thing, which safe loading would not read back."
    for everywhere, _ in results:
        assert everywhere[0] == "ArgumentTypeError"
        assert everywhere[1].startswith(place)
    (_, other), (_, own) = results
    assert own[0] == "ArgumentTypeError"
    assert other[0] == "RankError"
    assert other[1].startswith(
        f"rank 1 failed while saving {tmp_path}/a.pt: ArgumentTypeError: state['config'] is a"
    )


def save_to_bad_places(folder):
    fabric = launched()
    (Path(folder) / f"file{fabric.global_rank}").write_text("")
    fabric.barrier()
    return [
        failure(fabric, "save", Path(folder) / "file0" / "a.pt", {"step": 1}),
        failure(fabric, "save", folder, {"step": 1}),
    ]


def test_a_place_that_cannot_be_written_is_an_error_on_all_ranks(ranks, tmp_path):
    first, second = ranks.run(save_to_bad_places, str(tmp_path), world_size=2)
    assert [kind for kind, _ in first] == ["NotADirectoryError", "IsADirectoryError"]
    below = f"{tmp_path}/file0/a.pt"
    assert second == [
        ("RankError", f"rank 0 failed while saving {below}: NotADirectoryError: {first[0][1]}"),
        ("RankError", f"rank 0 failed while saving {tmp_path}: IsADirectoryError: {first[1][1]}"),
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file0", "file1"]


class Breaking(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise OSError(28, "No space left on device")


def save_with_breaking_storage(path):
    return failure(launched(plugins=Breaking()), "save", path, {"step": 1})


def test_rank_zeros_failure_to_write_is_an_error_on_all_ranks(ranks, tmp_path):
    path = str(tmp_path / "a.pt")
    first, *others = ranks.run(save_with_breaking_storage, path, world_size=3)
    assert first == ("OSError", "[Errno 28] No space left on device")
    text = f"rank 0 failed while saving {path}: OSError: [Errno 28] No space left on device"
    assert others == [("RankError", text)] * 2


def load_bad_files(folder):
    fabric = launched()
    rank, folder = fabric.global_rank, Path(folder)
    torch.save({"thing": Thing()}, folder / f"thing{rank}")
    torch.save({"step": 1}, folder / f"step{rank}")
    fabric.barrier()
    return [
        failure(fabric, "load", folder / "absent.pt"),
        failure(fabric, "load", folder),
        failure(fabric, "load", folder / "thing0"),
        failure(fabric, "load", folder / "step0", {"epoch": 0}),
        failure(fabric, "load", folder / ("absent.pt" if rank == 1 else "step0")),
        failure(fabric, "load_raw", folder / "step0", network()),
    ]


def test_what_cannot_be_loaded_is_an_error_on_all_ranks(ranks, tmp_path):
    first, second = ranks.run(load_bad_files, str(tmp_path), world_size=2)
    kinds = ["FileNotFoundError", "IsADirectoryError", "UsageError", "MissingKeysError"]
    assert [kind for kind, _ in first[:4]] == [kind for kind, _ in second[:4]] == kinds
    assert "weights_only=False" in first[2][1]
    assert issubclass(UsageError, RuntimeError)
    assert second[4] == ("FileNotFoundError", f"There is no checkpoint file at {tmp_path}/absent.pt.")
    text = f"rank 1 failed while loading {tmp_path}/absent.pt: FileNotFoundError: {second[4][1]}"
    assert first[4] == ("RankError", text)
    assert first[5][0] == second[5][0] == "RuntimeError"
    assert issubclass(RankError, RuntimeError)


class FailsOnOne(nn.Linear):
    def state_dict(self, *args, **kwargs):
        if dist.get_rank() == 1:
            raise ValueError("no state here")
        return super().state_dict(*args, **kwargs)


def save_what_fails_on_one(path):
    return failure(launched(), "save", path, {"model": FailsOnOne(1, 1)})


def test_a_model_that_fails_on_one_rank_is_an_error_on_all(ranks, tmp_path):
    first, second = ranks.run(save_what_fails_on_one, str(tmp_path / "a.pt"), world_size=2)
    assert second == ("ValueError", "no state here")
    assert first[1].endswith("ValueError: no state here")


# killed while writing


KILLED = """
    import os, signal, sys
    import torch
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.save(sys.argv[1], {"step": 1, "w": torch.zeros(10)})
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    fabric.save(sys.argv[1], {"step": 2, "w": torch.ones(100_000)})
"""


def test_a_run_killed_in_save_can_be_resumed(tmp_path):
    path = tmp_path / "a.pt"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    state = {"step": 0}
    Fabric(accelerator="cpu", devices=1).load(path, state)
    assert state == {"step": 1}
