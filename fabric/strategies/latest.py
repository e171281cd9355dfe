"""The checkpoints of a directory, by their step: save one more and retire the oldest, load the newest."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies.sharded_save import choose_format
from fabric.strategies.state import restore, together
from fabric.utilities.cloud_io import is_local_path, join_path, list_directory
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from fabric.core.types import PathLike

_NAME = re.compile(r"step-(\d+)(\.pt)?")
_LEFT_BEHIND = re.compile(r"\.step-\d+(\.pt)?\.[0-9a-f]{8}\.(part|old)")


def save_latest(
    strategy: Any, directory: PathLike, state: dict[str, Any], step: int, keep: int, wait: bool
) -> Path | str:
    """See `Fabric.save_latest`."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if type(value) is not int or value < least:
            raise ConfigurationError(f"save_latest({name}={value!r}) must be an int of at least {least}.")
    name = f"step-{step:08d}"
    format, _ = choose_format(strategy, join_path(directory, name), None, None)
    name += ".pt" * (format == "full")
    path = join_path(directory, name)
    then = partial(retire, strategy.checkpoint_io, directory, keep, name)
    strategy.save_checkpoint(path, state, format=format, wait=wait, then=then, facts={"step": step})
    return Path(path) if is_local_path(path) else path


def load_latest(strategy: Any, directory: PathLike, state: dict[str, Any], strict: bool) -> int | None:
    """See `Fabric.load_latest`."""
    strategy.finish_save()
    names = strategy.broadcast(checkpoints(directory) if strategy.is_global_zero else None)
    said = ""
    for name in names:
        path = join_path(directory, name)
        with ExitStack() as stack:
            try:
                tree = stack.enter_context(strategy.opened(path))
            except Exception as error:  # on all ranks: its own, or one that quotes another rank's
                said = f"{type(error).__name__}: {error}"
                rank_zero_warn(f"{path} cannot be loaded, and the one before it is tried. {said}")
                continue
            with together(strategy, f"loading {path}"):
                restore(strategy, tree, state, strict)
            return step_of(name)
    if names:
        raise UsageError(
            f"None of the {len(names)} checkpoints in {directory} can be loaded. The oldest: {said}"
        )
    return None


def checkpoints(directory: PathLike) -> list[str]:
    """The names of a directory's checkpoints, the newest first."""
    names = filter(_NAME.fullmatch, list_directory(directory))
    return sorted(names, key=lambda name: (step_of(name), name), reverse=True)


def step_of(name: str) -> int:
    """The step in the name of a checkpoint."""
    return int(_NAME.fullmatch(name)[1])  # type: ignore[index]


def retire(io: Any, directory: PathLike, keep: int, new: str) -> None:
    """Remove all but `new` and the newest of the others, and what saves that were killed left behind.

    `new` stays, whatever its step: a later one may be there that is damaged.
    """
    others = [name for name in checkpoints(directory) if name != new]
    left = filter(_LEFT_BEHIND.fullmatch, list_directory(directory))
    for name in [*others[keep - 1 :], *left]:
        io.remove_checkpoint(join_path(directory, name))
