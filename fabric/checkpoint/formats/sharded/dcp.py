"""Sharded checkpoints by torch.distributed.checkpoint (DCP): each rank writes its part, and reads its part.

Imported lazily: DCP takes seconds to import. A checkpoint is the same tree as in a full file. DCP flattens it
("model.0.weight"). `.metadata` also has the tree itself, with types of containers and numbers as keys.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZipFile

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from fabric.checkpoint.content import check_shape, check_tags, listed_file, unsafe_object_error
from fabric.checkpoint.digest import LARGE, DigestWriter, damaged
from fabric.checkpoint.formats.registry import MANIFEST, METADATA, directory_at, format_of_name
from fabric.checkpoint.formats.sharded._torch import place_in_file
from fabric.checkpoint.formats.sharded.description import read_description
from fabric.checkpoint.formats.sharded.directory import check, write_manifest
from fabric.checkpoint.formats.sharded.plan import chunks_to_write, describe
from fabric.checkpoint.portable import LazyTensor, is_placeholder, owner_of
from fabric.checkpoint.snapshot import Snapshot, storage_key, values
from fabric.checkpoint.torch_io import TorchCheckpointIO, saving
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.tree import flatten, map_tree
from fabric.precision.dtypes import as_bytes
from fabric.utilities.state_keys import LOSS_SCALE, PLAIN_DICTS, same_dict_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from fabric.checkpoint.formats.sharded.plan import Chunk


_LARGE = 16 << 20
"""Size in bytes from which torch writes a tensor; its overhead matters only for smaller ones."""


class Pickled(NamedTuple):
    """A tensor with more than its values (a Parameter, a sparse one). It is written as an object."""

    value: Tensor


@contextmanager
def _writing(path: Path, digests: dict[str, Any]) -> Iterator[Any]:
    """Context with a new file that computes its digest, which is flushed to the disk at the end."""
    with path.open("wb", buffering=0) as file:
        digested = DigestWriter(file)
        yield digested
        digested.finish()
        os.fsync(file.fileno())
    digests[path.name] = {"size": digested.size, "crc32": digested.crc}


class ShardWriter:
    """The values of a checkpoint that one rank writes.

    Args:
        tree: The checkpoint, with the same keys on all ranks. A sharded tensor is a DTensor. A tensor of
            another rank is a placeholder (`placeholder_of`).
        rank: Its number in the save, and in the name of its file.
    """

    @torch.no_grad()  # DTensor.to_local takes 10 times as long with autograd
    def __init__(self, tree: dict[str, Any], rank: int = 0) -> None:
        self.rank = rank
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.tied: dict[str, str] = {}
        self._first: dict[Any, str] = {}
        self.tree = self._flatten(tree, ())

    @property
    def owners(self) -> dict[str, int]:
        """Owners, as global ranks, of the values of which this rank has placeholders."""
        return {name: owner_of(value) for name, value in self.values.items() if is_placeholder(value)}

    @torch.no_grad()
    def plan(self, owners: Mapping[str, int], root: int = 0, rank: int = 0) -> list[Chunk]:
        """Choose the chunks that this rank writes, without communication, and return them.

        Args:
            owners: Rank zero's `owners`.
            root: Rank zero's global rank.
            rank: This global rank.
        """
        # Placeholders on rank zero do not show which values are tied.
        tied = [(name, self.values[self.tied[name]]) for name in owners if name in self.tied]
        chosen = chunks_to_write([*self.values.items(), *tied], owners, root, rank)
        self._parts = [value for _, value in chosen]
        return [chunk for chunk, _ in chosen]

    @torch.no_grad()
    def describe(self, plans: Iterable[list[Chunk]]) -> None:
        """On rank zero: describe the checkpoint, from the chunks of each rank.

        Raises:
            UsageError: No rank has some value, or the chunks do not cover some tensor.
        """
        self._metadata, self._keys = describe(self.values, plans)

    def copy(self) -> None:
        """Copy the values that this rank writes to host memory; afterwards the originals may change."""
        self._parts = [_copied(part) for part in self._parts]

    def write(self, directory: Path) -> list[Any]:
        """Write this rank's file; return the lengths of its chunks, its size and its digest, for JSON."""
        lengths: list[int] = []
        digests: dict[str, Any] = {}
        name = _file_of(self.rank)
        if self._parts:
            with saving(), _writing(directory / name, digests) as stream:
                for part in self._parts:
                    start = stream.tell()
                    if isinstance(part, torch.Tensor):
                        _write_archive(part.detach(), stream)
                    else:
                        torch.save(part.value if isinstance(part, Pickled) else part, stream)
                    lengths.append(stream.tell() - start)
        return [lengths, digests.get(name)]

    def finish(self, directory: Path, written: list[Any], facts: Any) -> None:
        """On rank zero: write metadata and manifest; `written`: the result of `write` on each rank."""
        places: dict[Any, Any] = {}
        files: dict[str, Any] = {}
        for rank, (lengths, digest) in enumerate(written):
            name, start = _file_of(rank), 0
            for key, length in zip(self._keys[rank], lengths, strict=True):
                if key is not None:
                    places[key] = place_in_file(name, start, length)
                start += length
            if digest is not None:
                files[name] = digest
        metadata: Any = self._metadata
        ties: dict[str, list[str]] = {}
        for name, first in self.tied.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
            ties.setdefault(first, []).append(name)
        for key, place in [*places.items()]:
            places.update({replace(key, fqn=name): place for name in ties.get(key.fqn, ())})
        metadata.storage_data, metadata.planner_data, metadata.fabric_tree = places, self.paths, self.tree
        metadata.version = "1.0.0"  # of torch's format
        with _writing(directory / METADATA, files) as stream:
            pickle.dump(metadata, stream)
        write_manifest(directory, files, torch=torch.__version__, **facts)

    def _flatten(self, node: Any, path: tuple[str | int, ...]) -> Any:
        """Return the tree with the names of values in DCP in place of the values."""
        if type(node) in PLAIN_DICTS:
            return same_dict_type(
                node, {key: self._flatten(value, (*path, str(key))) for key, value in node.items()}
            )
        if _is_flattened(node):
            return type(node)([self._flatten(value, (*path, i)) for i, value in enumerate(node)])
        name = ".".join([str(step) for step in path])
        while name in self.paths:  # {"a.b": 1, "a": {"b": 2}}
            name += "'"
        self.paths[name] = path
        if isinstance(node, torch.Tensor):
            node = node if is_placeholder(node) or _is_plain(node) else Pickled(node)
            alone = isinstance(node, Pickled) or is_placeholder(node)
            first = self._first.setdefault(name if alone else storage_key(node), name)
            if first != name:
                self.tied[name] = first
                return MetadataIndex(name)
        self.values[name] = node
        return MetadataIndex(name)


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _write_archive(tensor: Tensor, stream: Any) -> None:
    """Write the bytes of `torch.save(tensor)`; the ZIP archive around the values is made once per shape."""
    if tensor.numel() * tensor.dtype.itemsize > _LARGE:
        flat = as_bytes(tensor.cpu())
        if flat.untyped_storage().nbytes() > flat.numel():  # torch would write the whole storage of a view
            flat = flat.clone()
        torch.save(flat.view(tensor.dtype).view(tensor.shape), stream)
        return
    head, tail = _archive_ends(tensor.dtype, tensor.shape)
    stream.write(head)
    stream.write(values(tensor))
    stream.write(tail)


