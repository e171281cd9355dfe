"""The paths of devices, on one or more. Skipped, visibly, where there is none."""

import copy

import pytest
import torch
from accelerated import DEVICE, KIND
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.utilities.apply_func import move_data_to_device

pytestmark = pytest.mark.gpu


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def train(fabric: Fabric, steps: int = 5) -> list[torch.Tensor]:
    net = model()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    data = torch.randn(steps, 16, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = net(fabric.to_device(x)).pow(2).mean()
        fabric.backward(loss)
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"])
def test_one_device_in_every_precision(precision):
    fabric = Fabric(accelerator=KIND, devices=1, precision=precision)
    losses = train(fabric)
    assert fabric.device == DEVICE
    assert all(loss.device == fabric.device for loss in losses)
    assert losses[-1] < losses[0]


def test_one_device_equals_plain_torch():
    fabric = Fabric(accelerator=KIND, devices=1)
    got = train(fabric)
    net = model().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    data = torch.randn(5, 16, 8, generator=torch.Generator().manual_seed(1))
    for x, want in zip(data, got, strict=True):
        optimizer.zero_grad()
        loss = net(x.to(DEVICE)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        assert torch.equal(loss, want)


def test_ddp_over_the_devices_backend_with_host_tensors_beside_it(ranks):
    (result,) = ranks.run(ddp_on_one_device, world_size=1, group=False)
    assert result == ([0.0], 1.0, "cpu", KIND)


def ddp_on_one_device():
    fabric = Fabric(accelerator=KIND, devices=1, strategy="ddp_spawn")
    fabric.strategy.setup_environment()
    fabric._launched = True
    try:
        losses = train(fabric)
        reference = train(Fabric(accelerator=KIND, devices=1))
        gap = [float(max((a - b).abs() for a, b in zip(losses, reference, strict=True)))]
        host = fabric.all_reduce(torch.ones(3), reduce_op="sum")
        device = fabric.broadcast({"x": torch.ones(2, device=DEVICE)})["x"]
        return gap, float(host[0]), host.device.type, device.device.type
    finally:
        fabric.strategy.teardown()


def test_batches_arrive_on_the_device():
    fabric = Fabric(accelerator=KIND, devices=1)
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2, pin_memory=True))
    batches = list(loader)
    assert [b.device for b in batches] == [fabric.device] * 4
    assert torch.equal(torch.cat(batches).cpu(), torch.arange(8.0))
    stay = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2), move_to_device=False)
    assert next(iter(stay)).device.type == "cpu"


def test_init_module_and_tensor_are_made_on_the_device():
    fabric = Fabric(accelerator=KIND, devices=1, precision="bf16-true")
    with fabric.init_module():
        net = torch.nn.Linear(2, 2)
    with fabric.init_tensor():
        x = torch.zeros(2)
    assert net.weight.device == x.device == fabric.device
    assert net.weight.dtype == x.dtype == torch.bfloat16


def test_a_checkpoint_of_the_device_loads_on_the_host(tmp_path):
    fabric = Fabric(accelerator=KIND, devices=1)
    net = fabric.setup(model())
    fabric.save(tmp_path / "x.pt", {"model": net})
    plain = model()
    with torch.no_grad():
        plain[0].weight.zero_()
    Fabric(accelerator="cpu").load(tmp_path / "x.pt", {"model": plain})
    assert all(torch.equal(a, b.cpu()) for a, b in zip(plain.parameters(), net.parameters(), strict=True))


def test_a_skipped_step_of_the_scaler():
    fabric = Fabric(accelerator=KIND, devices=1, precision="16-mixed")
    net = model()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = copy.deepcopy(net.state_dict())
    fabric.backward(net(torch.full((2, 8), 1e3, device=DEVICE)).pow(2).sum() * 1e6)
    fabric.clip_gradients(net, optimizer, max_norm=1.0)
    optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_moving_a_batch_is_asynchronous_and_right():
    batch = {"x": torch.arange(4.0).pin_memory(), "y": [torch.ones(2)]}
    moved = move_data_to_device(batch, torch.device(KIND))
    assert moved["x"].device.type == moved["y"][0].device.type == KIND
    assert moved["x"].sum() == 6
