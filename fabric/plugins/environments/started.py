"""Base of environments whose ranks exist before the script: environment variables give their ranks.

Base of all but the local one. Sets no variable and talks to nobody before the store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, PORTS = 12000, 20000  # below the range from which kernels give ports to clients


class ExternalEnvironment(ClusterEnvironment):
    """Ranks that something else started, all of them, before the script ran."""

    launcher: str
    """What starts them, as messages call it."""
    variables: ClassVar[Mapping[str, tuple[str | int, ...]]]
    """The row of "rank", "size", "local_rank", "local_size", "node_rank" and "nodes": names of variables, of
    which the first that is set counts, and a number for where none is.
    """
    remedy: str
    """The command or setting that starts {nodes} times {devices}, {tasks} in all; see `_remedy`."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Variables that are all set where it started this process."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always: nothing is left to start."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR; else this machine if there is but one; else what the scheduler says.

        Raises:
            ConfigurationError: Nothing says it.
        """
        return os.environ.get("MASTER_ADDR") or ("127.0.0.1" if self.num_nodes() == 1 else self._main_host())

    @property
    def main_port(self) -> int:
        """MASTER_PORT; else a number derived from the job's id: all ranks agree on it without talking.

        Raises:
            ConfigurationError: MASTER_PORT is no number.
        """
        return self._whole("MASTER_PORT") if os.environ.get("MASTER_PORT") else self._derived_port()

    @classmethod
    def sign(cls) -> tuple[bool, str]:
        """Whether it started this process, and why, for people; where it did not, what looked like it."""
        if not all([name in os.environ for name in cls.marks]):
            return False, ""
        return True, f"{cls.launcher} started this process ({cls.marks[0]}={os.environ[cls.marks[0]]})"

    @classmethod
    def detect(cls) -> bool:
        """Whether it started this process."""
        return cls.sign()[0]

    def world_size(self) -> int:
        """Number of processes of the job, as the launcher says."""
        return self._told("size")

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher says how many ranks there are."""

    def global_rank(self) -> int:
        """Index of this process in the job, as the launcher says."""
        return self._told("rank")

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher says which rank this is."""

    def local_rank(self) -> int:
        """Index of this process on its machine, as the launcher says."""
        return self._told("local_rank")

    def node_rank(self) -> int:
        """Index of this machine in the job, as the launcher says."""
        return self._told("node_rank")

    def local_world_size(self) -> int | None:
        """Number of processes on this machine; None where the launcher does not say."""
        return self._told("local_size", 0) or None

    def num_nodes(self) -> int | None:
        """Number of machines; counted from the ranks where the launcher does not say."""
        if told := self._told("nodes", 0):
            return told
        here = self.local_world_size()
        return -(-self.world_size() // here) if here else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what the launcher started with what the script asks for.

        Raises:
            ConfigurationError: The numbers of processes or machines differ, or machines have unequal numbers.
        """
        tasks = self.world_size()
        each = self.local_world_size() or num_devices, self.num_nodes() or num_nodes
        if tasks != num_devices * num_nodes or (num_devices, num_nodes) != each:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {num_devices * num_nodes} "
                f"processes, {num_devices} on each machine, but {self.launcher} started {tasks} "
                f'({self._counts()}). Write devices="auto" and num_nodes={each[1]} in the script, or '
                f"{self._remedy(num_devices, num_nodes)}."
            )

    def _told(self, what: str, *default: int) -> int:
        return self._whole(*self._row(what), *default)

    def _row(self, what: str) -> tuple[str | int, ...]:
        """The variables that tell it."""
        return self.variables.get(what, ())

    def _whole(self, *row: str | int) -> int:
        """The first of these variables that is set, as a number; else the first number among them."""
        name, numbers = first_set(*row), [number for number in row if isinstance(number, int)]
        number = next(iter(numbers), None) if name is None else whole_number(name)
        if number is None:
            needed = " or ".join(map(str, row))
            raise ConfigurationError(
                f"{type(self).__name__} needs {needed}, which {self.launcher} sets, but it is not set. Start "
                f"the script with {self.launcher}, or leave FABRIC_ENVIRONMENT and plugins= out and what "
                "started this process is found."
            )
        return number

    def _no_address(self, looked: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} does not know where rank zero is: there are {self.num_nodes()} machines, "
            f"and {looked}. Set MASTER_ADDR to the name or address of rank zero's machine, for all ranks."
        )

    def _main_host(self) -> str:
        """Rank zero's machine, where there are several."""
        raise self._no_address("MASTER_ADDR is not there")

    def _derived_port(self) -> int:
        """A port that all ranks of this job compute, and other jobs most likely do not."""
        return self._whole("MASTER_PORT")

    def _counts(self) -> str:
        """The variables that say what was started, with their values."""
        rows = map(self._row, ("size", "nodes", "local_size"))
        told = [f"{name}={os.environ[name]}" for row in rows if (name := first_set(*row))]
        return ", ".join(told) or f"{self.world_size()} ranks"

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        """The command or setting that starts the number of ranks asked for."""
        return self.remedy.format(devices=num_devices, nodes=num_nodes, tasks=num_devices * num_nodes)


def first_set(*row: str | int) -> str | None:
    """The first variable of a row that is set."""
    return next((name for name in row if isinstance(name, str) and os.environ.get(name)), None)


def port_of(*numbers: int) -> int:
    """A port for a job with this id (and step, index): neighbouring jobs and steps get different ones."""
    mixed = 0
    for number in numbers:
        mixed = mixed * 101 + number
    return FIRST_PORT + mixed % PORTS
