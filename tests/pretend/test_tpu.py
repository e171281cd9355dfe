"""The TPU accelerator on the pretend device: all of it but the name is the generic accelerator's."""

from __future__ import annotations

import pytest
import torch

from fabric import Fabric
from fabric.integrations.tpu.accelerator import TPUAccelerator

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not hasattr(torch, "sim"), reason="needs the pretend device"),
]


class PretendTPU(TPUAccelerator):
    @classmethod
    def name(cls):
        return "sim"


def train(strategy):
    fabric = Fabric(accelerator=PretendTPU(), devices=2, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.arange(8.0).view(2, 4)[fabric.global_rank : fabric.global_rank + 1]
    fabric.backward(model(fabric.to_device(x)).pow(2).mean())
    optimizer.step()
    weights = fabric.strategy.get_module_state_dict(model)
    return fabric.device.type, weights["weight"].cpu()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_on_it(ranks, strategy):
    (kind, weights), (_, same) = ranks.run(train, strategy, world_size=2)
    assert kind == "sim"
    assert torch.isfinite(weights).all()
    assert strategy != "ddp" or torch.equal(weights, same)
