"""Ranks that Kubeflow's training operator started, one in each pod. Reads the variables of the pod."""

from __future__ import annotations

import os

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.started import StartedEnvironment


class KubeflowEnvironment(StartedEnvironment):
    """One process in each pod of a PyTorchJob; with several in a pod, torchrun starts them."""

    launcher = "the PyTorchJob"
    variables = {"rank": ("RANK",), "size": ("WORLD_SIZE",), "node_rank": ("RANK",)}
    marks = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_PORT")

    @classmethod
    def sign(cls) -> tuple[bool, str]:
        """Whether Kubeflow's operator started this pod; a launcher inside it would set LOCAL_RANK."""
        return (False, "") if "LOCAL_RANK" in os.environ else super().sign()

    def local_rank(self) -> int:
        """0: a pod has one process."""
        return 0

    def local_world_size(self) -> int | None:
        """1: a pod has one process."""
        return 1

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the pods with what the script asks for.

        Raises:
            ConfigurationError: The numbers differ, or the pods were meant for torchrun.
        """
        per_pod = os.environ.get("PET_NPROC_PER_NODE", "")
        if per_pod.isdecimal() and int(per_pod) > 1:
            raise ConfigurationError(
                f"The PyTorchJob has nprocPerNode {per_pod} (PET_NPROC_PER_NODE), so WORLD_SIZE="
                f"{self.world_size()} counts {per_pod} processes in each pod, but python runs as one. Write "
                "`torchrun train.py` as the command of the pods (it reads the PET_ variables), or "
                'nprocPerNode: "1".'
            )
        super().validate_settings(num_devices, num_nodes)

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        if num_devices > 1:
            return (
                f'set nprocPerNode: "{num_devices}", the replicas (master and workers) to {num_nodes} and '
                "the command of the pods to `torchrun train.py`"
            )
        return f"set the replicas (master and workers) to {num_nodes}"
