"""`TensorBoardLogger`: logs metrics, settings and graphs. Called by `Fabric.log_dict`. Lazy imports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fabric.core.extras import require_packages
from fabric.core.lazy import lazy_names
from fabric.loggers.logger import DirectoryLogger, flatten_params, to_scalar
from fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor
    from torch.nn import Module
    from torch.utils.tensorboard import SummaryWriter

    from fabric.core.types import PathLike

__getattr__ = lazy_names(__name__)


class TensorBoardLogger(DirectoryLogger):
    """Writes event files to `root_dir/name/version_N[/sub_dir]`.

    Args:
        root_dir: Directory of all experiments.
        name: Directory of the experiment; None or "": none.
        version: An int N for `version_N`, or a directory name. None: the highest existing N plus one.
        default_hp_metric: Record a metric `hp_metric` of -1 with settings that have no metrics, because
            TensorBoard shows no settings otherwise.
        prefix: Prefix of every name, with a "-".
        sub_dir: Directory within the run; `~` and variables are expanded.
        kwargs: Keyword arguments of `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    _service = "TensorBoard"

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
        require_packages("TensorBoardLogger", "tensorboard", "tensorboard")
        super().__init__(root_dir, name, version, prefix)
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs

    @property
    def sub_dir(self) -> str | None:
        """Directory within the run, unchanged."""
        return self._sub_dir

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=self.log_dir, **self._kwargs)

    def _to_scalar(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: to_scalar(f"{name}.{key}", line, self._service) for key, line in value.items()}
        return super()._to_scalar(name, value)

    def _write(self, row: dict[str, Any], step: int) -> None:
        for name, value in row.items():
            add = self.experiment.add_scalars if isinstance(value, dict) else self.experiment.add_scalar
            add(name, value, step)

    @rank_zero_only
    def log_hyperparams(
        self,
        params: dict[str, Any] | Namespace,
        metrics: dict[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Record settings, and the metrics reached with them.

        Args:
            params: Nested dicts become names like `optimizer/lr`; values other than numbers and
                strings become text.
            metrics: Numbers by name; a single number means `hp_metric`.
            step: Position of the metrics on the x axis.
        """
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, dict):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        named = {self._prefixed(name): self._to_scalar(name, value) for name, value in metrics.items()}
        self._write(named, 0 if step is None else step)
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(flatten_params(params), named):
            self.experiment.file_writer.add_summary(summary)

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of `model`, traced on `input_array` or on `model.example_input_array`."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            rank_zero_warn(
                "The graph was not logged: there is no input to trace it on. Pass input_array=, or set "
                "model.example_input_array."
            )
            return
        self.experiment.add_graph(model, example)

    @rank_zero_only
    def save(self) -> None:
        """Write the events in memory."""
        if self._experiment is not None:
            self._experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the events in memory and close the files; `status` is ignored. Logging again opens others."""
        if self._experiment is not None:
            self._experiment.close()
