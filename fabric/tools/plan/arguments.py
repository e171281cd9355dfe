"""The command line of `fabric plan`. Imports no torch."""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "devices": ("1", "ranks of each machine; default: 1"),
    "num_nodes": ("1", "machines; default: 1"),
    "memory": (None, "of each device, with a unit: 80GB"),
    "strategy": (None, '"ddp", "zero1,zero3", ...; default: all that the script may use'),
    "precision": (None, '"32-true", "bf16-mixed", ...; default: the script\'s own and bf16-mixed'),
    "batch_size": (None, "samples of a rank; default: the script's own"),
    "bandwidth": (None, "of each rank, 400Gb/s or 50GB/s: adds lower bounds of a step's time"),
    "flops": (None, "of each rank, operations per second, 400T: adds the same"),
}
"""Options of `fabric plan`: default and help."""


def add_command(commands: Any) -> None:
    """Add the command's parser to those of `fabric`."""
    plan = commands.add_parser(
        "plan",
        help="predict memory, traffic and the largest batch size by strategy",
        description="Run two steps of a script in one process, as one of N ranks, and print what it needs.",
        usage="fabric plan [options] (script.py | -m module) [arguments of the script]",
        epilog="fabric plan --devices 8 --memory 80GB train.py --lr 0.1\n"
        "fabric plan --devices 8 --num-nodes 4 --strategy zero2,hsdp train.py",
        allow_abbrev=False,
    )
    for name, (default, text) in OPTIONS.items():
        plan.add_argument(f"--{name.replace('_', '-')}", default=default, metavar="VALUE", help=text)
    plan.add_argument("--fake", action="store_true", help="tensors without values: models need no memory")
    plan.add_argument("--json", action="store_true", help="print a JSON object in place of the table")
