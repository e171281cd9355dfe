"""What users write as `devices=`, checked against what there is. Pure functions: no hardware is asked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_NUMBER = re.compile(r"[+-]?[0-9]+")  # int() would also take "1_0" and digits of other scripts
_ALL = -1
_CPU_ADVICE = (
    'With accelerator="cpu", devices= is the number of processes; a CPU has no numbered devices. '
    'Write a number of processes, such as devices=2, or devices="auto" for one.'
)


def parse_gpu_devices(
    devices: object, available: Sequence[int], kind: str = "CUDA", note: str = ""
) -> list[int]:
    """The device indices behind `devices`, in the user's order.

    Args:
        devices: What the user wrote: "auto", a count, -1 for all, a list of indices, or these as a string.
        available: Indices of the devices of this machine.
        kind: What error messages call the devices.
        note: A sentence for errors on why fewer devices may be visible than the machine has.

    Raises:
        ArgumentTypeError: A float, a bool, another type, or a list that holds anything but integers.
        ConfigurationError: No devices, devices that do not exist, one of them twice, or an unreadable string.
    """
    here = _inventory(available, kind) + (f" {note}" if note else "")
    advice = f"{here} {_gpu_remedy(available)}".strip()
    wanted = _read(devices, advice)
    if wanted is None or wanted in (0, []):
        raise ConfigurationError(
            f"devices={devices!r} asks for no {kind} device at all. To run without one, write "
            f'accelerator="cpu" (with devices=1 or devices="auto"). {here}'
        )
    if wanted == _ALL:
        if not available:
            raise ConfigurationError(f"devices={devices!r} asks for every {kind} device. {here}")
        return list(available)
    if isinstance(wanted, int):
        return _first(wanted, devices, available, advice)
    _check_indices(wanted, devices, available, here, advice)
    return wanted


def parse_cpu_devices(devices: object, auto: int = 1) -> int:
    """The number of processes on the CPU behind `devices`; "auto" and -1 mean `auto`.

    Raises:
        ArgumentTypeError: A list, None, a float, a bool or another type.
        ConfigurationError: A number below 1, or a string that is no number.
    """
    if devices is None or isinstance(devices, list | tuple):
        raise ArgumentTypeError(f"devices={devices!r} is no number. {_CPU_ADVICE}")
    wanted = _read(devices, _CPU_ADVICE)
    if wanted == _ALL:
        return auto
    if not isinstance(wanted, int):
        raise ConfigurationError(f"devices={devices!r} is a list of indices. {_CPU_ADVICE}")
    if wanted < 1:
        raise ConfigurationError(f"devices={devices!r} is less than one process. {_CPU_ADVICE}")
    return wanted


def check_device_type(device: torch.device, expected: str) -> None:
    """Refuse a device that belongs to another accelerator.

    Raises:
        ConfigurationError: `device` is not of the type `expected`.
    """
    if device.type != expected:
        raise ConfigurationError(
            f'accelerator="{expected}" cannot set up the device "{device}". Pass a "{expected}" device, or '
            f"write the accelerator that this device belongs to."
        )


def _read(devices: object, advice: str) -> int | list[int] | None:
    """None, a count (`_ALL` for "auto") or indices: the form of what a person wrote, no value checked yet."""
    if isinstance(devices, str):
        return _read_string(devices, advice)
    if devices is None or (isinstance(devices, int) and not isinstance(devices, bool)):
        return devices
    if not isinstance(devices, list | tuple):
        raise ArgumentTypeError(
            f"devices={devices!r} is a {type(devices).__name__}; it must be an int, a str or a list of ints. "
            f"{advice}"
        )
    for index in devices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentTypeError(
                f"devices={devices!r} holds {index!r}, a {type(index).__name__}; a list of devices holds "
                f"ints only. {advice}"
            )
    return list(devices)


def _read_string(text: str, advice: str) -> int | list[int]:
    stripped = text.strip()
    if stripped == "auto":
        return _ALL
    if _NUMBER.fullmatch(stripped):
        return int(stripped)
    parts = [part.strip() for part in stripped.removesuffix(",").split(",")]
    if "," in stripped and all(_NUMBER.fullmatch(part) for part in parts):
        return [int(part) for part in parts]
    raise ConfigurationError(
        f'devices={text!r} cannot be read. A string is "auto", a count such as "2", "-1" for all, or indices '
        f'such as "0,1" (one index: "0,"). {advice}'
    )


def _first(count: int, devices: object, available: Sequence[int], advice: str) -> list[int]:
    if count < 0:
        raise ConfigurationError(
            f"devices={devices!r} is a negative count; only -1, for all, has a meaning. {advice}"
        )
    if count > len(available):
        raise ConfigurationError(f"devices={devices!r} asks for more devices than there are. {advice}")
    return list(available[:count])


def _check_indices(
    indices: list[int], devices: object, available: Sequence[int], here: str, advice: str
) -> None:
    missing = sorted({index for index in indices if index not in available})
    if missing:
        raise ConfigurationError(
            f"devices={devices!r} names {_join(missing)}, which this machine does not have. {advice}"
        )
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise ConfigurationError(
            f"devices={devices!r} names {_join(twice)} more than once; each process needs a device of its "
            f"own. {here} Write devices={list(dict.fromkeys(indices))}."
        )


def _inventory(available: Sequence[int], kind: str) -> str:
    if not available:
        return f'This machine has no {kind} device; write accelerator="cpu" or "auto".'
    plural = "s" if len(available) > 1 else ""
    return f"This machine has {len(available)} {kind} device{plural}: {_join(available)}."


def _gpu_remedy(available: Sequence[int]) -> str:
    if not available:
        return ""
    count = len(available)
    many = f"a count from 1 to {count}" if count > 1 else "devices=1"
    return f'Write {many}, a list such as devices={list(available[:2])}, or devices="auto" for all.'


def _join(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
