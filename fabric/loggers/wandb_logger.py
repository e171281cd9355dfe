"""`WandbLogger`: runs of Weights & Biases. Called by `Fabric.log_dict`; loads wandb when the run begins."""

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
    """Metrics, settings and files as a run of Weights & Biases, which begins with what is logged first.

    Args:
        name: Of the run, as it is shown; None: W&B makes one up.
        save_dir: Where W&B makes its directory `wandb`.
        version: The id of a run, which goes on; None: a new run.
        offline: Keep the run on disk; `wandb sync` sends it. None: as WANDB_MODE says, else online.
        project: What runs are grouped by; None: as WANDB_PROJECT says.
        prefix: Put before every metric's name, with a "-".
        kwargs: For `wandb.init`.

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

    def _begin(self) -> Any:
        import wandb

        resume = {} if self._version is None else {"id": self._version, "resume": "allow"}
        run = wandb.init(dir=self._save_dir, **{**resume, **self._settings})
        self._version = run.id
        # W&B drops what comes with a lower step than before, but not what lies on an axis of the user's.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _write(self, row: dict[str, Any], step: int) -> None:
        self.experiment.log({**row, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record settings in the run's config; later values replace earlier ones."""
        self.experiment.config.update(as_dict(params), allow_val_change=True)

    @rank_zero_only
    def log_artifact(self, path: PathLike, name: str | None = None) -> None:
        """Keep a file or directory as an artifact of type "file"; another of its name is a version of it."""
        import wandb

        wanted = name or Path(path).resolve().name
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", wanted), type="file")  # W&B takes no others
        (artifact.add_dir if Path(path).is_dir() else artifact.add_file)(os.fspath(path))
        self.experiment.log_artifact(artifact)

    def _end(self, succeeded: bool) -> None:
        self._experiment.finish(exit_code=0 if succeeded else 1)
