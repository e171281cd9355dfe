"""The command line of `fabric doctor`. Imports no torch."""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "accelerator": ("", '"cpu": without devices; default: auto'),
    "baseline": ("", "what --json printed on a healthy day"),
    "devices": ("auto", "how many ranks to start, outside of launchers; default: auto"),
    "dir": (".", "where checkpoints will be; default: the current directory"),
    "timeout": ("30", "seconds for all ranks to arrive; default: 30"),
}
"""Options of `fabric doctor`: default and help."""


def add_command(commands: Any) -> None:
    """Add the command's parser to those of `fabric`."""
    doctor = commands.add_parser(
        "doctor",
        help="check machines, network and devices before a job",
        description="Print what is wrong with machines, network and devices, and the fix. Inside a launcher "
        "(srun, torchrun --no-python, fabric run -m fabric doctor) each rank runs it.",
        epilog="fabric doctor\nsrun fabric doctor --dir /shared/run\nfabric doctor --json > healthy.json",
        allow_abbrev=False,
    )
    for name, (default, text) in OPTIONS.items():
        doctor.add_argument(f"--{name}", default=default, metavar=name.upper(), help=text)
    doctor.add_argument("--json", action="store_true", help="print a JSON object in place of the table")
