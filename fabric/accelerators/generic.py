"""The accelerator that torch itself names: base of cuda and mps, and used as it is for xpu and others.

All questions go to `torch.<device type>` when asked, so importing this touches no driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.devices import ALL, check_device_type, read_devices
from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        return parse_gpu_devices(devices, range(cls.auto_device_count()), cls.name().upper(), cls._note())

    @classmethod
    def get_parallel_devices(cls, devices: list[int]) -> list[torch.device]:
        """One torch.device per index."""
        return [torch.device(cls.name(), index) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        """How many devices this process can see."""
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
        """See `Accelerator.explain_unavailable`."""
        name = cls.name()
        return f"torch.{name}.is_available() is False", f"install a build of torch with {name}"

    @classmethod
    def _module(cls) -> Any:
        """`torch.cuda` and its like; None where torch has no such device type."""
        return getattr(torch, cls.name(), None)

    @classmethod
    def _note(cls) -> str:
        return ""


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
    wanted = read_devices(devices, advice)
    if wanted is None or wanted in (0, []):
        raise ConfigurationError(
            f"devices={devices!r} asks for no {kind} device at all. To run without one, write "
            f'accelerator="cpu" (with devices=1 or devices="auto"). {here}'
        )
    if wanted == ALL:
        if not available:
            raise ConfigurationError(f"devices={devices!r} asks for every {kind} device. {here}")
        return list(available)
    if isinstance(wanted, int):
        if wanted < 0:
            raise ConfigurationError(
                f"devices={devices!r} is a negative count; only -1, for all, has a meaning. {advice}"
            )
        if wanted > len(available):
            raise ConfigurationError(f"devices={devices!r} asks for more devices than there are. {advice}")
        return list(available[:wanted])
    _check_indices(wanted, devices, available, here, advice)
    return wanted


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
