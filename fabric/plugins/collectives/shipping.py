"""Any object from one rank to all: its structure is pickled, its tensors travel beside it as bytes."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

from fabric.core.errors import ArgumentTypeError
from fabric.plugins.collectives.packed import as_bytes, buckets

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.collective import Collective
    from fabric.plugins.collectives.packed import Wire

FRAME_BYTES = 2048
"""Size of the first message: structure and small objects ride in it."""
_HEAD = 8  # bytes of the payload's length; a negative one announces an error


def broadcast_tree(data: Any, src: int, collective: Collective, wire: Wire) -> Any:
    """`src`'s `data` on every rank, in one message for small plain objects. All ranks of the group.

    Args:
        data: Any object that pickles; what ranks other than `src` pass is ignored. Tensors anywhere in it
            keep dtype,
            shape, `requires_grad` and identity; those of a device arrive on the receiver's own.
        src: Global rank that sends.
        collective: The group.
        wire: What the group's backend can send.

    Raises:
        ArgumentTypeError: `src`'s object does not pickle; raised on every rank.
    """
    if collective.world_size == 1:
        return data
    control = torch.device("cpu") if "cpu" in wire.sendable else wire.via
    if collective.rank != src:
        built, labels = _receive(src, collective, control)
        tensors = [
            torch.empty(x.shape, dtype=x.dtype, device="cpu" if x.on_host else wire.device) for x in labels
        ]
        _ship(tensors, False, src, collective, wire)
        return _Loader(built, [label.dress(t) for label, t in zip(labels, tensors, strict=True)]).load()
    file = io.BytesIO()
    outline = _Outline(file)
    try:
        outline.dump(data)
        payload = pickle.dumps((file.getvalue(), [_label(t) for t in outline.tensors]))
    except Exception as error:
        raise _refuse(f"{type(error).__name__}: {error}", src, collective, control) from error
    _send(payload, len(payload), src, collective, control)
    # Receivers know one device of their own besides the host, so everything else leaves from one device too.
    tensors = [t if t.device.type == "cpu" else t.to(wire.device) for t in outline.tensors]
    _ship(tensors, True, src, collective, wire)
    return data


class _Label(NamedTuple):
    """What a receiver must know of a tensor before its bytes arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    is_parameter: bool

    def dress(self, tensor: Tensor) -> Tensor:
        """`tensor` as the sender has it, once its bytes are there: afterwards autograd forbids writing."""
        if self.is_parameter:
            return Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_() if self.requires_grad else tensor


def _label(tensor: Tensor) -> _Label:
    grad = tensor.requires_grad and tensor.is_leaf
    on_host = tensor.device.type == "cpu"
    return _Label(tuple(tensor.shape), tensor.dtype, on_host, grad, type(tensor) is Parameter)


class _Outline(pickle.Pickler):
    """Pickles an object, and sets its tensors aside wherever they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The place of a plain tensor in `tensors`; subclasses and exotic layouts know how they pickle."""
        if type(obj) is not torch.Tensor and type(obj) is not Parameter:
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Loader(pickle.Unpickler):
    """Builds the object again around tensors that have arrived."""

    def __init__(self, outline: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(outline))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """The tensor at a place."""
        return self._tensors[place]


def _send(payload: bytes, length: int, src: int, collective: Collective, control: torch.device) -> None:
    room = FRAME_BYTES - _HEAD
    head = length.to_bytes(_HEAD, "little", signed=True) + payload[:room]
    frame = torch.frombuffer(bytearray(head.ljust(FRAME_BYTES, b"\0")), dtype=torch.uint8)
    collective.broadcast(frame.to(control), src)
    if len(payload) > room:
        rest = torch.frombuffer(bytearray(payload[room:]), dtype=torch.uint8)
        collective.broadcast(rest.to(control), src)


def _receive(src: int, collective: Collective, control: torch.device) -> tuple[bytes, list[_Label]]:
    room = FRAME_BYTES - _HEAD
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=control)
    head = collective.broadcast(frame, src).cpu().numpy().tobytes()
    length = int.from_bytes(head[:_HEAD], "little", signed=True)
    payload = head[_HEAD : _HEAD + abs(length)]
    if abs(length) > room:
        rest = torch.empty(abs(length) - room, dtype=torch.uint8, device=control)
        payload += collective.broadcast(rest, src).cpu().numpy().tobytes()
    if length < 0:
        raise ArgumentTypeError(payload.decode())
    parts: tuple[bytes, list[_Label]] = pickle.loads(payload)
    return parts


def _refuse(reason: str, src: int, collective: Collective, control: torch.device) -> ArgumentTypeError:
    """The error for an object that does not pickle, after the other ranks have got it too."""
    text = (
        f"broadcast(src={src}): rank {src}'s object cannot be pickled ({reason}). Broadcast plain data, "
        "tensors, or "
        f"objects of classes defined at the top level of a module."
    )
    payload = text.encode()
    _send(payload, -len(payload), src, collective, control)
    return ArgumentTypeError(text)


def _ship(tensors: list[Tensor], sender: bool, src: int, collective: Collective, wire: Wire) -> None:
    """Broadcast the bytes of `tensors` in place. Buckets follow sizes and devices, alike on all ranks."""
    raw = [as_bytes(t) for t in tensors]
    for bucket in buckets(raw):
        parts = [raw[i] for i in bucket]
        home = parts[0].device
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        sent = flat if home.type in wire.sendable else flat.to(wire.via)
        collective.broadcast(sent, src)
        if sender or sent is parts[0]:
            continue
        pieces = sent.to(home).split([p.numel() for p in parts])
        torch._foreach_copy_(parts, list(pieces))
