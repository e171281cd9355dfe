"""Which rank writes which chunk of a sharded checkpoint, and on rank zero the description of all chunks.

Each rank chooses its chunks from the device mesh and the placements of its DTensors, without messages. It
sends their list to rank zero only.
"""

from __future__ import annotations

import json
import math
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from fabric.checkpoint.formats.sharded._torch import chunk_of
from fabric.checkpoint.portable import is_placeholder
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh


class Chunk(NamedTuple):
    """The part of one value that one rank writes."""

    name: str
    kind: str
    """dtype and shape of the whole tensor; "": an object."""
    offsets: Sequence[int] = ()
    sizes: Sequence[int] = ()


def chunks_to_write(
    values: Iterable[tuple[str, Any]], owners: Mapping[str, int], root: int, rank: int
) -> list[tuple[Chunk, Any]]:
    """Return the chunks that this rank writes, with their local values. No communication.

    A DTensor is written by the mesh of its owner. Replicas of a shard divide the tensors by size.
    Other values are written by their owner.

    Args:
        values: Names and values on this rank; DTensors must be in the same order on all ranks of a mesh.
        owners: Global ranks by name, of values that rank zero does not have.
        root: Rank zero's global rank; it owns all other values.
        rank: This global rank.
    """
    chunks: list[tuple[Chunk, Any]] = []
    loads: dict[Any, list[int]] = {}
    ranks_of: dict[DeviceMesh, set[int]] = {}
    boxes: dict[Any, Any] = {}
    for name, value in values:
        owner = owners.get(name, root)
        if isinstance(value, DTensor) and not is_placeholder(value):
            mesh: Any = value.device_mesh
            if mesh not in ranks_of:
                ranks_of[mesh] = set(mesh.mesh.flatten().tolist())
            if not {owner, rank} <= ranks_of[mesh] or not _writes_replica(value, loads):
                continue
            key = mesh, value.placements, value.shape
            box = boxes.get(key) or boxes.setdefault(key, chunk_of(value))
            chunks.append((Chunk(name, _kind(value), [*box.offsets], [*box.sizes]), value.to_local()))
        elif owner == rank and not is_placeholder(value):
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            chunks.append((Chunk(name, _kind(value), [0] * len(shape), [*shape]), value))
    return chunks


def _writes_replica(tensor: DTensor, loads: dict[Any, list[int]]) -> bool:
    """Whether this rank writes its shard: its replica has the fewest elements so far.

    Of empty shards only that of a tensor without elements is written, once.
    """
    mesh: Any = tensor.device_mesh
    replica, count, dims = 0, 1, []
    for dim, (place, placement) in enumerate(zip(mesh.get_coordinate(), tensor.placements, strict=True)):
        if placement.is_replicate():
            replica, count = replica * mesh.size(dim) + place, count * mesh.size(dim)
            dims.append(dim)
        elif place and not tensor.to_local().numel():
            replica = -1
    load = loads.setdefault((mesh, *dims), [0] * count)
    writer = load.index(min(load))
    load[writer] += tensor.numel()
    return writer == replica


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"


def pack_chunks(chunks: Iterable[Chunk]) -> bytes:
    """Return the message with a rank's chunks: JSON, compressed."""
    return zlib.compress(json.dumps([*chunks], separators=(",", ":")).encode(), 1)


def unpack_chunks(message: bytes) -> list[Chunk]:
    """Return the chunks of a message of `pack_chunks`, which may be padded."""
    return [Chunk(*row) for row in json.loads(zlib.decompressobj().decompress(message))]


def describe(
    values: Mapping[str, Any], plans: Iterable[Iterable[Chunk]]
) -> tuple[Metadata, list[list[MetadataIndex | None]]]:
    """Return torch's description of a checkpoint, and for each rank the keys of its chunks in it.

    The key is None for a chunk whose name rank zero lacks.

    Args:
        values: Rank zero's values.
        plans: The chunks of each rank, in rank order.

    Raises:
        UsageError: No rank writes some value, or ranks have different tensors of one name.
    """
    found: dict[str, Any] = {}
    keys: list[list[MetadataIndex | None]] = []
    shared: dict[Any, Any] = {}
    known = {name: (name, _kind(value)) for name, value in values.items()}
    for rank, plan in enumerate(plans):
        keys.append([])
        for chunk in plan:
            name, kind = known.get(chunk.name, (None, ""))
            if name is not None and chunk.kind != kind and (chunk.kind or not is_placeholder(values[name])):
                raise UsageError(
                    f"{name} is {chunk.kind or 'an object'} on rank {rank}, and {kind or 'an object'} on "
                    "rank 0. One name in a checkpoint has one shape and dtype. Write different names."
                )
            keys[-1].append(None if name is None else _add(found, shared, values[name], chunk))
    lost = [name for name in values if name not in found]
    if lost:
        raise UsageError(
            f"No rank holds the value of {', '.join(lost[:3])}, so it cannot be saved. Remove it from the "
            "state, or give it a value on one rank."
        )
    _check_complete(found)
    return Metadata(found), keys


def _check_complete(found: Mapping[str, Any]) -> None:
    """Raise UsageError if the chunks of a tensor do not make it up. Equal boxes are one object."""
    complete: set[Any] = set()
    for name, one in found.items():
        if not isinstance(one, TensorStorageMetadata):
            continue
        key = one.size, *map(id, one.chunks)
        if key not in complete and not _covers(one.size, one.chunks):
            boxes = [f"{[*each.offsets]} + {[*each.sizes]}" for each in one.chunks]
            raise UsageError(
                f"The chunks of {name} on the ranks do not make up one tensor of shape {[*one.size]}: "
                f"{', '.join(boxes[:8])}{', ...' * (len(boxes) > 8)} (offsets + sizes). Write the same "
                "placements on all ranks."
            )
        complete.add(key)


def _add(found: dict[str, Any], shared: dict[Any, Any], value: Any, chunk: Chunk) -> MetadataIndex:
    """Add a chunk to the description; return its key. Equal parts of it are one object: `shared`."""
    name = chunk.name
    if not chunk.kind:
        found[name] = BytesStorageMetadata()
        return MetadataIndex(name)
    tensor = found.get(name)
    if tensor is None:
        local = value.to_local() if isinstance(value, DTensor) else value
        made = TensorProperties.create_from_tensor(local)
        properties = shared.setdefault(tuple(vars(made).values()), made)
        tensor = found[name] = TensorStorageMetadata(properties, torch.Size(value.shape), [])
    key = (*chunk.offsets, *chunk.sizes)
    if key not in shared:
        shared[key] = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    tensor.chunks.append(shared[key])
    return MetadataIndex(name, shared[key].offsets, len(tensor.chunks) - 1)


def _covers(shape: torch.Size, boxes: list[ChunkStorageMetadata]) -> bool:
    """Whether boxes are the cells of a grid over the whole shape, each once, as shards of a mesh are."""
    if sum([math.prod(box.sizes) for box in boxes]) != math.prod(shape):
        return False
    if not math.prod(shape):
        return len(boxes) == 1
    for dim, size in enumerate(shape):
        edges = {(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes}
        cuts = sorted({cut for edge in edges for cut in edge})
        if (cuts[0], cuts[-1]) != (0, size) or not edges <= {*pairwise(cuts)} | {(0, 0)}:
            return False
    return len({box.offsets for box in boxes}) == len(boxes)
