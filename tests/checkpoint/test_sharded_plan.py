"""Which rank writes what of a sharded checkpoint, what ranks send for it, and what rank zero refuses."""

from __future__ import annotations

import json
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import launched
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fabric.checkpoint.formats.sharded.dcp import Checkpoint, ShardWriter
from fabric.checkpoint.formats.sharded.plan import Chunk, describe
from fabric.collectives.torch_collective import TorchCollective
from fabric.core.errors import RankError, UsageError
from fabric.guard.control_connections import _Connection


@contextmanager
def received():
    """The bytes that this rank receives in collectives and in the call check, as the only entry of a list."""
    found, take = [0], _Connection.receive

    def counted(name, size_of):
        call = getattr(TorchCollective, name)

        def run(self, *args, **kwargs):
            found[0] += size_of(*args)
            return call(self, *args, **kwargs)

        return mock.patch.object(TorchCollective, name, run)

    def taken(self):
        message = take(self)
        found[0] += 0 if message is None else len(message[1])
        return message

    with (
        counted("start_all_gather_flat", lambda output, tensor: output.nbytes),
        counted("broadcast", lambda tensor, src: tensor.nbytes * (dist.get_rank() != src)),
        counted("gather", lambda tensor, parts, dst=0: sum([part.nbytes for part in parts])),
        mock.patch.object(_Connection, "receive", taken),
    ):
        yield found


def bytes_of_a_save(name, folder, layers):
    fabric = launched(name)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / f"{name}-warm", state, format="sharded")
    with received() as found:
        fabric.save(folder / f"{name}-{layers:02}", state, format="sharded")
    return found[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["zero3", "ddp"])
def test_what_a_rank_receives_in_a_save_does_not_depend_on_the_tensors(ranks, tmp_path, name, world_size):
    few, many = (
        ranks.run(bytes_of_a_save, name, tmp_path, layers, world_size=world_size) for layers in (2, 40)
    )
    for rank in range(1, world_size):
        assert many[rank] <= few[rank] + 64, (few, many)
    if name == "zero3":
        assert many[0] > few[0] + 1000


def distribute(full, mesh, placements):
    """The DTensor of a full tensor that all ranks have, without messages."""
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = local.chunk(mesh.size(dim), placement.dim)
            own = mesh.get_coordinate()[dim]
            empty = local.narrow(placement.dim, 0, 0)
            local = parts[own] if own < len(parts) else empty
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


CASES = [
    ((8, 6), (Replicate(), Shard(0))),
    ((8, 6), (Shard(1), Replicate())),
    ((5, 3), (Shard(0), Shard(1))),
    ((1, 3), (Replicate(), Shard(0))),  # an empty shard
    ((0, 3), (Replicate(), Shard(0))),
    ((4, 4), (Replicate(), Replicate())),
    ((), (Replicate(), Replicate())),
    *[((16, 16), (Replicate(), Shard(0)))] * 6,
]


def save_on_a_mesh(folder, submesh):
    fabric = launched("ddp")
    count = fabric.world_size
    shape = (2, count // 2) if count % 2 == 0 else (1, count)
    mesh = DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=("a", "b"))
    cases = CASES
    if submesh:  # replicas of the other rows are in other meshes
        mesh, cases = mesh["b"], [(shape, placed[1:]) for shape, placed in CASES if placed[0].is_replicate()]
    full = {f"t{n}": torch.arange(float(torch.Size(s).numel())).view(s) + n for n, (s, _) in enumerate(cases)}
    parts = {name: distribute(full[name], mesh, case[1]) for name, case in zip(full, cases, strict=True)}
    fabric.save(folder / "c", {"parts": parts}, format="sharded")
    found = Checkpoint(folder / "c").tree()["parts"]
    assert [name for name in full if not found[name].clone().equal(full[name])] == []


def written_by(folder):
    manifest = json.loads((folder / "fabric.json").read_text())["files"]
    return {name: entry["size"] for name, entry in manifest.items() if name.endswith("distcp")}


