"""Steps on one device: host syncs, peak memory, CUDA graphs, async saves. Skipped without a device."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from accelerated import DEVICE, KIND, MODULE, captured, host_syncs, peak
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.report.format import STEP, read
from fabric.strategies import DDPStrategy, FSDPStrategy, ZeRO1Strategy

pytestmark = pytest.mark.gpu

WIDTH, DEPTH = 512, 8
BLOCK = (WIDTH + 1) * WIDTH * 4
"""Bytes of a block's parameters."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


def net(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[Block() for _ in range(depth)], nn.Linear(WIDTH, 4))


STRATEGIES: dict[str, Any] = {
    "single": lambda: "single_device",
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "fsdp": partial(FSDPStrategy, auto_wrap_policy={Block}),
}


def fabric_of(strategy: str, **kwargs: Any) -> Fabric:
    fabric = Fabric(accelerator=KIND, devices=1, strategy=STRATEGIES[strategy](), **kwargs)
    fabric.launch()
    return fabric


# Host syncs


def test_the_counter_of_host_syncs_counts():
    x = torch.ones(4, device=DEVICE)
    with host_syncs() as places:
        x.sum().item()
    assert places
    with host_syncs() as places:
        x.cpu()
    assert places
    with host_syncs() as places:
        x.add_(1)
    assert places == []


def syncs_of_steps(strategy: str, precision: str, **kwargs: Any) -> list[list[str]]:
    fabric = fabric_of(strategy, precision=precision, **kwargs)
    model = fabric.setup_module(net(2))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-3, fused=True))
    rows = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=8, pin_memory=True))
    found = []
    batches = iter(loader)
    for _ in range(len(loader)):
        with host_syncs() as places:
            optimizer.zero_grad()
            loss = model(next(batches)).pow(2).mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
        found.append(places)
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_steady_step_has_no_host_sync(ranks, strategy, precision):
    (found,) = ranks.run(syncs_of_steps, strategy, precision, world_size=1)
    assert len(found) == 6
    assert found[1:] == [[]] * 5  # the first step allocates and compiles


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recorded_step_has_no_host_sync_and_the_peak_of_the_device(ranks, tmp_path, strategy):
    ((found, most),) = ranks.run(recorded_steps, strategy, str(tmp_path), world_size=1)
    assert found[1:] == [[]] * 5
    records = [record for record in read(tmp_path / "rank-00000.bin") if isinstance(record, bytes)]
    *_, kibibytes = STEP.unpack_from(b"".join(records))  # of the first step
    assert 0 < kibibytes <= most // 1024
    assert kibibytes > DEPTH * BLOCK // 1024


def recorded_steps(strategy: str, folder: str) -> tuple[list[list[str]], int]:
    return syncs_of_steps(strategy, "32-true", report=folder), MODULE.max_memory_allocated()


def test_a_step_with_a_loss_scale_has_no_more_host_syncs_than_in_plain_torch(ranks):
    (found,) = ranks.run(syncs_of_steps, "single", "16-mixed", world_size=1)
    (plain,) = ranks.run(syncs_of_plain_steps, world_size=1)
    assert [len(places) for places in plain[1:]] == [1] * 5  # the scaler reads whether gradients are finite
    assert all(len(ours) <= len(torchs) for ours, torchs in zip(found[1:], plain[1:], strict=True)), found


