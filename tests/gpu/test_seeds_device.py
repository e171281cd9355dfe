"""Seeds and states of the device's random generator. Skipped, visibly, where there is none."""

import pytest
import torch
from accelerated import DEVICE, KIND
from torch import nn

from fabric import Fabric
from fabric.utilities.seed import collect_rng_states, isolate_rng, set_rng_states

pytestmark = pytest.mark.gpu


def draw() -> torch.Tensor:
    return torch.randn(1000, device=DEVICE)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):  # which seed_everything sets
        monkeypatch.setenv(name, "0")


def test_a_seed_gives_the_numbers_of_torch_manual_seed():
    fabric = Fabric(accelerator=KIND, devices=1)
    fabric.seed_everything(7, verbose=False)
    first, second = draw(), draw()
    fabric.seed_everything(7, verbose=False)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(draw(), first)
    fabric.seed_everything(8, verbose=False)
    assert not torch.equal(draw(), first)


def test_collected_states_continue_the_stream_of_the_device():
    torch.manual_seed(3)
    draw()
    states = collect_rng_states()
    expected = draw()
    torch.manual_seed(4)
    assert not torch.equal(draw(), expected)
    set_rng_states(states)
    assert torch.equal(draw(), expected)


def test_isolate_rng_restores_the_stream_of_the_device():
    torch.manual_seed(3)
    draw()
    state = torch.get_device_module(KIND).get_rng_state()
    expected = draw()
    torch.get_device_module(KIND).set_rng_state(state)
    with isolate_rng():
        torch.manual_seed(5)
        draw()
    assert torch.equal(draw(), expected)


def test_dropout_masks_continue_from_a_checkpoint(tmp_path):
    fabric = Fabric(accelerator=KIND, devices=1)
    dropout = nn.Dropout(0.5)
    x = torch.ones(1000, device=DEVICE)
    torch.manual_seed(11)
    dropout(x)
    fabric.save(tmp_path / "c.pt", {"rng": fabric.rng_state()})
    expected = dropout(x)
    torch.manual_seed(12)
    assert not torch.equal(dropout(x), expected)
    fabric.load(tmp_path / "c.pt", {"rng": fabric.rng_state()})
    assert torch.equal(dropout(x), expected)
