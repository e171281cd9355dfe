"""A job of two ranks that is attacked when it opens its connections and when it saves: job.py FOLDER HOW."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from fabric import Fabric
from fabric.checkpoint.formats.sharded.dcp import ShardWriter
from fabric.core.errors import RankError, UsageError
from fabric.guard import handshake


def sockets_of_children():
    """The sockets that a child inherits, which leaves descriptors open as os.system does."""
    command = ["ls", "-l", "/proc/self/fd"]
    child = subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {line.split()[-1] for line in child.splitlines() if "socket:" in line}


def wait_for(file):
    end = time.monotonic() + 120
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} was not made")
        time.sleep(0.02)


def train(fabric, folder):
    rank = fabric.global_rank
    # Those of the process that started the tests are not ours.
    streams = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)}
    if rank == 0:
        (folder / "port.new").write_text(os.environ["MASTER_PORT"])
        (folder / "port.new").rename(folder / "port")
    else:
        wait_for(folder / "attacked")  # until then rank zero waits in all_reduce
        connect = handshake.connect

        def late(*arguments):
            wait_for(folder / "answered")  # the stranger has answered rank zero's challenges first
            return connect(*arguments)

        handshake.connect = late
    total = fabric.all_reduce(torch.tensor(rank + 1.0), reduce_op="sum").item()
    objects = fabric.all_gather_object({"rank": rank, "large": "x" * 100_000})
    write = ShardWriter.write

    def slow(self, directory):
        found = write(self, directory)
        if rank:
            (folder / "saves").write_text(str(directory))
            wait_for(folder / "save attacked")
        return found

    ShardWriter.write = slow
    model = fabric.setup(torch.nn.Linear(4, 4))
    fabric.save(folder / "saved", {"model": model}, format="sharded")
    refused = []
    for planted in sorted(folder.glob("planted-*")):
        try:
            fabric.load(planted)
        except (UsageError, RankError) as error:
            refused.append(str(error).partition(". ")[0])
    told = {"total": total, "ranks": [one["rank"] for one in objects], "refused": refused}
    told["sockets"] = sorted(sockets_of_children() - streams)
    told["environ"] = "FABRIC_JOB_SECRET" in os.environ
    sys.stdout.write(json.dumps({"rank": rank, **told}) + "\n")


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2]
    os.umask(0o002)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=how)
    if how == "ddp":
        fabric.launch()
        train(fabric, folder)
    else:
        fabric.launch(train, folder)
