"""`CSVLogger`: metrics as rows of `metrics.csv`, on local or remote storage. Called by `Fabric.log_dict`."""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.loggers.logger import DirectoryLogger, as_dict
from fabric.utilities.cloud_io import append_text, is_url, join_path, read_text, write_text
from fabric.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from argparse import Namespace

    from fabric.core.types import PathLike


class CSVLogger(DirectoryLogger):
    """Writes `root_dir/name/version_N/metrics.csv`: a row per `log_metrics`, a column per name, and `step`.

    New names may be logged at any time; earlier rows have empty fields for them. A run with an explicit
    `version` appends to an existing file. Rows in memory are written by `save` and `finalize`, and when the
    logger is collected or the interpreter exits.

    Args:
        root_dir: Directory of all experiments; any path that fsspec supports.
        name: Directory of the experiment; None or "": none.
        version: An int N for `version_N`, or a directory name. None: the highest existing N plus one.
        prefix: Prefix of every name, with a "-".
        flush_logs_every_n_steps: Number of rows in memory at which they are written.

    Raises:
        ConfigurationError: `flush_logs_every_n_steps` is below 1.
    """

    def __init__(
        self,
        root_dir: PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix)
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                f"flush_logs_every_n_steps={flush_logs_every_n_steps} is below 1. Write 1 to write every row."
            )
        self._flush_every = flush_logs_every_n_steps

    def _open(self) -> _CSVRows:
        rows = _CSVRows(join_path(self.log_dir, "metrics.csv"))
        # Without a call of `finalize`, the last rows are written when the logger is collected.
        weakref.finalize(self, rows.save_in_process, os.getpid())
        return rows

    def _write(self, row: dict[str, Any], step: int) -> None:
        self.experiment.log_metrics(row, step)
        if len(self.experiment.metrics) >= self._flush_every:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write `hparams.json` in `log_dir`; values that JSON does not support are written as text.

        Args:
            params: A (nested) dictionary by name, or the Namespace of argparse.
            args: Ignored.
            kwargs: Ignored.
        """
        text = json.dumps(as_dict(params), indent=2, default=str)
        write_text(join_path(self.log_dir, "hparams.json"), text + "\n")

    @rank_zero_only
    def save(self) -> None:
        """Write the rows in memory."""
        if self._experiment is not None:
            self._experiment.save()


class _CSVRows:
    """A CSV file and the rows to append; `metrics` has the rows that are not written yet."""

    def __init__(self, path: str) -> None:
        self.metrics_file_path = path
        self.metrics: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Add a row."""
        self.metrics.append({"step": step, **metrics})

    def save(self) -> None:
        """Append the rows; if they have new columns, rewrite the file with its old rows."""
        if not self.metrics:
            return
        path = self.metrics_file_path
        columns = _columns(path)
        all_columns = list(dict.fromkeys([*columns, *(name for row in self.metrics for name in row)]))
        if columns == all_columns:
            append_text(path, _table(all_columns, self.metrics))
        else:
            old_rows = list(csv.DictReader(io.StringIO(read_text(path) or "", newline="")))
            write_text(path, _table(all_columns, [*old_rows, *self.metrics], header=True))
        self.metrics = []

    def save_in_process(self, pid: int) -> None:
        """Save, unless this is a forked child of the process that logged."""
        if os.getpid() == pid:
            self.save()


def _table(columns: list[str], rows: list[dict[str, Any]], header: bool = False) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(path: str) -> list[str]:
    """Return the names of a table's header, which has several lines if a name has a line break; none
    without a file.
    """
    if is_url(path):
        return next(csv.reader(io.StringIO(read_text(path) or "", newline="")), [])
    try:
        with Path(path).open(newline="") as file:
            return next(csv.reader(file), [])
    except FileNotFoundError:
        return []
