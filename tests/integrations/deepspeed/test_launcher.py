"""One script, started by itself, and by DeepSpeed's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).with_name("train.py")
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command", [[sys.executable], [str(BIN / "deepspeed"), "--num_gpus", "2"]], ids=["python", "deepspeed"]
)
def test_the_loop_is_plain_torch(tmp_path, command):
    paths = [str(BIN), os.environ["PATH"]]
    environ = {**os.environ, "PATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(SCRIPT.parents[3])
    file = tmp_path / "losses.pt"
    done = subprocess.run(
        [*command, SCRIPT, file], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(torch.load(file), torch.stack(losses))
