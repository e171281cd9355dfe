"""The accelerator that torch itself names: base of cuda and mps, and used as it is for xpu and others.

All questions go to `torch.<device type>` when asked, so importing this touches no driver.
"""

from __future__ import annotations

from typing import Any

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.devices import ALL, check_device_type, read_devices
from fabric.core.errors import ConfigurationError


class TorchAccelerator(Accelerator):
    """Devices of the type `name()`: that of torch's one accelerator, unless a subclass names another.

    The type is asked for, not stored: an instance pickles into child processes, and every question can be put
    to the class.
    """

    @classmethod
    def name(cls) -> str:
        """The torch device type, for example "xpu"; "accelerator" where torch has none."""
        current = torch.accelerator.current_accelerator()
        return "accelerator" if current is None else current.type

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one, where there may be several. One without an index leaves the current
        one as it is.

        Raises:
            ConfigurationError: `device` is of another kind.
        """
        check_device_type(device, self.name())
        set_device = getattr(self._module(), "set_device", None)
        if set_device is not None and device.index is not None:
            set_device(device.index)

    def teardown(self) -> None:
        """Give cached memory back to the driver, for other processes to use."""
        empty_cache = getattr(self._module(), "empty_cache", None)
        if empty_cache is not None and self.is_available():
            empty_cache()

    @classmethod
    def parse_devices(cls, devices: int | str | list[int] | None) -> list[int]:
        """The indices of the devices that the user asked for, in the user's order.

        Raises:
            ArgumentTypeError: A float, a bool, or a list that holds anything but integers.
            ConfigurationError: No devices, devices that this machine does not have, or one of them twice.
        """
        return parse_gpu_devices(devices, cls.auto_device_count(), cls.name().upper(), cls._note())

    @classmethod
    def get_parallel_devices(cls, devices: list[int]) -> list[torch.device]:
        """One torch.device per index."""
        return [torch.device(cls.name(), index) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that are visible to this process."""
        module = cls._module()
        return 0 if module is None else int(module.device_count())

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process can see at least one device."""
        return cls.auto_device_count() > 0

    @classmethod
    def backend(cls) -> str:
        """The backend that torch.distributed prefers for this device type, for example "nccl" or "xccl"."""
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
        """`torch.cuda` and its like; None where torch has no such device type."""
        return getattr(torch, cls.name(), None)

    @classmethod
    def _note(cls) -> str:
        """A sentence on why this process may see fewer than there are."""
        return ""


def parse_gpu_devices(devices: object, count: int, kind: str = "CUDA", note: str = "") -> list[int]:
    """The device indices behind `devices`, in the user's order.

    Args:
        devices: What the user wrote: "auto", a number, -1 for all, a list of indices, or these as a string.
        count: How many devices this machine has.
        kind: What error messages call them.
        note: A further sentence on them.

    Raises:
        ArgumentTypeError: A float, a bool, another type, or a list that holds anything but integers.
        ConfigurationError: No devices, devices that do not exist, one of them twice, or an unreadable string.
    """
    there = list(range(count))
    advice = f"This machine has {count} {kind} devices{': ' * bool(there)}{str(there)[1:-1]}.{note} "
    if there:
        advice += f'Write a number of them, a list such as devices={there[:2]}, devices="auto" for all, or '
    advice += f'{"" if there else "Write "}accelerator="cpu" for none.'
    wanted = read_devices(devices, advice)
    if wanted == ALL:
        wanted = count
    indices = list(range(wanted)) if isinstance(wanted, int) else wanted or []
    if not indices or not set(indices) <= set(there) or len(set(indices)) < len(indices):
        raise ConfigurationError(
            f"devices={devices!r} cannot be, each process needs one of its own. {advice}"
        )
    return indices