@lru_cache(256)
def _archive_ends(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values: the same for all tensors of one dtype and shape."""
    made = BytesIO()
    torch.save(torch.empty(shape, dtype=dtype), made)
    with ZipFile(made) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    archive_bytes = made.getbuffer()
    # Source: the ZIP format (APPNOTE 4.3.7): 30 bytes, the lengths of name and padding in the last four.
    start = entry.header_offset + 30
    start += sum([int.from_bytes(archive_bytes[start - n : start - n + 2], "little") for n in (4, 2)])
    return bytes(archive_bytes[:start]), bytes(archive_bytes[start + entry.file_size :])


class Checkpoint:
    """A reader of a sharded checkpoint, also of `torch.distributed.checkpoint.save`.

    Args:
        directory: Its path.
        safe: Whether to refuse objects that safe loading does not read.
    """

    def __init__(self, directory: Path, safe: bool = True) -> None:
        self.directory, self.safe = directory, safe
        self._metadata = self._read_metadata()
        if hasattr(self._metadata, "fabric_tree") and not (directory / MANIFEST).exists():
            raise damaged(directory, f"{MANIFEST} is missing")
        self._reader: FileSystemReader | None = FileSystemReader(directory)
        self._reader.set_up_storage_reader(self._metadata, False)
        self._made: dict[Any, Any] = {}

    def tree(self) -> dict[str, Any]:
        """Return its content; tensors are read when they are used (see `LazyTensor`), until `close`."""
        known = self._metadata.state_dict_metadata
        tree = getattr(self._metadata, "fabric_tree", None)
        if tree is None:
            paths = self._metadata.planner_data or {}
            tree = _nested([(paths.get(name, (name,)), MetadataIndex(name)) for name in known])
        check_shape(tree, self.directory)
        made: dict[str, Any] = self._values(tree)
        check_tags(made, self.directory)
        return made

    def close(self) -> None:
        """Make tensors that were not read yet unusable: the files may change."""
        self._reader = None

    def _values(self, node: Any) -> Any:
        if isinstance(node, MetadataIndex):
            return self._value(node.fqn)
        if type(node) in PLAIN_DICTS:
            return same_dict_type(node, {key: self._values(value) for key, value in node.items()})
        return type(node)([self._values(value) for value in node])

    def _value(self, name: str) -> Any:
        known: Any = self._metadata.state_dict_metadata[name]
        if isinstance(known, TensorStorageMetadata):
            places = [self._metadata.storage_data[MetadataIndex(name, c.offsets)] for c in known.chunks]
            key = tuple([(place.relative_path, place.offset) for place in places])
            if key not in self._made:
                self._made[key] = LazyTensor.of(known.size, known.properties.dtype, partial(self._fill, name))
            return self._made[key]
        read, size, index = _Read(), torch.Size([0]), MetadataIndex(name)
        self._read([ReadItem(LoadItemType.BYTE_IO, index, size, index, size, size)], read)
        try:
            made = torch.load(read.data, map_location="cpu", weights_only=self.safe)
        except pickle.UnpicklingError as error:
            raise unsafe_object_error(f"{name!r} in {self.directory} is an object that") from error
        check_shape(made, self.directory)
        return made

    def _fill(self, name: str, target: Tensor, offsets: Sequence[int]) -> Tensor:
        """Read a part of a tensor, of the shape of `target`, into it."""
        wanted = ChunkStorageMetadata(torch.Size(offsets), target.size())
        known: Any = self._metadata.state_dict_metadata[name]
        self._read(create_read_items_for_chunk_list(name, known, [wanted]), _Read(target))
        return target

    def _read(self, items: list[ReadItem], into: Any) -> None:
        if self._reader is None:
            raise UsageError(f"A tensor of {self.directory} was kept, and used after it was loaded. Copy it.")
        self._reader.read_data(LoadPlan(items), into).wait()

    def _read_metadata(self) -> Any:
        file = listed_file(self.directory, METADATA)
        try:
            with file.open("rb") as stream:
                metadata = read_description(file, stream) if self.safe else pickle.load(stream)
            names = {place.relative_path for place in metadata.storage_data.values()}
        except UsageError:
            raise
        except Exception as error:
            raise damaged(self.directory, f"{METADATA} cannot be read ({error})") from error
        for name in names:
            listed_file(self.directory, name)
        return metadata


class _Read:
    """The destination of a read of DCP: bytes are kept here, values are copied into `target`."""

    def __init__(self, target: Any = None) -> None:
        self.target = target
        self.data: Any = None

    def load_bytes(self, item: Any, value: Any) -> None:
        self.data = value

    def resolve_tensor(self, item: Any) -> Any:
        where = zip(item.dest_offsets, item.lengths, strict=True)
        return self.target[tuple([slice(start, start + length) for start, length in where])]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass


def consolidate(
    path: Path, output: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Convert a sharded checkpoint to one full file, in the memory of one tensor.

    Args:
        path: The sharded checkpoint.
        output: The file; replaced if it exists.
        progress: Called after each tensor with the numbers of tensors read so far and in all.

    Returns:
        The names of entries that the file lacks: a safetensors file has one model only.

    Raises:
        UsageError: `path` does not exist or is not a sharded checkpoint, or a file in it is damaged.
        ConfigurationError: `output` holds one model, but there is none, or several; or `output` is `path`.
    """
    if output.resolve() == path.resolve():
        raise ConfigurationError(
            f"{output} is the checkpoint itself, which the file would replace. Write another name."
        )
    if not path.exists():
        raise UsageError(f"There is no {path}. Give the directory that fabric.save has written.")
    if directory_at(path) is None:
        raise UsageError(
            f"{path} is not a sharded checkpoint, a directory that fabric.save has written. A file needs no "
            "conversion: fabric.load and torch.load read it."
        )
    check(path, 0, 1)
    checkpoint = Checkpoint(path)
    if (format := format_of_name(output)) is not None:
        tree = format.load().model_in(checkpoint.tree(), path)
        TorchCheckpointIO().save_checkpoint(tree, output)
        return [name for name in checkpoint.tree() if name not in tree]
    tree = checkpoint.tree()
    made: dict[int, Tensor] = {}
    total = len({id(leaf) for leaf in flatten(tree)[0] if isinstance(leaf, LazyTensor)})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name[:100]}.") as folder:

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, LazyTensor):
                return leaf
            if id(leaf) not in made:  # else tied
                made[id(leaf)] = leaf.read(_file_backed(Path(folder) / str(len(made)), leaf))
                progress(len(made), total)
            return made[id(leaf)]

        TorchCheckpointIO().save_checkpoint(map_tree(whole, tree), output)
    return []


