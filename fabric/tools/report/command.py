"""`fabric report DIR`: the report of a run as a page, as text or as JSON. Called by `fabric/cli.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.tools.report.aggregate import RunAggregate
from fabric.tools.report.summary import summarize
from fabric.tools.report.text import as_text, follow, headline

if TYPE_CHECKING:
    import argparse


def run_report(options: argparse.Namespace) -> int:
    """Write or print the report of a run and return the exit code: with --follow 1 where it failed.

    Raises:
        ConfigurationError: An option is wrong, or the directory has no files of a run.
        UsageError: A file is damaged, of another version, or of another run.
        MissingExtraError: plotly is not installed, which only the page needs.
    """
    interval = _seconds(options.interval)
    if options.out is not None and (options.text or options.json or options.follow):
        raise ConfigurationError(
            f"--out {options.out} is for the page, which --text, --json and --follow do not write. Write "
            f"fabric report {options.directory} --out {options.out}, or > {options.out} after --text."
        )
    run = RunAggregate(options.directory)
    run.update()
    if options.follow:
        return _follow(run, interval)
    summary = summarize(run)
    if options.json:
        print(json.dumps(_finite(summary), default=str, allow_nan=False))
    elif options.text:
        print(as_text(summary))
    else:
        _write(run, summary, Path(options.out or run.directory / "report.html"))
    return 0


def _write(run: RunAggregate, summary: dict[str, Any], path: Path) -> None:
    from fabric.tools.report.page import as_page

    page = as_page(run, summary)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. The page is one file in a directory that exists. "
            f"Write a place of yours: fabric report {run.directory} --out report.html."
        ) from error
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; {headline(summary)}")


def _follow(run: RunAggregate, interval: float) -> int:
    try:
        for line in follow(run, interval):
            print(line, flush=True)
    except KeyboardInterrupt:
        return 130
    return int(summarize(run)["state"] == "failed")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"--interval {text} is no time. It is the seconds between two lines of --follow. "
            "Write --interval 60."
        )
    return seconds


def _finite(value: Any) -> Any:
    """Return values of JSON, which has no NaN: None in its place."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
