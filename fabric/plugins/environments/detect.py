"""Which environment this process is in: one order of precedence, one variable that overrules it.

Reads variables only, and removes those of a rank that started this process. The module of an environment is
imported if some variable looks like it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError
from fabric.core.registry import Registry, unknown_name_message
from fabric.launch.parent_death import JOINED, PARENT_PID, REPORT_FD

if TYPE_CHECKING:
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
_MARKS: dict[str, tuple[str, ...]] = {}
"""Names, and variables without which nothing speaks for them: their classes are not loaded to be asked."""
_HERE = "plugins.environments"
for _name, _home, _what, *_marks in (  # the innermost launcher comes first
    ("process_group", f"{_HERE}.process_group:ProcessGroupEnvironment", "torch.distributed"),
    ("local", f"{_HERE}.local:LocalEnvironment", "this machine; `fabric run` for several"),
    ("torchelastic", f"{_HERE}.torchelastic:TorchElasticEnvironment", "torchrun", "TORCHELASTIC_RUN_ID"),
    ("torchrun", f"{_HERE}.torchelastic:TorchElasticEnvironment", "torchrun"),
    ("horovod", "integrations.horovod.environment:HorovodEnvironment", "horovodrun", "HOROVOD_RANK"),
    ("lsf", f"{_HERE}.lsf:LSFEnvironment", "LSF's jsrun", "JSM_NAMESPACE_RANK"),
    (
        *("mpi", f"{_HERE}.mpi:MPIEnvironment", "mpirun, mpiexec"),
        *("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    ),
    ("slurm", f"{_HERE}.slurm:SLURMEnvironment", "SLURM's srun", "SLURM_JOB_ID", "SLURM_JOBID"),
    ("kubeflow", f"{_HERE}.kubeflow:KubeflowEnvironment", "a pod of Kubeflow's operator", "KUBERNETES_PORT"),
    ("ray", "integrations.ray.environment:RayEnvironment", "actors of a Ray cluster"),
):
    ENVIRONMENT_REGISTRY.register(_name, f"fabric.{_home}", _what)
    if _marks:
        _MARKS[_name] = tuple(_marks)
PRECEDENCE = ("process_group", "local", *_MARKS, "local")
"""Registered names in the order in which they are asked."""

_PLACE = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)

_FLAGS = ("ACCELERATOR", "STRATEGY", "DEVICES", "NUM_NODES", "PRECISION")
"""What `fabric run` tells the ranks of its command line."""


class Found(NamedTuple):
    """The chosen environment and the reason."""

    environment: ClusterEnvironment
    why: str
    forced: str | None = None
    """The value of FABRIC_ENVIRONMENT, if that decided."""


def find_environment() -> Found:
    """The environment that FABRIC_ENVIRONMENT names, else the first of `PRECEDENCE` that started this one.

    A process that a rank has started is no rank: it forgets the variables of that rank first.

    Raises:
        ConfigurationError: The name is not registered.
    """
    parent = _forget_parent()
    if name := os.environ.get("FABRIC_ENVIRONMENT"):
        if name not in ENVIRONMENT_REGISTRY:
            raise ConfigurationError(
                unknown_name_message("FABRIC_ENVIRONMENT", name, ENVIRONMENT_REGISTRY.names())
            )
        return Found(ENVIRONMENT_REGISTRY.get(name), f"FABRIC_ENVIRONMENT={name} forces it", name)
    signs = [("process_group", _existing_group()), ("local", _our_launch())]
    for name, marks in _MARKS.items():
        if not os.environ.keys().isdisjoint(marks):
            kind: Any = ENVIRONMENT_REGISTRY.entry(name).load()
            signs.append((name, kind.sign()))
    here = [(name, why) for name, (speaks, why) in signs if speaks]
    (name, why), *later = [*here, ("local", "nothing else started this process")]
    after = [f"{other} comes later ({reason})" for other, reason in later[:-1]]
    doubts = [reason for _, (speaks, reason) in signs if reason and not speaks]
    return Found(ENVIRONMENT_REGISTRY.get(name), "; ".join([why, *after, *doubts, *parent]))


def _forget_parent() -> list[str]:
    """Remove the variables of the rank that started this process; the reason, for people, if one did."""
    process, _, port = os.environ.get(JOINED, "").partition(":")
    if process in ("", str(os.getpid())):
        return []
    # Another port: a launcher between that rank and this process has set the variables anew.
    place = _PLACE if os.environ.get("MASTER_PORT") == port else ()
    flags = [f"FABRIC_{name}" for name in _FLAGS] if os.environ.get("FABRIC_LAUNCHED") == "cli" else []
    own = (JOINED, "FABRIC_LAUNCHED", "FABRIC_STORE_FD", PARENT_PID, REPORT_FD)
    for name in (*own, *place, *flags):
        os.environ.pop(name, None)
    return [f"a rank (process {process}) started this process, which is not a rank of its job"]


def _existing_group() -> tuple[bool, str]:
    # What exists beats what variables promise.
    from torch import distributed

    exists = distributed.is_available() and distributed.is_initialized()
    return exists, "torch.distributed is initialised already" if exists else ""


def _our_launch() -> tuple[bool, str]:
    how = os.environ.get("FABRIC_LAUNCHED")
    return how is not None, f"our launcher started this process (FABRIC_LAUNCHED={how})" if how else ""
