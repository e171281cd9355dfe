"""Ranks (BENCH_RANKS, 2) by hand: the script starts itself again, joins the group, and calls a barrier.

`plain.py first` imports torch before it starts the others, as a script does that calls `fabric.launch()`.
"""

import os
import socket
import subprocess
import sys

if "first" in sys.argv:
    import torch  # noqa: F401

if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    size = os.environ.get("BENCH_RANKS", "2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=size, RANK="0")
    others = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)})
        for rank in range(1, int(size))
    ]

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "0" and "others" in globals():
    sys.exit(max([other.wait() for other in others]))
