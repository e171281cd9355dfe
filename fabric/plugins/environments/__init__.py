"""Who am I and where is rank zero: one class per way in which processes come to be. Lazy: loads no torch."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.environments.detect import ENVIRONMENT_REGISTRY
    from fabric.plugins.environments.kubeflow import KubeflowEnvironment
    from fabric.plugins.environments.local import LightningEnvironment, LocalEnvironment
    from fabric.plugins.environments.lsf import LSFEnvironment
    from fabric.plugins.environments.mpi import MPIEnvironment
    from fabric.plugins.environments.process_group import ProcessGroupEnvironment
    from fabric.plugins.environments.slurm import SLURMEnvironment
    from fabric.plugins.environments.torchelastic import TorchElasticEnvironment

__all__ = [
    "ENVIRONMENT_REGISTRY",
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "LocalEnvironment",
    "MPIEnvironment",
    "ProcessGroupEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ENVIRONMENT_REGISTRY": "fabric.plugins.environments.detect",
        "ClusterEnvironment": "fabric.plugins.environments.cluster_environment",
        "KubeflowEnvironment": "fabric.plugins.environments.kubeflow",
        "LSFEnvironment": "fabric.plugins.environments.lsf",
        "LightningEnvironment": "fabric.plugins.environments.local",
        "LocalEnvironment": "fabric.plugins.environments.local",
        "MPIEnvironment": "fabric.plugins.environments.mpi",
        "ProcessGroupEnvironment": "fabric.plugins.environments.process_group",
        "SLURMEnvironment": "fabric.plugins.environments.slurm",
        "TorchElasticEnvironment": "fabric.plugins.environments.torchelastic",
    },
)
