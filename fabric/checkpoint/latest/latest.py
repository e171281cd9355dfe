"""The checkpoints of a directory, by their step: save one more and remove the oldest, load the newest."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.state import together
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.traits import overridden
from fabric.strategies.checkpoints import Checkpoints
from fabric.utilities.cloud_io import join_path, list_directory, local_path
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from pathlib import Path

    from fabric.core.types import PathLike

_OURS = re.compile(r"(step-\d+(?:\.pt)?)|\.(step-\d+(?:\.pt)?)\.[0-9a-f]{8}\.(part|old)")
"""Names of a checkpoint, of an incomplete one, and of a former one that a save has set aside."""


def save_latest(
    strategy: Any, directory: PathLike, state: dict[str, Any], step: int, keep: int, wait: bool
) -> Path | str:
    """Save a checkpoint of a step and remove older ones; documented in `Fabric.save_latest`."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if type(value) is not int or value < least:
            raise ConfigurationError(f"save_latest({name}={value!r}) must be an int of at least {least}.")
    directory = local_path(directory) or directory  # absolute: the loop may change its working directory
    name = f"step-{step:08d}"
    name += ".pt" if strategy.saves_one_file(join_path(directory, name)) else ""
    path = join_path(directory, name)
    then = partial(remove_old, strategy.checkpoint_io, directory, keep, name)
    if overridden(type(strategy), Checkpoints, "save_checkpoint"):  # with Lightning's signature, so it waits
        strategy.save_checkpoint(path, state)
        with together(strategy, f"retiring checkpoints of {directory}"):
            if strategy.is_global_zero:
                then()
    else:
        strategy.save_checkpoint(path, state, wait=wait, then=then, facts={"step": step})
    return local_path(path) or path


def load_latest(strategy: Any, directory: PathLike, state: dict[str, Any], strict: bool) -> int | None:
    """Load the newest valid checkpoint and return its step; documented in `Fabric.load_latest`."""
    strategy.finish_save()
    with together(strategy, f"looking for checkpoints in {directory}"):
        where = local_path(directory)
        if where is not None and where.is_file():
            raise NotADirectoryError(f"{where} is a file. Give load_latest the directory of save_latest.")
        names = checkpoints(directory) if strategy.is_global_zero else None
    names = strategy.broadcast(names)
    failure = ""
    for name in names:
        path = join_path(directory, name)
        with ExitStack() as stack:
            try:
                tree = stack.enter_context(strategy.opened(path, state=state))
            except Exception as error:  # on all ranks: this rank's error, or one that quotes another's
                failure = f"{type(error).__name__}: {error}"
                with together(strategy, f"loading {path}"):  # also where warnings are errors
                    rank_zero_warn(f"{path} cannot be loaded, and the one before it is tried. {failure}")
                continue
            with together(strategy, f"loading {path}"):
                strategy.restore(tree, state, strict)
            return step_of(name)
    if names:
        raise UsageError(
            f"None of the {len(names)} checkpoints in {directory} can be loaded. The oldest: {failure}"
        )
    return None


def checkpoints(directory: PathLike) -> list[str]:
    """Return the names of a directory's checkpoints, the newest first.

    Checkpoints that a killed save has set aside are among them.
    """
    found = [_OURS.fullmatch(name) for name in list_directory(directory)]
    names = {one[1] or one[2] for one in found if one and one[3] != "part"}
    return sorted(names, key=lambda name: (step_of(name), name), reverse=True)


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return int(name.removeprefix("step-").removesuffix(".pt"))


def remove_old(io: Any, directory: PathLike, keep: int, new: str) -> None:
    """Remove all checkpoints but `new` and the newest others, and temporary files of killed saves.

    `new` is kept whatever its step, since later ones may be damaged. Others of the same step are removed.
    """
    others = [name for name in checkpoints(directory) if step_of(name) != step_of(new)]
    kept, there = [new, *others[: keep - 1]], list_directory(directory)
    for name in there:
        one = _OURS.fullmatch(name)
        alone = one and one[3] == "old" and one[2] in kept and one[2] not in there
        if one and name not in kept and not alone:
            io.remove_checkpoint(join_path(directory, name))
