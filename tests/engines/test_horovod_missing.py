"""Horovod where it is not installed, and what horovodrun tells a process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fabric import Fabric
from fabric.core.errors import ConfigurationError, MissingExtraError
from fabric.integrations.horovod import scale_learning_rate
from fabric.integrations.horovod.environment import HorovodEnvironment
from fabric.plugins.environments.detect import find_environment

TOLD = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_a_missing_package():
    with pytest.raises(MissingExtraError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy="horovod")
    assert str(caught.value) == (
        'strategy="horovod" needs the package horovod, which is not installed. Run `bash '
        'tests/integrations/horovod/install.sh VENV`, or write strategy="ddp", which needs nothing else.'
    )


def test_the_place_that_horovodrun_tells(monkeypatch):
    for name, value in TOLD.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    found = find_environment()
    assert type(found.environment) is HorovodEnvironment
    assert found.reason == "horovodrun started this process (HOROVOD_RANK=3)"
    here = found.environment
    assert (here.global_rank(), here.world_size(), here.local_rank(), here.node_rank()) == (3, 4, 1, 1)
    assert (here.local_world_size(), here.num_nodes()) == (2, 2)
    with pytest.raises(ConfigurationError, match=r"horovodrun started 4 .*`horovodrun -np 3"):
        here.validate_settings(3, 1)
    monkeypatch.setenv("HOROVOD_SIZE", "many")
    with pytest.raises(ConfigurationError, match="HOROVOD_SIZE='many' must be a whole number"):
        here.world_size()


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [4.0, 4.0, 4.0]), (2, [1.0, 2.5, 4.0, 4.0]), (3, [1.0, 2.0, 3.0, 4.0, 4.0])]
)
def test_learning_rates_are_scaled_when_asked(warmup, rates):
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, seen = scale_learning_rate(optimizer, 4, warmup), []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == rates


def test_nothing_of_it_is_loaded_unasked():
    code = "import sys; from fabric import Fabric; Fabric(accelerator='cpu', devices=1); "
    code += "print([name for name in sys.modules if 'horovod' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
