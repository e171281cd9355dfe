"""Detection of a blocked device. NCCL's operations return at once, and the host then waits in user code."""

from __future__ import annotations

import time
from typing import Any

import torch


class StalledDevice:
    """Checks whether a device completes its queued work. Costs the main thread nothing.

    The watchdog's thread records an event behind the device's work, and later queries it. It does so only
    once the main thread has been at one place for some time: during graph capture no other thread may use
    the device.

    Args:
        device: The device of this rank.
        after: Seconds at one place after which the event is recorded.
    """

    def __init__(self, device: torch.device, after: float) -> None:
        self.device, self._after = device, after
        self._event: Any = None
        self._recorded_for: float | None = None

    def poll(self, unmoved_since: float | None) -> tuple[str, float] | None:
        """Return the wait for the device and its start; None: its work is complete, or not yet checked.

        Args:
            unmoved_since: Since when the main thread has been at one place (`time.monotonic()`).
        """
        if unmoved_since is None or time.monotonic() - unmoved_since < self._after:
            self._event = self._recorded_for = None
            return None
        if self._recorded_for != unmoved_since:
            self._recorded_for, self._event = unmoved_since, torch.Event(self.device)
            self._event.record(torch.accelerator.current_stream(self.device))
            return None
        return None if self._event.query() else (f"work of {self.device}", unmoved_since)
