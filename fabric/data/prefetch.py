"""Batches on their way to a device: the next one is copied on a side stream while the last one is used.

Used by the data loader. Never copies ahead what could be written over while the user still reads it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from contextlib import contextmanager, nullcontext
from datetime import date, timedelta
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

_CONTAINERS = (OrderedDict, defaultdict, dict, list, tuple)
_PLAIN = (
    *(type(None), int, float, complex, str, bytes, date, timedelta, PurePath),
    *(torch.device, torch.dtype, torch.Size),
)
_MANY = 10_000  # objects in one batch; also ends the walk of objects that refer to each other


class Prefetch:
    """Batches of `batches` on `device`, the next one on its way while the last one is used.

    When batch k is given, the copy of batch k + 1 has been issued on a side stream; batch k + 2 has not been
    fetched. So each batch waits until its successor is fetched, and what fetching or copying the successor
    raises is raised when the successor is asked for. These are copied on the current stream, when asked for:
    the first batch, which nothing could overlap; a batch that is not in host memory, or whose tensors cannot
    all be found (see `find_tensors`). From the first one on whose copy hides tensors, and on devices without
    side streams, each batch is also fetched when asked for.

    Args:
        batches: Gives pairs (batch, note). The note comes back, untouched, with its batch.
        device: Where batches go.
        move: Function (batch, device) that moves a batch. It must not write to memory that the last batch
            is in.
        side: Takes the place of the device's own side stream.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, Any]],
        device: torch.device,
        move: Callable[[Any, torch.device], Any],
        *,
        side: SideStream | None = None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._move = move
        self._side = side
        self._looks_ahead = side is not None or _has_streams(device)
        # The next batch, its note and its tensors if it was copied ahead (else None); or what it raised.
        self._next: tuple[Any, Any, list[Tensor] | None] | Exception | None = None

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
        batch, note, tensors = (*next(self._batches), None) if taken is None else taken
        if tensors is not None and self._side is not None:
            self._side.hand_over(tensors)
        else:
            batch = self._move(batch, self._device)
            self._looks_ahead = self._looks_ahead and find_tensors(batch) is not None
        if self._looks_ahead:
            self._look_ahead()
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
            batch, note = pair
            tensors = find_tensors(batch)
            if tensors and all([tensor.device.type == "cpu" for tensor in tensors]):
                # Only now: what the first move made on the device, the side stream waits for.
                self._side = self._side or SideStream(self._device)
                with self._side.ahead(), _normal_tensors():
                    moved = self._move(batch, self._device)
                tensors = find_tensors(moved)
                batch = batch if tensors is None else moved
            else:
                tensors = None
            self._next = batch, note, tensors
        except Exception as error:
            self._next = error


class SideStream:
    """A stream beside the current one. All of one device share it, and with it its cached memory.

    Waits, when made, for what the current stream has been given so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        index = self._module.current_device() if device.index is None else device.index
        self._stream = _stream_of(torch.device(device.type, index))
        self._copied: Any = None
        self._stream.wait_stream(self._module.current_stream(self._stream.device))

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """A context whose work goes to the side stream, and does not wait for the current one."""
        with self._module.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def hand_over(self, tensors: list[Tensor]) -> None:
        """Let the current stream use `tensors`: it waits for the last work of `ahead`, the host does not."""
        current = self._module.current_stream(self._stream.device)
        current.wait_event(self._copied)
        for tensor in tensors:
            if tensor.device == self._stream.device:
                # Freed, its memory goes back to the side stream, where the next copy would not wait for
                # what the current stream still reads.
                tensor.record_stream(current)


def find_tensors(batch: Any) -> list[Tensor] | None:
    """Every tensor that `batch` holds; None where it holds anything that may hide one.

    Looked into are dict, list, tuple, and objects of classes that are written in Python without slots. Only
    dense tensors without gradient count as found.
    """
    found: list[Tensor] = []
    todo = [batch]
    for data in todo:  # grows on the way
        kind: Any = type(data)
        if kind is Tensor:
            if data.layout is not torch.strided or data.is_nested or data.is_quantized or data.requires_grad:
                return None
            found.append(data)
        elif not isinstance(data, _PLAIN) and kind.__module__ != "numpy":
            if not _is_open(kind) or len(todo) > _MANY:
                return None
            todo.extend(getattr(data, "__dict__", {}).values())
            if isinstance(data, _CONTAINERS):
                todo.extend(data.values() if isinstance(data, dict) else data)
    return found


@cache
def _is_open(kind: Any) -> bool:
    """Whether all that an instance holds is its items and its `__dict__`."""
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), object)
    # Slots, and what classes of extensions hold in C, take room that an empty subclass has not.
    twin: Any = type("twin", (base,), {}) if kind.__dictoffset__ else base
    return all(
        [getattr(kind, size) == getattr(twin, size) for size in ("__basicsize__", "__weakrefoffset__")]
    )


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
