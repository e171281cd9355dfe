"""The command line of `fabric report`. Imports no torch."""

from __future__ import annotations

from typing import Any


def add_command(commands: Any) -> None:
    """Add the command's parser to those of `fabric`."""
    report = commands.add_parser(
        "report",
        help="show where the time of a run goes, its failures and its logged values",
        description="Write one HTML file from what Fabric(report=DIR) has recorded, also during the run.",
        epilog="fabric report runs/report\nfabric report runs/report --text\n"
        "fabric report runs/report --follow",
        allow_abbrev=False,
    )
    report.add_argument("directory", metavar="DIR", help="the directory of the run")
    kinds = report.add_mutually_exclusive_group()
    kinds.add_argument("--out", metavar="FILE", help="the page; default: DIR/report.html")
    kinds.add_argument("--text", action="store_true", help="print it as text in place of the page")
    kinds.add_argument("--json", action="store_true", help="print the aggregated numbers as a JSON object")
    kinds.add_argument("--follow", action="store_true", help="print a line a minute until the run has ended")
    report.add_argument("--interval", metavar="S", default="60", help="seconds between these; default: 60")
