"""`Logger`: the base of loggers, called by `Fabric.log_dict` on every rank. Only rank zero writes."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.utilities.cloud_io import is_url, join_path, list_directory
from fabric.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from fabric.core.types import PathLike


class Logger(ABC):
    """Base of loggers, which write metrics. Subclasses decorate what writes with `rank_zero_only`."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""

    @property
    def root_dir(self) -> str | None:
        """Directory of all experiments; None where nothing is saved locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this run; None where nothing is saved locally."""
        return None

    @property
    def group_separator(self) -> str:
        """The separator between the parts of a metric's name, as in `train/loss`."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers by name at a step.

        Args:
            metrics: Numbers, by name.
            step: Position on the x axis; None: the logger counts.
        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record the settings of the run.

        Args:
            params: By name, a dictionary (nested) or the Namespace of argparse.
            args: As a logger takes them.
            kwargs: Likewise.
        """

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of a `model`, where the logger can, from a batch `input_array` of shape (batch,
        ...).
        """
        return

    def log_artifact(self, path: PathLike, name: str | None = None) -> None:
        """Keep a file or directory (a checkpoint, a plot) with the run, where the logger can.

        Args:
            path: On this machine; read at once, or soon after.
            name: Of what is kept; None: the last part of `path`.
        """
        return

    def save(self) -> None:
        """Make everything that was logged so far durable."""
        return

    def finalize(self, status: str) -> None:
        """End the run. `status` says how: "success", "failed"."""
        self.save()


class _DummyExperiment:
    """Stands for the experiment on ranks above zero: every method may be called and does nothing."""

    def nop(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle ask for hooks that must not seem to exist
        return self.nop

    def __getitem__(self, index: int) -> _DummyExperiment:
        return self

    def __setitem__(self, index: int, value: Any) -> None:
        return


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The getter of an `experiment` property, such that ranks above zero get an object that does nothing."""

    @functools.wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else _DummyExperiment()

    return experiment


class _Writing(Logger):
    """A logger of the run `version`, with a `prefix`, and a writer in `_experiment`, which is opened when
    somebody first asks for it. Subclasses say how that is done, and what is written.
    """

    LOGGER_JOIN_CHAR = "-"
    _charts = ""
    """Who takes numbers only; "": any value goes."""
    _count = 0

    def __init__(self, version: Any, prefix: str) -> None:
        self._version = version
        self._prefix = prefix
        self._experiment: Any = None

    @abstractmethod
    def _begin(self) -> Any:
        """The writer: of a new run, or of one that goes on."""

    @abstractmethod
    def _write(self, row: dict[str, Any], step: int) -> None:
        """Record numbers by their whole names."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer, the package's own object; on ranks above zero, one that does nothing."""
        if self._experiment is None:
            self._experiment = self._begin()
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: Numbers, or tensors of one element, by name. TensorBoard: also dicts of these, which make
                one chart of several lines. W&B: also its own objects (images, tables).
            step: Position on the x axis; None counts the calls, from 0 in a process that has not loaded this
                logger's state.

        Raises:
            ConfigurationError: A tensor has more than one element, or the value is of another kind.
        """
        row = {self._prefixed(name): self._plain(name, value) for name, value in metrics.items()}
        self._write(row, self._count if step is None else step)
        self._count += 1

    def _plain(self, name: str, value: Any) -> Any:
        return scalar(name, value, self._charts)

    def __getstate__(self) -> dict[str, Any]:
        # Writers own rows, threads and open files: a copy opens its own, of the same run.
        return {**self.__dict__, "_version": self.version, "_experiment": None}

    def state_dict(self) -> dict[str, Any]:
        """The run and how far it has counted, for `fabric.save(path, {"logger": logger, ...})`."""
        return {"version": self._version, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on, as `state` of `state_dict` says; and with its run, unless one was given or has begun."""
        self._count = state["count"]
        if self._version is None:
            self._version = state["version"]

    def _prefixed(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name


class RunLogger(_Writing):
    """A logger whose runs a service keeps by their ids; subclasses say how one begins and ends.

    Args:
        version: The id of a run, which goes on; None: a new one.
        prefix: Put before every metric's name.
    """

    @abstractmethod
    def _end(self, succeeded: bool) -> None:
        """End the run that has begun."""

    @property
    def version(self) -> str | None:
        """The id of the run; None before it begins, and on ranks above zero."""
        version: str | None = self._version
        return version

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run, as failed unless `status` is "success"; logging again goes on with it."""
        if self._experiment is not None:
            self._end(status == "success")
            self._experiment = None


class DirectoryLogger(_Writing):
    """A logger whose files lie in `root_dir/name/version_N`.

    Args:
        root_dir: Directory of all experiments.
        name: Directory of the experiment; None or "": none.
        version: An int N for `version_N`, or a directory name. None: one more than the highest there is.
        prefix: Put before every metric's name.
    """

    _sub_dir: str | None = None

    def __init__(self, root_dir: PathLike, name: str | None, version: int | str | None, prefix: str) -> None:
        super().__init__(version, prefix)
        self._root_dir = os.fspath(root_dir)
        self._name = name or ""

    @property
    def name(self) -> str:
        """Directory of the experiment under `root_dir`."""
        return self._name

    @property
    def version(self) -> int | str:
        """Which run this is; chosen when first asked for."""
        if self._version is None:
            self._version = _next_version(self._directory())
        version: int | str = self._version
        return version

    @property
    def root_dir(self) -> str:
        """Directory of all experiments, as it was given; `log_dir` has `~` and variables expanded."""
        return self._root_dir

    @property
    def log_dir(self) -> str:
        """Directory of this run."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return self._directory(version, self._sub_dir)

    def _directory(self, *below: str | None) -> str:
        parts = [os.path.expandvars(part) for part in (self._root_dir, self._name, *below) if part]
        return join_path(*[part if is_url(part) else str(Path(part).expanduser()) for part in parts])


def scalar(name: str, value: Any, charts: str = "") -> Any:
    """A metric's value as a plain number; what has no `item` method stays as it is, unless a service `charts`
    numbers only.

    Raises:
        ConfigurationError: A tensor or array has more or less than one element; or the value is no number.
    """
    try:
        found = value.item() if callable(getattr(value, "item", None)) else value
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The metric {name!r} has shape {tuple(value.shape)} and is no scalar. Log value.mean(), or one "
            "name per element."
        ) from error
    if charts and not hasattr(found, "__float__"):
        raise ConfigurationError(
            f"The metric {name!r} is a {type(value).__name__}, which {charts} cannot chart. "
            f"Log a number, or call logger.experiment's own methods."
        )
    return found


def as_dict(params: dict[str, Any] | Namespace) -> dict[str, Any]:
    """Settings as a dictionary of their own."""
    return dict(vars(params) if isinstance(params, Namespace) else params)


def flat(params: dict[str, Any] | Namespace, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings by names like `optimizer/lr`; other values than numbers and strings as their text."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in as_dict(params).items():
        if isinstance(value, dict | Namespace) and value:
            found.update(flat(value, f"{prefix}{key}/"))
            continue
        value = scalar(str(key), value) if getattr(value, "ndim", None) == 0 else value
        found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _next_version(directory: str) -> int:
    """One more than the highest `version_N` in `directory`."""
    runs = [entry for entry in list_directory(directory) if entry.startswith("version_")]
    numbers = [run.removeprefix("version_") for run in runs]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
