"""The last act is a save beside the loop, which ends late, or fails: how it starts, how it ends, path."""

import sys
import threading
import time

import torch

from fabric import Fabric
from fabric.plugins.io import TorchCheckpointIO
from fabric.strategies import DDPStrategy


class Late(TorchCheckpointIO):
    def __init__(self, how):
        super().__init__()
        self.fails, self.takes = how.startswith("fails"), 3 if how == "other raises" else 1

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        time.sleep(self.takes)  # the script has ended meanwhile
        if self.fails:
            raise OSError(28, "No space left on device", str(path))
        super().save_checkpoint(checkpoint, path, storage_options)


def train(fabric, how, path):
    fabric.save(path, {"w": torch.ones(2_000_000)}, wait=False)
    print("after the save of rank", fabric.global_rank, flush=True)
    if how == "other raises" and fabric.global_rank == 1:
        threading.Timer(8, print).start()  # it takes its time to end, too
        raise ValueError("boom")
    if how == "fails and raises":
        raise ValueError("boom")


if __name__ == "__main__":
    start, how, path = sys.argv[1:]
    strategy = {"one": "auto", "script": "ddp"}.get(start) or DDPStrategy(start_method=start)
    plugins = Late(how)
    fabric = Fabric(accelerator="cpu", devices=1 if start == "one" else 2, strategy=strategy, plugins=plugins)
    if start in ("one", "script"):
        fabric.launch()
        train(fabric, how, path)
    else:
        fabric.launch(train, how, path)