def syncs_of_plain_steps() -> list[list[str]]:
    model = net(2).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(KIND)
    rows = torch.randn(6, 8, WIDTH).pin_memory()
    found = []
    for row in rows:
        with host_syncs() as places:
            optimizer.zero_grad()
            with torch.autocast(KIND, torch.float16):
                out = model(row.to(DEVICE, non_blocking=True))
            scaler.scale(out.float().pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        found.append(places)
    return found


# Peak memory


def warm() -> None:
    """Let libraries allocate what they keep, such as cuBLAS' workspace, before bytes are counted."""
    model = net(1).to(DEVICE)
    for _ in range(2):
        model(torch.ones(8, WIDTH, device=DEVICE)).pow(2).mean().backward()


def peak_of_setup(how: str) -> tuple[float, float, float]:
    """In blocks: most bytes during setup, bytes after it, bytes of the model."""
    fabric = fabric_of("fsdp")
    with peak() as found:
        with fabric.init_module(empty_init=True) if how == "empty" else nullcontext():
            model = net()
        model = fabric.setup_module(model)
    held = sum([p.to_local().nbytes for p in model.parameters()])
    return found.most / BLOCK, found.now / BLOCK, held / BLOCK


@pytest.mark.parametrize("how", ["host", "empty"])
def test_setup_of_fsdp_holds_its_part_and_one_block(ranks, how):
    ((most, now, held),) = ranks.run(peak_of_setup, how, world_size=1)
    assert DEPTH < held < DEPTH + 0.1
    assert held <= now <= held + 0.1
    assert most <= held + 2.1  # of one rank the part of a block is a block


def peaks_of_steps(strategy: str) -> dict[str, tuple[float, float, float]]:
    """In blocks, by whose step it is: most bytes during setup, bytes after it, most bytes added by a step."""
    warm()
    found = {}
    for whose in ("ours", "torch"):
        fabric = fabric_of(strategy)
        model: Any = net()
        with peak() as setup:
            if whose == "ours":
                model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
            else:
                model, optimizer = plain_setup(strategy, model)
        x = torch.ones(8, WIDTH, device=DEVICE)
        for _ in range(3):
            with peak() as used:
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                fabric.backward(loss) if whose == "ours" else loss.backward()
                optimizer.step()
        found[whose] = setup.most / BLOCK, setup.now / BLOCK, used.most / BLOCK
        del model, optimizer, loss
        fabric.strategy.teardown()
    return found


def plain_setup(strategy: str, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    model.to(DEVICE)
    if strategy == "fsdp":
        mesh = init_device_mesh(KIND, (1,))
        for block in [m for m in model.modules() if isinstance(m, Block)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_setup_and_step_hold_no_more_than_in_plain_torch(ranks, strategy):
    (found,) = ranks.run(peaks_of_steps, strategy, world_size=1)
    assert all([a <= b + 0.2 for a, b in zip(found["ours"], found["torch"], strict=True)]), found
    assert found["ours"][1] > DEPTH  # the model is on the device


# CUDA graphs


def train_captured(precision: str, steps: int, ours: bool) -> list[torch.Tensor]:
    """The parameters after three eager steps and `steps` replays of one."""
    fabric = Fabric(accelerator=KIND, devices=1, precision=precision)
    model: Any = net(2) if ours else net(2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ours:
        model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        if ours:
            loss = model(x).pow(2).mean()
            fabric.backward(loss)
        else:
            with torch.autocast(KIND, torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
                out = model(x)
            out.float().pow(2).mean().backward()
        optimizer.step()

    repeat = captured(step)
    for number in range(steps):
        x.fill_(1.0 + number)  # a replay reads the memory of the captured input
        repeat()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_captured_step_equals_that_of_plain_torch(precision):
    got, expected = (train_captured(precision, 4, ours) for ours in (True, False))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    fewer = train_captured(precision, 3, True)
    assert not torch.equal(got[0], fewer[0])  # each replay trains


# Saves


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_an_async_save_holds_the_values_of_its_call(ranks, tmp_path, strategy):
    ranks.run(save_beside_the_loop, strategy, str(tmp_path / "a.pt"), world_size=1)


def save_beside_the_loop(strategy: str, path: str) -> None:
    fabric = fabric_of(strategy)
    model = fabric.setup_module(net(2))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
    x = torch.ones(8, WIDTH, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()

    step()
    expected = {k: v.cpu().clone() for k, v in fabric.strategy.get_module_state_dict(model).items()}
    saving = fabric.save(path, {"model": model, "optimizer": optimizer}, wait=False)
    for _ in range(5):
        step()  # writes the memory that the save was asked to keep
    saving.wait()
    loaded = fabric.load(path)["model"]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key].cpu(), expected[key]) for key in expected)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    again = fabric.strategy.get_module_state_dict(model)
    assert all(torch.equal(again[key].cpu(), expected[key]) for key in expected)


def test_an_async_save_waits_at_most_once_for_the_device(tmp_path):
    fabric = Fabric(accelerator=KIND, devices=1)
    model = net(2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    fabric.backward(model(torch.ones(8, WIDTH, device=DEVICE)).pow(2).mean())
    optimizer.step()
    with host_syncs() as places:
        saving = fabric.save(tmp_path / "a.pt", {"model": model, "optimizer": optimizer}, wait=False)
    saving.wait()
    assert len(places) <= 1, places
