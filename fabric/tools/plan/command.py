"""`fabric plan train.py`: the plan of a user's script, printed. Called by `fabric/cli.py`."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError
from fabric.tools.plan.plan import PlanRequest, listed, make_plan
from fabric.tools.plan.units import read_bandwidth, read_bytes, read_flops

if TYPE_CHECKING:
    import argparse


def run_plan(options: argparse.Namespace, command: list[str]) -> int:
    """Print the plan of a script and return the exit code: 1 if no row fits into `--memory`.

    Args:
        options: Options of the command line.
        command: The script (or "-m" and a module) and its arguments.
    """
    request = PlanRequest(
        _number(options.devices, "--devices"),
        _number(options.num_nodes, "--num-nodes"),
        None if options.memory is None else read_bytes(options.memory),
        listed(options.strategy),
        listed(options.precision),
        None if options.batch_size is None else _number(options.batch_size, "--batch-size"),
        options.fake,
        None if options.bandwidth is None else read_bandwidth(options.bandwidth),
        None if options.flops is None else read_flops(options.flops),
    )

    def loop() -> None:
        sys.argv = command
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")

    plan = make_plan(loop, request)
    print(json.dumps(plan.as_dict(), indent=2) if options.json else plan)
    return int(request.memory is not None and plan.best is None)


def _number(text: str, option: str) -> int:
    if not str(text).isdigit() or int(text) < 1:
        raise ConfigurationError(f"{option} {text} must be a whole number, at least 1. Write {option} 8.")
    return int(text)
