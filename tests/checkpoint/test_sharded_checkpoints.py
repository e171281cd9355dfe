"""Sharded checkpoints on real ranks: each writes its part; any layout and world size loads what any saved."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoint_cases import failure, launched, net, over_ranks, same
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.tensor import DTensor

from fabric import Fabric
from fabric.checkpoint.formats.sharded import dcp as sharded
from fabric.checkpoint.formats.sharded import directory
from fabric.checkpoint.portable import LazyTensor
from fabric.plugins.io import CheckpointIO
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


def trained(fabric, steps=2, seed=0, **settings):
    model = net(seed)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(torch.arange(16.0).view(4, 4) - step).pow(2).mean())
        optimizer.step()
    return model, optimizer


PLAIN = {
    "step": 2,
    "config": {"name": "x", "path": Path("a/b"), 7: {}, "sizes": (1, [2, 3])},
    "table": [{"w": torch.arange(6.0).view(2, 3)}, (torch.ones(2, dtype=torch.bfloat16), None)],
}


# from any layout to any other


def save_both(name, folder):
    fabric = launched(name)
    model, optimizer = trained(fabric, replica_check=False)
    if name == "pipeline" and fabric.global_rank == 3:  # of the second row: the first one's values count
        for tensor in [*model.module.parameters(), *model.module.buffers()]:
            tensor.data.add_(1)
    state = {"model": model, "optimizer": optimizer, **PLAIN}
    fabric.save(folder / "full", state, format="full")
    full_tensor, DTensor.full_tensor = DTensor.full_tensor, None  # nothing is gathered
    try:
        fabric.save(folder / "parts", state, format="sharded")
    finally:
        DTensor.full_tensor = full_tensor


def load_parts(name, folder, source):
    fabric = launched(name)
    model, optimizer = trained(fabric, steps=1, seed=5)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(folder / "parts", state)
    assert set(rest) == {"config", "table"}
    fabric.save(folder / f"by-{name}", {**state, **rest}, format="full")


PLACES = {
    "single": 1, "ddp": 2, "zero1": 3, "zero2": 2, "zero3": 4, "hsdp": 4, "tp": 2, "tp-fsdp": 4,
    "pipeline": 4,
}  # fmt: skip
TRIPS = {
    "single": ["zero3", "pipeline"],
    "ddp": ["zero1", "tp"],
    "zero1": ["zero1", "zero2", "single"],
    "zero2": ["hsdp", "pipeline"],
    "zero3": ["single", "ddp", "tp-fsdp", "zero1"],
    "hsdp": ["zero3", "tp"],
    "tp": ["zero2", "ddp"],
    "tp-fsdp": ["tp-fsdp", "pipeline", "single"],
    "pipeline": ["pipeline", "zero1", "zero3", "tp"],
}


@pytest.mark.parametrize("source", PLACES)
def test_any_layout_loads_what_any_other_saved(ranks, tmp_path, source):
    ranks.run(save_both, source, tmp_path, world_size=PLACES[source])
    expected = torch.load(tmp_path / "full", weights_only=True)
    assert len(expected["optimizer"]["state"]) == len(list(net().parameters()))
    for target in TRIPS[source]:
        ranks.run(load_parts, target, tmp_path, source, world_size=PLACES[target])
        same(torch.load(tmp_path / f"by-{target}", weights_only=True), expected)


def written_files(folder):
    manifest = json.loads((folder / directory.MANIFEST).read_text())
    return {
        name: said["size"] for name, said in manifest["files"].items() if name.endswith(".distcp")
    }, manifest


WIDE = 64 * 1024


def save_wide(name, folder):
    fabric = launched(name)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE // 64, 64, bias=False), nn.Linear(64, WIDE // 64, bias=False)])
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(2, WIDE // 64)).sum())
    optimizer.step()
    fabric.save(folder / name, {"model": model, "optimizer": optimizer}, format="sharded")
    read, in_place = [], []
    own = [getattr(p, "to_local", lambda p=p: p)().data_ptr() for p in model.parameters()]
    original = LazyTensor.of.__func__

    def counted(cls, shape, dtype, fill):
        def count(target, offsets):
            read.append(target.numel() * target.element_size())
            in_place.append(read[-1] * (target.data_ptr() in own))
            return fill(target, offsets)

        return original(cls, shape, dtype, count)

    LazyTensor.of = classmethod(counted)
    try:
        fabric.load(folder / name, {"model": model, "optimizer": optimizer})
    finally:
        LazyTensor.of = classmethod(original)
    return sum(read), sum(in_place)


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [  # in halves of the model: weights, and two moments of each
        ("zero3", [3, 3], [3, 3]),
        ("pipeline", [3, 3], [3, 3]),
        ("zero1", [4, 2], [4, 4]),
        ("ddp", [6], [6, 6]),
    ],
)
def test_a_rank_writes_and_reads_its_part_only(ranks, tmp_path, name, written, read):
    found, in_place = zip(*ranks.run(save_wide, name, tmp_path, world_size=2), strict=True)
    files, manifest = written_files(tmp_path / name)
    half = WIDE * 4
    assert list(files) == ["__0_0.distcp", "__1_0.distcp"][: len(written)]
    for sizes, expected in ((files.values(), written), (found, read)):
        assert [size // half for size in sizes] == expected  # and some bytes of pickles
        assert all(size % half < 0.25 * half for size in sizes)
    if name == "zero3":  # no second copy of the parts, while they are loaded
        assert in_place == (half, half)
    assert (manifest["format"], manifest["world_size"]) == (1, 2)
    assert manifest["torch"] == torch.__version__
    kinds = {
        "zero3": "FSDPStrategy",
        "pipeline": "PipelineStrategy",
        "zero1": "ZeRO1Strategy",
        "ddp": "DDPStrategy",
    }
    assert manifest["strategy"] == kinds[name]


def load_before_setup(folder):
    fabric = launched("zero3")
    model, _ = trained(fabric)
    fabric.save(folder / "c", {"model": model})
    for empty in (True, False):
        with fabric.init_module(empty_init=empty):
            fresh = net(5)
        fabric.load(folder / "c", {"model": fresh})
        fresh = fabric.setup(fresh)
        same(*[dict(fabric.strategy.get_module_state_dict(m)) for m in (fresh, model)])


def test_a_model_loaded_before_setup_keeps_its_weights(ranks, tmp_path):
    ranks.run(load_before_setup, tmp_path, world_size=2)


class Kept(nn.Module):
    """Keeps the tensor that it loads, as metrics of torchmetrics do."""

    total = torch.zeros(())

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "total"] = self.total

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.total = state_dict.pop(prefix + "total")


def load_what_is_kept(folder):
    fabric = launched("zero3")
    saved, loaded = Kept(), Kept()
    saved.total = torch.tensor(3.0)
    fabric.save(folder / "kept", {"metric": saved, "model": trained(fabric)[0]})
    fabric.load(folder / "kept", {"metric": loaded})
    assert type(loaded.total) is torch.Tensor
    assert loaded.total + 1 == 4  # the file is closed


def test_a_module_may_keep_the_tensors_that_it_loads(ranks, tmp_path):
    ranks.run(load_what_is_kept, tmp_path, world_size=2)


def tied_on_the_last_stage(folder, wait):
    fabric = launched("pipeline")
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    module[3].weight = module[2].weight
    model = fabric.setup(module)
    expected = copy.deepcopy(dict(fabric.strategy.get_module_state_dict(model)))
    saving = fabric.save(folder / "c", {"model": model, "again": model}, format="sharded", wait=wait)
    if saving is not None:
        saving.wait()
    held = fabric.load(folder / "c")
    for name in ("model", "again"):
        same(dict(held[name]), expected)


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_tied_on_a_later_stage_is_saved(ranks, tmp_path, wait):
    ranks.run(tied_on_the_last_stage, tmp_path, wait, world_size=2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def save_tied(name, folder):
    fabric = launched(name)
    torch.manual_seed(0)
    model = fabric.setup(Tied())
    fabric.save(folder / name, {"model": model}, format="sharded")
    torch.manual_seed(1)
    other = fabric.setup(Tied())
    fabric.load(folder / name, {"model": other})
    got, expected = (fabric.strategy.get_module_state_dict(m) for m in (other, model))
    same(got, expected)
    with pytest.warns(match="0 of 2 tensors") if fabric.is_global_zero else nullcontext():
        fabric.load_raw(folder / name, other, strict=False)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_tied_weights_are_written_once(ranks, tmp_path, name):
    ranks.run(save_tied, name, tmp_path, world_size=2)
    files, _ = written_files(tmp_path / name)
    assert 64 * 32 * 4 < sum(files.values()) < 1.9 * 64 * 32 * 4


# which format is written


def save_as_the_strategy_says(folder):
    fabric = launched("zero3")
    fabric.save(folder / "zero3", {"model": fabric.setup(net())})
    full = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=FSDPStrategy(state_dict_type="full", sharding_strategy="SHARD_GRAD_OP"),
    )
    full.launch()
    full.save(folder / "zero2", {"model": full.setup(net())})
    for name, distributed in (("tp", True), ("tp-full", False)):
        strategy = ModelParallelStrategy(over_ranks, 1, save_distributed_checkpoint=distributed)
        mesh = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        mesh.launch()
        mesh.save(folder / name, {"model": mesh.setup(net())})
    ddp = launched("ddp")
    ddp.save(folder / "ddp", {"model": ddp.setup(net())})


def test_the_strategy_chooses_the_format(ranks, tmp_path):
    ranks.run(save_as_the_strategy_says, tmp_path, world_size=2)
    assert [(tmp_path / name).is_dir() for name in ("zero3", "tp", "zero2", "tp-full", "ddp")] == [
        True
    ] * 2 + [False] * 3


class Recorded(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(path, weights_only=True)

    def remove_checkpoint(self, path):
        Path(path).unlink()


def save_elsewhere(folder):
    fabric = launched("zero3", plugins=[Recorded()])
    fabric.save(folder / "own", {"step": 1})
    plain = launched("zero3")
    return [
        fabric.load(folder / "own"),
        failure(fabric, "save", folder / "b", {"step": 1}, format="sharded"),
        failure(plain, "save", "memory://b", {"step": 1}, format="sharded"),
        failure(plain, "save", folder / "b", {"step": 1}, format="shraded"),
        failure(plain, "save", folder / "b", {"step": 1}, format="full" if plain.global_rank else "sharded"),
    ]


def test_what_cannot_be_sharded_says_so(ranks, tmp_path):
    for loaded, plugin, url, unknown, differ in ranks.run(save_elsewhere, tmp_path, world_size=2):
        assert loaded == {"step": 1}
        assert plugin[0] == url[0] == unknown[0] == "ConfigurationError"
        assert "Recorded stores one dictionary. Write format='full'." in plugin[1]
        assert "memory://b is no path of a file system. Write format='full'." in url[1]
        assert "format='shraded'): write 'full' or 'sharded'. Did you mean 'sharded'?" in unknown[1]
        assert differ[0] == "CollectiveMismatch"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["own"]


# filters, and what does not fit


def save_filtered(folder):
    fabric = launched("zero3")
    model, optimizer = trained(fabric)
    keep = {"model": lambda name, value: name.startswith("0")}
    fabric.save(folder / "c", {"model": model, "optimizer": optimizer}, filter=keep)
    other, _ = trained(fabric, seed=5)
    before = {k: v.clone() for k, v in fabric.strategy.get_module_state_dict(other).items()}
    with pytest.warns(match="2 of 9 tensors") if fabric.is_global_zero else nullcontext():
        fabric.load(folder / "c", {"model": other}, strict=False)
    after, saved = (fabric.strategy.get_module_state_dict(m) for m in (other, model))
    return {key: (value.equal(before[key]), value.equal(saved[key])) for key, value in after.items()}


def test_filters(ranks, tmp_path):
    for found in ranks.run(save_filtered, tmp_path, world_size=2):
        assert found["0.weight"] == found["0.bias"] == (False, True)
        assert found["2.weight"] == (True, False)


def load_what_does_not_fit(name, folder):
    fabric = launched(name)
    model, _ = trained(fabric)
    state = dict(model.state_dict())
    missing = {key: value for key, value in state.items() if key != "2.bias"} | {"2.bas": torch.ones(6)}
    cases = {"keys": missing, "shape": {**state, "2.weight": torch.ones(3, 3)}, "tensor": torch.ones(2)}
    told = []
    for case, saved in cases.items():
        for format in ("full", "sharded"):
            fabric.save(folder / f"{case}-{format}", {"model": saved}, format=format)
    before = {key: value.clone() for key, value in fabric.strategy.get_module_state_dict(model).items()}
    for case in cases:
        for wanted in ({"model": model}, {"model": model, "epoch": 1}, {"model": [model]}):
            texts = [failure(fabric, "load", folder / f"{case}-{f}", wanted) for f in ("full", "sharded")]
            told.append([(kind, text.replace("-sharded", "-full")) for kind, text in texts])
            if name == "zero3" and case != "keys":
                same(dict(fabric.strategy.get_module_state_dict(model)), before)
    told.append([failure(fabric, "load_raw", folder / f"keys-{f}", model) for f in ("full", "sharded")])
    return told


@pytest.mark.parametrize("name", ["ddp", "zero3", "pipeline"])
def test_what_does_not_fit_is_told_as_of_a_full_file(ranks, tmp_path, name):
    for told in ranks.run(load_what_does_not_fit, name, tmp_path, world_size=2):
        assert len(told) == 10
        for full, parts in told:
            assert full is not None
            assert full == parts


# all or nothing


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def overwrite(folder):
    fabric = launched("zero3")
    model, optimizer = trained(fabric)
    if fabric.is_global_zero:
        (folder / "c").write_text("a file")
    fabric.barrier()
    for step in range(3):
        fabric.save(folder / "c", {"model": model, "optimizer": optimizer, "step": step})
        assert fabric.load(folder / "c")["step"] == step


def test_a_checkpoint_or_file_at_the_path_is_replaced(ranks, tmp_path):
    ranks.run(overwrite, tmp_path, world_size=2)
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == [".metadata", "__0_0.distcp", "__1_0.distcp", "fabric.json"]


def fail_to_write(folder, where):
    fabric = launched("zero3")
    model, _ = trained(fabric)
    fabric.save(folder / "c", {"model": model, "step": 1})

    rename = Path.rename

    def full(*args):
        if where != "rename" or args[0].suffix == ".part":
            raise OSError(28, "No space left on device")
        return rename(*args)

    places = {
        "data": (sharded.ShardWriter, "write"),
        "digest": (sharded.DigestWriter, "write"),
        "rename": (Path, "rename"),
    }
    with pytest.MonkeyPatch.context() as patched:
        if fabric.global_rank == (0 if where == "rename" else 1):
            patched.setattr(*places[where], full)
        told = failure(fabric, "save", folder / "c", {"model": model, "step": 2})
    return told, fabric.load(folder / "c")["step"]


@pytest.mark.parametrize("where", ["data", "digest", "rename"])
def test_a_failure_on_one_rank_is_one_on_all_and_leaves_the_old(ranks, tmp_path, where):
    found = ranks.run(fail_to_write, tmp_path, where, world_size=2)
    failed = 0 if where == "rename" else 1
    text = f"[Errno 28] No space left on device: '{tmp_path}/c'"
    for rank, (told, step) in enumerate(found):
        assert step == 1
        if rank == failed:
            assert told == ("OSError", text)
        else:
            assert told == ("RankError", f"rank {failed} failed while saving {tmp_path}/c: OSError: {text}")
    assert names(tmp_path) == ["c"]


def damage(folder):
    fabric = launched("zero3")
    model, _ = trained(fabric)
    fabric.save(folder / "c", {"model": model})
    told = []
    for name in ("__0_0.distcp", "__1_0.distcp"):
        if fabric.is_global_zero:
            data = bytearray((folder / "c" / name).read_bytes())
            data[len(data) // 2] ^= 4
            (folder / "c" / name).write_bytes(data)
        fabric.barrier()
        told.append(failure(fabric, "load", folder / "c", {"model": model}))
        if fabric.is_global_zero:
            data[len(data) // 2] ^= 4
            (folder / "c" / name).write_bytes(data)
        fabric.barrier()
    fabric.load(folder / "c", {"model": model})
    return told


def test_a_damaged_file_is_an_error_on_all_ranks(ranks, tmp_path):
    for told in ranks.run(damage, tmp_path, world_size=2):
        for (kind, text), name in zip(told, ("__0_0.distcp", "__1_0.distcp"), strict=True):
            assert kind in ("DamagedCheckpointError", "RankError")
            assert f"{tmp_path}/c is damaged: {name} has changed. Load" in text


# torch's own


def load_of_torch(folder):
    fabric = launched("zero3")
    model, optimizer = trained(fabric)
    plain = {"model": model.module.state_dict(), "optimizer": optimizer.optimizer.state_dict(), "step": 4}
    save_by_torch(plain, checkpoint_id=folder / "torch")
    fabric.save(folder / "full", {"model": model, "optimizer": optimizer}, format="full")
    other, second = trained(fabric, seed=5)
    state = {"model": other, "optimizer": second, "step": 0}
    assert fabric.load(folder / "torch", state) == {}
    assert state["step"] == 4
    fabric.save(folder / "again", {"model": other, "optimizer": second}, format="full")


def test_a_checkpoint_of_torch_alone_is_loaded(ranks, tmp_path):
    ranks.run(load_of_torch, tmp_path, world_size=2)
    got, expected = [torch.load(tmp_path / name, weights_only=True) for name in ("again", "full")]
    same(got["model"], expected["model"])
    assert got["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    same(*[{n: sorted(e.items()) for n, e in held["optimizer"]["state"].items()} for held in (got, expected)])


def values_of_their_own(folder):
    fabric = launched("ddp")
    own = torch.full((3,), float(fabric.global_rank))
    state = {"own": own, "rank": fabric.global_rank, "kind": own + 1 if fabric.global_rank else None}
    fabric.save(
        folder / "c", {**state, **({"more": own + 2} if fabric.global_rank else {})}, format="sharded"
    )
    loaded = fabric.load(folder / "c")
    return loaded.pop("own").tolist(), loaded


def test_rank_zeros_values_count_where_ranks_have_their_own(ranks, tmp_path):
    assert (
        ranks.run(values_of_their_own, tmp_path, world_size=3) == [([0.0] * 3, {"rank": 0, "kind": None})] * 3
    )


def other_places(folder):
    """Each rank a checkpoint of its own: all of its files are checked."""
    fabric = launched("ddp")
    rank = fabric.global_rank
    fabric.save(folder / "c0", {"w": torch.ones(4)}, format="sharded")
    if rank == 0:
        shutil.copytree(folder / "c0", folder / "c1")
    fabric.barrier()
    data = folder / f"c{rank}" / "__0_0.distcp"
    if rank == 0:  # the second of two files
        data.write_bytes(data.read_bytes()[:-1])
    return failure(fabric, "load", folder / f"c{rank}")


def test_checkpoints_that_differ_are_each_checked(ranks, tmp_path):
    first, second = ranks.run(other_places, tmp_path, world_size=2)
    assert first[0] == "DamagedCheckpointError"
    assert f"{tmp_path}/c0 is damaged: __0_0.distcp has" in first[1]
    assert second[0] == "RankError"
