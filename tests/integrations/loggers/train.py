"""A loop on two ranks with W&B (offline) and MLflow. Run by test_loggers.py: train.py FOLDER STRATEGY."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torchmetrics import MeanMetric

from fabric import Fabric
from fabric.loggers import MLFlowLogger, WandbLogger


def train(fabric, folder):
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for logger in fabric.loggers:
        logger.log_hyperparams(argparse.Namespace(lr=0.1, model={"width": 4}))
    mean = MeanMetric()
    for step in range(3):
        loss = model(torch.full((2, 4), float(fabric.global_rank))).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean.update(loss.detach())
        fabric.log("rank", fabric.global_rank, step, sync_dist=True)
        fabric.log_dict({"loss": loss.detach(), "mean": mean}, step)
    fabric.log("late", 7.0, step=1)
    path = folder / "step=3.pt"
    fabric.save(path, {"model": model})
    for logger in fabric.loggers:
        logger.log_artifact(path)
        logger.log_artifact(folder / "plots", "plots")
        logger.finalize("success")
    loaded = [name for name in ("wandb", "mlflow") if name in sys.modules]
    (folder / f"rank-{fabric.global_rank}.txt").write_text(" ".join(loaded))


if __name__ == "__main__":
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    loggers = [
        WandbLogger("first", folder, offline=True, project="tests", settings={"console": "off"}),
        MLFlowLogger("tests", "first", save_dir=folder / "mlruns"),
    ]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=loggers)
    if strategy == "ddp":
        fabric.launch()
        train(fabric, folder)
    else:
        fabric.launch(train, folder)
