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
    assert parse_gpu_devices(devices, FOUR) == expected


def test_the_users_list_and_the_inventory_are_not_returned_themselves():
    wanted = [0, 1]
    assert parse_gpu_devices(wanted, FOUR) is not wanted
    assert parse_gpu_devices("auto", FOUR) is not FOUR


@pytest.mark.parametrize("devices", [0, "0", [], (), None])
def test_no_gpu_devices_says_how_to_use_the_cpu(devices):
    with pytest.raises(ConfigurationError) as caught:
        parse_gpu_devices(devices, [0, 1])
    message = str(caught.value)
    assert f"devices={devices!r}" in message
    assert 'accelerator="cpu"' in message
    assert "This machine has 2 CUDA devices: 0, 1." in message


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (3, "asks for more devices than there are"),
        ("3", "asks for more devices than there are"),
        ([0, 2], "names 2, which this machine does not have"),
        ("2,", "names 2, which this machine does not have"),
        ([5, 0, 4], "names 4, 5, which"),
        ([-1], "names -1, which this machine does not have"),
        ("-1,", "names -1, which"),
        ([0, -2], "names -2, which"),
        (-2, "is a negative count; only -1"),
        ("-2", "is a negative count; only -1"),
        ([1, 1], "names 1 more than once"),
        ("1,0,1", "names 1 more than once"),
        ("", "cannot be read"),
        (",", "cannot be read"),
        ("0,,1", "cannot be read"),
        ("all", "cannot be read"),
        ("cuda:0", "cannot be read"),
        ("1;3", "cannot be read"),
        ("1.5", "cannot be read"),
        ("1_0", "cannot be read"),
        ("²", "cannot be read"),
    ],
)
def test_gpu_devices_that_cannot_be(devices, why):
    with pytest.raises(ConfigurationError) as caught:
        parse_gpu_devices(devices, [0, 1])
    message = str(caught.value)
    assert message.startswith(f"devices={devices!r} {why}")
    assert "This machine has 2 CUDA devices: 0, 1." in message
    assert "Write " in message


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (True, "is a bool"),
        (False, "is a bool"),
        (1.0, "is a float"),
        ({0, 1}, "is a set"),
        (torch.device("cuda", 0), "is a device"),
        ([0, 1.0], "holds 1.0, a float"),
        ([True], "holds True, a bool"),
        (["0"], "holds '0', a str"),
        ([None], "holds None, a NoneType"),
    ],
)
def test_gpu_devices_of_the_wrong_type(devices, why):
    with pytest.raises(ArgumentTypeError) as caught:
        parse_gpu_devices(devices, [0])
    message = str(caught.value)
    assert message.startswith(f"devices={devices!r} {why}")
    assert "This machine has 1 CUDA device: 0." in message
    assert 'devices=1, a list such as devices=[0], or devices="auto"' in message


def test_duplicates_show_the_list_without_them():
    with pytest.raises(ConfigurationError, match=r"Write devices=\[1, 0\]\.$"):
        parse_gpu_devices("1,0,1", [0, 1])


@pytest.mark.parametrize("devices", ["auto", -1, 1, "2", [0], None, 0])
def test_a_machine_without_devices(devices):
    with pytest.raises(ConfigurationError, match=r'This machine has no MPS device; write accelerator="cpu"'):
        parse_gpu_devices(devices, [], "MPS")


def test_the_note_stands_beside_the_inventory():
    with pytest.raises(
        ConfigurationError, match=r"1 CUDA device: 0\. \(Only some are visible\.\) Write devices=1"
    ):
        parse_gpu_devices([1], [0], note="(Only some are visible.)")


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
        (0, "less than one process"),
        ("0", "less than one process"),
        (-2, "less than one process"),
        ("-3", "less than one process"),
        ("1,3", "a list of indices"),
        ("0,", "a list of indices"),
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
        parse_gpu_devices(0, [0])
    with pytest.raises(TypeError, match="float"):
        parse_gpu_devices(1.5, [0])


def test_check_device_type():
    check_device_type(torch.device("cuda", 1), "cuda")
    with pytest.raises(ConfigurationError, match=r'accelerator="cuda" cannot set up the device "cpu"'):
        check_device_type(torch.device("cpu"), "cuda")
