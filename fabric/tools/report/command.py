"""`fabric report DIR`: the report of a run as a page, as text or as JSON. Called by `fabric/cli.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError
from fabric.tools.report.aggregate import RunAggregate
from fabric.tools.report.summary import summarize
from fabric.tools.report.text import as_text, follow_run, headline

if TYPE_CHECKING:
    import argparse


def run_report(options: argparse.Namespace) -> int:
    """Write or print the report of a run and return the exit code: with --follow 1 if it failed.

    Raises:
        ConfigurationError: An option is wrong, or the directory has no files of a run.
        UsageError: A file is damaged, of another version, or of another run.
        MissingExtraError: plotly is not installed, which only the page needs.
    """
    if not re.fullmatch(r"\d*\.?\d+", options.interval) or not float(options.interval):
        raise ConfigurationError(
            f"--interval {options.interval} is no time. It is the seconds between two lines of --follow. "
            "Write --interval 60."
        )
    run = RunAggregate(options.directory)
    run.update()
    if options.follow:
        try:
            for line in follow_run(run, float(options.interval)):
                print(line, flush=True)
        except KeyboardInterrupt:
            return 130
        return int(summarize(run)["state"] == "failed")
    if options.json:
        text = json.dumps(summarize(run), default=str)
        print(json.dumps(json.loads(text, parse_constant=lambda _: None)))  # JSON has no NaN
    elif options.text:
        print(as_text(summarize(run)))
    else:
        _write(run, Path(options.out or run.directory / "report.html"))
    return 0


def _write(run: RunAggregate, path: Path) -> None:
    from fabric.tools.report.page import as_page

    page = as_page(run)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. The page is one file in a directory that exists. "
            f"Write a place of yours: fabric report {run.directory} --out report.html."
        ) from error
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; {headline(summarize(run))}")
