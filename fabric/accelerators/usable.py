"""Devices that accept an allocation now; others are held, or filled, by somebody else."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError

_PROBE_TIMEOUT = 300.0
"""Seconds for a child to import torch, which is slow on a shared file system, and to touch every device."""

# The parent's import path goes along as it is: "-c" alone would put the working directory first.
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
    """Indices of devices that accept an allocation now, lowest first.

    A device that another process holds in exclusive mode, or that is full, is left out. A child process tries
    them (a few seconds): this process then holds no device, so that its own ranks can take them and fork
    stays possible. Two jobs that ask at the same moment may find the same devices.

    Args:
        num_devices: How many to find; -1 for all that are usable, possibly none.
        accelerator: As in `Fabric`: of which kind.

    Raises:
        ArgumentTypeError: `num_devices` is no int.
        ConfigurationError: Below -1, or more than this machine has; a kind that is unknown or has no devices.
        UsageError: Fewer are usable at the moment (a RuntimeError).
    """
    from fabric.accelerators.select import select_accelerator

    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise ArgumentTypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Write an int: how many devices "
            f"to find, or -1 for all that are usable."
        )
    if num_devices == 0:
        return []
    kind = select_accelerator(accelerator).name()
    if kind in ("cpu", "mps"):
        raise ConfigurationError(
            f"find_usable_devices(accelerator={accelerator!r}) means {kind} here, of which there is one, and "
            "never taken. Ask only where there are several devices."
        )
    count = int(torch.get_device_module(kind).device_count())
    if not -1 <= num_devices <= count:
        raise ConfigurationError(
            f"num_devices={num_devices}: this machine has {count} {kind} devices. Ask for at most so many, "
            "or for -1: all that are usable."
        )
    tried = _try_devices(kind, count)
    usable = [index for index, refusal in enumerate(tried) if not refusal]
    if len(usable) < num_devices:
        refusals = "; ".join(f"{index}: {refusal}" for index, refusal in enumerate(tried) if refusal)
        raise UsageError(
            f"num_devices={num_devices}: {len(usable)} of {count} {kind} devices are usable: {usable}. "
            "Another process may fill or hold the others (see nvidia-smi, or the vendor's tool). They "
            f"answered: {refusals}. Ask for fewer, or free the others."
        )
    return usable if num_devices == -1 else usable[:num_devices]


def _try_devices(kind: str, count: int) -> list[str]:
    """Return for each device "" if it is usable, else the reason why it is not."""
    script = _PROBE.format(path=sys.path, kind=kind, count=count)
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"The child process that tries {kind} devices failed ({type(error).__name__}). Choose devices "
            f"yourself, such as devices=[0]. It wrote: {getattr(error, 'stderr', None) or 'nothing'}"
        ) from error
    # Other lines may surround the answer: packages print while torch is imported, or at exit.
    answer = next(line for line in done.stdout.splitlines() if line.startswith("tried:"))
    refusals: list[str] = json.loads(answer.removeprefix("tried:"))
    return refusals
