import subprocess
import sys

import pytest
import torch

from fabric.accelerators import find_usable_cuda_devices, usable
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError


@pytest.fixture
def four_gpus(monkeypatch):
    """Four devices in a process that has CUDA initialised; 1 and 3 are held by somebody else."""
    zeros = torch.zeros

    def allocate(*shape, device):
        if device.index in (1, 3):
            raise torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return zeros(*shape)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "zeros", allocate)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("asked", "found"), [(-1, [0, 2]), (1, [0]), (2, [0, 2]), (0, [])])
def test_occupied_devices_are_skipped(asked, found):
    assert find_usable_cuda_devices(asked) == found


@pytest.mark.usefixtures("four_gpus")
def test_the_default_is_all_that_are_usable():
    assert find_usable_cuda_devices() == [0, 2]


@pytest.mark.usefixtures("four_gpus")
def test_fewer_usable_than_asked():
    with pytest.raises(
        UsageError,
        match=r"found 2 usable of 4 CUDA devices\..* 1: CUDA error: all .* 3: CUDA.*Write devices=\[0, 2\]",
    ):
        find_usable_cuda_devices(3)
    with pytest.raises(RuntimeError, match="see nvidia-smi"):
        find_usable_cuda_devices(4)


@pytest.mark.usefixtures("four_gpus")
def test_all_occupied(monkeypatch):
    monkeypatch.setattr(usable, "_refusal", lambda device: "busy")
    assert find_usable_cuda_devices(-1) == []
    with pytest.raises(UsageError, match=r"found 0 usable of 4.*0: busy; 1: busy.*wait for it"):
        find_usable_cuda_devices(1)


@pytest.mark.usefixtures("four_gpus")
def test_more_than_the_machine_has():
    with pytest.raises(
        ConfigurationError, match=r"this machine has 4 of them \(0 to 3\)\. Ask for at most 4"
    ):
        find_usable_cuda_devices(5)


@pytest.mark.parametrize("asked", [-1, 1, 2])
def test_a_machine_without_gpus(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match=r'this machine has none\. Write accelerator="cpu"'):
        find_usable_cuda_devices(asked)


def test_zero_asks_nothing_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_usable_cuda_devices(0) == []


def test_negative_counts_and_wrong_types():
    with pytest.raises(ConfigurationError, match="num_devices=-2 is negative"):
        find_usable_cuda_devices(-2)
    for wrong in (1.0, True, "2", None, [0]):
        with pytest.raises(ArgumentTypeError, match="Write an int"):
            find_usable_cuda_devices(wrong)


FAKE_TORCH = """
print("a banner of some package")
def device(kind, index):
    return index
def zeros(size, device):
    if device in {busy}:
        raise RuntimeError("busy")
"""


@pytest.mark.parametrize(("asked", "found"), [(-1, [1, 3]), (1, [1])])
def test_a_child_process_tries_the_devices(monkeypatch, tmp_path, asked, found):
    # The child imports from this process's path, so a stand-in for torch is enough to see its logic run.
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(busy=(0, 2)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert find_usable_cuda_devices(asked) == found
    with pytest.raises(UsageError, match="answered: 0: busy; 2: busy"):
        find_usable_cuda_devices(4)


def test_a_child_process_that_fails_is_reported(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken driver library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(UsageError, match="broken driver library"):
        find_usable_cuda_devices(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_real_devices_this_process_stays_uninitialised():
    code = (
        "import torch\n"
        "from fabric.accelerators import find_usable_cuda_devices\n"
        "found = find_usable_cuda_devices()\n"
        "print(torch.cuda.is_initialized(), len(found) > 0)\n"
        "torch.cuda.init()\n"
        "print(find_usable_cuda_devices() == found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
