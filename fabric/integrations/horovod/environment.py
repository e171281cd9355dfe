"""`HorovodEnvironment`: ranks that `horovodrun` started."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from fabric.integrations.horovod.package import load_horovod
from fabric.launch.stores import prefix_store, reserve_port
from fabric.plugins.environments.started import ExternalEnvironment

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store


class HorovodEnvironment(ExternalEnvironment):
    """Processes started by `horovodrun`. Horovod broadcasts the address and port of rank zero."""

    launcher = "horovodrun"
    variables = {
        "rank": ("HOROVOD_RANK",),
        "size": ("HOROVOD_SIZE",),
        "local_rank": ("HOROVOD_LOCAL_RANK",),
        "local_size": ("HOROVOD_LOCAL_SIZE",),
        "node_rank": ("HOROVOD_CROSS_RANK",),
        "nodes": ("HOROVOD_CROSS_SIZE",),
    }
    marker_variables = ("HOROVOD_RANK",)
    remedy = "start it with `horovodrun -np {tasks} python train.py`"

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the key-value store of the job, hosted by rank zero. All ranks must call this."""
        endpoint = None
        if rank == 0:
            several = (self.num_nodes() or 1) > 1
            address = os.environ.get("MASTER_ADDR") or (socket.gethostname() if several else "127.0.0.1")
            endpoint = address, reserve_port(address, 0, one_interface=several)
        address, port = load_horovod().broadcast_object(endpoint, 0, name="fabric.store")
        return prefix_store(address, port, rank == 0, timeout)
