"""torch's description of a sharded checkpoint (`.metadata`), read without running code of it."""

from __future__ import annotations

import pathlib
import pickle
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fabric.checkpoint.content import unsafe_global_error
from fabric.checkpoint.formats.registry import METADATA
from fabric.checkpoint.formats.sharded._torch import layout_of, memory_format_of, place_in_file
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_CLASSES = (
    *(ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, Metadata),
    *(StorageMeta, TensorProperties, type(place_in_file("", 0, 0))),
)
"""Classes of a description; it also has containers, dtypes and paths."""
_CALLED = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": layout_of,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": memory_format_of,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's description of a checkpoint, which is a pickle, without running any code.

    A pickle can set attributes of each object that it names (BUILD). For functions, and classes that it only
    calls, it gets new functions (`_call_of`); `_unchanged` restores all other classes.

    Args:
        file: The path, for errors.
        stream: The file's bytes.
    """

    def __init__(self, file: pathlib.Path, stream: Any) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a name in the pickle refers to.

        Raises:
            UsageError: No description contains this name.
        """
        module = module.removesuffix("._local")  # the module of paths in Python 3.13 only
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return _call_of(pathlib.Path if name in ("PosixPath", "WindowsPath") else getattr(pathlib, name))
        if called := _CALLED.get(f"{module}.{name}"):
            return _call_of(called)
        for known in _CLASSES:
            if (module, name) == (known.__module__, known.__qualname__):
                return known
        raise unsafe_global_error(self._file, f"{module}.{name}")


def _call_of(called: Any) -> Callable[..., Any]:
    """Return a new function that calls `called`: a pickle can change attributes of this function only."""
    return lambda *arguments: called(*arguments)  # noqa: PLW0108  a new function each time


def _attributes(kind: type) -> dict[str, Any]:
    return {**vars(kind), "__name__": kind.__name__, "__qualname__": kind.__qualname__}


@contextmanager
def _unchanged(classes: Sequence[Any]) -> Iterator[None]:
    """Restore attributes of classes at the end.

    Raises:
        UsageError: Some were changed.
    """
    before = [_attributes(one) for one in classes]
    try:
        yield
    finally:
        changed = []
        for one, had in zip(classes, before, strict=True):
            now = _attributes(one)
            for name in now.keys() | had.keys():
                if name not in had:
                    delattr(one, name)
                elif now.get(name) is not had[name]:
                    setattr(one, name, had[name])
                else:
                    continue
                changed.append(f"{one.__name__}.{name}")
        if changed:
            raise UsageError(
                f"A checkpoint's {METADATA} holds code: it replaces {changed[0]}. Do not load it, "
                "and check its source."
            )


def read_description(file: pathlib.Path, stream: Any) -> Any:
    """Return the description in a stream; `file`: for errors.

    Raises:
        UsageError: It refers to an object that no description has, or changes a class.
    """
    with _unchanged(_CLASSES):
        return _MetadataUnpickler(file, stream).load()
