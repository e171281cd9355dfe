"""Ranks that Kubeflow's training operator started, one in each pod. Reads the variables of the pod."""

from __future__ import annotations

import os

from fabric.plugins.environments.started import ExternalEnvironment


class KubeflowEnvironment(ExternalEnvironment):
    """One process in each pod of a PyTorchJob; with several in a pod, torchrun starts them."""

    launcher = "the PyTorchJob"
    variables = {
        "rank": ("RANK",),
        "size": ("WORLD_SIZE",),
        "local_rank": (0,),  # a pod has one process
        "local_size": (1,),
        "node_rank": ("RANK",),
    }
    marks = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_PORT")

    @classmethod
    def sign(cls) -> tuple[bool, str]:
        """Whether Kubeflow's operator started this pod; a launcher inside it would set LOCAL_RANK."""
        return (False, "") if "LOCAL_RANK" in os.environ else super().sign()

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        if num_devices > 1:
            return (
                f'set nprocPerNode: "{num_devices}", the replicas (master and workers) to {num_nodes} and '
                "the command of the pods to `torchrun train.py`"
            )
        return f"set the replicas (master and workers) to {num_nodes}"
