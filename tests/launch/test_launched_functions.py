"""Functions that spawn, fork and forkserver run, launched from warm ranks: no new interpreter is needed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ports import free_port

from fabric import Fabric
from fabric.launch import supervisor
from fabric.strategies import DDPStrategy
from fabric.testing import rank_info


def launched(function, *args, devices=2, nodes=1):
    strategy = DDPStrategy(start_method="fork")
    return Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy).launch(
        function, *args
    )


def collects(fabric):
    gc.collect()
    return fabric.all_reduce(1.0, reduce_op="sum").item()


def launched_beside_garbage(path):
    """A process group that is garbage when ranks are forked, as after a cell of a notebook."""
    gc.disable()
    ring = [dist.ProcessGroupGloo(dist.FileStore(path, 1), 0, 1, timedelta(seconds=60))]
    ring.append(ring)
    del ring
    try:
        return launched(collects)
    finally:
        gc.enable()


def test_ranks_leave_the_garbage_of_their_parent_alone(ranks, tmp_path):
    assert ranks.run(launched_beside_garbage, f"{tmp_path}/store", world_size=1, group=False) == [2.0]


def sends_for_a_while(fabric, path):
    def send():
        time.sleep(1.5)
        Path(f"{path}{fabric.global_rank}").write_text("sent")

    threading.Thread(target=send).start()  # as loggers do
    return "done"


def upload(path):
    grace, supervisor.STOP_GRACE_S = supervisor.STOP_GRACE_S, 0.2
    note, supervisor.EXIT_NOTE_S = supervisor.EXIT_NOTE_S, 0.3
    try:
        return launched(sends_for_a_while, path)
    finally:
        supervisor.STOP_GRACE_S, supervisor.EXIT_NOTE_S = grace, note


def test_what_threads_of_a_rank_send_after_its_function_arrives(ranks, tmp_path):
    assert ranks.run(upload, f"{tmp_path}/sent", world_size=1, group=False) == ["done"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sent0", "sent1"]


def hears(fabric):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(fabric.global_rank))
    fabric.barrier()
    if fabric.global_rank == 0:
        os.kill(os.getppid(), signal.SIGUSR1)  # as a scheduler does, to the process that it has started
    while not heard:
        time.sleep(0.01)
    return fabric.all_gather(torch.tensor(heard)).flatten().tolist()


def hear():
    return launched(hears)


def test_a_signal_to_the_launching_process_is_for_the_ranks(ranks):
    assert ranks.run(hear, world_size=1, group=False) == [[0, 1]]


def place(fabric):
    variables = [os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")]
    return variables, fabric.all_gather(torch.tensor(fabric.global_rank)).tolist()


def node(port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK=str(rank_info().rank))
    try:
        return launched(place, devices=1, nodes=2)
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            del os.environ[name]


def test_a_function_on_two_machines(ranks):
    assert ranks.run(node, free_port(), world_size=2, group=False) == [
        (["2", str(rank), "1", "0"], [0, 1]) for rank in range(2)
    ]
