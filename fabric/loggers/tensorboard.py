"""`TensorBoardLogger`: metrics, settings and graphs. Called by `Fabric.log_dict`; loads tensorboard late."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.loggers.logger import DirectoryLogger, flat, number, rank_zero_experiment, scalar
from fabric.utilities.cloud_io import is_url, join_path
from fabric.utilities.extras import require
from fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor
    from torch.nn import Module
    from torch.utils.tensorboard import SummaryWriter

    from fabric.core.types import PathLike


class TensorBoardLogger(DirectoryLogger):
    """Writes event files to `root_dir/name/version_N[/sub_dir]`.

    Args:
        root_dir: Directory of all experiments.
        name: Directory of the experiment; None or "": none.
        version: An int N for `version_N`, or a directory name. None: one more than the highest there is.
        default_hp_metric: Record a metric `hp_metric` of -1 with settings that come without metrics:
            TensorBoard shows no settings otherwise.
        prefix: Put before every name, with a "-".
        sub_dir: Directory within the run; `~` and variables are expanded.
        kwargs: For `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(
        self,
        root_dir: PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: PathLike | None = None,
        **kwargs: Any,
    ) -> None:
        require("TensorBoardLogger", "tensorboard", "tensorboard")
        super().__init__(_expanded(root_dir), name, version, prefix)
        self._given_root = os.fspath(root_dir)
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self._experiment: SummaryWriter | None = None

    @property
    def root_dir(self) -> str:
        """Directory of all experiments, as it was given; `log_dir` has `~` and variables expanded."""
        return self._given_root

    @property
    def sub_dir(self) -> str | None:
        """Directory within the run, as it was given."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """Directory of the event files."""
        run = super().log_dir
        return join_path(run, _expanded(self._sub_dir)) if self._sub_dir else run

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The `SummaryWriter`; on ranks above zero, an object that does nothing."""
        if self._experiment is None:
            from torch.utils.tensorboard import SummaryWriter

            self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics; a dict as value makes one chart of several lines.

        Args:
            metrics: Numbers, tensors of one element, or dicts of these, by name.
            step: Position on the x axis; None counts the calls, from 0 in a process that has not loaded this
                logger's state.

        Raises:
            ConfigurationError: A value is of another kind.
        """
        self._add(metrics, self._at(step))

    def _add(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            full_name = self._prefixed(name)
            if isinstance(value, dict):
                lines = {key: scalar(f"{name}.{key}", line) for key, line in value.items()}
                self.experiment.add_scalars(full_name, lines, step)
                continue
            self.experiment.add_scalar(full_name, number(name, value, "TensorBoard"), step)

    @rank_zero_only
    def log_hyperparams(
        self,
        params: dict[str, Any] | Namespace,
        metrics: dict[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Record settings, with the metrics that they led to.

        Args:
            params: Nested dicts become names like `optimizer/lr`; other values than numbers and
                strings, their text.
            metrics: By name; a number means `hp_metric`.
            step: Where the metrics are on the x axis.
        """
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, dict):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        self._add(metrics, 0 if step is None else step)
        named = {self._prefixed(name): scalar(name, value) for name, value in metrics.items()}
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(flat(params), named):
            self.experiment.file_writer.add_summary(summary)

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of `model`, traced on `input_array` or on `model.example_input_array`."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            rank_zero_warn(
                "The graph was not logged: there is nothing to trace it on. Pass input_array=, or set "
                "model.example_input_array."
            )
            return
        self.experiment.add_graph(model, example)

    @rank_zero_only
    def save(self) -> None:
        """Write what is still in memory."""
        if self._experiment is not None:
            self._experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is still in memory and close the files; logging again opens new ones."""
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()


def _expanded(path: PathLike) -> str:
    text = os.path.expandvars(os.fspath(path))
    return text if is_url(text) else str(Path(text).expanduser())
