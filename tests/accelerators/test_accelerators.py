import pickle
import subprocess
import sys

import pytest
import torch

import fabric.accelerators
from fabric.accelerators import (
    ACCELERATOR_REGISTRY,
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
)
from fabric.accelerators.generic import TorchAccelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import Registry

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeXPU:
    """What torch.xpu offers, on a machine without one."""

    def __init__(self, count):
        self.count = count
        self.calls = []

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.calls.append(("set_device", index))

    def empty_cache(self):
        self.calls.append(("empty_cache",))


@pytest.fixture
def xpu(monkeypatch):
    fake = FakeXPU(2)
    monkeypatch.setattr(torch, "xpu", fake)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    return fake


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_public_names_are_sorted_and_exist():
    assert fabric.accelerators.__all__ == sorted(fabric.accelerators.__all__)
    assert dir(fabric.accelerators) == fabric.accelerators.__all__
    for name in fabric.accelerators.__all__:
        assert getattr(fabric.accelerators, name).__doc__


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoAccelerator"):
        fabric.accelerators.NoAccelerator  # noqa: B018


def test_importing_the_package_loads_no_torch():
    assert run_python("import sys, fabric.accelerators; print('torch' in sys.modules)") == ["False"]


def test_importing_and_asking_every_module_leaves_cuda_alone():
    code = (
        "import torch\n"
        "def refuse(*args, **kwargs): raise SystemExit('CUDA was asked at import')\n"
        "count, torch.cuda.device_count = torch.cuda.device_count, refuse\n"
        "torch.cuda.is_available = torch.cuda.init = torch.cuda._lazy_init = refuse\n"
        "torch._C._cuda_getDeviceCount = refuse\n"
        "import fabric.accelerators.select\n"
        "from fabric.accelerators import *\n"
        "torch.cuda.device_count = count if torch.cuda._device_count_nvml() >= 0 else (lambda: 0)\n"
        "CUDAAccelerator.auto_device_count(), CUDAAccelerator.is_available()\n"
        "fabric.accelerators.select.select_accelerator('auto')\n"
        "print(torch.cuda.is_initialized())"
    )
    assert run_python(code) == ["False"]


def test_the_registry_holds_the_three_and_makes_them():
    assert {"cpu", "cuda", "mps"} <= set(ACCELERATOR_REGISTRY.available_accelerators())
    for name, kind in (("cpu", CPUAccelerator), ("cuda", CUDAAccelerator), ("mps", MPSAccelerator)):
        made = ACCELERATOR_REGISTRY.get(name)
        assert type(made) is kind
        assert made.name() == kind.name() == name


@pytest.mark.parametrize("kind", [CPUAccelerator, CUDAAccelerator, MPSAccelerator, TorchAccelerator])
def test_an_accelerator_pickles(kind):
    assert type(pickle.loads(pickle.dumps(kind()))) is kind


@pytest.mark.parametrize(
    ("kind", "backend"), [(CPUAccelerator, "gloo"), (CUDAAccelerator, "nccl"), (MPSAccelerator, "gloo")]
)
def test_backends(kind, backend):
    assert kind.backend() == backend


@pytest.mark.parametrize("kind", [CPUAccelerator, CUDAAccelerator, MPSAccelerator])
def test_a_device_of_another_kind_is_refused(kind):
    with pytest.raises(ConfigurationError, match='cannot set up the device "xpu:0"'):
        kind().setup_device(torch.device("xpu", 0))


def test_cpu():
    accelerator = CPUAccelerator()
    assert accelerator.is_available()
    assert accelerator.auto_device_count() == 1
    assert accelerator.parse_devices("3") == 3
    assert accelerator.parse_devices("auto") == accelerator.parse_devices(-1) == 1
    assert accelerator.get_parallel_devices(2) == [torch.device("cpu")] * 2
    assert accelerator.get_parallel_devices("2") == [torch.device("cpu")] * 2
    accelerator.setup_device(torch.device("cpu"))
    accelerator.synchronize(torch.device("cpu"))
    accelerator.teardown()
    with pytest.raises(ArgumentTypeError, match="number of processes"):
        CPUAccelerator.parse_devices([0, 1])


