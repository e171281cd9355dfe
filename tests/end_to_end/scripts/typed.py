"""A user's script, as type checkers read it. test_installed has it checked, and runs it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from fabric import Fabric
from fabric.wrappers import _FabricModule


class Net(nn.Module):
    width: int = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(self.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def describe(self, times: int) -> str:
        return "net" * times


def count(loader: DataLoader[Any]) -> int:
    return len(list(loader))


def train(fabric: Fabric) -> None:
    nets = [Net() for _ in range(6)]
    data = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
    sgd, adam = SGD(nets[0].parameters(), lr=0.1), Adam(nets[1].parameters())

    model, optimizer = fabric.setup(nets[0], sgd)
    assert_type(model, Net)
    assert_type(optimizer, SGD)
    assert_type(model.describe(2), str)
    assert_type(model.width, int)
    assert_type(optimizer.state_dict(), dict[str, Any])
    assert_type(fabric.setup(nets[2]), Net)
    alone = fabric.setup_module(nets[1])
    assert_type(alone, Net)
    assert_type(fabric.setup_optimizers(adam), Adam)

    two = nets[3], SGD(nets[3].layer.parameters(), lr=0.1), Adam(nets[3].parameters())
    assert_type(fabric.setup(*two), tuple[Net, SGD, Adam])
    last = SGD(nets[4].parameters(), lr=0.1)
    schedule = StepLR(last, 3)
    assert_type(fabric.setup(nets[4], last, scheduler=schedule), tuple[Net, SGD, StepLR])

    loader = fabric.setup_dataloaders(data)
    loader.set_epoch(1)
    assert_type(loader.state_dict(), dict[str, Any])
    first, second = fabric.setup_dataloaders(data, data)
    assert count(first) == count(second) == len(loader)

    marked = fabric.setup(nets[5])
    assert isinstance(marked, _FabricModule)
    marked.mark_forward_method("describe")
    for (x,) in loader:
        optimizer.zero_grad()
        fabric.backward(model(x).mean())
        optimizer.step()
    fabric.print(f"{model.describe(1)} {model.width}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    train(fabric)
