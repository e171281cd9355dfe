"""Parsing of `devices=`, and its check for a CPU. Pure functions: no hardware is queried."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"[+-]?[0-9]+")  # int() also accepts "1_0" and digits of other scripts
ALL = -1
"""Result of `read_devices` for all devices."""

_CPU_ADVICE = (
    'With accelerator="cpu", devices= is the number of processes; a CPU has no numbered devices. '
    'Write a number of processes, such as devices=2, or devices="auto" for one.'
)


def parse_cpu_devices(devices: object, auto: int = 1) -> int:
    """Return the number of processes on the CPU for `devices`; "auto" and -1 mean `auto`.

    Raises:
        ArgumentTypeError: A list, None, a float, a bool or another type.
        ConfigurationError: A number below 1, or a string that is no number.
    """
    if devices is None or isinstance(devices, list | tuple):
        raise ArgumentTypeError(f"devices={devices!r} is no number. {_CPU_ADVICE}")
    requested = read_devices(devices, _CPU_ADVICE)
    if requested == ALL:
        return auto
    if not isinstance(requested, int) or requested < 1:
        raise ConfigurationError(f"devices={devices!r} is no number of processes. {_CPU_ADVICE}")
    return requested


def check_device_type(device: torch.device, expected: str) -> None:
    """Raise if a device belongs to another accelerator.

    Raises:
        ConfigurationError: `device` is not of the type `expected`.
    """
    if device.type != expected:
        raise ConfigurationError(
            f'accelerator="{expected}" cannot set up the device "{device}". Pass a "{expected}" device, or '
            f"write accelerator= for the accelerator of this device."
        )


def read_devices(devices: object, advice: str) -> int | list[int] | None:
    """Return None, a number (`ALL` for "auto") or indices; the values are not checked."""
    if isinstance(devices, str):
        return _read_string(devices, advice)
    if devices is None or (isinstance(devices, int) and not isinstance(devices, bool)):
        return devices
    if not isinstance(devices, list | tuple) or any([type(index) is not int for index in devices]):
        raise ArgumentTypeError(f"devices={devices!r} must be an int, a str or a list of ints. {advice}")
    return list(devices)


def _read_string(text: str, advice: str) -> int | list[int]:
    stripped = text.strip()
    if stripped == "auto":
        return ALL
    if _NUMBER.fullmatch(stripped):
        return int(stripped)
    parts = [part.strip() for part in stripped.removesuffix(",").split(",")]
    if "," in stripped and all(_NUMBER.fullmatch(part) for part in parts):
        return [int(part) for part in parts]
    raise ConfigurationError(
        f'devices={text!r} cannot be read. A string is "auto", a number such as "2", "-1" for all, or '
        f'indices such as "0,1" (one index: "0,"). {advice}'
    )
