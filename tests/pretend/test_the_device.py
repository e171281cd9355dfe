"""The pretend accelerator itself: that it refuses, counts and forgets as a real one."""

import copy
import io
import math

import pytest
import torch
from sim_build import missing
from torch import nn

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"the pretend accelerator cannot be built: {missing()}"
)
X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def syncs():
    from sim import HostSyncs

    return HostSyncs


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + X,
        lambda x: x @ X.t(),
        lambda x: torch.cat([x, X]),
        nn.Linear(3, 1),
        lambda x: x + x.to("sim:0"),
    ],
)
def test_tensors_of_two_devices_do_not_meet(mixed):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mixed(X.to("sim:1"))


def test_what_may_be_on_the_host():
    x = X.to("sim:1")
    assert torch.equal((x * torch.tensor(2.0)).cpu(), X * 2)
    assert torch.equal(x[torch.tensor([1])].cpu(), X[1:])
    with pytest.raises(TypeError, match="can't convert sim:1 device type tensor to numpy"):
        x.numpy()


def test_memory_is_counted_and_not_initialised():
    torch.sim.reset_peak_memory_stats(2)
    before = torch.sim.memory_allocated(2)
    made = torch.empty(1000, device="sim:2")
    assert made.isnan().all()
    assert torch.sim.memory_allocated(2) == before + 4000
    del made
    assert torch.sim.memory_allocated(2) == before
    assert torch.accelerator.max_memory_allocated("sim:2") >= before + 4000


def test_every_wait_of_the_host_is_counted(syncs):
    x = torch.ones(3, device="sim")
    with syncs() as waits:
        x.add_(1).sum()
        X.pin_memory().to("sim", non_blocking=True)
    assert not waits.kinds
    with syncs() as waits:
        x.sum().item()
        x.cpu()
        x.nonzero()
        torch.tensor([1.0], device="sim")
        torch.accelerator.synchronize()
    assert waits.kinds == {
        "item": 1,
        "copy to cpu": 1,
        "nonzero": 1,
        "copy from cpu": 1,
        "synchronize device": 1,
    }


def test_random_streams_of_a_device():
    torch.manual_seed(3)
    first, host = torch.rand(5, device="sim"), torch.get_rng_state()
    assert torch.equal(host, torch.get_rng_state())
    state = torch.sim.get_rng_state()
    one = torch.rand(5, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(one, torch.rand(5, device="sim"))
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device="sim"))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_model_trains_as_on_the_cpu(optimizer):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    models = [host, copy.deepcopy(host).to("sim:1")]
    for model in models:
        stepper = optimizer(model.parameters(), lr=0.01)
        for _ in range(3):
            stepper.zero_grad()
            model(X.to(next(model.parameters()).device)).pow(2).mean().backward()
            stepper.step()
    for one, other in zip(*[model.parameters() for model in models], strict=True):
        torch.testing.assert_close(one, other.cpu())


def test_saved_tensors_know_their_device():
    file = io.BytesIO()
    torch.save({"x": X.to("sim:3")}, file)
    assert torch.load(io.BytesIO(file.getvalue()))["x"].device == torch.device("sim:3")
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), map_location="cpu")["x"], X)


def test_a_scaler_skips_what_is_not_finite():
    model = nn.Linear(2, 2).to("sim")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("sim")
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 2), math.inf, device="sim")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, model.weight)
