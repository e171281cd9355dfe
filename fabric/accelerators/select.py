"""Accelerators by name; from what the user wrote to one and its devices. Called once, by `resolve`."""

from __future__ import annotations

from typing import Any

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import Registry, unknown_name_message

ACCELERATOR_REGISTRY = Registry("accelerator", "fabric.accelerators")
"""Third parties add theirs with `register`, or with an entry point of the group "fabric.accelerators"."""

ACCELERATOR_REGISTRY.register("cpu", "fabric.accelerators.cpu:CPUAccelerator", "the host")
ACCELERATOR_REGISTRY.register("cuda", "fabric.accelerators.cuda:CUDAAccelerator", "NVIDIA and AMD GPUs")
ACCELERATOR_REGISTRY.register("mps", "fabric.accelerators.mps:MPSAccelerator", "GPUs of Apple silicon")
ACCELERATOR_REGISTRY.register("tpu", "fabric.integrations.tpu.accelerator:TPUAccelerator", "Google's TPUs")


def select_accelerator(choice: str | Accelerator, here: bool = True) -> Accelerator:
    """The accelerator behind what a user wrote as `accelerator=`.

    Args:
        choice: "auto" (cuda, else mps, else torch's other accelerator, else cpu), "gpu" (cuda or mps), a
            registered name, the device type that torch.accelerator reports, or an object, returned unchecked.
        here: Whether it must be on this machine.

    Raises:
        ArgumentTypeError: Neither a string nor an Accelerator.
        ConfigurationError: An unknown name, or no such device on this machine.
    """
    if isinstance(choice, Accelerator):
        return choice
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"accelerator={choice!r} must be a name or an Accelerator object. Write one of "
            f"{', '.join(map(repr, _known()))}, or an object such as CUDAAccelerator()."
        )
    if choice == "auto":
        other = _other()
        return _gpu() or (other if other is not None and other.is_available() else _by_name("cpu"))
    accelerator = _gpu() if choice == "gpu" else _by_name(choice)
    if accelerator is None:
        fact = "torch sees neither a CUDA nor an MPS device"
        remedy = _by_name("cuda").explain_unavailable()[1]
        raise ConfigurationError(_unavailable(choice, fact, remedy))
    if here and not accelerator.is_available():
        raise ConfigurationError(_unavailable(choice, *accelerator.explain_unavailable()))
    return accelerator


def select_devices(accelerator: Accelerator, devices: Any) -> list[torch.device]:
    """One device per process of this machine, from what the user wrote as `devices=`.

    Raises:
        ArgumentTypeError: `devices` has the wrong type.
        ConfigurationError: `devices` asks for what this machine does not have.
    """
    if isinstance(devices, str) and devices.strip() == "auto":
        # Accelerators of users know counts and lists; "auto" came to Lightning's accelerators as a count.
        # Zero stays "auto": the parser then says that there is no device, not that the user asked for none.
        devices = accelerator.auto_device_count() or devices
    return accelerator.get_parallel_devices(accelerator.parse_devices(devices))


def first_device(accelerator: Accelerator) -> torch.device:
    """The one that a process sees which sees but one."""
    return torch.device("cpu") if accelerator.name() == "cpu" else torch.device(accelerator.name(), 0)


def group_backend(accelerator: Accelerator, device: torch.device) -> str:
    """torch.distributed's backend for the tensors of `device`, and gloo for those of the host beside it."""
    own = accelerator.backend()
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def _gpu() -> Accelerator | None:
    for name in ("cuda", "mps"):
        accelerator = _by_name(name)
        if accelerator.is_available():
            return accelerator
    return None


def _other() -> Accelerator | None:
    # By the type, not by what is there: on a CUDA build, torch.accelerator.is_available() would initialise
    # the driver, and forked children could not use it any more.
    from fabric.accelerators.generic import TorchAccelerator

    other = TorchAccelerator()
    return None if other.name() in ("accelerator", "cuda", "mps", "cpu") else other


def _by_name(name: str) -> Accelerator:
    if name in ACCELERATOR_REGISTRY:
        made: Accelerator = ACCELERATOR_REGISTRY.get(name)
        return made
    other = _other()
    if other is not None and other.name() == name:
        return other
    raise ConfigurationError(unknown_name_message("accelerator", name, _known()))


def _known() -> list[str]:
    other = _other()
    return sorted({"auto", "gpu", *ACCELERATOR_REGISTRY.names(), *([other.name()] if other else [])})


def _unavailable(choice: str, fact: str, remedy: str) -> str:
    return (
        f'accelerator="{choice}" was asked for, but {fact} on this machine (torch {torch.__version__}). '
        f'Write accelerator="cpu" or "auto", or {remedy}.'
    )
