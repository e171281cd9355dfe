"""safetensors files on real ranks: any layout writes one, and reads its part of one, or of a directory."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import failure
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.checkpoint.portable import LazyTensor
from fabric.strategies import ModelParallelStrategy, PipelineStrategy

WIDE = 64


def over_ranks(model, mesh):
    parallelize_module(model, mesh["tensor_parallel"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


SPECIAL = {
    "single": lambda: "auto",
    "tp": lambda: ModelParallelStrategy(over_ranks, data_parallel_size=1),
    "tp-fsdp": lambda: ModelParallelStrategy(over_ranks, data_parallel_size=2, tensor_parallel_size=2),
    "pipeline": lambda: PipelineStrategy(num_stages=2, num_microbatches=2),
}
PLACES = {"single": 1, "ddp": 2, "zero1": 2, "zero3": 2, "tp": 2, "tp-fsdp": 4, "pipeline": 2}

OTHERS = {
    "single": "zero3", "ddp": "pipeline", "zero1": "ddp", "zero3": "single", "pipeline": "zero1",
    "tp": "tp-fsdp", "tp-fsdp": "tp",
}  # fmt: skip


def launched(name):
    strategy = SPECIAL.get(name, lambda: name)()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def net(seed=0, tied=True):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(32, WIDE),
        nn.Linear(WIDE, 2 * WIDE),
        nn.Tanh(),
        nn.Linear(2 * WIDE, WIDE),
        nn.Linear(WIDE, 32, bias=False),
    )
    if tied:
        model[4].weight = model[0].weight
    return model


def ties(name):
    """Stages have no parameter together."""
    return name not in ("tp", "tp-fsdp")


def whole(fabric, model):
    return {k: v.clone() for k, v in fabric.strategy.get_module_state_dict(model).items()}


def same(got, expected):
    assert sorted(got) == sorted(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)


# from any layout to any other


def save_from(name, path, wait):
    fabric = launched(name)
    model = fabric.setup(net(tied=ties(name)))
    saving = fabric.save(path, {"model": model}, wait=wait)
    if saving is not None:
        saving.wait()
    assert path.is_file()
    again = fabric.setup(net(seed=1, tied=ties(name)))
    fabric.load(path, {"model": again})
    same(whole(fabric, again), whole(fabric, model))


def load_into(name, path, setup):
    fabric = launched(name)
    for load in (lambda m: fabric.load(path, {"model": m}), lambda m: fabric.load_raw(path, m)):
        model = net(seed=1, tied=ties(name))
        model = fabric.setup(model) if setup else model
        load(model)
        model = model if setup else fabric.setup(model)
        same(whole(fabric, model), net(tied=ties(name)).state_dict())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_any_layout_writes_it_and_any_other_reads_it(ranks, tmp_path, name, wait):
    path = tmp_path / "model.safetensors"
    ranks.run(save_from, name, path, wait, world_size=PLACES[name])
    expected = net(tied=ties(name)).state_dict()
    same(load_file(path), {k: v for k, v in expected.items() if not (ties(name) and k == "4.weight")})
    ranks.run(load_into, OTHERS[name], path, True, world_size=PLACES[OTHERS[name]])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def hugging(folder, model):
    """As `save_pretrained` writes: in shards, tied names once, no word of them."""
    weights = dict(model.state_dict())
    if model[4].weight is model[0].weight:
        del weights["4.weight"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {key: names[i % 2] for i, key in enumerate(weights)}
    for name in names:
        save_file({k: v for k, v in weights.items() if where[k] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_any_layout_reads_a_directory_of_hugging_face(ranks, tmp_path, name, setup):
    hugging(tmp_path, net(tied=ties(name)))
    ranks.run(load_into, name, tmp_path, setup, world_size=PLACES[name])


def bytes_read(name, path):
    fabric = launched(name)
    model = fabric.setup(net(seed=1, tied=ties(name)))
    read = []
    original = LazyTensor.of.__func__

    def counted(cls, shape, dtype, fill):
        def count(target, offsets):
            read.append(target.numel() * target.element_size())
            return fill(target, offsets)

        return original(cls, shape, dtype, count)

    LazyTensor.of = classmethod(counted)
    try:
        fabric.load_raw(path, model)
    finally:
        LazyTensor.of = classmethod(original)
    same(whole(fabric, model), net(tied=ties(name)).state_dict())
    return sum(read), max(read)


@pytest.mark.parametrize("name", ["zero3", "tp", "tp-fsdp"])
def test_a_rank_reads_its_part_only(ranks, tmp_path, name):
    hugging(tmp_path, net(tied=ties(name)))
    expected = net(tied=ties(name)).state_dict()
    sizes = {key: value.nbytes for key, value in expected.items()}
    alone = [] if ties(name) else ["0.weight", "4.weight"] * (name == "tp") + ["3.bias"]
    parts = PLACES[name]
    split = sum([size for key, size in sizes.items() if key not in alone])
    for total, most in ranks.run(bytes_read, name, tmp_path, world_size=parts):
        if name == "zero3":
            assert total == split // 2
            assert most == max(sizes.values()) // 2
        else:
            assert total <= split // 2 + sum([sizes[key] for key in alone])
        assert total < 0.7 * sum(sizes.values())


# what does not fit


def told(name, folder):
    fabric = launched(name)
    model = fabric.setup(net())
    state = {"model": model, "step": 1}
    path = folder / "a.safetensors"
    texts = [failure(fabric, "save", path, state, wait=wait) for wait in (True, False)]
    texts.append(failure(fabric, "save", path, {"model": model}, format="sharded"))
    for file in ("a.safetensors", "a.pt"):
        fabric.save(
            folder / file, {"model": {"0.weight": torch.ones(3, 3), "0.wei": torch.ones(1)}}, format="full"
        )
        texts.append(failure(fabric, "load", folder / file, {"model": model}))
    fabric.save(path, {"model": model})
    if fabric.is_global_zero:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    fabric.barrier()
    return [*texts, failure(fabric, "load", path, {"model": model})]


@pytest.mark.parametrize("name", ["ddp", "zero3", "pipeline"])
def test_all_ranks_are_told_what_is_wrong(ranks, tmp_path, name):
    for first, beside, parts, safe, plain, damaged in ranks.run(told, name, tmp_path, world_size=2):
        assert first == beside
        assert first[0] == parts[0] == "ConfigurationError"
        assert "state has 'model' (OrderedDict), 'step' (int). Write" in first[1]
        assert "a name that ends with .safetensors is one file. Write format='full'." in parts[1]
        assert safe is not None
        assert safe == plain
        assert damaged[0] == "DamagedCheckpointError"
        assert "a.safetensors is damaged: its bytes" in damaged[1]
