"""`Prefetch`: copies the next batch to the device on a side stream while the current one is used.

Used by the data loader. Never prefetches into memory that the user may still read.
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
    """Iterator of (batch on `device`, position) that prefetches one batch.

    When batch k is returned, the copy of batch k + 1 has been issued on a side stream; batch k + 2 has not
    been fetched. So batch k is returned only after batch k + 1 is fetched. An error in fetching or copying
    batch k + 1 is raised when that batch is requested. The first batch is copied on the current stream, since
    nothing could overlap with it. On devices without side streams each batch is copied when requested.

    Args:
        batches: Yields pairs (batch, position). Positions are returned unchanged.
        device: The device for batches.
        move: Function (batch, device) that moves a batch. It must not write to memory of the last batch.
        prefetches: Whether batches may be fetched before they are requested.
        side: Replaces the device's side stream.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, Any]],
        device: torch.device,
        move: Callable[[Any, torch.device], Any],
        prefetches: bool = True,
        *,
        side: SideStream | None = None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._move = move
        self._side = side
        self._prefetches = prefetches and (side is not None or _has_streams(device))
        self._last_batch: Any = None
        self._next: tuple[Any, Any] | Exception | None = None  # the prefetched batch, or its error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        """Return the next batch, on the device and ready for the current stream, and its position."""
        prefetched, self._next = self._next, None
        if isinstance(prefetched, Exception):
            try:
                raise prefetched
            finally:
                del prefetched  # it refers to this frame
        if prefetched is None or self._side is None:
            batch, position = next(self._batches)
            batch = self._move(batch, self._device)
        else:
            batch, position = prefetched
            self._side.wait_stream()
        if self._prefetches:
            self._fetch_next()
            # Referenced until the side stream has waited for its reads: other code may use the same stream
            # of torch's pool, and reuse the memory.
            self._last_batch = batch
        return batch, position

    def close(self) -> None:
        """Drop the prefetched batch, close `batches` if it has `close()`, and end the iteration."""
        source, self._batches, self._next = self._batches, iter(()), None
        close = getattr(source, "close", None)
        if callable(close):
            close()

    def _fetch_next(self) -> None:
        try:
            pair = next(self._batches, None)
            if pair is None:
                self._batches = iter(())
                return
            self._side = self._side or SideStream(self._device)
            with self._side.on_side_stream(), _outside_inference_mode():
                self._next = self._move(pair[0], self._device), pair[1]
        except Exception as error:
            self._next = error


class SideStream:
    """A side stream for copies. All loaders of a device share it, and so its cached memory."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        index = self._module.current_device() if device.index is None else device.index
        self._stream = _stream_of(torch.device(device.type, index))
        self._current = partial(self._module.current_stream, self._stream.device)
        self._reader = self._current()
        """The stream that was current when the last batch was returned."""
        self._copied: Any = None

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Context whose work is issued on the side stream, concurrent with later work of the current one.

        The side stream first waits for earlier work. A copy may get the memory of a batch that the host has
        released and the device still reads.
        """
        self._stream.wait_stream(self._reader)
        self._reader = self._current()
        self._stream.wait_stream(self._reader)
        with self._module.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def wait_stream(self) -> None:
        """Make the current stream wait for the last work of `on_side_stream`; the host does not wait."""
        self._current().wait_event(self._copied)


def _has_streams(device: torch.device) -> bool:
    """Whether the device has streams like CUDA's: those of a CPU do nothing, mps has none."""
    return device.type not in ("cpu", "meta", "mps") and hasattr(getattr(torch, device.type, None), "Stream")


@cache
def _stream_of(device: torch.device) -> Any:
    # One per device, not per epoch: memory cached by the allocator for a stream is not reused by others.
    return torch.get_device_module(device).Stream(device)


def _outside_inference_mode() -> Any:
    # The batch after one requested in inference mode must not consist of inference tensors.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