@pytest.mark.parametrize("submesh", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_chunk_is_written_once(ranks, tmp_path, world_size, submesh):
    ranks.run(save_on_a_mesh, tmp_path, submesh, world_size=world_size)
    data = Checkpoint(tmp_path / "c")._metadata
    chunks = sum([len(known.chunks) for known in data.state_dict_metadata.values()])
    assert chunks == len(data.storage_data)
    sizes = written_by(tmp_path / "c")
    assert sum(sizes.values()) == sum([place.length for place in data.storage_data.values()])
    if world_size == 4 and not submesh:
        assert len(sizes) == 4, "replicas share the tensors out"
        assert max(sizes.values()) < 2 * min(sizes.values())


def save_other_tensors(folder):
    fabric = launched("ddp")
    rank, mesh = fabric.global_rank, DeviceMesh("cpu", torch.arange(fabric.world_size))
    cases = {
        "shape": distribute(torch.ones(6 + rank, 2), mesh, [Shard(0)]),
        "dtype": distribute(torch.ones(6, 2).to([torch.float32, torch.float64][rank > 0]), mesh, [Shard(0)]),
        "kind": distribute(torch.ones(6, 2), mesh, [Shard(0)]) if rank else "text",
        "placements": distribute(torch.ones(2, 2), mesh, [Shard(int(rank > 0))]),
    }
    texts = {}
    for name, value in cases.items():
        with pytest.raises((UsageError, RankError)) as caught:
            fabric.save(folder / name, {"w": value}, format="sharded")
        texts[name] = f"{type(caught.value).__name__}: {caught.value}"
    fabric.save(folder / "good", {"w": torch.ones(1)}, format="sharded")
    return texts


OTHERS = {
    "shape": "w is float32[7, 2] on rank 1, and float32[6, 2] on rank 0. One name in a checkpoint has one "
    "shape and dtype. Write different names.",
    "dtype": "w is float64[6, 2] on rank 1, and float32[6, 2] on rank 0. ",
    "kind": "w is float32[6, 2] on rank 1, and an object on rank 0. ",
    "placements": "The chunks of w on the ranks do not make up one tensor of shape [2, 2]: [0, 0] + [1, 2], ",
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_tensors_of_one_name(ranks, tmp_path, world_size):
    first, *others = ranks.run(save_other_tensors, tmp_path, world_size=world_size)
    for name, text in OTHERS.items():
        assert first[name].startswith(f"UsageError: {text}")
        for other in others:
            assert other[name].startswith(f"RankError: rank 0 failed while saving {tmp_path / name}: UsageEr")
            assert text in other[name]
    assert [entry.name for entry in tmp_path.iterdir()] == ["good"]


def plan_of_layers(count, rows):
    """Values of equal layers, and plans of two ranks that write `rows` of them each."""
    values = {f"w{layer}": torch.zeros(4, 2) for layer in range(count)}
    kind = "float32[4, 2]"
    return values, [
        [Chunk(name, kind, [2 * rank, 0], [rows if name == "w1" else 2, 2]) for name in values]
        for rank in range(2)
    ]


def test_equal_layers_share_the_objects_that_describe_them():
    metadata, keys = describe(*plan_of_layers(3, 2))
    one, *others = metadata.state_dict_metadata.values()
    for other in others:
        assert other.properties is one.properties
        assert all(box is first for box, first in zip(other.chunks, one.chunks, strict=True))
    assert [[key.fqn for key in row] for row in keys] == [["w0", "w1", "w2"]] * 2


def test_a_layer_with_a_hole_among_equal_layers_is_refused():
    with pytest.raises(UsageError, match="The chunks of w1 on the ranks do not make up one tensor"):
        describe(*plan_of_layers(3, 1))


def autograd_of_a_plan(name):
    fabric, seen = launched(name), set()
    model = fabric.setup(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    local = DTensor.to_local

    def spied(self, **options):
        seen.add(torch.is_grad_enabled())
        return local(self, **options)

    with fabric.strategy.layout.gathering(keep=True, parts=True):
        state = fabric.strategy.get_module_state_dict(model)
    with mock.patch.object(DTensor, "to_local", spied):
        writer = ShardWriter({"model": state})
        writer.plan({}, 0, fabric.global_rank)
    return seen


def test_a_plan_takes_local_tensors_without_autograd(ranks):
    assert ranks.run(autograd_of_a_plan, "zero3", world_size=2) == [{False}] * 2
