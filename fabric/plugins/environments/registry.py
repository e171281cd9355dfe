"""Environments by name, for FABRIC_ENVIRONMENT and for third parties' entry points."""

from fabric.core.registry import Registry

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
ENVIRONMENT_REGISTRY.register(
    "local", "fabric.plugins.environments.local:LocalEnvironment", "this machine; `fabric run` for several"
)
ENVIRONMENT_REGISTRY.register(
    "torchelastic", "fabric.plugins.environments.torchelastic:TorchElasticEnvironment", "torchrun"
)
ENVIRONMENT_REGISTRY.register(
    "torchrun", "fabric.plugins.environments.torchelastic:TorchElasticEnvironment", "torchrun"
)
ENVIRONMENT_REGISTRY.register(
    "process_group",
    "fabric.plugins.environments.process_group:ProcessGroupEnvironment",
    "an initialised torch.distributed",
)
