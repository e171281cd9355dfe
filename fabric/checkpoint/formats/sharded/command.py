"""`fabric consolidate`: converts a sharded checkpoint to one file. Loads torch only when it runs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.core.messages import print_line

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def add_command(commands: Any) -> None:
    """Add the command's parser to those of `fabric`."""
    merge = commands.add_parser(
        "consolidate",
        help="convert a sharded checkpoint to one file",
        description="Convert a sharded checkpoint to one file, which torch.load reads. With --output "
        "F.safetensors the file has its model only. Needs the memory of one tensor, and no ranks.",
        epilog="fabric consolidate run/step-00000100\n"
        "fabric consolidate run/step-00000100 --output model.safetensors",
    )
    merge.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory that fabric.save has written")
    merge.add_argument("--output", metavar="F", help="the file; default: CHECKPOINT.full.pt")
    merge.add_argument("--force", action="store_true", help="replace the file if it exists, without asking")


def run_consolidate(options: argparse.Namespace) -> int:
    """Write the file and return the exit code: 1 if it exists and stays, or cannot be written.

    Raises:
        ConfigurationError: A path is a URL, or the file exists and there is no terminal for a question.
    """
    output = options.output or f"{options.checkpoint.rstrip(os.sep)}.full.pt"
    checkpoint, file = _as_local_path(options.checkpoint), _as_local_path(output)
    if file.is_file() and not options.force:
        if not sys.stdin.isatty():
            raise ConfigurationError(f"{output} exists. Write --force to replace it, or another --output.")
        if input(f"{output} exists. Replace it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    from fabric.checkpoint.formats.sharded.dcp import consolidate

    try:
        omitted = consolidate(checkpoint, file, _show_progress)
    except OSError as error:
        print(f"fabric consolidate: {error}", file=sys.stderr)
        return 1
    note = f", with the model only: without {', '.join(map(repr, omitted))}" if omitted else ""
    print_line(f"{options.checkpoint} is now also one file: {output}{note}")
    return 0


def _show_progress(done: int, total: int) -> None:
    """Draw a bar on a terminal."""
    if sys.stderr.isatty():
        bar = "#" * (40 * done // total)
        print(f"\r[{bar:40}] {done} of {total} tensors", end="\n" * (done == total), file=sys.stderr)


def _as_local_path(text: str) -> Path:
    from fabric.utilities.cloud_io import local_path

    path = local_path(text)
    if path is None:
        raise ConfigurationError(
            f"{text} is a URL, but consolidate reads and writes local files. Copy them, and write a path."
        )
    return path