@pytest.mark.usefixtures("two_gpus")
def test_cuda_answers_at_call_time_on_class_and_object():
    assert CUDAAccelerator.is_available()
    assert CUDAAccelerator.auto_device_count() == 2
    assert CUDAAccelerator.parse_devices("auto") == [0, 1]
    assert CUDAAccelerator().parse_devices("1,") == [1]
    assert CUDAAccelerator.get_parallel_devices([1, 0]) == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_cuda_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not CUDAAccelerator.is_available()
    assert CUDAAccelerator.auto_device_count() == 0
    with pytest.raises(ConfigurationError, match="This machine has 0 CUDA devices"):
        CUDAAccelerator.parse_devices("auto")


@pytest.mark.usefixtures("two_gpus")
def test_cuda_says_when_a_variable_hides_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(
        ConfigurationError, match=r"devices: 0, 1\. CUDA_VISIBLE_DEVICES='2,3' renumbers them from 0\. Write"
    ):
        CUDAAccelerator.parse_devices([2, 3])


@pytest.mark.usefixtures("two_gpus")
def test_cuda_setup_sets_the_current_device_and_nothing_else(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    precision = torch.get_float32_matmul_precision()
    CUDAAccelerator().setup_device(torch.device("cuda", 1))
    CUDAAccelerator().setup_device(torch.device("cuda"))  # no index: the current device stays
    assert calls == [1]
    assert torch.get_float32_matmul_precision() == precision


def test_cuda_teardown_gives_cached_memory_back(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    CUDAAccelerator().teardown()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    CUDAAccelerator().teardown()
    assert calls == ["empty_cache"]


@pytest.mark.gpu
@needs_gpu
def test_cuda_on_a_real_device():
    accelerator = CUDAAccelerator()
    device = accelerator.get_parallel_devices(accelerator.parse_devices(1))[0]
    accelerator.setup_device(device)
    assert torch.cuda.current_device() == 0
    product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    accelerator.synchronize(device)
    assert product.sum().item() == 64.0**3
    accelerator.teardown()


def test_mps_is_one_device(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert MPSAccelerator.is_available()
    assert MPSAccelerator.parse_devices("auto") == MPSAccelerator.parse_devices(1) == [0]
    assert MPSAccelerator.get_parallel_devices([0]) == [torch.device("mps", 0)]
    MPSAccelerator().setup_device(torch.device("mps", 0))
    with pytest.raises(ConfigurationError, match="This machine has 1 MPS devices: 0"):
        MPSAccelerator.parse_devices(2)


def test_mps_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert not MPSAccelerator.is_available()
    assert MPSAccelerator.auto_device_count() == 0


def test_another_device_type_of_torch(xpu):
    accelerator = TorchAccelerator()
    assert accelerator.name() == "xpu"
    assert accelerator.backend() == "xccl"
    assert accelerator.is_available()
    assert accelerator.parse_devices("auto") == [0, 1]
    assert accelerator.get_parallel_devices([1]) == [torch.device("xpu", 1)]
    accelerator.setup_device(torch.device("xpu", 1))
    accelerator.teardown()
    assert xpu.calls == [("set_device", 1), ("empty_cache",)]
    with pytest.raises(ConfigurationError, match="This machine has 2 XPU devices: 0, 1"):
        accelerator.parse_devices(3)


def test_synchronize_waits_for_the_devices_own_type_only(xpu, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    TorchAccelerator().synchronize(torch.device("xpu", 1))
    TorchAccelerator().synchronize(torch.device("cpu"))
    assert waited == [torch.device("xpu", 1)]


def test_a_machine_whose_torch_knows_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert not TorchAccelerator.is_available()
    assert TorchAccelerator.auto_device_count() == 0
    assert TorchAccelerator.backend() == "gloo"
    TorchAccelerator().teardown()


class LightningStyleAccelerator(Accelerator):
    """Only what Lightning asks of a subclass."""

    def setup_device(self, device):
        self.device = device

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count():
        return 3

    @staticmethod
    def is_available():
        return True


def test_a_subclass_gets_defaults_for_the_rest():
    accelerator = LightningStyleAccelerator()
    assert accelerator.name() == "lightningstyle"
    assert accelerator.backend() == "gloo"
    accelerator.synchronize(torch.device("cpu"))
    registry = Registry("accelerator", "fabric.no_such_group")
    LightningStyleAccelerator.register_accelerators(registry)
    assert isinstance(registry.get("lightningstyle"), LightningStyleAccelerator)


def test_the_base_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Accelerator()
