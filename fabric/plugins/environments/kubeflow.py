"""`KubeflowEnvironment`: ranks of Kubeflow's training operator, one per pod. Reads the pod's variables."""

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
    marker_variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_PORT")

    @classmethod
    def detect_with_reason(cls) -> tuple[bool, str]:
        """Return whether Kubeflow's operator started this process; a launcher in the pod sets LOCAL_RANK."""
        return (False, "") if "LOCAL_RANK" in os.environ else super().detect_with_reason()

    def _remedy(self, num_devices: int, num_nodes: int) -> str:
        if num_devices > 1:
            return (
                f'set nprocPerNode: "{num_devices}", the replicas (master and workers) to {num_nodes} and '
                "the command of the pods to `torchrun train.py`"
            )
        return f"set the replicas (master and workers) to {num_nodes}"
