"""`MPIEnvironment`: ranks that mpirun or mpiexec started. Reads its variables; mpi4py for missing ones."""

from __future__ import annotations

import os
import socket
import zlib
from functools import cache
from importlib import import_module
from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.started import ExternalEnvironment, derive_port, first_set

# Variables with an id of the job: equal on all ranks of one mpirun, and different for the next.
_JOB_VARIABLES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "I_MPI_HYDRA_UUID", "MPIRUN_ID"),
    *("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "JOB_ID"),
)


_QUANTITIES = ("rank", "size", "local_rank", "local_size")
_VARIABLE_SETS = (
    # OpenMPI. Its NODE_RANK is a rank on the node.
    [f"OMPI_COMM_WORLD_{quantity.upper()}" for quantity in _QUANTITIES],
    [f"MV2_COMM_WORLD_{quantity.upper()}" for quantity in _QUANTITIES],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],  # Hydra: MPICH, Intel MPI
    ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],  # Cray PALS
)
# srun sets these for every step where MPI is the default, interactive shells included.
_AMBIGUOUS_SETS = (["PMI_RANK", "PMI_SIZE"], ["PMIX_RANK"])


def _launcher_variables() -> dict[str, str]:
    """Return the MPI launcher's variables by quantity; empty: no MPI launcher."""
    variable_sets = _VARIABLE_SETS if "SLURM_JOB_ID" in os.environ else (*_VARIABLE_SETS, *_AMBIGUOUS_SETS)
    names = next((names for names in variable_sets if set(names) <= set(os.environ)), [])
    return dict(zip(_QUANTITIES, names, strict=False))


class MPIEnvironment(ExternalEnvironment):
    """Processes started by an MPI launcher: OpenMPI, MPICH, Intel MPI, MVAPICH2 or Cray PALS.

    Only ranks and sizes are read; torch does not communicate by MPI. On several machines set MASTER_ADDR
    (`mpirun -x MASTER_ADDR=...`) or install mpi4py. Without mpi4py, ranks are assumed to be placed by node,
    unless their numbers show round-robin placement.
    """

    launcher = "mpirun"
    remedy = "start it with `mpirun -np {tasks}`, {devices} on each machine"

    @classmethod
    def detect_with_reason(cls) -> tuple[bool, str]:
        """Return whether mpirun or mpiexec started this process, even in a job of SLURM or LSF."""
        name = _launcher_variables().get("rank")
        return name is not None, f"mpirun started this process ({name}={os.environ[name]})" if name else ""

    def world_size(self) -> int:
        """The launcher's size variable."""
        return (
            self._int_value("size")
            if self._variables_of("size")
            else len(self._hosts_for("the number of ranks"))
        )

    def local_rank(self) -> int:
        """The launcher's local rank variable, else counted by mpi4py."""
        if self._variables_of("local_rank"):
            return self._int_value("local_rank")
        rank, hosts = self.global_rank(), self._hosts_for("the rank on this machine")
        return hosts[:rank].count(hosts[rank])

    def local_world_size(self) -> int | None:
        """The launcher's local size variable, else counted by mpi4py."""
        if self._variables_of("local_size"):
            return self._int_value("local_size")
        hosts = self._hosts_for("the number of ranks on this machine")
        return hosts.count(hosts[self.global_rank()])

    def node_rank(self) -> int:
        """Index of this machine, from its ranks, since no launcher sets it. Exact if mpi4py is used."""
        nodes, local_size = self.num_nodes() or 1, self.local_world_size() or 1
        if nodes == 1:
            return 0
        rank, local = self.global_rank(), self.local_rank()
        if not os.environ.get("MASTER_ADDR") or not self._variables_of("local_rank"):
            hosts = _hosts(self._missing_address("neither MASTER_ADDR nor mpi4py is there"))
            return list(dict.fromkeys(hosts)).index(hosts[rank])
        is_round_robin = rank % local_size != local and rank // nodes == local
        return rank % nodes if is_round_robin else rank // local_size

    def _variables_of(self, quantity: str) -> tuple[str | int, ...]:
        variables = _launcher_variables() or dict(zip(_QUANTITIES, _VARIABLE_SETS[0], strict=True))
        return (variables[quantity],) if quantity in variables else ()

    def _hosts_for(self, quantity: str) -> list[str]:
        """Return the machine of every rank, from which `quantity` is counted."""
        known = ", ".join(sorted(_launcher_variables().values()))
        error = ConfigurationError(
            f"The MPI launcher sets no variable for {quantity}: of the known ones only {known} are set. "
            "Install mpi4py, or set OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK "
            "and OMPI_COMM_WORLD_LOCAL_SIZE for each rank, or start the script with torchrun."
        )
        return _hosts(error)

    def _main_host(self) -> str:
        lookup = "neither MASTER_ADDR (mpirun -x MASTER_ADDR=...) nor mpi4py is there"
        return _hosts(self._missing_address(lookup))[0]

    def _derived_port(self) -> int:
        name = first_set(*_JOB_VARIABLES)
        return derive_port(zlib.crc32(os.environ[name].encode() if name else b""))


def _hosts(missing_error: ConfigurationError) -> list[str]:
    """Return the machine of every rank; raises `missing_error` without mpi4py. All ranks must call this."""
    try:
        return _gather_hosts()
    except ImportError:
        raise missing_error from None


@cache
def _gather_hosts() -> list[str]:
    world: Any = import_module("mpi4py.MPI").COMM_WORLD  # its import joins the MPI job
    return list(world.allgather(socket.gethostname()))
