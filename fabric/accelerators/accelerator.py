"""The interface of an accelerator: which devices there are and how a process takes one.

Called by `resolve` (which devices?) and by strategies (`setup_device`, `teardown`). Never starts a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fabric.core.registry import Registry


class Accelerator(ABC):
    """One kind of device. Subclass it for hardware that torch knows and this package does not."""

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process.

        Raises:
            ConfigurationError: `device` is of another kind.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Give back what this process holds beyond live tensors, such as cached memory."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Check the value of `devices=` and return the argument for `get_parallel_devices`.

        Raises:
            ArgumentTypeError: It is of the wrong kind.
            ConfigurationError: There are no such devices.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """One device per process of this machine, from `devices`, which `parse_devices` gave."""

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
        """The name that users write as `accelerator=`; a subclass may say it with a static method."""
        return cls.__name__.removesuffix("Accelerator").lower()

    @classmethod
    def backend(cls) -> str:
        """The torch.distributed backend that moves this accelerator's tensors between ranks."""
        return "gloo"

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on `device` is done. Nothing to wait for on a CPU."""
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type == device.type:
            torch.accelerator.synchronize(device)

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Two clauses for an error: why `is_available` is False, and what helps but another accelerator."""
        return f"{cls.__name__}.is_available() is False", "run on a machine that has such a device"

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry) -> None:
        """Add this class to a registry, under its name."""
        about = (cls.__doc__ or cls.__name__).partition("\n")[0]
        accelerator_registry.register(cls.name(), cls, description=about)
