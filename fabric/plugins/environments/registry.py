"""Environments by name, for FABRIC_ENVIRONMENT and for third parties' entry points."""

from fabric.core.registry import Registry

_HERE = "fabric.plugins.environments"

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
ENVIRONMENT_REGISTRY.register(
    "kubeflow", f"{_HERE}.kubeflow:KubeflowEnvironment", "a pod of Kubeflow's training operator"
)
ENVIRONMENT_REGISTRY.register(
    "local", f"{_HERE}.local:LocalEnvironment", "this machine; `fabric run` for several"
)
ENVIRONMENT_REGISTRY.register("lsf", f"{_HERE}.lsf:LSFEnvironment", "LSF's jsrun")
ENVIRONMENT_REGISTRY.register("mpi", f"{_HERE}.mpi:MPIEnvironment", "mpirun, mpiexec")
ENVIRONMENT_REGISTRY.register(
    "process_group", f"{_HERE}.process_group:ProcessGroupEnvironment", "an initialised torch.distributed"
)
ENVIRONMENT_REGISTRY.register("slurm", f"{_HERE}.slurm:SLURMEnvironment", "SLURM's srun")
ENVIRONMENT_REGISTRY.register("torchelastic", f"{_HERE}.torchelastic:TorchElasticEnvironment", "torchrun")
ENVIRONMENT_REGISTRY.register("torchrun", f"{_HERE}.torchelastic:TorchElasticEnvironment", "torchrun")
