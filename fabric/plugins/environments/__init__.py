"""Who am I and where is rank zero: one class per way in which processes come to be. Lazy: loads no torch."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.environments.local import LightningEnvironment, LocalEnvironment
    from fabric.plugins.environments.process_group import ProcessGroupEnvironment
    from fabric.plugins.environments.registry import ENVIRONMENT_REGISTRY
    from fabric.plugins.environments.torchelastic import TorchElasticEnvironment

__all__ = [
    "ENVIRONMENT_REGISTRY",
    "ClusterEnvironment",
    "LightningEnvironment",
    "LocalEnvironment",
    "ProcessGroupEnvironment",
    "TorchElasticEnvironment",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ENVIRONMENT_REGISTRY": "fabric.plugins.environments.registry",
        "ClusterEnvironment": "fabric.plugins.environments.cluster_environment",
        "LightningEnvironment": "fabric.plugins.environments.local",
        "LocalEnvironment": "fabric.plugins.environments.local",
        "ProcessGroupEnvironment": "fabric.plugins.environments.process_group",
        "TorchElasticEnvironment": "fabric.plugins.environments.torchelastic",
    },
)
