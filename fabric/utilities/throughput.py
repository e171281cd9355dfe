"""Batches, samples, tokens and FLOP per second over a rolling window, for users' loops; `Fabric` calls none.

Times are the caller's, in seconds: nothing here reads a clock or waits for a device.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import torch

from fabric.core.errors import ConfigurationError
from fabric.utilities.flops import get_available_flops, measure_flops

__all__ = ["T", "Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]

T = TypeVar("T", bound=float)


class _MonotonicWindow(deque[T]):
    """The last `maxlen` values of a counter that only grows."""

    def __init__(self, name: str, maxlen: int) -> None:
        super().__init__(maxlen=maxlen)
        self.name = name

    def check(self, value: T) -> None:
        """Raise ConfigurationError unless `value` is greater than the last one."""
        if self and value <= self[-1]:
            raise ConfigurationError(
                f"{self.name}={value} is not greater than the {self.name}={self[-1]} of the update before. "
                f"Pass totals since the start, or call reset() first."
            )

    @property
    def growth(self) -> T:
        """From the oldest value to the newest."""
        return self[-1] - self[0]  # type: ignore[return-value]


class Throughput:
    """Rates over the last `window_size` updates.

    `compute()` gives `time`, `batches`, `samples` (and `lengths`) as last passed, and once the window is full
    `device/batches_per_sec`, `device/samples_per_sec`, `device/items_per_sec` (from `lengths`),
    `device/flops_per_sec` and `device/mfu`. With several ranks the first four also come without `device/`:
    times `world_size`, as ranks are taken to be equally fast.

    Args:
        available_flops: What the device can do at best, in FLOP/s; see `get_available_flops`. Needed for
            `mfu`.
        world_size: Number of ranks.
        window_size: Updates in the window, at least 2.
        separator: Between `device` and the name of a rate.
        using_sparse_model: The model has 2:4 sparse weights, for which the peak is higher.
        sparse_cuda_acceleration_factor: How much higher.

    Raises:
        ConfigurationError: The window is too small to measure.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
        using_sparse_model: bool | None = None,
        sparse_cuda_acceleration_factor: float = 2.0,
    ) -> None:
        if window_size < 2:
            raise ConfigurationError(f"window_size={window_size} holds no interval. Pass 2 or more.")
        if world_size < 1:
            raise ConfigurationError(f"world_size={world_size} must be at least 1.")
        if using_sparse_model and available_flops is not None:
            available_flops *= sparse_cuda_acceleration_factor
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._time: _MonotonicWindow[float] = _MonotonicWindow("time", window_size)
        self._batches: _MonotonicWindow[int] = _MonotonicWindow("batches", window_size)
        self._samples: _MonotonicWindow[int] = _MonotonicWindow("samples", window_size)
        self._lengths: _MonotonicWindow[int] = _MonotonicWindow("lengths", window_size)
        self._length_times: deque[float] = deque(maxlen=window_size)
        self._flops: deque[int] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Record where this rank stands. All but `flops` are totals since the start and must grow.

        Args:
            time: Seconds.
            batches: Batches seen by this rank.
            samples: Samples seen by this rank; at least `batches`.
            lengths: Items (tokens, frames) seen by this rank; at least `samples`. Updates may leave it out:
                its rate is that of the last `window_size` which have it.
            flops: Floating-point operations of this rank since the update before.

        Raises:
            ConfigurationError: A total did not grow or contradicts another; nothing was recorded.
        """
        if samples < batches:
            raise ConfigurationError(f"samples={samples} cannot be fewer than batches={batches}.")
        if lengths is not None and lengths < samples:
            raise ConfigurationError(f"lengths={lengths} cannot be less than samples={samples}.")
        windows: list[tuple[_MonotonicWindow[Any], float]]
        windows = [(self._time, time), (self._batches, batches), (self._samples, samples)]
        if lengths is not None:
            windows.append((self._lengths, lengths))
        for window, value in windows:
            window.check(value)
        for window, value in windows:
            window.append(value)
        if lengths is not None:
            self._length_times.append(time)
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, int | float]:
        """The metrics; rates are in units per second."""
        if not self._time:
            return {}
        metrics: dict[str, int | float] = {
            "time": self._time[-1],
            "batches": self._batches[-1],
            "samples": self._samples[-1],
        }
        if self._lengths:
            metrics["lengths"] = self._lengths[-1]
        if len(self._time) == self._time.maxlen:
            metrics.update(self._rates(self._time.growth))
        return metrics

    def reset(self) -> None:
        """Forget all updates."""
        for window in (self._time, self._batches, self._samples, self._lengths, self._flops):
            window.clear()
        self._length_times.clear()

    def _rates(self, seconds: float) -> dict[str, float]:
        amounts: dict[str, float] = {
            "batches_per_sec": self._batches.growth,
            "samples_per_sec": self._samples.growth,
        }
        if len(self._lengths) > 1:
            over = self._length_times[-1] - self._length_times[0]
            amounts["items_per_sec"] = self._lengths.growth / over * seconds
        if len(self._flops) == self._flops.maxlen:
            amounts["flops_per_sec"] = (
                sum(self._flops) - self._flops[0]
            )  # done before the window's first time
        device = f"device{self.separator}"
        rates = {f"{device}{name}": amount / seconds for name, amount in amounts.items()}
        if self.world_size > 1:
            rates.update({name: amount / seconds * self.world_size for name, amount in amounts.items()})
        if "flops_per_sec" in amounts and self.available_flops:
            rates[f"{device}mfu"] = rates[f"{device}flops_per_sec"] / self.available_flops
        return rates


class ThroughputMonitor(Throughput):
    """A `Throughput` that knows the world size and the peak of the device from `fabric`, and logs through it.

    Args:
        fabric: A launched `Fabric`.
        kwargs: As for `Throughput`; they win over what `fabric` says.
    """

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        kwargs.setdefault("world_size", fabric.world_size)
        if "available_flops" not in kwargs:
            kwargs["available_flops"] = get_available_flops(fabric.device, _compute_dtype(fabric))
        super().__init__(**kwargs)
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, int | float]:
        """Compute the metrics and log them with `fabric.log_dict`.

        Args:
            step: The step to log at; None counts the calls from 0.
            kwargs: For `compute`.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


def _compute_dtype(fabric: Any) -> torch.dtype:
    policy = getattr(fabric.strategy.precision, "policy", None)
    return torch.get_default_dtype() if policy is None else policy.compute
