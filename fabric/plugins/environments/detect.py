"""`find_environment`: detects the environment of this process, in an order that FABRIC_ENVIRONMENT overrides.

Reads variables only, and removes those of a rank that started this process. The module of an environment is
imported only if one of its marker variables is set.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError
from fabric.core.registry import Registry, unknown_name_message
from fabric.launch.parent_death import JOINED, LAUNCHED, PARENT_PID, RANK_VARIABLES, REPORT_FD, parent_rank

if TYPE_CHECKING:
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
_MARKER_VARIABLES: dict[str, tuple[str, ...]] = {}
"""Marker variables by name: if none is set, the environment is excluded without importing its class."""
_PACKAGE = "plugins.environments"
for _name, _home, _description, *_markers in (  # the innermost launcher first
    ("process_group", f"{_PACKAGE}.process_group:ProcessGroupEnvironment", "torch.distributed"),
    ("local", f"{_PACKAGE}.local:LocalEnvironment", "this machine; `fabric run` for several"),
    ("torchelastic", f"{_PACKAGE}.torchelastic:TorchElasticEnvironment", "torchrun", "TORCHELASTIC_RUN_ID"),
    ("torchrun", f"{_PACKAGE}.torchelastic:TorchElasticEnvironment", "torchrun"),
    ("horovod", "integrations.horovod.environment:HorovodEnvironment", "horovodrun", "HOROVOD_RANK"),
    ("lsf", f"{_PACKAGE}.lsf:LSFEnvironment", "LSF's jsrun", "JSM_NAMESPACE_RANK"),
    (
        *("mpi", f"{_PACKAGE}.mpi:MPIEnvironment", "mpirun, mpiexec"),
        *("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    ),
    ("slurm", f"{_PACKAGE}.slurm:SLURMEnvironment", "SLURM's srun", "SLURM_JOB_ID", "SLURM_JOBID"),
    (
        "kubeflow",
        f"{_PACKAGE}.kubeflow:KubeflowEnvironment",
        "a pod of Kubeflow's operator",
        "KUBERNETES_PORT",
    ),
    ("ray", "integrations.ray.environment:RayEnvironment", "actors of a Ray cluster"),
):
    ENVIRONMENT_REGISTRY.register(_name, f"fabric.{_home}", _description)
    if _markers:
        _MARKER_VARIABLES[_name] = tuple(_markers)
PRECEDENCE = ("process_group", "local", *_MARKER_VARIABLES, "local")
"""Registered names in the order of detection."""

_FLAGS = ("ACCELERATOR", "STRATEGY", "DEVICES", "NUM_NODES", "PRECISION", "REPORT")
"""Options that `fabric run` passes to the ranks as FABRIC_<NAME>."""


class DetectedEnvironment(NamedTuple):
    """The chosen environment and the reason."""

    environment: ClusterEnvironment
    reason: str
    forced: str | None = None
    """The value of FABRIC_ENVIRONMENT, if it is set."""


def find_environment() -> DetectedEnvironment:
    """Return the environment named by FABRIC_ENVIRONMENT, else the first of `PRECEDENCE` that is detected.

    A process that a rank has started is no rank: the variables of that rank are removed first.

    Raises:
        ConfigurationError: The name is not registered.
    """
    parent = _remove_parent_variables()
    if name := os.environ.get("FABRIC_ENVIRONMENT"):
        if name not in ENVIRONMENT_REGISTRY:
            raise ConfigurationError(
                unknown_name_message("FABRIC_ENVIRONMENT", name, ENVIRONMENT_REGISTRY.names())
            )
        return DetectedEnvironment(
            ENVIRONMENT_REGISTRY.get(name), f"FABRIC_ENVIRONMENT={name} forces it", name
        )
    results = [("process_group", _existing_group()), ("local", _launched_by_fabric())]
    for name, marker_variables in _MARKER_VARIABLES.items():
        if not os.environ.keys().isdisjoint(marker_variables):
            kind: Any = ENVIRONMENT_REGISTRY.entry(name).load()
            results.append((name, kind.detect_with_reason()))
    detections = [(name, reason) for name, (detected, reason) in results if detected]
    (name, reason), *later = [*detections, ("local", "nothing else started this process")]
    lower = [f"{other} has lower precedence ({reason})" for other, reason in later[:-1]]
    rejections = [reason for _, (detected, reason) in results if reason and not detected]
    return DetectedEnvironment(
        ENVIRONMENT_REGISTRY.get(name), "; ".join([reason, *lower, *rejections, *parent])
    )


def warn_of_foreign_ranks(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Warn if another program started this process as one of several ranks, and Fabric makes another job.

    Args:
        environment: The detected environment.
        num_devices: Processes on this machine.
        num_nodes: Machines.
    """
    environ = os.environ
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    numbers = rank.isdecimal() and size.isdecimal() and int(size) > 1
    if LAUNCHED in environ or "MASTER_ADDR" not in environ or not numbers:
        return
    from fabric.plugins.environments.local import LocalEnvironment

    if type(environment) is not LocalEnvironment:
        return
    expected = environment.node_rank() * num_devices + environment.local_rank()
    if environment.creates_processes_externally:
        healthy = num_devices * num_nodes == int(size) and int(rank) == expected
    else:  # by hand, on several machines, the command runs once on each; some clouds count machines
        by_hand = "NODE_RANK" in environ or num_nodes > 1
        healthy = by_hand and int(size) in (num_devices * num_nodes, num_nodes)
    if healthy:
        return
    from fabric.core.source import library_frames
    from fabric.utilities.warnings import PossibleUserWarning

    warnings.warn(  # in each of these processes: RANK may be left over
        f"The environment has RANK={rank} and WORLD_SIZE={size}, but no launcher that Fabric detects. This "
        f"process is in a job of {num_devices * num_nodes}. If your own script starts the ranks, set "
        "FABRIC_ENVIRONMENT=torchelastic, LOCAL_RANK and LOCAL_WORLD_SIZE, or write `fabric run`. If the "
        "variables are left over from another job, write `unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR "
        "MASTER_PORT`.",
        category=PossibleUserWarning,
        stacklevel=library_frames() + 1,
    )


def _remove_parent_variables() -> list[str]:
    """Remove the variables of the rank that started this process; return a text about it, or nothing."""
    process, is_rank = parent_rank()
    if not process:
        return []
    rank_variables = () if is_rank else RANK_VARIABLES
    flags = [f"FABRIC_{name}" for name in _FLAGS] if os.environ.get(LAUNCHED) == "cli" else []
    fabric_variables = (JOINED, LAUNCHED, "FABRIC_STORE_FD", PARENT_PID, REPORT_FD)
    for name in (*fabric_variables, *rank_variables, *flags):
        os.environ.pop(name, None)
    return [f"a rank (process {process}) started this process, which is not a rank of its job"]


def _existing_group() -> tuple[bool, str]:
    # An existing group takes precedence over variables.
    distributed = sys.modules.get("torch.distributed")  # a command may run without torch
    exists = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return exists, "torch.distributed is initialised already" if exists else ""


def _launched_by_fabric() -> tuple[bool, str]:
    how = os.environ.get(LAUNCHED)
    return how is not None, f"Fabric's launcher started this process (FABRIC_LAUNCHED={how})" if how else ""
