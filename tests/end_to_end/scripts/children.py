"""Each rank starts this script again, as a job of its own of N ranks: `children.py N`."""

import json
import multiprocessing
import os
import subprocess
import sys

from fabric import Fabric


def launch(devices):
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    return fabric


def in_a_worker(queue):
    try:
        launch(2)
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def child(*arguments):
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=100).stdout


if __name__ == "__main__":
    if sys.argv[1:]:
        fabric = launch(int(sys.argv[1]))
        value = fabric.all_reduce(100.0 + fabric.global_rank).item()
        fabric.print(json.dumps({"world_size": fabric.world_size, "value": value}))
    else:
        fabric = Fabric(accelerator="cpu", devices=2)
        before = json.loads(child("1"))
        fabric.launch()
        said = [json.loads(child(devices)) for devices in (["1", "2"] if fabric.global_rank else ["2", "1"])]
        queue = multiprocessing.get_context("spawn").Queue()
        worker = multiprocessing.get_context("spawn").Process(target=in_a_worker, args=(queue,))
        worker.start()
        refused = queue.get(timeout=100)
        worker.join()
        value = fabric.all_reduce(float(fabric.global_rank)).item()
        own = {"rank": fabric.global_rank, "value": value, "said": said, "refused": refused, "before": before}
        sys.stdout.write(json.dumps({**own, "joined": os.environ["FABRIC_JOINED"]}) + "\n")
