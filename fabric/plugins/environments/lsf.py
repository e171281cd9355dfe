"""`LSFEnvironment`: ranks that LSF's jsrun started. Reads its variables and LSF's file of machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fabric.plugins.environments.started import ExternalEnvironment, derive_port


class LSFEnvironment(ExternalEnvironment):
    """Processes started by `jsrun` in a job of LSF.

    The machines are those of LSB_DJOB_RANKFILE (or LSB_HOSTS) in their order. If the list has more machines
    than there are nodes with ranks, the first one is assumed to run the batch script only. MASTER_ADDR
    overrides rank zero's address.
    """

    launcher = "jsrun"
    variables = {
        "rank": ("JSM_NAMESPACE_RANK",),
        "size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_size": ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # or that of its MPI
    }
    marker_variables = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID")
    remedy = "start it with `jsrun --nrs {nodes} --tasks_per_rs {devices}`"

    def node_rank(self) -> int:
        """Index of this machine in the list; if it is not listed, computed from the ranks."""
        names = [host.partition(".")[0] for host in self._machines()]
        host = socket.gethostname().partition(".")[0]
        return names.index(host) if host in names else self.global_rank() // (self.local_world_size() or 1)

    def _machines(self) -> list[str]:
        file = os.environ.get("LSB_DJOB_RANKFILE", "")
        listed = Path(file).read_text() if file and Path(file).is_file() else os.environ.get("LSB_HOSTS", "")
        hosts = list(dict.fromkeys(listed.split()))
        return hosts[1:] if len(hosts) > (self.num_nodes() or len(hosts)) else hosts

    def _main_host(self) -> str:
        machines = self._machines()
        if not machines:
            raise self._missing_address("neither LSB_DJOB_RANKFILE nor LSB_HOSTS lists them")
        return machines[0]

    def _derived_port(self) -> int:
        return derive_port(self._first_int("LSB_JOBID"), self._first_int("LSB_JOBINDEX", 0))
