"""NVIDIA GPUs (and AMD's, which torch calls "cuda" too), counted through NVML so that fork stays possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from fabric.accelerators.generic import TorchAccelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError

if TYPE_CHECKING:
    from fabric.core.registry import Registry

_PROBE_TIMEOUT = 300.0
"""Seconds for a child to import torch, which is slow on a shared file system, and to touch every device."""

# The parent's import path goes along as it is: "-c" alone would put the working directory first.
_PROBE = """
import sys
sys.path[:] = {path!r}
import json, torch
tried = []
for index in range({count}):
    if tried.count("") == {enough}:
        break
    try:
        torch.zeros(1, device=torch.device("cuda", index))
    except Exception as error:
        tried.append(str(error) or type(error).__name__)
    else:
        tried.append("")
print("tried:" + json.dumps(tried))
"""


class CUDAAccelerator(TorchAccelerator):
    """CUDA devices; ranks talk over NCCL.

    Everything is asked at call time. `auto_device_count` and `is_available` use `torch.cuda.device_count()`,
    which asks NVML and leaves CUDA uninitialised; `torch.cuda.is_available()` would initialise the driver,
    and children that are forked afterwards could not use it.
    """

    @classmethod
    def name(cls) -> str:
        """`"cuda"`."""
        return "cuda"

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """See `Accelerator.explain_unavailable`."""
        fact = "torch.cuda.is_available() is False"
        if torch.version.cuda is None and torch.version.hip is None:
            return fact, "install a CUDA build of torch"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" and CUDA_VISIBLE_DEVICES, which is {visible!r}"
        return fact, f"check the driver with nvidia-smi{hint}"

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry) -> None:
        """Add "cuda"."""
        accelerator_registry.register("cuda", cls, description="CUDA devices, NCCL between ranks")

    @classmethod
    def _note(cls) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return ""
        return f"(CUDA_VISIBLE_DEVICES={visible!r} limits and renumbers them from 0.)"


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of CUDA devices that accept an allocation now, lowest first.

    A device that another process holds in exclusive mode, or that is full, is left out. Unless CUDA is
    initialised here already, a child process tries them (a few seconds): this process then holds no device,
    so that its own ranks can take them and fork stays possible. Two jobs that ask at the same moment may find
    the same devices.

    Args:
        num_devices: How many to find; -1 for all that are usable, possibly none.

    Raises:
        ArgumentTypeError: `num_devices` is no int.
        ConfigurationError: Below -1, or more than this machine has.
        UsageError: Fewer are usable at the moment (a RuntimeError).
    """
    _check_count(num_devices)
    if num_devices == 0:
        return []
    count = torch.cuda.device_count()
    if count == 0 or num_devices > count:
        have = f"{count} of them (0 to {count - 1})" if count else "none"
        raise ConfigurationError(
            f"find_usable_cuda_devices({num_devices}) needs CUDA devices, but this machine has {have}. "
            + (f"Ask for at most {count}." if count else 'Write accelerator="cpu" and devices=1.')
        )
    tried = _try_devices(count, count if num_devices == -1 else num_devices)
    usable = [index for index, refusal in tried.items() if not refusal]
    if len(usable) < num_devices:
        refusals = "; ".join(f"{index}: {refusal}" for index, refusal in tried.items() if refusal)
        raise UsageError(
            f"find_usable_cuda_devices({num_devices}) found {len(usable)} usable of {count} CUDA devices. "
            f"Another process may fill or hold the others (see nvidia-smi). They answered: {refusals}. "
            + (f"Write devices={usable}, or free the others." if usable else "Free one, or wait for it.")
        )
    return usable


def _check_count(num_devices: object) -> None:
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise ArgumentTypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Write an int: how many devices "
            f"to find, or -1 for all that are usable."
        )
    if num_devices < -1:
        raise ConfigurationError(
            f"num_devices={num_devices} is negative. Write how many devices to find, or -1 for all that are "
            f"usable."
        )


def _try_devices(count: int, enough: int) -> dict[int, str]:
    """Devices in order, until `enough` are usable: "" for a usable one, else the reason why it is not."""
    if not torch.cuda.is_initialized():
        return _try_in_child(count, enough)
    # This process may itself hold a device in exclusive mode; a child would be refused there.
    tried: dict[int, str] = {}
    for index in range(count):
        if list(tried.values()).count("") == enough:
            break
        tried[index] = _refusal(index)
    return tried


def _refusal(index: int) -> str:
    try:
        torch.zeros(1, device=torch.device("cuda", index))
    except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are RuntimeErrors
        return _first_line(str(error))
    return ""


def _try_in_child(count: int, enough: int) -> dict[int, str]:
    script = _PROBE.format(path=sys.path, count=count, enough=enough)
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"The child process that tries the CUDA devices failed ({type(error).__name__}). Choose devices "
            f"yourself, such as devices=[0]. It wrote: {getattr(error, 'stderr', None) or 'nothing'}"
        ) from error
    # Other lines may surround the answer: packages print while torch is imported, or at exit.
    answer = next(line for line in done.stdout.splitlines() if line.startswith("tried:"))
    refusals: list[str] = json.loads(answer.removeprefix("tried:"))
    return {index: refusal and _first_line(refusal) for index, refusal in enumerate(refusals)}


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["refused without a message"])[0]
