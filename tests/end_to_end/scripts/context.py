"""A subject for test_launch: `context.py START_METHOD` (or `alone`): a sequence divided over 2 ranks."""

import json
import os
import sys

import torch
from torch import nn

from fabric import Fabric
from fabric.strategies import ContextParallel, DDPStrategy


def train(fabric: Fabric) -> None:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in torch.randn(3, 2, 13, 8):
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
    os.write(1, (json.dumps({"rank": fabric.global_rank, "loss": round(loss.item(), 5)}) + "\n").encode())


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "alone":
        train(Fabric(accelerator="cpu", devices=1))
        sys.exit()
    part = ContextParallel(2, blocks={nn.TransformerEncoderLayer})
    strategy = DDPStrategy(start_method=how, context_parallel=part)
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train)
