from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fabric.core.errors import ConfigurationError
from fabric.core.precision import parse_precision
from fabric.throughput import flops
from fabric.throughput.throughput import Throughput, ThroughputMonitor, get_available_flops, measure_flops


def filled(count=3, lengths=False, **kwargs):
    """After `count` updates, each of 2 seconds, 1 batch, 4 samples, 20 items and 1000 FLOP."""
    throughput = Throughput(window_size=3, **kwargs)
    for i in range(1, count + 1):
        throughput.update(
            time=2.0 * i, batches=i, samples=4 * i, lengths=20 * i if lengths else None, flops=1000
        )
    return throughput


def test_totals_at_once_and_rates_once_the_window_is_full():
    assert filled(0).compute() == {}
    assert filled(2).compute() == {"time": 4.0, "batches": 2, "samples": 8}
    assert filled(3).compute() == {
        "time": 6.0,
        "batches": 3,
        "samples": 12,
        "device/batches_per_sec": 0.5,
        "device/samples_per_sec": 2.0,
        "device/flops_per_sec": 500.0,
    }


def test_only_the_window_counts():
    throughput = filled(3)
    throughput.update(time=16.0, batches=4, samples=16, flops=7000)
    metrics = throughput.compute()
    assert metrics["device/batches_per_sec"] == 2 / 12
    assert metrics["device/flops_per_sec"] == 8000 / 12
    throughput.reset()
    assert throughput.compute() == {}
    throughput.update(time=1.0, batches=1, samples=1)


def test_items_world_size_separator_and_peak():
    metrics = filled(lengths=True, world_size=4, separator="_", available_flops=2000).compute()
    assert metrics["lengths"] == 60
    assert metrics["device_items_per_sec"] == 10
    assert metrics["items_per_sec"] == 40
    assert metrics["batches_per_sec"] == 2
    assert metrics["samples_per_sec"] == 8
    assert metrics["flops_per_sec"] == 2000
    assert metrics["device_mfu"] == 0.25


def test_sparse_models_have_a_higher_peak():
    assert filled(available_flops=1000, using_sparse_model=True).compute()["device/mfu"] == 0.25
    assert filled(available_flops=1000, using_sparse_model=False).compute()["device/mfu"] == 0.5


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"time": 6.0}, r"time=6.0 is not greater than the time=6.0"),
        ({"time": 5.0}, r"time=5.0 is not greater"),
        ({"batches": 3}, r"batches=3 is not greater"),
        ({"samples": 12}, r"samples=12 is not greater"),
        ({"samples": 3}, r"samples=3 cannot be fewer than batches=4"),
        ({"lengths": 60}, r"lengths=60 is not greater"),
        ({"lengths": 15}, r"lengths=15 cannot be less than samples=16"),
    ],
)
def test_contradicting_updates_are_refused_and_leave_nothing(update, message):
    throughput = filled(lengths=True)
    before = throughput.compute()
    with pytest.raises(ConfigurationError, match=message):
        throughput.update(**{"time": 8.0, "batches": 4, "samples": 16, "lengths": 80, **update})
    assert throughput.compute() == before


def test_lengths_in_some_updates_only():
    throughput = Throughput(window_size=3)
    for i, lengths in enumerate([None, 40, None, 80, 140], start=1):
        throughput.update(time=2.0 * i, batches=i, samples=4 * i, lengths=lengths)
        rates = throughput.compute()
        assert ("device/items_per_sec" in rates) == (i >= 4)
    assert rates["lengths"] == 140
    assert rates["device/items_per_sec"] == 100 / 6  # from the second update to the fifth
    assert rates["device/batches_per_sec"] == 0.5
    throughput.reset()
    throughput.update(time=1.0, batches=1, samples=1, lengths=1)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 1, "lengths": 1}


def test_flops_of_some_updates_are_no_rate_of_all():
    throughput = Throughput(window_size=3)
    for i, done in enumerate([1000, None, 1000, None, 1000, 3000], start=1):
        throughput.update(time=2.0 * i, batches=i, samples=4 * i, flops=done)
        assert ("device/flops_per_sec" in throughput.compute()) == (i == 6)
    assert throughput.compute()["device/flops_per_sec"] == 1000


@pytest.mark.parametrize("arguments", [{"window_size": 1}, {"world_size": 0}])
def test_impossible_settings(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        Throughput(**arguments)


class Loop:
    """The part of a Fabric that the monitor uses."""

    def __init__(self):
        self.world_size = 2
        self.device = torch.device("cpu")
        policy = SimpleNamespace(policy=parse_precision("bf16-mixed"))
        self.strategy = SimpleNamespace(precision=policy, topology=SimpleNamespace(world_size=2))
        self.logged = []

    def log_dict(self, metrics, step=None):
        self.logged.append((metrics, step))


def test_monitor_logs_and_counts_steps():
    loop = Loop()
    monitor = ThroughputMonitor(loop, window_size=2)
    assert (monitor.world_size, monitor.available_flops) == (2, None)
    monitor.update(time=1.0, batches=1, samples=1)
    metrics = monitor.compute_and_log()
    monitor.update(time=2.0, batches=2, samples=2)
    monitor.compute_and_log()
    monitor.compute_and_log(step=10)
    monitor.compute_and_log()
    assert loop.logged[0] == (metrics, 0)
    assert [step for _, step in loop.logged] == [0, 1, 10, 11]
    assert loop.logged[1][0]["samples_per_sec"] == 2.0
    assert ThroughputMonitor(loop, world_size=1, available_flops=5.0).available_flops == 5.0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_measured_flops_of_a_linear_layer(device):
    model = nn.Linear(3, 5, bias=False, device=device)
    x = torch.ones(2, 3, device=device)
    forward = 2 * 2 * 3 * 5
    assert measure_flops(model, lambda: model(x)) == forward
    assert measure_flops(model, lambda: model(x), lambda out: out.sum()) == 2 * forward
    assert model.weight.grad is None


def test_measuring_keeps_gradients():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    measure_flops(model, lambda: model(torch.ones(1, 2)), lambda out: out.sum())
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A10", "float16", 125),
        ("NVIDIA A10G", torch.float16, 70),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA L4", "int8", 242.5),
        ("Tesla T4", torch.float16, 65),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("NVIDIA RTX A6000", "tf32", 77.4),
        ("NVIDIA GeForce RTX 3090", torch.float32, 35.6),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
    ],
)
def test_published_peaks(name, dtype, tera):
    assert flops._peak_of(name, dtype) == int(tera * 1e12)


def test_float32_means_tf32_where_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert flops._peak_of("NVIDIA A100-SXM4-40GB", torch.float32) == int(156e12)
        assert flops._peak_of("Tesla T4", torch.float32) == int(8.1e12)  # has no TF32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", torch.float16),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", torch.float16),
        ("Unheard-of 9000", torch.float16),
        ("Tesla V100-SXM2-32GB", torch.bfloat16),
    ],
)
def test_unknown_peaks_warn(name, dtype):
    with pytest.warns(UserWarning, match=f"{name}.*available_flops="):
        assert flops._peak_of(name, dtype) is None


def test_processors_have_no_published_peak():
    assert get_available_flops(torch.device("cpu"), torch.float32) is None
