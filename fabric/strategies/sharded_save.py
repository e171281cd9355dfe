"""Saving sharded checkpoints: what all ranks do together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.registry import did_you_mean
from fabric.plugins.collectives.objects import gather_objects
from fabric.plugins.io.directory import begin, put_in_place, remove
from fabric.plugins.io.torch_io import TorchCheckpointIO
from fabric.strategies import state as states
from fabric.utilities.cloud_io import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fabric.core.types import Filter, PathLike

FORMATS = ("full", "sharded")


def choose_format(
    strategy: Any, path: PathLike, format: str | None, storage_options: Any
) -> tuple[str, Path | None]:
    """What to write, and where (on a disk): what was asked for, else the strategy's way, where storage can.

    Raises:
        ConfigurationError: There is no such format, or it cannot be written there.
    """
    if format not in (None, *FORMATS):
        raise ConfigurationError(
            f"fabric.save(format={format!r}): write 'full' or 'sharded'.{did_you_mean(str(format), FORMATS)}"
        )
    storage, where, why = strategy.checkpoint_io, local_path(path), ""
    if type(storage) is not TorchCheckpointIO:
        why = f"{type(storage).__name__} stores one dictionary"
    elif where is None:
        why = f"{path} is no path of a file system"
    elif storage_options is not None:
        why = f"storage_options={storage_options!r} mean nothing to it"
    if format == "sharded" and why:
        raise ConfigurationError(
            f"fabric.save(format='sharded') writes a directory that all ranks see, but {why}. Write "
            "format='full'."
        )
    return format or ("full" if why else strategy.state_dict_type), where


def save_sharded(
    strategy: Any,
    path: Any,
    state: dict[str, Any],
    filter: Filter | None,
    facts: Mapping[str, Any],
    then: Callable[[], None] | None,
) -> None:
    """Write each rank's part of `state` into a directory. All ranks must call this."""
    doing, zero, channel = f"saving {path}", strategy.is_global_zero, strategy.channel()
    part: Path | None = None
    with states.together(strategy, doing), strategy.layout.gathering(keep=zero, parts=True):
        tree = states.gather(strategy, state, filter)
    try:
        with states.together(strategy, doing):
            from fabric.plugins.io.sharded import Part

            own = Part(tree)
            part = begin(path) if zero else None
        directory, names = strategy.broadcast((part, own.open))
        with states.together(strategy, doing):
            plan = own.plan([*own.values] if zero else names)
            _check_shared(directory)
        plans = gather_objects(plan, channel, "save")
        with states.together(strategy, doing):
            written = own.write(directory, plans, strategy.global_rank)
        told = gather_objects(written, channel, "save")
        with states.together(strategy, doing):
            if zero:
                own.finish(directory, told, facts)
                put_in_place(directory, path)
                if then is not None:
                    then()
    except BaseException:
        if part is not None:
            remove(part)
        raise


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(
            f"This rank does not see {directory}, which rank zero has made. Ranks write a sharded checkpoint "
            "to a file system that all of them share; without one, write fabric.save(..., format='full')."
        )
