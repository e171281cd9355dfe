"""A device type that torch was told of by `rename_privateuse1_backend`: nothing of ours names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from counting import fabric_of
from sim import HostSyncs
from torch.utils.data import DataLoader

from fabric import Fabric, seed_everything
from fabric.accelerators import find_usable_devices
from fabric.core.errors import ConfigurationError
from fabric.data.prefetch import SideStream
from fabric.strategies import PipelineStrategy
from fabric.utilities.seed import isolate_rng

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["sim", "auto"])
def test_by_its_name_alone(name):
    fabric = Fabric(accelerator=name, devices=1)
    assert fabric.device == torch.device("sim", 0)
    model = fabric.setup(torch.nn.Linear(2, 2))
    assert model(torch.ones(1, 2, device="sim")).device == fabric.device
    with fabric.init_tensor():
        assert torch.ones(2).device == fabric.device


def test_a_device_of_the_users_choice():
    fabric = Fabric(accelerator="sim", devices=[2])
    assert fabric.device == torch.device("sim", 2)
    fabric.launch()
    assert torch.accelerator.current_device_index() == 2
    torch.accelerator.set_device_index(0)
    with pytest.raises(ConfigurationError, match=r"This machine has 4 SIM devices: 0, 1, 2, 3"):
        Fabric(accelerator="sim", devices=[4])


SCRIPT = """
import torch, torch.distributed as dist
from fabric import Fabric

fabric = Fabric(devices="auto", strategy="ddp")
fabric.launch()
total = fabric.all_reduce(torch.ones(2, device=fabric.device) * fabric.global_rank, reduce_op="sum")
places = fabric.all_gather_object((str(fabric.device), str(total.device), total[0].item()))
if fabric.is_global_zero:
    print(places, dist.get_backend_config())
"""


@pytest.mark.slow
def test_a_script_gets_a_rank_for_each_device(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {
        **os.environ,
        "SIM_DEVICES": "2",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}",
    }
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == (
        "[('sim:0', 'sim:0', 1.0), ('sim:1', 'sim:1', 1.0)] cpu:gloo,sim:simnccl"
    )


def test_usable_devices():
    assert find_usable_devices(accelerator="sim") == [0, 1, 2, 3]
    assert find_usable_devices(2) == [0, 1]
    with pytest.raises(ConfigurationError, match=r"=5: this machine has 4 sim devices"):
        find_usable_devices(5)
    with pytest.raises(ConfigurationError, match="means cpu on this machine, of which there is one"):
        find_usable_devices(accelerator="cpu")


def test_random_numbers_are_seeded_and_kept_apart(monkeypatch):
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # which also takes them away again
    seed_everything(7)
    first = torch.rand(3, device="sim")
    seed_everything(7)
    with isolate_rng():
        torch.rand(5, device="sim")
        torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device="sim"), first)


def random_states(folder):
    fabric = fabric_of("ddp")
    torch.manual_seed(fabric.global_rank)
    torch.rand(2, device=fabric.device)
    fabric.save(folder / "state", {"rng": fabric.rng_state()})
    want = torch.rand(3, device=fabric.device), torch.rand(3)
    fabric.load(folder / "state", {"rng": fabric.rng_state()})
    assert torch.equal(torch.rand(3, device=fabric.device), want[0])
    assert torch.equal(torch.rand(3), want[1])


def test_random_states_of_the_device_are_saved(ranks, tmp_path):
    ranks.run(random_states, tmp_path, world_size=2)


class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def noise():
    """Stages draw on their own, and go on alike afterwards."""
    fabric = fabric_of(PipelineStrategy(balance=[1, 1], num_microbatches=2))
    model = fabric.setup(torch.nn.Sequential(Noise(), Noise()))
    torch.manual_seed(3)
    drawn = model(torch.zeros(2000, 2, device=fabric.device))[:, 0]
    after = torch.rand(4, device=fabric.device)
    assert fabric.agree(after.cpu()) is not None
    return drawn.cpu()


def test_stages_of_a_pipeline_draw_different_numbers(ranks):
    one, two = ranks.run(noise, world_size=2)
    assert torch.equal(one, two)
    # Two different numbers add up to one of a triangle: the variance is 1/6, of twice the same one 1/3.
    assert 0.14 < one.var() < 0.19


def test_batches_are_copied_ahead_on_a_side_stream(monkeypatch):
    handed = []
    wait_stream = SideStream.wait_stream

    def noted(side):
        handed.append(side._stream)
        wait_stream(side)

    monkeypatch.setattr(SideStream, "wait_stream", noted)
    fabric = Fabric(accelerator="sim", devices=1)
    data = DataLoader(torch.arange(8.0), batch_size=2, num_workers=1, pin_memory=True)
    with HostSyncs() as waits:
        batches = list(fabric.setup_dataloaders(data))
    assert torch.cat(batches).tolist() == list(range(8))
    assert waits.kinds["copy from cpu"] == 0
    assert len(handed) == 3
    assert handed[0] != torch.accelerator.current_stream()


def test_without_such_devices():
    code = 'from fabric import Fabric\nFabric(accelerator="sim")'
    environ = {
        **os.environ,
        "SIM_DEVICES": "0",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    assert "torch.sim.is_available() is False" in done.stderr, done.stderr
