"""Batches on their way to a device: the next one is copied on a side stream while the last one is used.

Used by the data loader. Never copies ahead what could be written over while the user still reads it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self


class Prefetch:
    """Batches of `batches` on `device`, the next one on its way while the last one is used.

    When batch k is given, the copy of batch k + 1 has been issued on a side stream; batch k + 2 has not been
    fetched. So each batch waits until its successor is fetched, and what fetching or copying the successor
    raises is raised when the successor is asked for. The first batch, which nothing could overlap, is copied
    on the current stream; on devices without side streams all are, when asked for.

    Args:
        batches: Gives pairs (batch, note). The note comes back, untouched, with its batch.
        device: Where batches go.
        move: Function (batch, device) that moves a batch. It must not write to memory that the last batch
            is in.
        looks_ahead: Whether batches may be fetched before they are asked for.
        side: Takes the place of the device's own side stream.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, Any]],
        device: torch.device,
        move: Callable[[Any, torch.device], Any],
        looks_ahead: bool = True,
        *,
        side: SideStream | None = None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._move = move
        self._side = side
        self._looks_ahead = looks_ahead and (side is not None or _has_streams(device))
        self._given: Any = None
        self._next: tuple[Any, Any] | Exception | None = None  # a batch that was copied ahead, or its error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        """The next batch, on the device and ready for the current stream, and its note."""
        taken, self._next = self._next, None
        if isinstance(taken, Exception):
            try:
                raise taken
            finally:
                del taken  # it refers to this frame
        if taken is None or self._side is None:
            batch, note = next(self._batches)
            batch = self._move(batch, self._device)
        else:
            batch, note = taken
            self._side.hand_over()
        if self._looks_ahead:
            self._look_ahead()
            # Held until the side stream has waited for its reads: other code may share that stream of torch's
            # pool, and its memory with it.
            self._given = batch
        return batch, note

    def close(self) -> None:
        """Drop the batch that is on its way, and close `batches` if it can be closed. Nothing comes after."""
        source, self._batches, self._next = self._batches, iter(()), None
        close = getattr(source, "close", None)
        if callable(close):
            close()

    def _look_ahead(self) -> None:
        try:
            pair = next(self._batches, None)
            if pair is None:
                self._batches = iter(())
                return
            self._side = self._side or SideStream(self._device)
            with self._side.ahead(), _normal_tensors():
                self._next = self._move(pair[0], self._device), pair[1]
        except Exception as error:
            self._next = error


class SideStream:
    """A stream beside the current one. All of one device share it, and with it its cached memory."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        index = self._module.current_device() if device.index is None else device.index
        self._stream = _stream_of(torch.device(device.type, index))
        self._current = partial(self._module.current_stream, self._stream.device)
        self._reader = self._current()
        """The stream that was given the last batch."""
        self._copied: Any = None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """A context whose work goes to the side stream, beside what the current stream is given after it.

        It waits for what was given before: a copy may get the memory of a batch that the host has let go of
        and the device still reads.
        """
        self._stream.wait_stream(self._reader)
        self._reader = self._current()
        self._stream.wait_stream(self._reader)
        with self._module.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def hand_over(self) -> None:
        """Let the current stream go on after the last work of `ahead`; the host does not wait."""
        self._current().wait_event(self._copied)


def _has_streams(device: torch.device) -> bool:
    """Whether the device has streams as CUDA has: those of a CPU do nothing, mps has none."""
    return device.type not in ("cpu", "meta", "mps") and hasattr(getattr(torch, device.type, None), "Stream")


@cache
def _stream_of(device: torch.device) -> Any:
    # Not one per epoch: the memory that the allocator caches for a stream serves no other.
    return torch.get_device_module(device).Stream(device)


def _normal_tensors() -> Any:
    # A batch asked for in inference mode must not make its successor one that cannot be trained on.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
