"""Ranks that LSF's jsrun started. Reads its variables and the file of machines that LSF writes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fabric.plugins.environments.detect import jsrun
from fabric.plugins.environments.started import StartedEnvironment, first_seen, port_of, short_name


class LSFEnvironment(StartedEnvironment):
    """Processes started by `jsrun` in a job of LSF.

    The machines are those of LSB_DJOB_RANKFILE (or LSB_HOSTS) in their order. Where it names more than run
    ranks, the first is taken to be the one that runs the batch script; MASTER_ADDR overrules.
    """

    launcher = "jsrun"

    @staticmethod
    def detect() -> bool:
        """Whether jsrun's variables are set."""
        return jsrun(os.environ).here

    def world_size(self) -> int:
        """JSM_NAMESPACE_SIZE."""
        return self._whole("JSM_NAMESPACE_SIZE")

    def global_rank(self) -> int:
        """JSM_NAMESPACE_RANK."""
        return self._whole("JSM_NAMESPACE_RANK")

    def local_rank(self) -> int:
        """JSM_NAMESPACE_LOCAL_RANK."""
        return self._whole("JSM_NAMESPACE_LOCAL_RANK")

    def local_world_size(self) -> int | None:
        """JSM_NAMESPACE_LOCAL_SIZE, or what jsrun's MPI says."""
        return self._whole("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", default=0) or None

    def node_rank(self) -> int:
        """Index of this machine among those of the job; where it is not listed, from the ranks."""
        names = [short_name(host) for host in self._machines()]
        own = short_name(socket.gethostname())
        return names.index(own) if own in names else self.global_rank() // (self.local_world_size() or 1)

    def _machines(self) -> list[str]:
        file = os.environ.get("LSB_DJOB_RANKFILE", "")
        listed = Path(file).read_text() if file and Path(file).is_file() else os.environ.get("LSB_HOSTS", "")
        hosts = first_seen(listed.split())
        return hosts[1:] if len(hosts) > (self.num_nodes() or len(hosts)) else hosts

    def _main_host(self) -> str:
        machines = self._machines()
        if not machines:
            raise self._no_address("neither LSB_DJOB_RANKFILE nor LSB_HOSTS lists them")
        return machines[0]

    def _derived_port(self) -> int:
        return port_of(self._whole("LSB_JOBID"), self._whole("LSB_JOBINDEX", default=0))

    def _counts(self) -> str:
        return (
            f"JSM_NAMESPACE_SIZE={self.world_size()}, {self.local_world_size() or 'unknown'} on this machine"
        )

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        return f"start it with `jsrun --nrs {num_nodes} --tasks_per_rs {num_devices}`"
