"""`SpikeDetection`: stops a run when the loss jumps, and records the batches. For users' loops."""

from __future__ import annotations

import json
import math
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.core.types import PathLike


class TrainingSpikeException(RuntimeError):
    """The loss of a batch jumped.

    Args:
        batch_idx: The number of the batch.
        args: Further arguments of the exception.
        why: The losses and bounds of this rank.
        kwargs: For subclasses; RuntimeError takes none.
    """

    def __init__(self, batch_idx: int, *args: Any, why: str = "", **kwargs: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}!{why}", *args, **kwargs)
        self.batch_idx, self.why = batch_idx, why

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), why=self.why), (self.batch_idx, *self.args[1:])


class SpikeDetection:
    """Compares each loss with the mean of earlier ones; raises on all ranks if it is out of bounds on any.

    A loss is a spike if it is worse than the mean by at least `atol` and by at least `rtol` times the mean.
    A bound of None is ignored. With `finite_only` a loss that is not finite is a spike, too.

    Args:
        mode: "min": larger is worse; "max": smaller is worse.
        window: Number of losses in the mean.
        warmup: Batches before the first check.
        atol: Absolute bound, in units of the loss.
        rtol: Bound relative to the mean.
        exclude_batches_path: JSON file (or the directory for `skip_batches.json`) to which rank zero writes
            the indices of spiking batches; None: the working directory.
        finite_only: Whether NaN and infinity are spikes; otherwise they are ignored.

    Raises:
        ConfigurationError: The mode is unknown; or both bounds are None without `finite_only`.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: PathLike | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f'mode={mode!r} is not known. Pass "min" or "max".')
        if atol is None and rtol is None and not finite_only:
            raise ConfigurationError(
                "Without atol, rtol and finite_only nothing is a spike. Pass one of them."
            )
        self.mode = mode
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.finite_only = finite_only
        self.exclude_batches_path = exclude_batches_path
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=window)

    def on_train_batch_end(self, fabric: Any, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Check the loss of a batch. All ranks must call this.

        Args:
            fabric: The `Fabric` of the loop.
            loss: The loss of this rank, a one-element tensor.
            batch: Ignored.
            batch_idx: Number of the batch, from 0; the same on all ranks.

        Raises:
            TrainingSpikeException: On all ranks.
        """
        value = float(loss.detach())
        spiked = batch_idx >= self.warmup and self._is_spike(value)
        if fabric.strategy.reduce_boolean_decision(spiked, all=False):
            self.bad_batches.append(batch_idx)
            if fabric.is_global_zero:
                self._write_bad_batches()
            count = len(self._losses)
            raise TrainingSpikeException(
                batch_idx,
                why=f" This rank's loss is {value:g}, the mean of the last {count} was "
                f"{sum(self._losses) / max(1, count):g} (atol={self.atol}, rtol={self.rtol}).",
            )
        if math.isfinite(value):
            self._losses.append(value)

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window and the recorded batches, as plain data."""
        return {"losses": list(self._losses), "bad_batches": list(self.bad_batches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self._losses.clear()
        self._losses.extend(state_dict["losses"])
        self.bad_batches = list(state_dict["bad_batches"])

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return self.finite_only
        if not self._losses or (self.atol is None and self.rtol is None):
            return False
        mean = sum(self._losses) / len(self._losses)
        worse_by = loss - mean if self.mode == "min" else mean - loss
        if worse_by <= 0:
            return False
        bounds = (self.atol, None if self.rtol is None else self.rtol * abs(mean))
        return all(worse_by >= bound for bound in bounds if bound is not None)

    def _write_bad_batches(self) -> None:
        path = Path.cwd() if self.exclude_batches_path is None else Path(self.exclude_batches_path)
        if path.suffix != ".json":
            path = path / "skip_batches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.bad_batches))
