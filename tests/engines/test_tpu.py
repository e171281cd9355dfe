"""`accelerator="tpu"`: torch's device type of that name, where torch_tpu has registered one; else why not."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from fabric import Fabric
from fabric.accelerators.select import group_backend, select_accelerator, select_devices
from fabric.core.errors import ConfigurationError
from fabric.integrations.tpu.accelerator import TPUAccelerator


def packages(monkeypatch, folder, *names):
    """Packages that end the process when they are imported, as torch_tpu does without libtpu."""
    for name in names:
        (folder / f"{name}.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(folder))


def refusal():
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="tpu")
    return str(caught.value)


def test_without_the_package():
    assert refusal() == (
        'accelerator="tpu" cannot be used: the package torch_tpu is not installed on this machine '
        f'(torch {torch.__version__}). Write accelerator="cpu" or "auto", or run `pip install '
        '"torch-fabric[tpu]"` on a machine with TPUs.'
    )


def test_it_is_looked_for_and_never_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(TPUAccelerator, "device_files", tmp_path)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    packages(monkeypatch, tmp_path, "torch_tpu")
    assert "torch_tpu is installed without libtpu" in refusal()
    packages(monkeypatch, tmp_path, "libtpu")
    assert "this process sees no TPU (neither /dev/vfio/N nor /dev/accelN)" in refusal()
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # the driver's own, without a device
    assert "this process sees no TPU" in refusal()
    (tmp_path / "vfio" / "0").touch()
    assert "torch_tpu supports no TPU of this machine" in refusal()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_tpu" in refusal()
    assert {"torch_tpu", "libtpu"}.isdisjoint(sys.modules)


def test_what_torch_registers_is_used(monkeypatch):
    monkeypatch.setattr(torch, "tpu", SimpleNamespace(device_count=lambda: 4), raising=False)
    backends = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setitem(backends, "tpu", "tpu_dist")
    monkeypatch.setattr(
        TPUAccelerator, "get_parallel_devices", lambda self, indices: [("tpu", i) for i in indices]
    )
    accelerator = select_accelerator("tpu")
    assert type(accelerator) is TPUAccelerator
    assert select_devices(accelerator, "auto") == [("tpu", i) for i in range(4)]
    assert select_devices(accelerator, [1, 3]) == [("tpu", 1), ("tpu", 3)]
    with pytest.raises(ConfigurationError, match="This machine has 4 TPU devices: 0, 1, 2, 3"):
        select_devices(accelerator, 5)
    assert group_backend(accelerator, SimpleNamespace(type="tpu")) == "cpu:gloo,tpu:tpu_dist"


@pytest.mark.parametrize(
    ("name", "instead"), [("xla", "ddp"), ("xla_fsdp", "fsdp"), ("single_xla", "single_device")]
)
def test_the_names_of_torch_xla_say_what_to_write(name, instead):
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", strategy=name)
    assert str(caught.value) == (
        f"strategy={name!r} is torch_xla's, whose last version (2.9) does not load with torch 2.10 or newer. "
        f"Its successor torch_tpu makes TPUs devices like any other: write accelerator='tpu', "
        f'strategy={instead!r}, and run `pip install "torch-fabric[tpu]"`.'
    )
