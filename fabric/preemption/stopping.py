"""`Stopper`: whether a signal or a deadline requests that this process stop soon. Imports no torch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.launch.signals import DUPLICATE_SIGNAL_S, Handlers, unless_ignored

DEADLINE = "FABRIC_DEADLINE"
MARGIN = "FABRIC_DEADLINE_MARGIN"
DEFAULT_MARGIN = 120.0
"""Seconds before the deadline at which the job should save and stop."""
_SLURM_END = "SLURM_JOB_END_TIME"


class Stopper:
    """Records SIGTERM, SIGUSR1, SIGHUP and `signals` as a request to stop.

    A second signal has its previous effect. SIGHUP is not handled if it is ignored. Previous handlers are
    called, too. Handlers can be set in the main thread only; in another one, only the deadline counts.

    Args:
        signals: Further signals.

    Raises:
        ConfigurationError: FABRIC_DEADLINE or its margin cannot be read.
    """

    def __init__(self, *signals: int) -> None:
        self.reason: str | None = None
        """Why the job should stop; None: no request."""
        self._deadline = deadline()
        self._first_signal = (0, float("-inf"))
        hangup_signals = unless_ignored(signal.SIGHUP)  # nohup ignores it
        numbers = {signal.SIGTERM, signal.SIGUSR1, *hangup_signals, *signals}
        self._handlers = Handlers(numbers, self._on_signal)

    def is_requested(self) -> bool:
        """Whether a stop of this process was requested. Reads a clock; no message."""
        if self.reason is None and self._deadline is not None and time.time() >= self._deadline:
            self.reason = "the deadline is near"
        return self.reason is not None

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._handlers.restore()

    def _on_signal(self, number: int, previous: Any) -> None:
        now = time.monotonic()
        if number == self._first_signal[0] and now - self._first_signal[1] < DUPLICATE_SIGNAL_S:
            return  # a duplicate of the first
        if self.reason is not None and not callable(previous):
            signal.signal(number, previous)
            os.kill(os.getpid(), number)  # the previous effect
            return
        self._first_signal = number, now
        self.reason = signal.Signals(number).name


def deadline() -> float | None:
    """Return the time (of `time.time()`) at which to stop; None: there is no deadline.

    FABRIC_DEADLINE is in seconds since 1970; without it SLURM's end of the job is used.

    Raises:
        ConfigurationError: FABRIC_DEADLINE or FABRIC_DEADLINE_MARGIN is no number of seconds.
    """
    end, margin = os.environ.get(DEADLINE) or os.environ.get(_SLURM_END), os.environ.get(MARGIN)
    if not end:
        return None
    try:
        return float(end) - float(margin or DEFAULT_MARGIN)
    except ValueError:
        raise ConfigurationError(
            f"{DEADLINE}={end} with {MARGIN}={margin} is no number. Write seconds since 1970, as printed by "
            "`date +%s -d '+8 hours'`, and for the margin a number of seconds."
        ) from None
