"""Rank and rendezvous of this process: one class per launcher. Lazy: loads no torch."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment as ClusterEnvironment
    from fabric.plugins.environments.detect import ENVIRONMENT_REGISTRY as ENVIRONMENT_REGISTRY
    from fabric.plugins.environments.kubeflow import KubeflowEnvironment as KubeflowEnvironment
    from fabric.plugins.environments.local import LightningEnvironment as LightningEnvironment
    from fabric.plugins.environments.local import LocalEnvironment as LocalEnvironment
    from fabric.plugins.environments.lsf import LSFEnvironment as LSFEnvironment
    from fabric.plugins.environments.mpi import MPIEnvironment as MPIEnvironment
    from fabric.plugins.environments.process_group import ProcessGroupEnvironment as ProcessGroupEnvironment
    from fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment
    from fabric.plugins.environments.torchelastic import TorchElasticEnvironment as TorchElasticEnvironment

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
