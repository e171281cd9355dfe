"""`TorchAccelerator`: the accelerator that torch reports (xpu, ...); base class of those for cuda and mps.

It queries `torch.<device type>` at call time, so importing this module loads no driver.
"""

from __future__ import annotations

from typing import Any

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.devices import ALL, check_device_type, read_devices
from fabric.core.errors import ConfigurationError


class TorchAccelerator(Accelerator):
    """Devices of the type `name()`, which is that of torch's current accelerator or of a subclass.

    The type is not stored, so that instances can be pickled, and methods can be called on the class.
    """

    @classmethod
    def name(cls) -> str:
        """Return the torch device type, for example "xpu"; "accelerator" if torch has none."""
        current = torch.accelerator.current_accelerator()
        return "accelerator" if current is None else current.type

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one, if the device type has several. Without an index, do nothing.

        Raises:
            ConfigurationError: `device` is of another kind.
        """
        check_device_type(device, self.name())
        set_device = getattr(self._module(), "set_device", None)
        if set_device is not None and device.index is not None:
            set_device(device.index)

    def teardown(self) -> None:
        """Release cached memory to the driver, for other processes."""
        empty_cache = getattr(self._module(), "empty_cache", None)
        if empty_cache is not None and self.is_available():
            empty_cache()

    @classmethod
    def parse_devices(cls, devices: int | str | list[int] | None) -> list[int]:
        """Return the indices of the requested devices, in the user's order.

        Args:
            devices: "auto", a number, -1 for all, a list of indices, or these as a string.

        Raises:
            ArgumentTypeError: A float, a bool, or a list of anything but integers.
            ConfigurationError: No devices, devices that this machine does not have, or one of them twice.
        """
        return parse_gpu_devices(devices, cls.auto_device_count(), cls.name().upper(), cls._visibility_hint())

    @classmethod
    def get_parallel_devices(cls, devices: list[int]) -> list[torch.device]:
        """Return one torch.device per index in `devices`."""
        return [torch.device(cls.name(), index) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that are visible to this process."""
        module = cls._module()
        return 0 if module is None else int(module.device_count())

    @classmethod
    def is_available(cls) -> bool:
        """Whether at least one device is visible to this process."""
        return cls.auto_device_count() > 0

    @classmethod
    def backend(cls) -> str:
        """Return torch.distributed's default backend for this device type, for example "nccl" or "xccl"."""
        if not torch.distributed.is_available():
            return "gloo"
        return str(torch.distributed.Backend.default_device_backend_map.get(cls.name(), "gloo"))

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Return two clauses for an error: why no such device is available, and a remedy."""
        name = cls.name()
        return f"torch.{name}.is_available() is False", f"install a build of torch with {name}"

    @classmethod
    def _module(cls) -> Any:
        """Return the module such as `torch.cuda`; None: torch has no such device type."""
        return getattr(torch, cls.name(), None)

    @classmethod
    def _visibility_hint(cls) -> str:
        """Return a sentence on why fewer devices may be visible than exist, or ""."""
        return ""


def parse_gpu_devices(devices: object, count: int, kind: str = "CUDA", note: str = "") -> list[int]:
    """Return the device indices for `devices`, in the user's order.

    Args:
        devices: The user's value: "auto", a number, -1 for all, a list of indices, or these as a string.
        count: The number of devices of this machine.
        kind: Their name in error messages.
        note: A further sentence for error messages.

    Raises:
        ArgumentTypeError: A float, a bool, another type, or a list of anything but integers.
        ConfigurationError: No devices, devices that do not exist, one of them twice, or an unreadable string.
    """
    available = list(range(count))
    advice = f"This machine has {count} {kind} devices{': ' * bool(available)}{str(available)[1:-1]}.{note} "
    if available:
        advice += (
            f'Write a number of them, a list such as devices={available[:2]}, devices="auto" for all, or '
        )
    advice += f'{"" if available else "Write "}accelerator="cpu" for none.'
    requested = read_devices(devices, advice)
    if requested == ALL:
        requested = count
    indices = list(range(requested)) if isinstance(requested, int) else requested or []
    if not indices or not set(indices) <= set(available) or len(set(indices)) < len(indices):
        raise ConfigurationError(
            f"devices={devices!r} cannot be used: each process needs a device of its own. {advice}"
        )
    return indices
