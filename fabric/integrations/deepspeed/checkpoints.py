"""DeepSpeed's checkpoint directories: each rank writes its part of one engine; other entries are included.

As with `fabric.save`, a directory is written under a temporary name, with a manifest of all files, and is
renamed when complete. `python -m fabric.integrations.deepspeed DIRECTORY FILE` converts one to a file with
the model in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint import state as states
from fabric.checkpoint.atomic_write import commit_path, present, remove
from fabric.checkpoint.content import listed_file
from fabric.checkpoint.digest import damaged
from fabric.checkpoint.formats.sharded.directory import begin, check, digest, write_manifest
from fabric.collectives.objects import gather_objects
from fabric.core.errors import UsageError
from fabric.integrations.deepspeed.package import load_deepspeed
from fabric.utilities.cloud_io import local_path, target_path
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabric.core.types import PathLike

_TAG, _OURS = "checkpoint", "fabric"


def directory_at(path: PathLike) -> Path | None:
    """Return DeepSpeed's directory at `path`; None: there is none."""
    local = local_path(present(path))
    return local if local is not None and (local / "latest").is_file() else None


def engine_of(layout: Any, state: Any, doing: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the engine of a state, its optimizer (None: not in the state), and all other entries.

    Raises:
        UsageError: The state does not have exactly one model that is an engine.
    """
    entries = state if isinstance(state, dict) else {"": state}
    models = layout.engines_in(entries)
    if len(models) != 1:
        raise UsageError(
            f"{doing} a directory of DeepSpeed's takes one model that was set up with its optimizer, but "
            f"state has {len(models)}. Save and load each in a directory of its own, or all of them with "
            "format='full' or 'sharded'."
        )
    engine = layout.engines[unwrap(entries[models[0]])]
    steppers = {key: unwrap(value) for key, value in entries.items() if layout.steps(unwrap(value), engine)}
    rest = {key: value for key, value in entries.items() if key not in models and key not in steppers}
    return engine, next(iter(steppers.values()), None), rest


def save(
    strategy: Any,
    path: PathLike,
    state: dict[str, Any],
    exclude_frozen: bool,
    facts: Mapping[str, Any],
    then: Callable[[], None] | None,
    allow_pickle: bool,
) -> None:
    """Write a state with one engine. All ranks must call this."""
    rank, world, part = strategy.global_rank, strategy.world_size, None
    with states.together(strategy, f"saving {path}"):
        engine, _, rest = engine_of(strategy.layout, state, "saving")
        client = {_OURS: states.gather(strategy, rest, None, allow_pickle)}
        target = target_path(path)
        if target is None:
            raise UsageError(f"DeepSpeed writes into file systems, and {path} is a URL. Write format='full'.")
        part = begin(target) if rank == 0 else None
    directory = strategy.broadcast(part)
    try:
        with strategy.layout.gathers():
            engine.save_checkpoint(
                str(directory), tag=_TAG, client_state=client, exclude_frozen_parameters=exclude_frozen
            )
        with states.together(strategy, f"saving {path}"):
            files = sorted([file for file in directory.rglob("*") if file.is_file()])
            local = {file.relative_to(directory).as_posix(): digest(file) for file in files[rank::world]}
        by_rank = gather_objects(local, strategy.channel(), "save")
        with states.together(strategy, f"saving {path}"):
            if rank == 0:
                digests = {name: value for of_rank in by_rank for name, value in of_rank.items()}
                write_manifest(directory, digests, **facts)
                commit_path(directory, target)
                if then is not None:
                    then()
    except BaseException:
        if part is not None:
            remove(part)
        raise


def tagged(directory: Path) -> Path:
    """Return the folder of a DeepSpeed directory that its file `latest` names.

    Raises:
        DamagedCheckpointError: It names no folder in the directory.
    """
    try:
        tag = listed_file(directory, "latest").read_text().strip()
    except UnicodeDecodeError:
        tag = ""
    folder = directory / tag
    if tag in ("", ".", "..") or len(Path(tag).parts) != 1 or folder.is_symlink() or not folder.is_dir():
        raise damaged(directory, f"its file `latest` names {tag[:80]!r}, which is no folder in it")
    return folder


class CheckedDirectory(dict[str, Any]):
    """A DeepSpeed directory that was checked; only DeepSpeed's engine can read it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory


def check_directory(strategy: Any, directory: Path) -> CheckedDirectory:
    """Check a directory before anything is loaded from it. All ranks must call this.

    Raises:
        DamagedCheckpointError: A file is missing or was changed.
        UsageError: Another number of ranks wrote it.
    """
    rank, world = strategy.global_rank, strategy.world_size
    check(directory, rank, world)
    saved = len(list(tagged(directory).glob("*_optim_states.pt")))
    if saved != world:
        raise UsageError(
            f"{directory} has the parts of {saved} ranks, and there are {world}: DeepSpeed reads its "
            "directories on as many ranks as wrote them. Save with format='full' or 'sharded', or make a "
            "file of the model for fabric.load_raw: python -m fabric.integrations.deepspeed DIRECTORY FILE"
        )
    return CheckedDirectory(directory)


def load(strategy: Any, directory: Path, state: Any, strict: bool) -> dict[str, Any]:
    """Load a directory into a state with one engine; return its other entries. All ranks must call this."""
    with states.together(strategy, f"loading {directory}"):
        engine, optimizer, rest = engine_of(strategy.layout, state, "loading")
    strategy.layout.drop(engine)
    found, client = engine.load_checkpoint(
        str(directory),
        load_module_strict=strict,
        load_optimizer_states=optimizer is not None,
        load_lr_scheduler_states=optimizer is not None,
        load_module_only=optimizer is None,
    )
    if found is None:
        raise damaged(directory, "DeepSpeed cannot read it (its warnings say why)")
    strategy.layout.loaded(engine, optimizer)
    with states.together(strategy, f"loading {directory}"):
        left = states.restore(strategy, client.get(_OURS, client), rest, strict)
    if isinstance(state, dict):
        state.update(rest)
    return left


def consolidate(directory: PathLike, file: PathLike) -> None:
    """Convert a DeepSpeed directory to one file: the model's state dict in float32, for
    `fabric.load_raw(file, model)` under any strategy, or `torch.load`. Runs in one process.

    Raises:
        UsageError: It is not a DeepSpeed directory.
    """
    found = directory_at(directory)
    if found is None:
        raise UsageError(
            f"{directory} is no directory of DeepSpeed's: it has no file `latest`. One of ours is made a "
            "file by `fabric consolidate`."
        )
    folder = tagged(found)
    load_deepspeed("cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_files

    from fabric.checkpoint.torch_io import TorchCheckpointIO

    state = get_fp32_state_dict_from_zero_checkpoint(str(found))
    first = get_model_state_files(str(folder))[0]
    module = torch.load(first, map_location="cpu", weights_only=False)["module"]
    # Under stage 1 DeepSpeed's state lacks frozen parameters; under stage 3 `module` has no values.
    state |= {name: value.float() for name, value in module.items() if name not in state and value.numel()}
    TorchCheckpointIO().save_checkpoint({name: value.clone() for name, value in state.items()}, file)
