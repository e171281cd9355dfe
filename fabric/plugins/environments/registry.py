"""Environments by name, for FABRIC_ENVIRONMENT and third parties; found unasked, in order: `detect.py`."""

from fabric.core.registry import Registry

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
for _name, _home, _what in (
    ("kubeflow", "kubeflow:KubeflowEnvironment", "a pod of Kubeflow's training operator"),
    ("local", "local:LocalEnvironment", "this machine; `fabric run` for several"),
    ("lsf", "lsf:LSFEnvironment", "LSF's jsrun"),
    ("mpi", "mpi:MPIEnvironment", "mpirun, mpiexec"),
    ("process_group", "process_group:ProcessGroupEnvironment", "an initialised torch.distributed"),
    ("slurm", "slurm:SLURMEnvironment", "SLURM's srun"),
    ("torchelastic", "torchelastic:TorchElasticEnvironment", "torchrun"),
    ("torchrun", "torchelastic:TorchElasticEnvironment", "torchrun"),
):
    ENVIRONMENT_REGISTRY.register(_name, f"fabric.plugins.environments.{_home}", _what)
ENVIRONMENT_REGISTRY.register(
    "horovod", "fabric.integrations.horovod.environment:HorovodEnvironment", "horovodrun"
)
ENVIRONMENT_REGISTRY.register(
    "ray", "fabric.integrations.ray.environment:RayEnvironment", "actors of a Ray cluster"
)
