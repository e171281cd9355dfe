"""safetensors files: the tensors of one model under its own keys, as Hugging Face writes and reads them.

The package `safetensors` reads files, which it maps into memory. This module writes them: the package needs
the whole model in memory, and leaves a temporary file if the process is killed. A file of Fabric has a CRC-32
of all its bytes in `__metadata__` of the header, which readers ignore.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.content import listed_file
from fabric.checkpoint.crc import Crc32, combine_crcs
from fabric.checkpoint.digest import CHANGED, Sealed, damaged, write_all
from fabric.checkpoint.formats.registry import FORMATS
from fabric.checkpoint.portable import TAG, LazyTensor, read_stored
from fabric.checkpoint.snapshot import storage_key, values
from fabric.core.errors import ConfigurationError, MissingExtraError
from fabric.utilities.state_keys import PLAIN_DICTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from fabric.core.types import PathLike

(_FORMAT,) = [row for row in FORMATS if row.module == __name__]
LENGTH, _ = _FORMAT.start
"""Bytes at the start of a file that hold the length of its header."""
SINGLE, INDEX = _FORMAT.files
"""Names of the single file in a directory of Hugging Face, and of the file that maps tensors to files."""
_START = b'{"__metadata__": {"fabric-crc32": "'
_FACTS = b', "fabric-facts": "'
"""Two marks of a file with a digest, since one flipped bit can destroy one of them."""
_TIES = "fabric-ties"
"""Key in a header of Fabric: maps names of tied tensors to the name that is stored."""
_BLANK = b"0" * 8
"""Placeholder of the digest while it is computed."""


def prepared(checkpoint: dict[str, Any], path: PathLike) -> dict[str, Tensor]:
    """Return the tensors to write to `path`: `checkpoint` itself, or its only entry if that is a dictionary.

    Raises:
        ConfigurationError: `checkpoint` has other entries, which such a file cannot hold.
        MissingExtraError: safetensors is not installed.
    """
    package = _package()
    held, place = checkpoint, "state"
    if len(checkpoint) == 1:
        ((name, only),) = checkpoint.items()
        if type(only) in PLAIN_DICTS and TAG not in only:
            held, place = only, f"state[{name!r}]"
    wrong = [why for key, value in held.items() if (why := _refused(package, key, value))]
    if held and not wrong:
        return held
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ConfigurationError(
        f"{path} can hold the tensors of one model and nothing else, but {place} has "
        f'{", ".join(wrong[:3]) or "no tensor"}{more}. Write fabric.save("{path}", {{"model": model}}), and '
        'the rest to a file of its own, or all of it to a name like "model.pt".'
    )


def model_in(checkpoint: dict[str, Any], path: PathLike) -> dict[str, Any]:
    """Return the part of a checkpoint for one file: its tensors, its only model, or the one named "model".

    Raises:
        ConfigurationError: It has no model, or several.
    """
    if all([isinstance(value, torch.Tensor) for value in checkpoint.values()]):
        return checkpoint
    # A model with other entries than tensors is refused when it is written, by a better error.
    trees = {name: tree for name, tree in checkpoint.items() if type(tree) in PLAIN_DICTS}
    models = {
        n: tree for n, tree in trees.items() if any([isinstance(x, torch.Tensor) for x in tree.values()])
    }
    chosen = "model" if "model" in models else next(iter(models), None)
    if chosen is None or (chosen != "model" and len(models) > 1):
        raise ConfigurationError(
            f"A safetensors file holds the tensors of one model, but {path} has {[*models] or 'none'}. Write "
            f'state = fabric.load("{path}") and fabric.save("NAME.safetensors", {{"model": state[NAME]}}).'
        )
    return {chosen: models[chosen]}


def write(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], file: Any) -> None:
    """Write tensors, one at a time in memory; tied tensors are written once, under the first name.

    Args:
        tensors: A result of `prepared`.
        facts: Stored in the header.
        file: Open for writing, with bytes. Never read or sought in.
    """
    first: dict[Any, str] = {}
    names = {name: first.setdefault(storage_key(tensor), name) for name, tensor in tensors.items()}
    tied = {name: kept for name, kept in names.items() if name != kept}
    # The widest dtypes first, so that each tensor is aligned.
    order = sorted(first.values(), key=lambda name: -tensors[name].dtype.itemsize)
    kept = {name: tensors[name] for name in order}
    header = _header(kept, {"torch": torch.__version__, **facts}, tied)
    crc = Crc32()
    crc.update(header)
    for tensor in kept.values():
        crc.update(values(read_stored(tensor)))
    write_all(file, header.replace(_START + _BLANK, _START + b"%08x" % crc.value, 1))
    for tensor in kept.values():
        write_all(file, values(read_stored(tensor)))


def sealed(path: Path, name: PathLike) -> list[Sealed]:
    """Return the ranges to verify of the files at `path` that have a digest.

    Args:
        path: As for `read`.
        name: The name in errors.

    Raises:
        DamagedCheckpointError: A file is missing, or the index was changed.
    """
    found = [_sealed(file, called) for file, called in _files(path, name)[0].values()]
    return [each for each in found if each is not None]


def read(path: Path, name: PathLike) -> dict[str, Tensor]:
    """Return the tensors at `path` as `LazyTensor`s, each read when it is used.

    If a directory has a single file and an index, the file is read, as by `from_pretrained`.

    Args:
        path: A file, a directory, or the index in one.
        name: The name in errors.

    Raises:
        DamagedCheckpointError: A file is missing or was changed; the message names it.
        MissingExtraError: safetensors is not installed.
    """
    files, where = _files(path, name)
    held = {file: _read_file(*place) for file, place in files.items()}
    try:
        return held[""] if where is None else {key: held[file][key] for key, file in where.items()}
    except KeyError as error:
        raise damaged(_index(path), f"its files are not those that it lists ({error!r})") from error


def _index(path: Path) -> Path:
    """Return the single file or the index of a directory; `path` itself if it is a file."""
    return path / (SINGLE if (path / SINGLE).is_file() else INDEX) if path.is_dir() else path


def _files(path: Path, name: PathLike) -> tuple[dict[str, tuple[Path, PathLike]], dict[str, str] | None]:
    """Return {file: (its path, its name in errors)} and {tensor: file}; of one file: {"": ...} and None."""
    path = _index(path)
    if not path.name.endswith(_FORMAT.listings):
        return {"": (path, name)}, None
    try:
        where: dict[str, str] = json.loads(path.read_text())["weight_map"]
        names = {*where.values()}
        return {file: (listed_file(path.parent, file, path), path.parent / file) for file in names}, where
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its files are not those that it lists ({error!r})") from error


def _read_file(path: Path, name: PathLike) -> dict[str, Tensor]:
    package = _package()
    try:
        with package.safe_open(path, framework="pt") as opened:
            held = {key: _stored(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118 - no dict
            metadata = opened.metadata() or {}
    except package.SafetensorError as error:
        raise damaged(name, str(error)) from error
    # Ties of Fabric, or of `save_model` of the package.
    try:
        ties = {key: kept for key, kept in metadata.items() if key != "format"}
        ties = json.loads(metadata[_TIES]) if _TIES in metadata else ties
        return {**{key: held[kept] for key, kept in ties.items() if kept in held}, **held}
    except (ValueError, AttributeError, TypeError) as error:
        raise damaged(name, f"its {_TIES} cannot be read ({error!r})") from error


def _stored(mapped: Tensor) -> LazyTensor:
    def fill(target: Tensor, offsets: Sequence[int]) -> Tensor:
        ends = zip(offsets, target.shape, strict=True)
        return target.copy_(mapped[tuple([slice(start, start + size) for start, size in ends])])

    return LazyTensor.of(mapped.shape, mapped.dtype, fill)


def _sealed(path: Path, name: PathLike) -> Sealed | None:
    """Return the range of the tensors with its digest, computed from that of all bytes in the header.

    None: the file has no digest, or is no safetensors file, for which `_read_file` raises.
    """
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = file.read(LENGTH)
        if int.from_bytes(length, "little") > size - LENGTH:
            return None
        header = file.read(int.from_bytes(length, "little"))
    if not header.startswith(_START) and _FACTS not in header:
        return None
    at, end = len(_START), len(_START) + len(_BLANK)
    rest = size - LENGTH - len(header)
    error = damaged(name, CHANGED)
    try:
        crc = int(header[at:end], 16)
    except ValueError:
        raise error from None
    if header[at:end] != b"%08x" % crc:  # int() also accepts "A" for "a", and blanks
        raise error
    blank = Crc32()
    blank.update(length + header[:at] + _BLANK + header[end:])
    return Sealed(path, size - rest, rest, crc ^ combine_crcs(blank.value, 0, rest), error)


def _header(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], tied: Mapping[str, str]) -> bytes:
    """Return the length and the header, with a placeholder for the digest."""
    package, entries, end = _package(), {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        spec = _spec(package, tensor)
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    free = {"fabric-crc32": _BLANK.decode(), "fabric-facts": json.dumps(facts), _TIES: json.dumps(tied)}
    text = json.dumps({"__metadata__": {**free, "format": "pt"}, **entries})
    header = text.encode() + b" " * (-len(text) % LENGTH)
    return len(header).to_bytes(LENGTH, "little") + header


def _refused(package: Any, key: Any, value: Any) -> str:
    """Return the text of the error for an entry that such a file cannot hold; "": it can."""
    if type(key) is not str or key == "__metadata__":
        return f"the key {key!r} ({type(key).__name__})"
    if not isinstance(value, torch.Tensor):
        kind = value[TAG] if isinstance(value, dict) and TAG in value else type(value).__name__
        return f"{key!r} ({kind})"
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return f"{key!r} (a sparse, quantized or nested tensor)"
    try:
        _spec(package, value)
    except package.SafetensorError:
        return f"{key!r} (a tensor of {value.dtype})"
    return ""


def _spec(package: Any, tensor: Tensor) -> Any:
    """Return the package's description of a tensor's dtype and shape."""
    return package.TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape, data_ptr=0, data_len=0
    )


def _package() -> Any:
    try:
        import safetensors

        safetensors.TensorSpec  # noqa: B018 - since 0.8
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "A .safetensors file needs the package safetensors, 0.8 or newer. Run `pip install "
            '"torch-fabric[safetensors]"`, or write to a name that ends with ".pt".'
        ) from error
    return safetensors
