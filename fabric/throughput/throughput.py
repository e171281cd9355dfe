"""`Throughput`: batches, samples, tokens and FLOP per second over a rolling window. Called by users' loops.

The caller passes times in seconds: this module never reads a clock, nor waits for a device.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import torch

from fabric.core.errors import ConfigurationError
from fabric.throughput.flops import get_available_flops, measure_flops

__all__ = ["T", "Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]

T = TypeVar("T", bound=float)


class Throughput:
    """Rates over the last `window_size` updates.

    `compute()` returns `time`, `batches`, `samples` (and `lengths`) as last passed. Once the window is full,
    it adds `device/batches_per_sec`, `device/samples_per_sec`, `device/items_per_sec` (from `lengths`),
    `device/flops_per_sec` and `device/mfu`. With several ranks, the first four are also returned without
    `device/`: multiplied by `world_size`, assuming that ranks are equally fast.

    Args:
        available_flops: Peak rate of the device in FLOP/s; see `get_available_flops`. Needed for `mfu`.
        world_size: Number of ranks.
        window_size: Updates in the window, at least 2.
        separator: Text between `device` and the name of a rate.
        using_sparse_model: Whether the model has 2:4 sparse weights, for which the peak is higher.
        sparse_cuda_acceleration_factor: Factor of the peak for sparse weights.

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
            raise ConfigurationError(f"window_size={window_size} contains no interval. Pass 2 or more.")
        if world_size < 1:
            raise ConfigurationError(f"world_size={world_size} must be at least 1.")
        if using_sparse_model and available_flops is not None:
            available_flops *= sparse_cuda_acceleration_factor
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._totals: dict[str, float] = {}
        """The totals of the last update."""
        self._points: deque[tuple[float, int, int]] = deque(maxlen=window_size)
        """(time, batches, samples)"""
        self._flops: deque[Any] = deque(maxlen=window_size)
        """FLOP of the same updates."""
        self._lengths: deque[tuple[float, int]] = deque(maxlen=window_size)
        """(time, lengths) of the updates that have lengths."""

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Record this rank's progress. All but `flops` are totals since the start and must increase.

        Args:
            time: Seconds.
            batches: Batches that this rank has processed.
            samples: Samples that this rank has processed; at least `batches`.
            lengths: Items (tokens, frames) of this rank; at least `samples`. Updates may leave it out:
                its rate is that of the last `window_size` updates with lengths.
            flops: Floating-point operations of this rank since the last update. The rate needs those of all
                updates in the window.

        Raises:
            ConfigurationError: A total did not increase or contradicts another; nothing was recorded.
        """
        if samples < batches:
            raise ConfigurationError(f"samples={samples} cannot be fewer than batches={batches}.")
        if lengths is not None and lengths < samples:
            raise ConfigurationError(f"lengths={lengths} cannot be less than samples={samples}.")
        totals = {"time": time, "batches": batches, "samples": samples}
        if lengths is not None:
            totals["lengths"] = lengths
        for name, value in totals.items():
            if name in self._totals and value <= self._totals[name]:
                raise ConfigurationError(
                    f"{name}={value} is not greater than the {name}={self._totals[name]} of the update "
                    "before. Pass totals since the start, or call reset() first."
                )
        self._totals.update(totals)
        self._points.append((time, batches, samples))
        self._flops.append(flops)
        if lengths is not None:
            self._lengths.append((time, lengths))

    def compute(self) -> dict[str, int | float]:
        """Return the metrics; rates are in units per second."""
        return {**self._totals, **(self._rates() if len(self._points) == self._points.maxlen else {})}

    def reset(self) -> None:
        """Remove all updates."""
        self._totals.clear()
        for window in (self._points, self._lengths, self._flops):
            window.clear()

    def _rates(self) -> dict[str, float]:
        seconds, batches, samples = [
            new - old for old, new in zip(self._points[0], self._points[-1], strict=True)
        ]
        rates = {"batches_per_sec": batches / seconds, "samples_per_sec": samples / seconds}
        if len(self._lengths) > 1:
            over, items = [new - old for old, new in zip(self._lengths[0], self._lengths[-1], strict=True)]
            rates["items_per_sec"] = items / over
        _, *flops = self._flops  # those of the first update precede the window's first time
        if None not in flops:
            rates["flops_per_sec"] = sum(flops) / seconds
        device = f"device{self.separator}"
        metrics = {f"{device}{name}": rate for name, rate in rates.items()}
        if self.world_size > 1:
            metrics.update({name: rate * self.world_size for name, rate in rates.items()})
        if "flops_per_sec" in rates and self.available_flops:
            metrics[f"{device}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics


class ThroughputMonitor(Throughput):
    """A `Throughput` with the world size and the device's peak of `fabric`, which logs by `fabric.log_dict`.

    Args:
        fabric: A launched `Fabric`.
        kwargs: As for `Throughput`; they override the values of `fabric`.
    """

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        kwargs.setdefault("world_size", fabric.strategy.topology.world_size)
        if "available_flops" not in kwargs:
            kwargs["available_flops"] = get_available_flops(fabric.device, _compute_dtype(fabric))
        super().__init__(**kwargs)
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, int | float]:
        """Compute the metrics and log them with `fabric.log_dict`.

        Args:
            step: The step to log at; None: the last one plus 1, from 0.
            kwargs: For `compute`.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


def _compute_dtype(fabric: Any) -> torch.dtype:
    policy = getattr(fabric.strategy.precision, "policy", None)
    return torch.get_default_dtype() if policy is None else policy.compute
