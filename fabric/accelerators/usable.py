"""`find_usable_devices`: devices that accept an allocation now, unlike those that other processes occupy."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError

_PROBE_TIMEOUT = 300.0
"""Seconds for a child to import torch, which is slow on a shared file system, and to use every device."""

# With the parent's import path: "-c" alone would put the working directory first.
_PROBE = """
import sys
sys.path[:] = {path!r}
import json, torch
tried = []
for index in range({count}):
    try:
        torch.zeros(1, device=torch.device({kind!r}, index))
        tried.append("")
    except Exception as error:
        tried.append((str(error) or type(error).__name__).strip().partition("\\n")[0])
print("tried:" + json.dumps(tried))
"""


def find_usable_devices(num_devices: int = -1, accelerator: str = "auto") -> list[int]:
    """Return the indices of devices that accept an allocation now, in ascending order.

    Devices that another process uses in exclusive mode, or that are full, are left out. A child process tries
    the devices (a few seconds), so that this process initialises none, and fork stays possible. Two jobs that
    call this at the same time may get the same devices.

    Args:
        num_devices: Number of devices to find; -1 for all usable ones, possibly none.
        accelerator: The kind of device, as in `Fabric`.

    Raises:
        ArgumentTypeError: `num_devices` is no int.
        ConfigurationError: Below -1, or more than this machine has; an unknown kind, or one without devices.
        UsageError: Fewer are usable now (a RuntimeError).
    """
    from fabric.accelerators.select import select_accelerator

    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise ArgumentTypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Write an int: the number of "
            "devices to find, or -1 for all usable ones."
        )
    if num_devices == 0:
        return []
    kind = select_accelerator(accelerator).name()
    if kind in ("cpu", "mps"):
        raise ConfigurationError(
            f"find_usable_devices(accelerator={accelerator!r}) means {kind} on this machine, of which there "
            "is one device, always usable. Call it only for an accelerator with several devices."
        )
    count = int(torch.get_device_module(kind).device_count())
    if not -1 <= num_devices <= count:
        raise ConfigurationError(
            f"num_devices={num_devices}: this machine has {count} {kind} devices. Write at most {count}, or "
            "-1 for all usable ones."
        )
    errors = _try_devices(kind, count)
    usable = [index for index, error in enumerate(errors) if not error]
    if len(usable) < num_devices:
        error_texts = "; ".join(f"{index}: {error}" for index, error in enumerate(errors) if error)
        raise UsageError(
            f"num_devices={num_devices}: {len(usable)} of {count} {kind} devices are usable: {usable}. "
            "Another process may occupy the others (see nvidia-smi, or the vendor's tool). Their errors: "
            f"{error_texts}. Ask for fewer, or free the others."
        )
    return usable if num_devices == -1 else usable[:num_devices]


def _try_devices(kind: str, count: int) -> list[str]:
    """Return, for each device, the error of an allocation; "": it is usable."""
    script = _PROBE.format(path=sys.path, kind=kind, count=count)
    command = [sys.executable, "-c", script]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"The child process that tries {kind} devices failed ({type(error).__name__}). Pass devices "
            f"explicitly, such as devices=[0]. Its stderr: {getattr(error, 'stderr', None) or 'empty'}"
        ) from error
    # Other lines may surround the answer: packages print while torch is imported, or at exit.
    answer = next(line for line in completed.stdout.splitlines() if line.startswith("tried:"))
    error_texts: list[str] = json.loads(answer.removeprefix("tried:"))
    return error_texts
