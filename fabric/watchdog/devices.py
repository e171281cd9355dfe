"""Whether a device has stopped. NCCL's operations return at once, and the host then waits in a line of the
user's.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceWatch:
    """Sees whether a device comes to the end of what it has been given.

    Costs the main thread nothing: the watchdog's own thread puts an event behind the device's work, and looks
    whether the device has come to it. It does so only once the main thread has been at one place for some
    time: while a graph is captured, no other thread may touch the device.

    Args:
        device: Of this rank.
        after: Seconds at one place after which it looks.
    """

    def __init__(self, device: torch.device, after: float) -> None:
        self.device, self._after = device, after
        self._event: Any = None
        self._of: float | None = None

    def look(self, stays: float | None) -> tuple[str, float] | None:
        """The wait for the device, if it has not gone on, as far as is known.

        Args:
            stays: Since when the main thread has been at one place (`time.monotonic()`).
        """
        if stays is None or time.monotonic() - stays < self._after:
            self._event = self._of = None
            return None
        if self._of != stays:
            self._of, self._event = stays, torch.Event(self.device)
            self._event.record(torch.accelerator.current_stream(self.device))
            return None
        return None if self._event.query() else (f"work of {self.device}", stays)
