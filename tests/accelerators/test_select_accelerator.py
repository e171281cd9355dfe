import pytest
import torch

from fabric.accelerators import (
    ACCELERATOR_REGISTRY,
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
)
from fabric.accelerators.generic import TorchAccelerator
from fabric.accelerators.select import select_accelerator, select_devices
from fabric.core.errors import ArgumentTypeError, ConfigurationError


class Machine:
    """Sets what torch reports to be there."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch
        self.has()

    def has(self, cuda=0, mps=False, other=None, other_count=1):
        kind = "cuda" if cuda else "mps" if mps else other
        self._patch.setattr(torch.cuda, "device_count", lambda: cuda)
        self._patch.setattr(torch.backends.mps, "is_available", lambda: mps)
        device = None if kind is None else torch.device(kind)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda: device)
        if other:
            self._patch.setattr(getattr(torch, other), "device_count", lambda: other_count)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(monkeypatch)


class ThirdParty(Accelerator):
    available = True

    def setup_device(self, device):
        pass

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("meta")] * devices

    @staticmethod
    def auto_device_count():
        return 3

    @classmethod
    def is_available(cls):
        return cls.available


@pytest.fixture
def third_party():
    ACCELERATOR_REGISTRY.register("third", ThirdParty)
    yield
    ACCELERATOR_REGISTRY.remove("third")


@pytest.mark.parametrize(
    ("there", "kind"),
    [
        ({}, CPUAccelerator),
        ({"cuda": 2}, CUDAAccelerator),
        ({"mps": True}, MPSAccelerator),
        ({"cuda": 1, "mps": True}, CUDAAccelerator),
        ({"other": "xpu"}, TorchAccelerator),
        ({"other": "xpu", "other_count": 0}, CPUAccelerator),
    ],
)
def test_auto(machine, there, kind):
    machine.has(**there)
    assert type(select_accelerator("auto")) is kind


def test_auto_on_a_cuda_build_without_a_device_is_the_cpu(machine, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert type(select_accelerator("auto")) is CPUAccelerator


@pytest.mark.parametrize(("there", "kind"), [({"cuda": 1}, CUDAAccelerator), ({"mps": True}, MPSAccelerator)])
def test_gpu(machine, there, kind):
    machine.has(**there)
    assert type(select_accelerator("gpu")) is kind


def test_gpu_where_there_is_none(machine):
    with pytest.raises(ConfigurationError) as caught:
        select_accelerator("gpu")
    message = str(caught.value)
    assert message.startswith(
        'accelerator="gpu" cannot be used: torch finds neither a CUDA nor an MPS device'
    )
    assert 'Write accelerator="cpu"' in message


def test_names(machine):
    machine.has(cuda=1, mps=True)
    assert type(select_accelerator("cpu")) is CPUAccelerator
    assert type(select_accelerator("cuda")) is CUDAAccelerator
    assert type(select_accelerator("mps")) is MPSAccelerator


def test_the_device_type_of_torch_is_a_name_too(machine):
    machine.has(other="xpu")
    assert select_accelerator("xpu").name() == "xpu"
    with pytest.raises(ConfigurationError, match="Known: auto, cpu, cuda, gpu, mps, tpu, xpu"):
        select_accelerator("npu")


def test_cuda_on_a_build_without_it(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigurationError) as caught:
        select_accelerator("cuda")
    assert str(caught.value) == (
        'accelerator="cuda" cannot be used: torch.cuda.is_available() is False on this machine (torch '
        f'{torch.__version__}). Write accelerator="cpu" or "auto", or install a CUDA build of torch.'
    )


def test_cuda_on_a_build_with_it_but_no_device(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigurationError, match=r"or check the driver with nvidia-smi\.$"):
        select_accelerator("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match=r"nvidia-smi and CUDA_VISIBLE_DEVICES, which is ''\.$"):
        select_accelerator("cuda")


def test_mps_elsewhere(machine):
    with pytest.raises(ConfigurationError, match=r'"mps" .* torch\.backends\.mps\.is_available\(\) is False'):
        select_accelerator("mps")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cudaa", "Did you mean 'cuda'"),
        ("cuda:0", "Write accelerator='cuda', devices=[0]."),
        ("gpus", "Did you mean 'gpu'"),
        ("", ""),
    ],
)
def test_unknown_names(machine, name, hint):
    with pytest.raises(ConfigurationError) as caught:
        select_accelerator(name)
    message = str(caught.value)
    assert f"accelerator={name!r} is not known" in message
    assert hint in message
    assert "Known: auto, cpu, cuda, gpu, mps, tpu." in message


@pytest.mark.parametrize("wrong", [None, 1, CPUAccelerator, torch.device("cpu")])
def test_wrong_types(machine, wrong):
    with pytest.raises(
        ArgumentTypeError, match=r"must be a name or an Accelerator object\. Write one of 'auto', 'cpu'"
    ):
        select_accelerator(wrong)


def test_an_object_is_taken_as_it_is(machine):
    mine = ThirdParty()
    assert select_accelerator(mine) is mine


@pytest.mark.usefixtures("third_party")
def test_third_parties(machine, monkeypatch):
    assert type(select_accelerator("third")) is ThirdParty
    monkeypatch.setattr(ThirdParty, "available", False)
    with pytest.raises(
        ConfigurationError, match=r'"third" .* ThirdParty\.is_available\(\) is False on this machine'
    ):
        select_accelerator("third")


def test_devices_of_each(machine):
    machine.has(cuda=2)
    cuda = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert select_devices(CUDAAccelerator(), "auto") == select_devices(CUDAAccelerator(), -1) == cuda
    assert select_devices(CUDAAccelerator(), "1,") == cuda[1:]
    assert select_devices(CPUAccelerator(), "auto") == [torch.device("cpu")]
    assert select_devices(CPUAccelerator(), 2) == [torch.device("cpu")] * 2


def test_auto_reaches_a_users_accelerator_as_a_count():
    assert select_devices(ThirdParty(), "auto") == [torch.device("meta")] * 3


def test_auto_devices_where_there_are_none(machine):
    with pytest.raises(
        ConfigurationError, match=r"devices='auto' cannot be.*This machine has 0 CUDA devices"
    ):
        select_devices(CUDAAccelerator(), "auto")
