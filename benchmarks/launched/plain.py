"""Two ranks by hand: the script starts itself once more, joins the group and meets the other at a barrier."""

import os
import socket
import subprocess
import sys

if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK="0")
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "0" and "other" in globals():
    sys.exit(other.wait())
