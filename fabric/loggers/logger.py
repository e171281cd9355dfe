"""`Logger`: the base class of loggers, called by `Fabric.log_dict` on every rank. Only rank zero writes."""

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
    """Base class of loggers. Subclasses decorate methods that write with `rank_zero_only`."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Number or name of this run of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """Directory of all experiments; None: nothing is saved locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this run; None: nothing is saved locally."""
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
            step: Position on the x axis; None: the logger's counter.
        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record the settings of the run.

        Args:
            params: A (nested) dictionary by name, or the Namespace of argparse.
            args: Further arguments of a subclass.
            kwargs: Likewise.
        """

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of `model`, traced on a batch `input_array` (batch, ...), if the logger can."""
        return

    def log_artifact(self, path: PathLike, name: str | None = None) -> None:
        """Store a file or directory (a checkpoint, a plot) with the run, if the logger can.

        Args:
            path: Path of the file on this machine; it is read at once, or soon after.
            name: Name of the artifact; None: the last part of `path`.
        """
        return

    def save(self) -> None:
        """Make everything that was logged so far durable."""
        return

    def finalize(self, status: str) -> None:
        """End the run with `status`: "success", "failed"."""
        self.save()


class _DummyExperiment:
    """The experiment on ranks above zero: every method may be called and does nothing."""

    def nop(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # hooks of copy and pickle must not exist
        return self.nop

    def __getitem__(self, index: int) -> _DummyExperiment:
        return self

    def __setitem__(self, index: int, value: Any) -> None:
        return


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the getter of `experiment`, so that it returns a dummy object on ranks above zero."""

    @functools.wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else _DummyExperiment()

    return experiment


class _ExperimentLogger(Logger):
    """A logger of run `version` whose writer, `experiment`, is opened on first use.

    `prefix` is put before every metric's name. Subclasses implement `_open` and `_write`.
    """

    LOGGER_JOIN_CHAR = "-"
    _service = ""
    """Name of a service that accepts numbers only; "": any value is accepted."""
    _count = 0

    def __init__(self, version: Any, prefix: str) -> None:
        self._version = version
        self._prefix = prefix
        self._experiment: Any = None

    @abstractmethod
    def _open(self) -> Any:
        """Open the writer of a new or a continued run."""

    @abstractmethod
    def _write(self, row: dict[str, Any], step: int) -> None:
        """Record numbers by their prefixed names."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer, an object of the logging package; on ranks above zero, a dummy object."""
        if self._experiment is None:
            self._experiment = self._open()
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: Numbers, or tensors of one element, by name. TensorBoard: also dicts of these, drawn as
                lines of one chart. W&B: also its objects (images, tables).
            step: Position on the x axis; None: the number of earlier calls, with those of a loaded state.

        Raises:
            ConfigurationError: A tensor has more than one element, or a value is of another kind.
        """
        row = {self._prefixed(name): self._to_scalar(name, value) for name, value in metrics.items()}
        self._write(row, self._count if step is None else step)
        self._count += 1

    def _to_scalar(self, name: str, value: Any) -> Any:
        return to_scalar(name, value, self._service)

    def __getstate__(self) -> dict[str, Any]:
        # Writers have rows, threads and open files: a copy opens another writer of the same run.
        return {**self.__dict__, "_version": self.version, "_experiment": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the run and its step counter, for `fabric.save(path, {"logger": logger, ...})`."""
        return {"version": self._version, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the step counter of `state`, and the run unless a version was passed or a run has begun."""
        self._count = state["count"]
        if self._version is None:
            self._version = state["version"]

    def _prefixed(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name


class RunLogger(_ExperimentLogger):
    """A logger whose runs are stored by a service under ids; subclasses open and end them.

    Args:
        version: The id of a run to continue; None: a new one.
        prefix: Prefix of every metric's name.
    """

    @abstractmethod
    def _end_run(self, succeeded: bool) -> None:
        """End the open run."""

    @property
    def version(self) -> str | None:
        """The id of the run; None before it begins, and on ranks above zero."""
        version: str | None = self._version
        return version

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run, as failed unless `status` is "success"; logging again continues it."""
        if self._experiment is not None:
            self._end_run(status == "success")
            self._experiment = None


class DirectoryLogger(_ExperimentLogger):
    """A logger whose files lie in `root_dir/name/version_N`.

    Args:
        root_dir: Directory of all experiments.
        name: Directory of the experiment; None or "": none.
        version: An int N for `version_N`, or a directory name. None: the highest existing N plus one.
        prefix: Prefix of every metric's name.
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
        """Number or name of this run; chosen on first access."""
        if self._version is None:
            self._version = _next_version(self._directory())
        version: int | str = self._version
        return version

    @property
    def root_dir(self) -> str:
        """Directory of all experiments, unchanged; `log_dir` has `~` and variables expanded."""
        return self._root_dir

    @property
    def log_dir(self) -> str:
        """Directory of this run."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return self._directory(version, self._sub_dir)

    def _directory(self, *subdirectories: str | None) -> str:
        parts = [os.path.expandvars(part) for part in (self._root_dir, self._name, *subdirectories) if part]
        return join_path(*[part if is_url(part) else str(Path(part).expanduser()) for part in parts])


def to_scalar(name: str, value: Any, service: str = "") -> Any:
    """Return a metric's value as a plain number; values without `item` method are returned unchanged.

    Args:
        name: The metric's name, for messages.
        value: Its value.
        service: Name of a service that accepts numbers only; "": any value is accepted.

    Raises:
        ConfigurationError: A tensor or array has not one element; or the service needs a number.
    """
    try:
        found = value.item() if callable(getattr(value, "item", None)) else value
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The metric {name!r} has shape {tuple(value.shape)} and is no scalar. Log value.mean(), or one "
            "name per element."
        ) from error
    if service and not hasattr(found, "__float__"):
        raise ConfigurationError(
            f"The metric {name!r} is a {type(value).__name__}, which {service} cannot chart. "
            f"Log a number, or call methods of logger.experiment."
        )
    return found


def as_dict(params: dict[str, Any] | Namespace) -> dict[str, Any]:
    """Return a copy of the settings as a dictionary."""
    return dict(vars(params) if isinstance(params, Namespace) else params)


def flatten_params(
    params: dict[str, Any] | Namespace, prefix: str = ""
) -> dict[str, bool | int | float | str]:
    """Return the settings by names like `optimizer/lr`; values other than numbers and strings as text."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in as_dict(params).items():
        if isinstance(value, dict | Namespace) and value:
            found.update(flatten_params(value, f"{prefix}{key}/"))
            continue
        value = to_scalar(str(key), value) if getattr(value, "ndim", None) == 0 else value
        found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _next_version(directory: str) -> int:
    """Return the highest N of `version_N` in `directory`, plus one."""
    runs = [entry for entry in list_directory(directory) if entry.startswith("version_")]
    numbers = [run.removeprefix("version_") for run in runs]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
