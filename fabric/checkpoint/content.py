"""Checks of a checkpoint's content: the files that it names, nesting of its data, and errors of reading."""

from __future__ import annotations

import pickletools
import re
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.digest import damaged
from fabric.checkpoint.portable import TAG
from fabric.core.errors import DamagedCheckpointError, UsageError
from fabric.utilities.state_keys import PLAIN_DICTS

if TYPE_CHECKING:
    from fabric.core.types import PathLike

DEEPEST = 200
"""Levels of dictionaries and lists in a checkpoint."""
_MOST = 10_000_000
"""Largest number of values, with shared lists counted at each use."""
_DTYPE = re.compile(r"[<>=|][biufc]\d{1,2}")
_CODE = {"os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "runpy", "importlib", "pty", "ctypes"}
_CODE |= {"webbrowser", "pdb", "timeit", "commands"}
_BUILTIN = {"eval", "exec", "compile", "getattr", "__import__", "open"}
"""Modules, and functions of builtins, that no checkpoint needs."""
_RENAMED = {"posix": "os", "nt": "os", "commands": "subprocess", "__builtin__": "builtins"}
_HEAD = 1 << 16


def listed_file(directory: Path, name: Any, by: Path | None = None) -> Path:
    """Return the path of a file that a manifest or an index in `directory` names; `by`: for errors.

    Raises:
        DamagedCheckpointError: It is no regular file in the directory: an absolute path, one with `..`, a
            pipe, a device, or a link to another place than the cache of Hugging Face that has the directory.
    """
    plain = type(name) is str and "\0" not in name and not Path(name).is_absolute()
    if not plain or not name or ".." in PurePosixPath(name).parts:
        raise damaged(by or directory, f"it names the file {name!r}, which is no path inside the directory")
    try:
        file: Path = directory / name
        root = directory.resolve()
        real = file.resolve(strict=True)
    except FileNotFoundError:
        raise damaged(by or directory, f"{name} is missing") from None
    except (OSError, RuntimeError) as error:  # a link to itself
        raise damaged(by or directory, f"{name} cannot be read ({error})") from None
    # ~/.cache/huggingface/hub/models--NAME: files of snapshots/REVISION are links to ../../blobs.
    cached = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not (cached or real.is_relative_to(root)) or not real.is_file():
        raise damaged(by or directory, f"{name} is no regular file in it")
    return file


def check_shape(tree: Any, path: PathLike) -> None:
    """Raise DamagedCheckpointError if data nest over `DEEPEST` levels, or a copy would be too large."""
    known: dict[int, tuple[int, int]] = {}

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Return the levels and the values below a container."""
        found = known.get(id(node))
        if depth + (0 if found is None else found[0]) > DEEPEST:
            raise damaged(path, f"its data nest more than {DEEPEST} levels deep, or contain themselves")
        if found is None:
            levels = count = 0
            for child in node.values() if isinstance(node, dict) else node:
                count += 1
                if isinstance(child, dict | list | tuple):
                    below, more = measure(child, depth + 1)
                    levels, count = max(levels, 1 + below), count + more
            found = known[id(node)] = levels, count
        return found

    if isinstance(tree, dict | list | tuple):
        _, count = measure(tree, 0)
        if count > _MOST and count > 1000 * len(known):
            raise damaged(
                path, f"its lists contain each other so often that they would have {count:.0e} values"
            )


def check_tags(tree: Any, path: PathLike) -> None:
    """Raise DamagedCheckpointError if a path or numpy value in `tree` has no form of `to_portable`."""
    if type(tree) in PLAIN_DICTS and TAG in tree:
        tag, value = tree[TAG], tree.get("value")
        array = isinstance(value, torch.Tensor) and _DTYPE.fullmatch(str(tree.get("dtype"))[:20])
        right = {"path": isinstance(value, str), "ndarray": array, "numpy_scalar": array}
        if type(tag) is not str or not right.get(tag, True):
            short = str(tree.get("dtype", "no dtype"))[:20]
            kind = f"a value of type {type(value).__name__}"
            raise damaged(path, f"an entry that is marked as {str(tag)[:20]!r} has {kind} and {short}")
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(child, dict | list | tuple):
                check_tags(child, path)


def unsafe_object_error(what: str) -> UsageError:
    """Return the error for an object in a checkpoint that safe loading refuses."""
    return UsageError(
        f"{what} safe loading refuses, because reading it can run any code. If you trust the file, write "
        "fabric.load(path, ..., weights_only=False)."
    )


def unsafe_global_error(path: PathLike, name: str) -> UsageError:
    """Return the error for a class or function in a pickle that safe loading refuses."""
    module, _, function = name.rpartition(".")
    if not _is_code(name):
        return unsafe_object_error(f"{path} refers to {name}, which")
    called = f"{_RENAMED.get(module, module)}.{function}" if module else function
    return UsageError(
        f"{path} holds code: {called}, which would run when the file is unpickled. Nothing that fabric.save "
        "or torch.save writes of a model needs it. Do not load this file, and check its source."
    )


def unreadable_error(path: PathLike, file: Path, error: Exception) -> Exception:
    """Return the error for a file that safe loading does not read, with the kind of file."""
    text = str(error)
    found = re.search(r"GLOBAL ([A-Za-z_][\w.]*) (?:was|whose)", text)
    name = found.group(1) if found else next((one for one in _names(file) if _is_code(one)), None)
    if name is not None:
        return unsafe_global_error(path, name)
    with file.open("rb") as stream:
        head = stream.read(_HEAD)
    if why := _describe_head(head):
        return DamagedCheckpointError(
            f"{path} is no checkpoint: {why}. Load a file that fabric.save or torch.save has written."
        )
    operand = re.search(r"WeightsUnpickler error:\s*(Unsupported operand (\d+))", text)
    if operand and head.startswith((b"\x80", b"PK")) and int(operand.group(2)) >= 128:
        return unsafe_object_error(f"{path} holds more than data ({operand.group(1)}), which")
    return damaged(path, "it was cut short, or not written by fabric.save or torch.save")


def _describe_head(head: bytes) -> str:
    """Return the kind of a file with this head; "": unknown."""
    if not head:
        return "it is empty"
    zeros = len(head) - len(head.lstrip(b"\0"))
    if zeros > 8:
        return "it begins with zeros, as a file whose bytes were not on the disk at a power cut"
    if head.startswith(b"version https://git-lfs"):
        return "it is the pointer of Git LFS to a file, which `git lfs pull` fetches"
    start = head[:200].decode(errors="replace")
    start = start[:-1] if len(head) > 200 else start  # the last letter may be cut
    text = "\ufffd" not in start and all([letter.isprintable() or letter in "\t\n\r" for letter in start])
    return f"it is a text file, which begins with {start[:40]!r}" if text else ""


def _is_code(name: str) -> bool:
    module, _, function = name.rpartition(".")
    builtin = _RENAMED.get(module, module) in ("", "builtins") and function in _BUILTIN
    return builtin or module.partition(".")[0] in _CODE


def _names(file: Path) -> list[str]:
    """Return the names of classes and functions in the pickle of a file, as far as it can be read."""
    found: list[str] = []
    strings: list[str] = []
    with suppress(Exception):  # of a file that is no pickle
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entry = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(entry) as stream:
                    data = stream.read(_HEAD)
        else:
            with file.open("rb") as stream:
                data = stream.read(_HEAD)
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST"):
                found.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                found.append(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    return found
