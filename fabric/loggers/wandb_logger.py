"""`WandbLogger`: runs of Weights & Biases. Called by `Fabric.log_dict`; imports wandb when the run begins."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.extras import require_packages
from fabric.loggers.logger import RunLogger, as_dict
from fabric.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from argparse import Namespace

    from fabric.core.types import PathLike


class WandbLogger(RunLogger):
    """Logs metrics, settings and files to a run of Weights & Biases, which begins at the first such call.

    Args:
        name: Displayed name of the run; None: chosen by W&B.
        save_dir: Directory in which W&B creates its directory `wandb`.
        version: The id of a run to continue; None: a new run.
        offline: Store the run on disk; `wandb sync` uploads it. None: WANDB_MODE, else online.
        project: The project, a group of runs; None: WANDB_PROJECT.
        prefix: Prefix of every metric's name, with a "-".
        kwargs: Keyword arguments of `wandb.init`.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: PathLike = ".",
        version: str | None = None,
        offline: bool | None = None,
        project: str | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        require_packages("WandbLogger", "wandb", "wandb")
        super().__init__(version, prefix)
        mode = {} if offline is None else {"mode": "offline" if offline else "online"}
        self._save_dir = os.fspath(save_dir)
        # A process may have several loggers: none of them ends the run of another.
        self._settings = {"reinit": "create_new", "name": name, "project": project, **mode, **kwargs}

    @property
    def name(self) -> str | None:
        """The project."""
        project: str | None = self._settings["project"]
        return project

    @property
    def root_dir(self) -> str:
        """The directory that contains the directory `wandb`."""
        return self._save_dir

    def _open(self) -> Any:
        import wandb

        resume = {} if self._version is None else {"id": self._version, "resume": "allow"}
        run = wandb.init(dir=self._save_dir, **{**resume, **self._settings})
        self._version = run.id
        # W&B drops values with a lower step than before, unless the x axis is a user's metric.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _write(self, row: dict[str, Any], step: int) -> None:
        self.experiment.log({**row, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record settings in the run's config; later values replace earlier ones.

        Args:
            params: A (nested) dictionary by name, or the Namespace of argparse.
            args: Ignored.
            kwargs: Ignored.
        """
        self.experiment.config.update(as_dict(params), allow_val_change=True)

    @rank_zero_only
    def log_artifact(self, path: PathLike, name: str | None = None) -> None:
        """Store a file or directory as an artifact of type "file"; the same name again adds a version.

        Args:
            path: A path on this machine.
            name: Name of the artifact, with other characters than W&B's replaced by "-". None: the last part
                of `path`.
        """
        import wandb

        artifact_name = name or Path(path).resolve().name
        artifact = wandb.Artifact(
            re.sub(r"[^\w.-]", "-", artifact_name), type="file"
        )  # W&B allows no other characters
        (artifact.add_dir if Path(path).is_dir() else artifact.add_file)(os.fspath(path))
        self.experiment.log_artifact(artifact)

    def _end_run(self, succeeded: bool) -> None:
        self._experiment.finish(exit_code=0 if succeeded else 1)
