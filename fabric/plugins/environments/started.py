"""`ExternalEnvironment`: the base class of environments whose launcher starts all ranks and sets variables.

All environments but the local one are subclasses. Sets no variable, and communicates only by the store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, int_variable

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, PORTS = 12000, 20000  # below the range from which kernels give ports to clients


class ExternalEnvironment(ClusterEnvironment):
    """Ranks that were all started by an external launcher."""

    launcher: str
    """The launcher's name in messages."""
    variables: ClassVar[Mapping[str, tuple[str | int, ...]]]
    """Names of variables and a default number for each quantity ("rank", "size", "local_rank", "local_size",
    "node_rank", "nodes"). The first variable that is set is used.
    """
    remedy: str
    """The command or setting that starts {nodes} x {devices} = {tasks} processes; see `_remedy`."""
    marker_variables: ClassVar[tuple[str, ...]] = ()
    """Variables that are all set if the launcher started this process."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always True."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR; else localhost if there is one machine; else the scheduler's address.

        Raises:
            ConfigurationError: There is none of these.
        """
        return os.environ.get("MASTER_ADDR") or ("127.0.0.1" if self.num_nodes() == 1 else self._main_host())

    @property
    def main_port(self) -> int:
        """MASTER_PORT; else a number derived from the job's id, so that all ranks have the same one.

        Raises:
            ConfigurationError: MASTER_PORT is no number.
        """
        return self._first_int("MASTER_PORT") if os.environ.get("MASTER_PORT") else self._derived_port()

    @classmethod
    def detect_with_reason(cls) -> tuple[bool, str]:
        """Return whether the launcher started this process, and a text that gives the reason."""
        if not all([name in os.environ for name in cls.marker_variables]):
            return False, ""
        name = cls.marker_variables[0]
        return True, f"{cls.launcher} started this process ({name}={os.environ[name]})"

    @classmethod
    def detect(cls) -> bool:
        """Whether the launcher started this process."""
        return cls.detect_with_reason()[0]

    def world_size(self) -> int:
        """Number of processes of the job, from the launcher's variables."""
        return self._int_value("size")

    def set_world_size(self, size: int) -> None:
        """Ignore `size`: the launcher determines the number of ranks."""

    def global_rank(self) -> int:
        """Index of this process in the job, from the launcher's variables."""
        return self._int_value("rank")

    def set_global_rank(self, rank: int) -> None:
        """Ignore `rank`: the launcher determines it."""

    def local_rank(self) -> int:
        """Index of this process on its machine, from the launcher's variables."""
        return self._int_value("local_rank")

    def node_rank(self) -> int:
        """Index of this machine in the job, from the launcher's variables."""
        return self._int_value("node_rank")

    def local_world_size(self) -> int | None:
        """Number of processes on this machine; None: the launcher does not set it."""
        return self._int_value("local_size", 0) or None

    def num_nodes(self) -> int | None:
        """Number of machines; computed from the world sizes if the launcher does not set it."""
        if count := self._int_value("nodes", 0):
            return count
        local_size = self.local_world_size()
        return -(-self.world_size() // local_size) if local_size else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the processes that the launcher started with the arguments of `Fabric`.

        Arguments as for `ClusterEnvironment.validate_settings`.

        Raises:
            ConfigurationError: The numbers of processes or machines differ, or machines have unequal numbers.
        """
        tasks = self.world_size()
        launched = self.local_world_size() or num_devices, self.num_nodes() or num_nodes
        if tasks != num_devices * num_nodes or (num_devices, num_nodes) != launched:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {num_devices * num_nodes} "
                f"processes, {num_devices} on each machine, but {self.launcher} started {tasks} "
                f'({self._launched_counts()}). Write devices="auto" and num_nodes={launched[1]} in the '
                f"script, or {self._remedy(num_devices, num_nodes)}."
            )

    def _int_value(self, quantity: str, *default: int) -> int:
        return self._first_int(*self._variables_of(quantity), *default)

    def _variables_of(self, quantity: str) -> tuple[str | int, ...]:
        """Return the names of variables (and the default) of a quantity."""
        return self.variables.get(quantity, ())

    def _first_int(self, *row: str | int) -> int:
        """Return the first of these variables that is set, as a number; else the first number among them."""
        name, numbers = first_set(*row), [number for number in row if isinstance(number, int)]
        number = next(iter(numbers), None) if name is None else int_variable(name)
        if number is None:
            needed = " or ".join(map(str, row))
            raise ConfigurationError(
                f"{type(self).__name__} needs {needed}, which {self.launcher} sets, but it is not set. Start "
                f"the script with {self.launcher}, or leave FABRIC_ENVIRONMENT and plugins= out, so that "
                "Fabric detects the environment."
            )
        return number

    def _missing_address(self, lookup: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} has no address of rank zero: there are {self.num_nodes()} machines, "
            f"and {lookup}. Set MASTER_ADDR to the name or address of rank zero's machine, for all ranks."
        )

    def _main_host(self) -> str:
        """Return rank zero's machine, if there are several."""
        raise self._missing_address("MASTER_ADDR is not set")

    def _derived_port(self) -> int:
        """Return a port that is equal on all ranks of this job and very likely different from other jobs'."""
        return self._first_int("MASTER_PORT")

    def _launched_counts(self) -> str:
        """Return the launcher's variables of counts, with their values."""
        rows = map(self._variables_of, ("size", "nodes", "local_size"))
        counts = [f"{name}={os.environ[name]}" for row in rows if (name := first_set(*row))]
        return ", ".join(counts) or f"{self.world_size()} ranks"

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        """Return the command or setting that starts this number of ranks."""
        return self.remedy.format(devices=num_devices, nodes=num_nodes, tasks=num_devices * num_nodes)


def first_set(*row: str | int) -> str | None:
    """Return the first name whose variable is set; None: none is."""
    return next((name for name in row if isinstance(name, str) and os.environ.get(name)), None)


def derive_port(*numbers: int) -> int:
    """Return a port for a job with this id (and step, index); it differs for neighbouring jobs and steps."""
    mixed = 0
    for number in numbers:
        mixed = mixed * 101 + number
    return FIRST_PORT + mixed % PORTS
