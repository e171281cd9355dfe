"""`Accelerator`: the interface to a kind of device: list devices and make one current.

Called by `resolve` (devices) and by strategies (`setup_device`, `teardown`). Never starts a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fabric.core.registry import Registry


class Accelerator(ABC):
    """A kind of device. Subclass it for hardware that torch supports and this package does not."""

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process.

        Raises:
            ConfigurationError: `device` is of another kind.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Release this process's resources other than live tensors, such as cached memory."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Check `devices`, the value of `Fabric(devices=)`; return the argument for `get_parallel_devices`.

        Raises:
            ArgumentTypeError: The value has a wrong type.
            ConfigurationError: There are no such devices.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return one device per process of this machine; `devices` is the result of `parse_devices`."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return the number of devices for `devices="auto"`."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Whether this machine has at least one such device."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `accelerator=`; a subclass may override it with a static method."""
        return cls.__name__.removesuffix("Accelerator").lower()

    @classmethod
    def backend(cls) -> str:
        """Return the torch.distributed backend for this accelerator's tensors."""
        return "gloo"

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on `device` is done; returns at once for a CPU."""
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type == device.type:
            torch.accelerator.synchronize(device)

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Return two clauses for an error: why `is_available` is False, and a remedy."""
        return f"{cls.__name__}.is_available() is False", "run on a machine that has such a device"

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry) -> None:
        """Add this class to `accelerator_registry`, under its name."""
        about = (cls.__doc__ or cls.__name__).partition("\n")[0]
        accelerator_registry.register(cls.name(), cls, description=about)
