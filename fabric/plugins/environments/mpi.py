"""Ranks that mpirun or mpiexec started. Reads the launcher's variables; mpi4py only for what they lack."""

from __future__ import annotations

import os
import socket
import zlib
from functools import cache
from importlib import import_module
from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.detect import PMIX_FLAVOUR, Flavour, mpi_flavour
from fabric.plugins.environments.started import FIRST_PORT, PORTS, StartedEnvironment, first_seen

# What is the same for all ranks of one mpirun and another for the next.
_JOB_VARIABLES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "I_MPI_HYDRA_UUID", "MPIRUN_ID"),
    *("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "JOB_ID"),
)


class MPIEnvironment(StartedEnvironment):
    """Processes started by an MPI launcher: OpenMPI, MPICH, Intel MPI, MVAPICH2 or Cray PALS.

    torch does not talk MPI here: ranks and sizes are all that is taken. On several machines set MASTER_ADDR
    (`mpirun -x MASTER_ADDR=...`) or install mpi4py. Without mpi4py the machines are taken to be filled one
    after the other, unless the ranks' numbers say that they go round.
    """

    launcher = "mpirun"

    @staticmethod
    def detect() -> bool:
        """Whether an MPI launcher's variables are set (those of srun's own MPI support are not that)."""
        return mpi_flavour(os.environ) is not None

    def world_size(self) -> int:
        """The launcher's size variable."""
        name = self._flavour().size
        return self._whole(name) if name else len(_hosts(self._missing("the number of ranks")))

    def global_rank(self) -> int:
        """The launcher's rank variable."""
        return self._whole(self._flavour().rank)

    def local_rank(self) -> int:
        """The launcher's local rank variable, else counted by mpi4py."""
        name, rank = self._flavour().local_rank, self.global_rank()
        if name:
            return self._whole(name)
        hosts = _hosts(self._missing("the rank on this machine"))
        return hosts[:rank].count(hosts[rank])

    def local_world_size(self) -> int | None:
        """The launcher's local size variable, else counted by mpi4py."""
        name = self._flavour().local_size
        if name:
            return self._whole(name)
        hosts = _hosts(self._missing("the number of ranks on this machine"))
        return hosts.count(hosts[self.global_rank()])

    def node_rank(self) -> int:
        """Index of this machine, from its ranks: no launcher says it. Exact where mpi4py is needed."""
        nodes, here = self.num_nodes() or 1, self.local_world_size() or 1
        if nodes == 1:
            return 0
        rank, local = self.global_rank(), self.local_rank()
        if not os.environ.get("MASTER_ADDR") or not self._flavour().local_rank:
            hosts = _hosts(self._no_address("neither MASTER_ADDR nor mpi4py is there"))
            return first_seen(hosts).index(hosts[rank])
        goes_round = rank % here != local and rank // nodes == local
        return rank % nodes if goes_round else rank // here

    def _flavour(self) -> Flavour:
        flavour = mpi_flavour(os.environ)
        if flavour is None:
            raise ConfigurationError(
                "MPIEnvironment needs an MPI launcher's variables (OMPI_COMM_WORLD_RANK, PMI_RANK, ...), but "
                "none are set. Start the script with mpirun, or leave FABRIC_ENVIRONMENT and plugins= out "
                "and what started this process is found."
            )
        return flavour

    def _missing(self, what: str) -> ConfigurationError:
        only = ", ".join(
            sorted(name for name in os.environ if name in (*PMIX_FLAVOUR, "PMI_RANK", "PMI_SIZE"))
        )
        return ConfigurationError(
            f"The MPI launcher does not tell {what}: of the known variables only {only} are set. Install "
            "mpi4py, or set OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK and "
            "OMPI_COMM_WORLD_LOCAL_SIZE for each rank, or start the script with torchrun."
        )

    def _main_host(self) -> str:
        return _hosts(
            self._no_address("neither MASTER_ADDR (mpirun -x MASTER_ADDR=...) nor mpi4py is there")
        )[0]

    def _derived_port(self) -> int:
        name = next((name for name in _JOB_VARIABLES if os.environ.get(name)), None)
        return FIRST_PORT + zlib.crc32(os.environ[name].encode() if name else b"") % PORTS

    def _counts(self) -> str:
        flavour = self._flavour()
        names = [name for name in (flavour.size, flavour.local_size) if name]
        return ", ".join(f"{name}={os.environ[name]}" for name in names) or f"{self.world_size()} ranks"

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        return f"start it with `mpirun -np {num_devices * num_nodes}`, {num_devices} on each machine"


def _hosts(absent: ConfigurationError) -> list[str]:
    """The machine of every rank. All ranks must call this; raises `absent` where mpi4py is not installed."""
    try:
        return _gather_hosts()
    except ImportError:
        raise absent from None


@cache
def _gather_hosts() -> list[str]:
    world: Any = import_module("mpi4py.MPI").COMM_WORLD  # its import joins the MPI job
    return list(world.allgather(socket.gethostname()))
