"""The command line of `fabric check`. Imports no torch."""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "devices": ("2", "how many ranks to compare; default: 2"),
    "steps": ("3", "how many steps of optimizers; default: 3"),
}
"""Options of `fabric check`: default and help."""


def add_command(commands: Any) -> None:
    """Add the command's parser to those of `fabric`."""
    check = commands.add_parser(
        "check",
        help="compare a script's first steps on one rank and on several",
        description="Run the first steps of a script on several ranks, and on one with the batches of all; "
        "compare gradients. On the CPU, without dropout.",
        usage="fabric check [options] (script.py | -m module) [arguments of the script]",
        epilog="fabric check train.py\nfabric check --devices 4 --steps 10 train.py --lr 0.1",
        allow_abbrev=False,
    )
    for name, (default, text) in OPTIONS.items():
        check.add_argument(f"--{name}", metavar="N", default=default, help=text)
