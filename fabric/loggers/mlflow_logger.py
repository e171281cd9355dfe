"""`MLFlowLogger`: runs of MLflow. Called by `Fabric.log_dict`; imports mlflow when the run begins."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.extras import require_packages
from fabric.loggers.logger import RunLogger, flatten_params
from fabric.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from argparse import Namespace

    from fabric.core.types import PathLike


class MLFlowLogger(RunLogger):
    """Logs metrics, settings and files to a run of MLflow, which begins at the first such call.

    Args:
        experiment_name: The experiment, a group of runs.
        run_name: Displayed name of the run; None: chosen by MLflow.
        tracking_uri: A server, or a database. None: MLFLOW_TRACKING_URI, else `save_dir/mlflow.db` (SQLite).
            A directory needs MLFLOW_ALLOW_FILE_STORE=true since MLflow 3.
        tags: Tags of the run, by name.
        save_dir: Directory of the database and the files, if there is no `tracking_uri`.
        prefix: Prefix of every metric's name, with a "-".
        run_id: The id of a run to continue; None: a new one.

    Raises:
        MissingExtraError: mlflow, or a package that it needs for SQLite, is not installed.
    """

    _service = "MLflow"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: PathLike = "./mlruns",
        prefix: str = "",
        run_id: str | None = None,
    ) -> None:
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        require_packages("MLFlowLogger", "mlflow", "mlflow", *([] if uri else ["sqlalchemy", "alembic"]))
        super().__init__(run_id, prefix)
        self._name = experiment_name
        self._run = {"run_name": run_name, "tags": tags}
        self._save_dir = None if uri else Path(save_dir).resolve()
        self._uri = uri or f"sqlite:///{self._save_dir}/mlflow.db"

    @property
    def name(self) -> str:
        """The experiment."""
        return self._name

    @property
    def root_dir(self) -> str | None:
        """The directory of the database and the files; None if a `tracking_uri` replaces it."""
        return None if self._save_dir is None else str(self._save_dir)

    def _open(self) -> Any:
        from mlflow import MlflowClient

        artifact_location = None
        if self._save_dir is not None:
            self._save_dir.mkdir(parents=True, exist_ok=True)
            artifact_location = (self._save_dir / "artifacts").as_uri()
        client = MlflowClient(tracking_uri=self._uri)
        if self._version is None:
            experiment_found = client.get_experiment_by_name(self._name)
            experiment = (
                experiment_found.experiment_id
                if experiment_found
                else client.create_experiment(self._name, artifact_location)
            )
            self._version = client.create_run(experiment, **self._run).info.run_id
        else:
            client.update_run(self._version, status="RUNNING")
        return client

    def _write(self, row: dict[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        client, now = self.experiment, int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in row.items()]
        client.log_batch(self._version, metrics=metrics)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record settings, under names like `optimizer/lr`; MLflow does not allow to change a value later.

        Args:
            params: A (nested) dictionary by name, or the Namespace of argparse.
            args: Ignored.
            kwargs: Ignored.
        """
        client = self.experiment
        for name, value in flatten_params(params).items():
            client.log_param(self._version, name, value)

    @rank_zero_only
    def log_artifact(self, path: PathLike, name: str | None = None) -> None:
        """Store the file at `path`, or the contents of a directory, with the run.

        Args:
            path: A path on this machine.
            name: Artifact directory of the run; None: its root.
        """
        client = self.experiment
        (client.log_artifacts if Path(path).is_dir() else client.log_artifact)(
            self._version, os.fspath(path), name
        )

    def _end_run(self, succeeded: bool) -> None:
        self._experiment.set_terminated(self._version, "FINISHED" if succeeded else "FAILED")
