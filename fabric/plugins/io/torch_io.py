"""`TorchCheckpointIO`: one file that plain `torch.load(weights_only=True)` reads, written aside and renamed."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.io.checkpoint_io import CheckpointIO

if TYPE_CHECKING:
    from fabric.core.types import PathLike


class TorchCheckpointIO(CheckpointIO):
    """Checkpoints as single files of `torch.save`, on a local disk or behind any fsspec URL."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write to a temporary file beside `path`, flush it to the disk, and rename it over `path`.

        Raises:
            ConfigurationError: `storage_options` were given; this IO has none.
            OSError: The file cannot be written; the old file, if any, is untouched.
        """
        if storage_options is not None:
            raise ConfigurationError(
                f"storage_options={storage_options!r} mean nothing to TorchCheckpointIO. "
                f"Pass a CheckpointIO of your own as Fabric(plugins=...) that reads them."
            )
        if _is_url(path):
            _save_to_url(checkpoint, str(path))
        else:
            _save_to_disk(checkpoint, Path(path))

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The dictionary that was saved. Local files are memory-mapped: bytes are read when they are used.

        Args:
            path: File or URL.
            map_location: As in `torch.load`; the default keeps tensors on the host.
            weights_only: None or True refuse arbitrary pickled objects; False trusts the file.

        Raises:
            FileNotFoundError: Nothing is at `path`.
            UsageError: The file holds objects that safe loading refuses.
        """
        safe = weights_only is not False
        try:
            if _is_url(path):
                return _load_from_url(str(path), map_location, safe)
            path = Path(path)
            if not path.is_file():
                raise FileNotFoundError(f"There is no checkpoint file at {path.absolute()}.")
            return _load_from_disk(path, map_location, safe)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"{path} holds objects that safe loading refuses: {str(error).splitlines()[0]} "
                f"If you trust the file, write fabric.load(path, ..., weights_only=False)."
            ) from error

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete the file at `path`, if it is there."""
        if _is_url(path):
            import fsspec

            filesystem, name = fsspec.core.url_to_fs(str(path))
            if filesystem.exists(name):
                filesystem.rm(name, recursive=True)
        else:
            Path(path).unlink(missing_ok=True)


def _is_url(path: PathLike) -> bool:
    return "://" in str(path)


def _save_to_disk(checkpoint: dict[str, Any], path: Path) -> None:
    path = path.absolute()
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory. Give a file name, for example {path / 'checkpoint.pt'}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def _umask() -> int:
    # The only portable way to read it is to set it; between the two calls no file of ours is made.
    current = os.umask(0)
    os.umask(current)
    return current


def _flush_directory(directory: Path) -> None:
    # The rename itself must reach the disk. Some systems cannot open directories; there it does so by itself.
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_to_url(checkpoint: dict[str, Any], url: str) -> None:
    import fsspec

    filesystem, name = fsspec.core.url_to_fs(url)
    parent = name.rsplit("/", 1)[0]
    if parent:
        filesystem.makedirs(parent, exist_ok=True)
    with filesystem.transaction, filesystem.open(name, "wb") as file:
        torch.save(checkpoint, file)


def _load_from_disk(path: Path, map_location: Any, safe: bool) -> dict[str, Any]:
    mapped = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cpu"
    try:
        return torch.load(path, map_location=map_location, weights_only=safe, mmap=mapped)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # a file in the old, unzipped format
            raise
        return torch.load(path, map_location=map_location, weights_only=safe)  # type: ignore[no-any-return]


def _load_from_url(url: str, map_location: Any, safe: bool) -> dict[str, Any]:
    import fsspec

    with fsspec.open(url, "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=safe)  # type: ignore[no-any-return]
