"""Two ranks that share one device. On CUDA by gloo, since NCCL refuses them. Skipped without a device."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, KIND, peak
from torch import nn

from fabric import Fabric
from fabric.strategies import DDPStrategy, FSDPStrategy

pytestmark = pytest.mark.gpu

WIDTH, STEPS = 256, 4
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": partial(FSDPStrategy, auto_wrap_policy={nn.Linear}),
}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
    )


def data() -> torch.Tensor:
    return torch.randn(STEPS, 2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def fabric_of(strategy: str) -> Fabric:
    """What a user writes for two ranks on one GPU."""
    backend = "gloo" if KIND == "cuda" else None  # the pretend device has one backend, which allows it
    chosen = STRATEGIES[strategy](
        parallel_devices=[DEVICE, DEVICE], process_group_backend=backend, start_method="forkserver"
    )
    return Fabric(accelerator=KIND, strategy=chosen)


def missing_in_backend(fabric: Fabric) -> str:
    """The error of torch's own collectives of a sharded step in this group; "" if there is none."""
    world = dist.get_world_size()
    part, whole = torch.ones(4, device=fabric.device), torch.empty(4 * world, device=fabric.device)
    try:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)  # as fully_shard does
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return ""


def train(fabric: Fabric, sharded: bool) -> dict[str, Any]:
    if sharded and (error := missing_in_backend(fabric)):
        return {"skip": f"torch's {dist.get_backend()} cannot run a sharded step: {error}"}
    with peak() as setup:
        model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in data()[:, fabric.global_rank]:
        optimizer.zero_grad()
        fabric.backward(model(fabric.to_device(batch)).pow(2).mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
    state = fabric.strategy.get_module_state_dict(model)
    first = sum([float(value.sum()) for value in fabric.broadcast(state).values()])
    return {
        "state": {key: value.float().cpu() for key, value in state.items()},
        "checksum": first,
        "held": setup.now,
        "devices": [str(device) for device in fabric.strategy.all_gather_object(fabric.device)],
        "ranks": [
            float(rank) for rank in fabric.all_gather(torch.tensor(float(fabric.global_rank), device=DEVICE))
        ],
        "backend": dist.get_backend_config(),
    }


def train_plain() -> dict[str, torch.Tensor]:
    model = net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in data():
        optimizer.zero_grad()
        model(batch.flatten(0, 1).to(DEVICE)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_on_one_device_equal_plain_torch(strategy):
    got = fabric_of(strategy).launch(train, strategy == "fsdp")
    if "skip" in got:
        pytest.skip(got["skip"])
    torch.testing.assert_close(got["state"], train_plain(), atol=1e-5, rtol=1e-5)
    assert got["devices"] == [str(DEVICE)] * 2
    assert got["ranks"] == [0.0, 1.0]
    assert ("gloo" if KIND == "cuda" else "simnccl") in got["backend"]
    assert "nccl" not in got["backend"].replace("simnccl", "")
    size = sum([p.nbytes for p in net().parameters()])
    if strategy == "fsdp":
        assert size / 2 <= got["held"] <= size / 2 * 1.05 + 8192
    else:
        assert got["held"] >= size
