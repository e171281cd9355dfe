import subprocess
import sys

import pytest
import torch

from fabric.accelerators import find_usable_cuda_devices
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError

FAKE_TORCH = """
print("a banner of some package")
def device(kind, index):
    return index
def zeros(size, device):
    if device in {busy}:
        raise RuntimeError("busy")
"""


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """Four devices, of which somebody else holds some."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def held(busy):
        # The child imports from this process's path, so a stand-in for torch is enough to see its logic run.
        (tmp_path / "torch.py").write_text(FAKE_TORCH.format(busy=busy))

    held((0, 2))
    return held


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("asked", "found"), [(-1, [1, 3]), (1, [1]), (2, [1, 3]), (0, [])])
def test_occupied_devices_are_skipped(asked, found):
    assert find_usable_cuda_devices(asked) == found


def test_fewer_usable_than_asked(four_gpus):
    with pytest.raises(
        UsageError,
        match=r"2 of 4 cuda devices are usable: \[1, 3\]\..*errors: 0: busy; 2: busy\. Ask for",
    ):
        find_usable_cuda_devices(3)
    four_gpus((0, 1, 2, 3))
    assert find_usable_cuda_devices() == []
    with pytest.raises(RuntimeError, match=r"0 of 4.*see nvidia-smi"):
        find_usable_cuda_devices(1)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("asked", [5, -2])
def test_more_than_the_machine_has(asked):
    with pytest.raises(
        ConfigurationError, match=rf"={asked}: this machine has 4 cuda devices\. Write at most 4"
    ):
        find_usable_cuda_devices(asked)


@pytest.mark.parametrize("asked", [-1, 1, 2])
def test_a_machine_without_gpus(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match=r'"cuda" cannot be used: .*Write accelerator="cpu"'):
        find_usable_cuda_devices(asked)


def test_zero_asks_nothing_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_usable_cuda_devices(0) == []


def test_wrong_types():
    for wrong in (1.0, True, "2", None, [0]):
        with pytest.raises(ArgumentTypeError, match="Write an int"):
            find_usable_cuda_devices(wrong)


def test_a_child_process_that_fails_is_reported(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken driver library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
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
