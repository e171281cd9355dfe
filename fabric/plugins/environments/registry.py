"""Environments by name, for FABRIC_ENVIRONMENT and third parties (entry points of group "fabric.environments")."""

from fabric.core.registry import Registry
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.environments.process_group import ProcessGroupEnvironment
from fabric.plugins.environments.torchelastic import TorchElasticEnvironment

ENVIRONMENT_REGISTRY = Registry("environment", "fabric.environments")
ENVIRONMENT_REGISTRY.register("local", LocalEnvironment, "this machine; `fabric run` for several")
ENVIRONMENT_REGISTRY.register("torchelastic", TorchElasticEnvironment, "torchrun")
ENVIRONMENT_REGISTRY.register("torchrun", TorchElasticEnvironment, "torchrun")
ENVIRONMENT_REGISTRY.register("process_group", ProcessGroupEnvironment, "an initialised torch.distributed")
