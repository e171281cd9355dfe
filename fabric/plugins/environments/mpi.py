"""Ranks that mpirun or mpiexec started. Reads the launcher's variables; mpi4py only for what they lack."""

from __future__ import annotations

import os
import socket
import zlib
from functools import cache
from importlib import import_module
from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.started import ExternalEnvironment, first_set, port_of

# What is the same for all ranks of one mpirun and another for the next.
_JOB_VARIABLES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "I_MPI_HYDRA_UUID", "MPIRUN_ID"),
    *("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "JOB_ID"),
)


_TOLD = ("rank", "size", "local_rank", "local_size")
_FLAVOURS = (
    [f"OMPI_COMM_WORLD_{what.upper()}" for what in _TOLD],  # its NODE_RANK is a rank on the node
    [f"MV2_COMM_WORLD_{what.upper()}" for what in _TOLD],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],  # Hydra: MPICH, Intel MPI
    ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],  # Cray PALS
)
# srun sets these for every step where MPI is the default, interactive shells included.
_BARE = (["PMI_RANK", "PMI_SIZE"], ["PMIX_RANK"])


def _flavour() -> dict[str, str]:
    """The variables in which an MPI launcher tells this process its place; empty: there are none."""
    flavours = _FLAVOURS if "SLURM_JOB_ID" in os.environ else (*_FLAVOURS, *_BARE)
    names = next((names for names in flavours if set(names) <= set(os.environ)), [])
    return dict(zip(_TOLD, names, strict=False))


class MPIEnvironment(ExternalEnvironment):
    """Processes started by an MPI launcher: OpenMPI, MPICH, Intel MPI, MVAPICH2 or Cray PALS.

    torch does not talk MPI here: ranks and sizes are all that is taken. On several machines set MASTER_ADDR
    (`mpirun -x MASTER_ADDR=...`) or install mpi4py. Without mpi4py the machines are taken to be filled one
    after the other, unless the ranks' numbers say that they go round.
    """

    launcher = "mpirun"
    remedy = "start it with `mpirun -np {tasks}`, {devices} on each machine"

    @classmethod
    def sign(cls) -> tuple[bool, str]:
        """Whether mpirun or mpiexec started this process, be it inside a job of SLURM or LSF."""
        name = _flavour().get("rank")
        return name is not None, f"mpirun started this process ({name}={os.environ[name]})" if name else ""

    def world_size(self) -> int:
        """The launcher's size variable."""
        return self._told("size") if self._row("size") else len(self._counted("the number of ranks"))

    def local_rank(self) -> int:
        """The launcher's local rank variable, else counted by mpi4py."""
        if self._row("local_rank"):
            return self._told("local_rank")
        rank, hosts = self.global_rank(), self._counted("the rank on this machine")
        return hosts[:rank].count(hosts[rank])

    def local_world_size(self) -> int | None:
        """The launcher's local size variable, else counted by mpi4py."""
        if self._row("local_size"):
            return self._told("local_size")
        hosts = self._counted("the number of ranks on this machine")
        return hosts.count(hosts[self.global_rank()])

    def node_rank(self) -> int:
        """Index of this machine, from its ranks: no launcher says it. Exact where mpi4py is needed."""
        nodes, here = self.num_nodes() or 1, self.local_world_size() or 1
        if nodes == 1:
            return 0
        rank, local = self.global_rank(), self.local_rank()
        if not os.environ.get("MASTER_ADDR") or not self._row("local_rank"):
            hosts = _hosts(self._no_address("neither MASTER_ADDR nor mpi4py is there"))
            return list(dict.fromkeys(hosts)).index(hosts[rank])
        goes_round = rank % here != local and rank // nodes == local
        return rank % nodes if goes_round else rank // here

    def _row(self, what: str) -> tuple[str | int, ...]:
        flavour = _flavour() or dict(zip(_TOLD, _FLAVOURS[0], strict=True))
        return (flavour[what],) if what in flavour else ()

    def _counted(self, what: str) -> list[str]:
        """The machine of every rank, of which `what` is counted."""
        only = ", ".join(sorted(_flavour().values()))
        error = ConfigurationError(
            f"The MPI launcher does not tell {what}: of the known variables only {only} are set. Install "
            "mpi4py, or set OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK and "
            "OMPI_COMM_WORLD_LOCAL_SIZE for each rank, or start the script with torchrun."
        )
        return _hosts(error)

    def _main_host(self) -> str:
        looked = "neither MASTER_ADDR (mpirun -x MASTER_ADDR=...) nor mpi4py is there"
        return _hosts(self._no_address(looked))[0]

    def _derived_port(self) -> int:
        name = first_set(*_JOB_VARIABLES)
        return port_of(zlib.crc32(os.environ[name].encode() if name else b""))


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
