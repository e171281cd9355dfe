"""Selection of an accelerator and its devices from the arguments of `Fabric`. Called once, by `resolve`."""

from __future__ import annotations

from typing import Any

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import Registry, unknown_name_message

ACCELERATOR_REGISTRY = Registry("accelerator", "fabric.accelerators")
"""Third parties use `register`, or an entry point of the group "fabric.accelerators"."""

ACCELERATOR_REGISTRY.register("cpu", "fabric.accelerators.cpu:CPUAccelerator", "the host")
ACCELERATOR_REGISTRY.register("cuda", "fabric.accelerators.cuda:CUDAAccelerator", "NVIDIA and AMD GPUs")
ACCELERATOR_REGISTRY.register("mps", "fabric.accelerators.mps:MPSAccelerator", "GPUs of Apple silicon")
ACCELERATOR_REGISTRY.register("tpu", "fabric.integrations.tpu.accelerator:TPUAccelerator", "Google's TPUs")


def select_accelerator(choice: str | Accelerator, must_be_available: bool = True) -> Accelerator:
    """Return the accelerator for the argument `accelerator=`.

    Args:
        choice: "auto" (cuda, else mps, else torch's other accelerator, else cpu), "gpu" (cuda or mps), a
            registered name, the device type that torch.accelerator reports, or an object, returned unchecked.
        must_be_available: Whether this machine must have such a device.

    Raises:
        ArgumentTypeError: Neither a string nor an Accelerator.
        ConfigurationError: An unknown name, or no such device on this machine.
    """
    if isinstance(choice, Accelerator):
        return choice
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"accelerator={choice!r} must be a name or an Accelerator object. Write one of "
            f"{', '.join(map(repr, _accelerator_names()))}, or an object such as CUDAAccelerator()."
        )
    if choice == "auto":
        generic = _generic_accelerator()
        return _gpu() or (generic if generic is not None and generic.is_available() else _by_name("cpu"))
    accelerator = _gpu() if choice == "gpu" else _by_name(choice)
    if accelerator is None:
        fact = "torch finds neither a CUDA nor an MPS device"
        remedy = _by_name("cuda").explain_unavailable()[1]
        raise ConfigurationError(_unavailable(choice, fact, remedy))
    if must_be_available and not accelerator.is_available():
        raise ConfigurationError(_unavailable(choice, *accelerator.explain_unavailable()))
    return accelerator


def select_devices(accelerator: Accelerator, devices: Any) -> list[torch.device]:
    """Return one device per process of this machine, for the argument `devices=`.

    Raises:
        ArgumentTypeError: `devices` has the wrong type.
        ConfigurationError: This machine does not have these devices.
    """
    if isinstance(devices, str) and devices.strip() == "auto":
        # Users' accelerators parse counts and lists: Lightning, too, passes them a count for "auto".
        # With no device, "auto" is passed, so that the error does not state that the user wrote 0.
        devices = accelerator.auto_device_count() or devices
    return accelerator.get_parallel_devices(accelerator.parse_devices(devices))


def first_device(accelerator: Accelerator) -> torch.device:
    """Return the device of a process to which only one device is visible."""
    return torch.device("cpu") if accelerator.name() == "cpu" else torch.device(accelerator.name(), 0)


def group_backend(accelerator: Accelerator, device: torch.device) -> str:
    """Return torch.distributed's backends: the accelerator's for `device`, and gloo for host tensors."""
    backend = accelerator.backend()
    return backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"


def _gpu() -> Accelerator | None:
    for name in ("cuda", "mps"):
        accelerator = _by_name(name)
        if accelerator.is_available():
            return accelerator
    return None


def _generic_accelerator() -> Accelerator | None:
    # By the type, not by availability: on a CUDA build, torch.accelerator.is_available() would initialise
    # the driver, so that forked children could not use it.
    from fabric.accelerators.generic import TorchAccelerator

    generic = TorchAccelerator()
    return None if generic.name() in ("accelerator", "cuda", "mps", "cpu") else generic


def _by_name(name: str) -> Accelerator:
    if name in ACCELERATOR_REGISTRY:
        accelerator: Accelerator = ACCELERATOR_REGISTRY.get(name)
        return accelerator
    generic = _generic_accelerator()
    if generic is not None and generic.name() == name:
        return generic
    raise ConfigurationError(unknown_name_message("accelerator", name, _accelerator_names()))


def _accelerator_names() -> list[str]:
    generic = _generic_accelerator()
    return sorted({"auto", "gpu", *ACCELERATOR_REGISTRY.names(), *([generic.name()] if generic else [])})


def _unavailable(choice: str, fact: str, remedy: str) -> str:
    return (
        f'accelerator="{choice}" cannot be used: {fact} on this machine (torch {torch.__version__}). '
        f'Write accelerator="cpu" or "auto", or {remedy}.'
    )
