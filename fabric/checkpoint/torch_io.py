"""`TorchCheckpointIO`: one file of torch or safetensors, written to a temporary path and renamed."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.atomic_write import (
    commit_path,
    copy_mode,
    named,
    remove,
    temporary_path,
)
from fabric.checkpoint.checkpoint_io import CheckpointIO
from fabric.checkpoint.content import check_shape, check_tags, unreadable_error
from fabric.checkpoint.digest import CHANGED, DigestWriter, Sealed, damaged, read_seal, verify
from fabric.checkpoint.formats.registry import directory_at, format_of_file, format_of_name
from fabric.core.errors import ConfigurationError, FabricError
from fabric.utilities.cloud_io import get_filesystem, local_path, target_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fabric.core.types import PathLike


_DAMAGE = (
    *("PytorchStreamReader", "zip archive", "unexpected EOF", "legacy .tar", "Invalid magic number"),
    "recursion",
)
"""Texts in errors of `torch.load` for a file that was truncated, or is no checkpoint."""
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError),
    *(AssertionError, OverflowError, MemoryError, struct.error, RuntimeError),
)
"""Errors of the safe unpickler of `torch.load` for a file that is no pickle."""
_CUT_SHORT = "it was cut short, or not written by fabric.save or torch.save"


class TorchCheckpointIO(CheckpointIO):
    """Checkpoints as single files of `torch.save`, on a local disk or behind any fsspec URL.

    A name that ends with ".safetensors" is written as safetensors. Files are read by content, not by name.

    Args:
        verify: Whether loading first reads the whole file and compares its digest. Files of other programs,
            which have none, are loaded unverified.
    """

    verify = True  # for subclasses that do not call __init__

    def __init__(self, verify: bool = True) -> None:
        self.verify = verify

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to a temporary file next to `path`, flush it to the disk, and rename it.

        Raises:
            ConfigurationError: `storage_options` were given; this IO has none. Or a safetensors file cannot
                hold this.
            OSError: The file cannot be written; the old file, if any, is untouched.
        """
        if storage_options is not None:
            raise ConfigurationError(
                f"fabric.save got storage_options={storage_options!r}. TorchCheckpointIO has no options. "
                "Leave them out, or pass your own CheckpointIO that reads them as Fabric(plugins=...)."
            )
        write = partial(_write, checkpoint, self.facts)
        if (format := format_of_name(path)) is not None:
            module = format.load()
            write = partial(module.write, module.prepared(checkpoint, path), self.facts)
        target = target_path(path)
        if target is None:
            _save_to_url(write, str(path))
            return
        with named(local_path(path) or target):
            _save_to_disk(write, target)

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dictionary that was saved. Local files are memory-mapped: bytes are read on first use.

        Args:
            path: File or URL; a directory of Hugging Face with safetensors files.
            map_location: As in `torch.load`; the default keeps tensors on the host, as those of safetensors
                are.
            weights_only: None or True refuse arbitrary pickled objects; False trusts the file.

        Raises:
            FileNotFoundError: Nothing is at `path`.
            DamagedCheckpointError: The file is no checkpoint, or was changed.
            UsageError: The file holds objects that safe loading refuses.
        """
        local = local_path(path)
        if local is not None:
            verify(self.sealed(path))
            return self.load_verified(path, map_location, weights_only)
        with tempfile.NamedTemporaryFile() as copy:  # mapped: it must exist until it is read
            _fetch(str(path), copy)
            verify(self._sealed(Path(copy.name), path))
            return self._read(Path(copy.name), path, map_location, weights_only)

    def sealed(self, path: PathLike) -> list[Sealed]:
        """Return the ranges to verify of the local files at `path`; with `verify=False` none.

        Raises:
            DamagedCheckpointError: A file was changed.
        """
        local = local_path(path)
        return [] if local is None else self._sealed(local, path)

    def load_verified(
        self, path: PathLike, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at a path of this host whose `sealed` ranges were verified.

        Arguments as for `load_checkpoint`.
        """
        return self._read(local_path(path), path, map_location, weights_only)

    def _sealed(self, path: Path, name: PathLike) -> list[Sealed]:
        if not self.verify:
            return []
        if (format := format_of_file(path, name)) is not None:
            return format.load().sealed(path, name)  # type: ignore[no-any-return]
        if not path.is_file():
            return []
        with path.open("rb", buffering=0) as file:
            seal = read_seal(file, name)
        return [] if seal is None else [Sealed(path, 0, seal["size"], seal["crc32"], damaged(name, CHANGED))]

    def _read(
        self, path: Any, name: PathLike, map_location: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        try:
            return self._tree(path, name, map_location, weights_only is not False)
        except FabricError:
            raise
        except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError) as error:
            if not isinstance(error, RuntimeError) or any([sign in str(error) for sign in _DAMAGE]):
                raise damaged(name, _CUT_SHORT) from error
            raise

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete the file or directory at `path`, if it is there."""
        local = local_path(path)
        if local is not None:
            remove(local)
        elif (filesystem := get_filesystem(path)).exists(str(path)):
            filesystem.rm(str(path), recursive=True)

    def _tree(self, path: Path, name: PathLike, map_location: Any, safe: bool) -> dict[str, Any]:
        if (format := format_of_file(path, name)) is not None:
            return format.load().read(path, name)  # type: ignore[no-any-return]
        if path.is_dir():
            raise IsADirectoryError(
                f"{name} is a directory, not a checkpoint file of fabric.save. If an engine wrote "
                "it (DeepSpeed), load it under its strategy, or convert it to a file with the engine's tool."
            )
        if not path.exists():
            where = (
                "" if Path(str(name)).is_absolute() or "://" in str(name) else f" (looked in {Path.cwd()})"
            )
            raise FileNotFoundError(f"There is no checkpoint file at {name}{where}.")
        try:
            tree = self._load(path, map_location, safe)
        except _UNREADABLE as error:
            known = isinstance(error, RuntimeError) and any([sign in str(error) for sign in _DAMAGE])
            if not safe or (isinstance(error, RuntimeError) and not known):
                raise
            raise unreadable_error(name, path, error) from error
        check_shape(tree, name)
        check_tags(tree, name)
        return tree

    def _load(self, path: Path, map_location: Any, safe: bool) -> dict[str, Any]:
        if format_of_name(path) is not None:  # torch would choose the format by the name
            with path.open("rb") as file:
                return torch.load(file, map_location, weights_only=safe)  # type: ignore[no-any-return]
        # Objects that only an unsafe load reads may hold tensors that are not found and copied. Files in the
        # old format, which are no archives, cannot be mapped.
        on_host = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cpu"
        mapped = safe and on_host and zipfile.is_zipfile(path)
        return torch.load(path, map_location, weights_only=safe, mmap=mapped)  # type: ignore[no-any-return]


def _fetch(url: str, file: Any) -> None:
    try:
        with get_filesystem(url).open(url, "rb") as opened:
            shutil.copyfileobj(opened, file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no checkpoint file at {url}.") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{url} is a directory, not a checkpoint file.") from error
    file.flush()


def _save_to_disk(write: Callable[[Any], None], path: Path) -> None:
    if path.is_dir():
        directory = directory_at(path)
        if directory is None:
            raise IsADirectoryError(
                f"{path} is a directory. Give a file name, for example {path / 'checkpoint.pt'}."
            )
        directory[0].load().refuse_foreign(path)
    elif path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as file:  # /dev/null, a pipe: nothing that a file may replace
            write(file)
        return
    part = temporary_path(path, directory=False)
    try:
        with part.open("r+b", buffering=0) as file:
            copy_mode(path, part)
            write(file)
            os.fsync(file.fileno())
        commit_path(part, path)
    except BaseException:
        remove(part)
        raise


def _write(checkpoint: dict[str, Any], facts: Mapping[str, Any], file: Any) -> None:
    digested: Any = DigestWriter(file)
    with saving():
        torch.save(checkpoint, digested)
    digested.seal(facts)


@contextmanager
def saving() -> Iterator[None]:
    """Disable the checksums of torch.save, which are slow, and which torch.load does not read.

    Raises:
        OSError: A write failed. torch's writer would replace it by an error of its own at the end.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def _save_to_url(write: Callable[[Any], None], url: str) -> None:
    # A separate instance: other writes of the loop must not become part of this transaction.
    filesystem = get_filesystem(url, skip_instance_cache=True)
    directory = url.rsplit("/", 1)[0]
    if not filesystem.isdir(directory):  # else s3fs would create the bucket, which needs permissions
        filesystem.makedirs(directory, exist_ok=True)
    with filesystem.transaction, filesystem.open(url, "wb") as file:
        write(file)
