"""`CPUAccelerator`: `devices=` is a number of processes, and every process has the same device."""

from __future__ import annotations

import torch

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.devices import check_device_type, parse_cpu_devices


class CPUAccelerator(Accelerator):
    """Tensors in host memory; ranks communicate by gloo."""

    def setup_device(self, device: torch.device) -> None:
        """Check that `device` is a CPU; there is nothing to set.

        Raises:
            ConfigurationError: `device` is of another kind.
        """
        check_device_type(device, "cpu")

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Return the number of processes that `devices` requests: 3 for 3 or "3"; 1 for "auto" and -1.

        Raises:
            ArgumentTypeError: A list, None, a float or a bool.
            ConfigurationError: A number below 1, or a string that is no number.
        """
        return parse_cpu_devices(devices, CPUAccelerator.auto_device_count())

    @staticmethod
    def get_parallel_devices(devices: int | str | list[int]) -> list[torch.device]:
        """Return the CPU once per process, of which `devices` is the number (raises like `parse_devices`)."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: several processes on one CPU only at the user's request."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always True."""
        return True

    @classmethod
    def name(cls) -> str:
        """Return "cpu"."""
        return "cpu"
