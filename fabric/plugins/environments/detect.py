"""Which environment this process is in: one order of precedence, one variable that overrules it.

Reads variables only; the module of an environment is imported once that environment is chosen.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError
from fabric.core.registry import unknown_name_message
from fabric.plugins.environments.registry import ENVIRONMENT_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment


class Sign(NamedTuple):
    """What the variables say about one environment."""

    here: bool
    """Whether it started this process."""
    why: str = ""
    """The reason, for people; where `here` is False, what looked like it."""


class Found(NamedTuple):
    """The chosen environment and the reason."""

    environment: ClusterEnvironment
    why: str
    forced: str | None = None
    """The value of FABRIC_ENVIRONMENT, if that decided."""


class Flavour(NamedTuple):
    """The variables in which an MPI launcher tells a rank its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str


MPI_FLAVOURS = (
    Flavour(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Flavour(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Flavour("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
    Flavour("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray PALS
)
"""Launchers that set all four; OpenMPI's NODE_RANK is a rank on the node, so it is not among them."""
PMI_FLAVOUR = Flavour("PMI_RANK", "PMI_SIZE", "", "")
PMIX_FLAVOUR = Flavour("PMIX_RANK", "", "", "")

_SHELLS = {"bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"}
_TERMINALS = {"screen", "tmux"}
_INTERACTIVE_NAMES = (
    _SHELLS | _TERMINALS | {"interactive"}
)  # srun names a job after its command, salloc "interactive"
_FIRST_SPECIAL_STEP = 0xFFFFFFFA  # from here on: the steps of the batch script, of salloc's shell, ...


def find_environment(environ: Mapping[str, str] | None = None, forced: str | None = None) -> Found:
    """The forced environment, else the first of `PRECEDENCE` that started this process, and why.

    Args:
        environ: The variables; None: those of this process.
        forced: A registered name; defaults to the variable FABRIC_ENVIRONMENT.

    Raises:
        ConfigurationError: The forced name is not registered.
    """
    environ = os.environ if environ is None else environ
    name = forced or environ.get("FABRIC_ENVIRONMENT")
    if name:
        if name not in ENVIRONMENT_REGISTRY:
            raise ConfigurationError(
                unknown_name_message("FABRIC_ENVIRONMENT", name, ENVIRONMENT_REGISTRY.names())
            )
        return Found(ENVIRONMENT_REGISTRY.get(name), f"FABRIC_ENVIRONMENT={name} forces it", name)
    signs = [(name, sign(environ)) for name, sign in SIGNS]
    chosen = next(index for index, (_, sign) in enumerate(signs) if sign.here)
    name, (_, why) = signs[chosen]
    later = [f"{other} comes later ({sign.why})" for other, sign in signs[chosen + 1 : -1] if sign.here]
    doubts = [sign.why for _, sign in signs[:-1] if not sign.here and sign.why]
    return Found(ENVIRONMENT_REGISTRY.get(name), "; ".join([why, *later, *doubts]))


def detect_environment(
    candidates: Sequence[type[ClusterEnvironment]] | None = None, forced: str | None = None
) -> ClusterEnvironment:
    """A new environment object: the forced one, else the first candidate that recognises this process.

    Args:
        candidates: Classes in order of precedence, the last of which should always say yes; None: ours.
        forced: A registered name; defaults to the variable FABRIC_ENVIRONMENT.

    Raises:
        ConfigurationError: The forced name is not registered.
    """
    if candidates is None or forced or os.environ.get("FABRIC_ENVIRONMENT"):
        return find_environment(forced=forced).environment
    kinds: Any = candidates
    found: ClusterEnvironment = next(kind for kind in kinds if kind.detect())()
    return found


def existing_group(_: Mapping[str, str]) -> Sign:
    """Whether torch.distributed is initialised: what exists beats what variables promise."""
    from torch import distributed

    exists = distributed.is_available() and distributed.is_initialized()
    return Sign(exists, "torch.distributed is initialised already" if exists else "")


def our_launch(environ: Mapping[str, str]) -> Sign:
    """Whether `fabric run` or a script's launch started this process, inside whatever else."""
    how = environ.get("FABRIC_LAUNCHED")
    return Sign(how is not None, f"our launcher started this process (FABRIC_LAUNCHED={how})" if how else "")


def torchrun(environ: Mapping[str, str]) -> Sign:
    """Whether torchrun started this process, be it inside sbatch, srun or a pod."""
    here = "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ
    return Sign(here, "torchrun started this process (TORCHELASTIC_RUN_ID)" if here else "")


def jsrun(environ: Mapping[str, str]) -> Sign:
    """Whether LSF's jsrun started this process. Its MPI variables are set as well."""
    if not {"LSB_JOBID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"} <= set(environ):
        return Sign(False)
    return Sign(True, f"jsrun started this process (JSM_NAMESPACE_RANK={environ['JSM_NAMESPACE_RANK']})")


def mpirun(environ: Mapping[str, str]) -> Sign:
    """Whether mpirun or mpiexec started this process, be it inside a job of SLURM or LSF."""
    flavour = mpi_flavour(environ)
    if flavour is None:
        return Sign(False)
    return Sign(True, f"an MPI launcher started this process ({flavour.rank}={environ[flavour.rank]})")


def mpi_flavour(environ: Mapping[str, str]) -> Flavour | None:
    """The variables that tell this process its place among MPI ranks; None: there are none."""
    for flavour in MPI_FLAVOURS:
        if set(flavour) <= set(environ):
            return flavour
    # srun sets these two for every step where MPI is the default, interactive shells included.
    if "SLURM_JOB_ID" not in environ:
        if {"PMI_RANK", "PMI_SIZE"} <= set(environ):
            return PMI_FLAVOUR
        if "PMIX_RANK" in environ:
            return PMIX_FLAVOUR
    return None


def srun(environ: Mapping[str, str]) -> Sign:
    """Whether srun started this process as one of its tasks: a shell inside SLURM is not that."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        return Sign(False)
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return Sign(False, f"SLURM job {job} is here, but srun did not start this process")
    task = environ.get("SLURM_TASK_PID", "")
    marks = _interactive_marks(environ)
    # Marks are inherited by an srun inside the shell, and a job may be named "bash": the task decides.
    if marks and task != str(os.getpid()) and _is_shell(task):
        return Sign(False, f"a shell in SLURM step {job}.{step} started this process ({marks})")
    return Sign(
        True, f"srun started this process (SLURM_PROCID={environ['SLURM_PROCID']}, step {job}.{step})"
    )


def batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is in a SLURM batch script, outside any srun, which SLURM runs once for all tasks."""
    return "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ


def training_operator(environ: Mapping[str, str]) -> Sign:
    """Whether Kubeflow's operator started this pod; a launcher inside it would set LOCAL_RANK."""
    wanted = {"KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
    if not wanted <= set(environ) or "LOCAL_RANK" in environ:
        return Sign(False)
    return Sign(True, f"Kubeflow started this pod (KUBERNETES_PORT, RANK={environ['RANK']})")


def nothing_else(_: Mapping[str, str]) -> Sign:
    """Always: this machine is what remains."""
    return Sign(True, "nothing else started this process")


SIGNS = (
    ("process_group", existing_group),
    ("local", our_launch),
    ("torchelastic", torchrun),
    ("lsf", jsrun),
    ("mpi", mpirun),
    ("slurm", srun),
    ("kubeflow", training_operator),
    ("local", nothing_else),
)
"""Registered names and what speaks for them; the first that does wins. The innermost launcher comes first."""
PRECEDENCE = tuple(name for name, _ in SIGNS)
"""Registered names in the order in which they are asked."""


def _interactive_marks(environ: Mapping[str, str]) -> str:
    names = ("SLURM_PTY_PORT", "SLURM_JOB_NAME")
    given = {name: environ[name] for name in names if name in environ}
    if given.get("SLURM_JOB_NAME", "bash") not in _INTERACTIVE_NAMES:
        del given["SLURM_JOB_NAME"]
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _is_shell(task: str) -> bool:
    """Whether process `task` is an interactive shell; True where it cannot be seen (in a container)."""
    try:
        words = Path(f"/proc/{int(task)}/cmdline").read_text().split("\0")[:-1]
    except (OSError, ValueError):
        return True
    if not words:
        return True
    name, options = Path(words[0]).name.lstrip("-").partition(":")[0], words[1:]
    commands = [word for word in options if not word.startswith("-") or re.match(r"-\w*c", word)]
    return name in _TERMINALS or (name in _SHELLS and ("-i" in options or not commands))
