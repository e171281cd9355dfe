"""What blocks of a pipeline send that is on the host stays there, as it would within one process."""

import pytest
import torch
from counting import fabric_of
from torch import nn

from fabric.strategies import PipelineStrategy


class First(nn.Linear):
    """Gives lengths on the host beside what it computes."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return {"x": super().forward(x), "lengths": torch.arange(len(x)), "scale": torch.ones(len(x), 1)}


class Second(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, given):
        assert given["lengths"].device.type == given["scale"].device.type == "cpu"
        mask = (given["lengths"] >= 0).to(given["x"].device)
        return super().forward(given["x"]) * mask[:, None], given["scale"]


def net():
    torch.manual_seed(4)
    return nn.Sequential(First(), nn.Identity(), Second())


def stages(settings):
    fabric = fabric_of(PipelineStrategy(num_microbatches=2, balance=[1, 2], **settings))
    model, optimizer = net(), None
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)).to(fabric.device)
    losses = []
    for batch in x:
        optimizer.zero_grad()
        out, scale = model(batch)
        assert scale.device.type == "cpu"
        loss = out.pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", [{}, {"process_group_backend": "simnccl"}])
def test_tensors_of_the_host_between_stages(ranks, settings):
    plain, expected = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        loss = plain(batch)[0].pow(2).mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in ranks.run(stages, settings, world_size=2):
        assert found == pytest.approx(expected, rel=1e-5)