def _file_backed(file: Path, like: Tensor) -> Tensor | None:
    """Return a file-backed buffer for a large tensor, which needs no memory; None: it is not large."""
    if like.numel() * like.dtype.itemsize < LARGE:
        return None
    flat = torch.from_file(str(file), shared=True, size=like.numel(), dtype=like.dtype)
    file.unlink()
    return flat.view(like.shape)


def _is_flattened(node: Any) -> bool:
    """Whether DCP stores the entries of a list or tuple under separate names."""
    if type(node) not in (list, tuple):
        return False
    return any([isinstance(v, torch.Tensor) or type(v) in PLAIN_DICTS or _is_flattened(v) for v in node])


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has no state but its values."""
    if isinstance(tensor, DTensor):
        return True
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or vars(tensor)
    return type(tensor) is torch.Tensor and not (odd or tensor.requires_grad)


def _copied(value: Any) -> Any:
    if isinstance(value, Pickled):
        return Pickled(Snapshot(None).of(value.value))
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)


def _nested(leaves: list[tuple[Any, Any]]) -> Any:
    """Return the tree for DCP's pairs (path, leaf): numbers in a path are indices of lists."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves:
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = leaf
    return _with_lists(tree)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    if all([type(key) is int for key in made]):
        return [made[key] for key in sorted(made)]
    # In the state of an optimizer, parameters have numbers.
    if "param_groups" in made and made.keys() <= {"state", "param_groups", "param_names", LOSS_SCALE}:
        state = made.get("state", {})
        made["state"] = {int(key) if key.isdigit() else key: value for key, value in state.items()}
    return made
