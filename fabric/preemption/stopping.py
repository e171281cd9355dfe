"""`Stopper`: whether a signal or a deadline has asked this process to end soon. Imports no torch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.launch.signals import TOGETHER_S, Handlers, unless_ignored

DEADLINE = "FABRIC_DEADLINE"
MARGIN = "FABRIC_DEADLINE_MARGIN"
DEFAULT_MARGIN = 120.0
"""Seconds before the deadline in which the job is to save and end."""
_SLURM_END = "SLURM_JOB_END_TIME"


class Stopper:
    """Notes SIGTERM, SIGUSR1, SIGHUP and `signals`, in place of ending; the next one does what it did before.

    SIGHUP is left alone where it is ignored. Handlers that were there are called, too. Signals can only be
    taken in the main thread; made in another one, it looks at the deadline alone.

    Args:
        signals: Further signals.

    Raises:
        ConfigurationError: FABRIC_DEADLINE or its margin cannot be read.
    """

    def __init__(self, *signals: int) -> None:
        self.reason: str | None = None
        """Why the job is to stop; None: go on."""
        self._deadline = deadline()
        self._first = (0, float("-inf"))
        hangup = unless_ignored(signal.SIGHUP)  # as nohup has it ignored
        numbers = {signal.SIGTERM, signal.SIGUSR1, *hangup, *signals}
        self._handlers = Handlers(numbers, self._on_signal)

    def asked(self) -> bool:
        """Whether this process was asked to stop. Reads a clock; sends nothing."""
        if self.reason is None and self._deadline is not None and time.time() >= self._deadline:
            self.reason = "the deadline is near"
        return self.reason is not None

    def restore(self) -> None:
        """Give the signals back to those who had them."""
        self._handlers.restore()

    def _on_signal(self, number: int, before: Any) -> None:
        now = time.monotonic()
        if number == self._first[0] and now - self._first[1] < TOGETHER_S:
            return  # the same request, by another way
        if self.reason is not None and not callable(before):
            signal.signal(number, before)
            os.kill(os.getpid(), number)  # at once, as without us
            return
        self._first = number, now
        self.reason = signal.Signals(number).name


def deadline() -> float | None:
    """The time (of `time.time()`) at which to begin to stop; None: there is no deadline.

    FABRIC_DEADLINE is seconds since 1970; without it SLURM's end of the job counts.

    Raises:
        ConfigurationError: It is none, or FABRIC_DEADLINE_MARGIN is no number of seconds.
    """
    end, margin = os.environ.get(DEADLINE) or os.environ.get(_SLURM_END), os.environ.get(MARGIN)
    if not end:
        return None
    try:
        return float(end) - float(margin or DEFAULT_MARGIN)
    except ValueError:
        raise ConfigurationError(
            f"{DEADLINE}={end} with {MARGIN}={margin}: write seconds since 1970, as `date +%s -d '+8 hours'` "
            "says, and for the margin a number of seconds."
        ) from None
