"""The model of the strategy contract: two blocks, so that a pipeline can split it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class SubjectHead(torch.nn.Linear):
    """A layer with a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 8) to (batch, 1)."""
        return super().forward(x) * self.scale


class Subject(torch.nn.Sequential):
    """Two blocks that map (batch, 4) to (batch, 1)."""

    def __init__(self) -> None:
        body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        super().__init__(OrderedDict(body=body, head=SubjectHead()))


def subject() -> tuple[Subject, torch.optim.Optimizer]:
    """Return the model, always with the same values, and its optimizer."""
    torch.manual_seed(1)
    net = Subject()
    return net, sgd(net)


def sgd(net: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum for a model, set up or not."""
    # Not Adam: it hides gradients that are summed instead of averaged.
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
