import pytest
import torch

from fabric.accelerators.devices import check_device_type, parse_cpu_devices
from fabric.accelerators.generic import parse_gpu_devices
from fabric.core.errors import ArgumentTypeError, ConfigurationError

FOUR = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("auto", FOUR),
        (" auto ", FOUR),
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (" 3 ", [0, 1, 2]),
        (4, FOUR),
        (-1, FOUR),
        ("-1", FOUR),
        ([1, 3], [1, 3]),
        ((1, 3), [1, 3]),
        ("1,3", [1, 3]),
        ("1, 3", [1, 3]),
        ("1,3,", [1, 3]),
        ([3, 1], [3, 1]),
        ([0], [0]),
        ("0,", [0]),
        ("0, ", [0]),
        ([3], [3]),
    ],
)
def test_gpu_devices(devices, expected):
    assert parse_gpu_devices(devices, 4) == expected


CANNOT = "cannot be used: each process needs a device of its own"


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        *[(none, CANNOT) for none in (0, "0", [], (), None)],
        *[(too_many, CANNOT) for too_many in (3, "3", [0, 2], "2,", [5, 0, 4])],
        *[(negative, CANNOT) for negative in ([-1], "-1,", [0, -2], "-1,0", -2, "-2")],
        *[(twice, CANNOT) for twice in ([1, 1], "1,0,1")],
        *[(text, "cannot be read") for text in ("", ",", "0,,1", "all", "cuda:0", "1;3", "1.5", "1_0", "²")],
    ],
)
def test_gpu_devices_that_cannot_be(devices, why):
    with pytest.raises(ConfigurationError) as caught:
        parse_gpu_devices(devices, 2)
    message = str(caught.value)
    assert message.startswith(f"devices={devices!r} {why}")
    assert message.endswith(
        "This machine has 2 CUDA devices: 0, 1. Write a number of them, a list such as devices=[0, 1], "
        'devices="auto" for all, or accelerator="cpu" for none.'
    )


@pytest.mark.parametrize(
    "devices", [True, False, 1.0, {0, 1}, torch.device("cuda", 0), [0, 1.0], [True], ["0"], [None]]
)
def test_gpu_devices_of_the_wrong_type(devices):
    with pytest.raises(ArgumentTypeError) as caught:
        parse_gpu_devices(devices, 1)
    message = str(caught.value)
    assert message.startswith(
        f"devices={devices!r} must be an int, a str or a list of ints. This machine has 1"
    )
    assert 'a list such as devices=[0], devices="auto" for all' in message


@pytest.mark.parametrize("devices", ["auto", -1, 1, "2", [0], None, 0])
def test_a_machine_without_devices(devices):
    with pytest.raises(
        ConfigurationError, match=r'This machine has 0 MPS devices\. Write accelerator="cpu" for none\.$'
    ):
        parse_gpu_devices(devices, 0, "MPS")


def test_the_note_stands_beside_the_inventory():
    with pytest.raises(
        ConfigurationError, match=r"1 CUDA devices: 0\. Only some are visible\. Write a number"
    ):
        parse_gpu_devices([1], 1, note=" Only some are visible.")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(1, 1), (3, 3), ("3", 3), (" 3 ", 3), ("auto", 1), (-1, 1), ("-1", 1)],
)
def test_cpu_devices(devices, expected):
    assert parse_cpu_devices(devices) == expected


@pytest.mark.parametrize("devices", [[0, 1], [0], [], (1,), None, 2.0, True, False, {1}])
def test_cpu_devices_of_the_wrong_type(devices):
    with pytest.raises(ArgumentTypeError) as caught:
        parse_cpu_devices(devices)
    message = str(caught.value)
    assert message.startswith(f"devices={devices!r}")
    assert "the number of processes" in message
    assert "devices=2" in message


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (0, "no number of processes"),
        ("0", "no number of processes"),
        (-2, "no number of processes"),
        ("-3", "no number of processes"),
        ("1,3", "no number of processes"),
        ("0,", "no number of processes"),
        ("two", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_cpu_devices_that_cannot_be(devices, why):
    with pytest.raises(ConfigurationError) as caught:
        parse_cpu_devices(devices)
    message = str(caught.value)
    assert message.startswith(f"devices={devices!r}")
    assert why in message
    assert "the number of processes" in message
    assert "devices=2" in message


def test_kinds_of_errors_are_the_builtin_ones():
    with pytest.raises(ValueError, match="accelerator"):
        parse_gpu_devices(0, 1)
    with pytest.raises(TypeError, match="list of ints"):
        parse_gpu_devices(1.5, 1)


def test_check_device_type():
    check_device_type(torch.device("cuda", 1), "cuda")
    with pytest.raises(ConfigurationError, match=r'accelerator="cuda" cannot set up the device "cpu"'):
        check_device_type(torch.device("cpu"), "cuda")
