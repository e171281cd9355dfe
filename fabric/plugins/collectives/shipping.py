"""Any object from one rank to all, or a part to each: its structure is pickled, its tensors travel beside
it as bytes.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.channel import all_on_host, as_bytes, buckets, to_tensors
from fabric.plugins.collectives.frames import FRAME_BYTES, ROOM, call_of
from fabric.plugins.collectives.gather import to_bytes
from fabric.plugins.collectives.route import check_parts

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel

_HEAD = 8  # bytes of the message's length, where no guard tells it


def broadcast_tree(data: Any, src: int, channel: Channel) -> Any:
    """`src`'s `data` on every rank, in one message for small objects. All ranks of the group.

    Args:
        data: Any object that pickles; what ranks other than `src` pass is ignored. Tensors anywhere in it
            keep dtype, shape, `requires_grad` and identity; those of a device arrive on the receiver's own.
        src: Global rank that sends.
        channel: The group.

    Raises:
        ArgumentTypeError: `src`'s object does not pickle; raised on every rank.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    if channel.world_size == 1:
        return data
    verb = f"broadcast(src={src})"
    if channel.collective.rank != src:
        built, labels, raw = _read(_tell(None, verb, src, channel))
        tensors = [label.room(channel.wire.device) for label in labels]
        if raw is None:
            _ship(tensors, False, src, channel)
        else:
            _fill(tensors, raw)
        return _Loader(built, [label.dress(t) for label, t in zip(labels, tensors, strict=True)]).load()
    file = io.BytesIO()
    outline = _Outline(file)
    try:
        outline.dump(data)
        message, rides = _write(file.getvalue(), outline.tensors, outline.tensors)
    except Exception as error:
        refusal = (
            f"{verb}: rank {src}'s object cannot be pickled ({type(error).__name__}: {error}). Broadcast "
            "plain data, tensors, or objects of classes defined at the top level of a module."
        )
        _tell(b"!T" + refusal.encode(), verb, src, channel)
        raise ArgumentTypeError(refusal) from error
    _tell(message, verb, src, channel)
    if not rides:
        # Receivers know one device of their own besides the host, so everything else leaves from one device
        # too.
        tensors = [t if t.device.type == "cpu" else t.to(channel.wire.device) for t in outline.tensors]
        _ship(tensors, True, src, channel)
    return data


def scatter_tree(data: Any, src: int, channel: Channel) -> Any:
    """This rank's part of `src`'s tree, whose leaves are split along dim 0 into one part per rank of the
    group.

    Args:
        data: A tensor, or nesting of them; what ranks other than `src` pass is ignored.
        src: Global rank that sends.
        channel: The group.

    Returns:
        The tree with leaves of shape (n / world_size, ...) for leaves of (n, ...).

    Raises:
        ConfigurationError: The first dimension of a leaf does not divide by the number of ranks; on all
            ranks.
        ArgumentTypeError: A leaf that is no tensor, or structure that does not pickle; on all ranks.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    world, me, verb = channel.world_size, channel.collective.rank_in_group, f"scatter(src={src})"
    rows: list[list[Tensor]] = []
    message = None
    if channel.collective.rank == src or world == 1:
        try:
            leaves, spec = flatten(data)
            tensors = to_tensors(leaves, channel.wire.device, verb)
            check_parts([list(t.shape) for t in tensors], world, verb)
            parts = [t.detach().chunk(world) for t in tensors]
            rows = [[part[i].contiguous() for part in parts] for i in range(world)]
            shell = unflatten([None] * len(tensors), spec, data)
            message, _ = _write(pickle.dumps((shell, spec)), rows[0], [t for row in rows for t in row])
        except Exception as error:
            kind = "C" if isinstance(error, ConfigurationError) else "T"
            _tell(f"!{kind}{error}".encode(), verb, src, channel)
            raise
    if world == 1:
        return unflatten([t.clone() for t in rows[0]], spec, data)
    built, labels, raw = _read(_tell(message, verb, src, channel))
    shell, spec = pickle.loads(built)
    mine = [label.room(channel.wire.device) for label in labels]
    size = sum([t.nbytes for t in mine])
    if raw is not None:
        _fill(mine, raw[me * size :])
    elif size:
        device = (
            torch.device("cpu") if all_on_host(mine) and "cpu" in channel.wire.sendable else channel.wire.via
        )
        sent = [torch.cat([as_bytes(t).to(device) for t in row]) for row in rows]
        got = torch.empty(size, dtype=torch.uint8, device=device)
        channel.collective.scatter(got, sent, src)
        _fill(mine, got)
    return unflatten(mine, spec, shell)


class _Label(NamedTuple):
    """What a receiver must know of a tensor before its bytes arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    is_parameter: bool

    def room(self, device: torch.device) -> Tensor:
        """Memory for it, on the host or on the receiver's own device."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_host else device)

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


def _write(outline: bytes, labelled: list[Tensor], data: list[Tensor]) -> tuple[bytes, bool]:
    """The message: outline, labels, and the bytes of `data` if all fits into a frame; whether it does."""
    labels = [_label(t) for t in labelled]
    size = sum([t.nbytes for t in data])
    if all_on_host(data) and size < ROOM:
        raw = b"".join([to_bytes(as_bytes(t)) for t in data])
        message = b"=" + pickle.dumps((outline, labels, raw))
        if len(message) <= ROOM:
            return message, True
    return b"=" + pickle.dumps((outline, labels, None)), False


def _read(message: bytes) -> tuple[bytes, list[_Label], Tensor | None]:
    """What `_write` made.

    Raises:
        ArgumentTypeError: The sender refused its object; or
        ConfigurationError: its shapes.
    """
    if message[:1] == b"!":
        kind = ConfigurationError if message[1:2] == b"C" else ArgumentTypeError
        raise kind(message[2:].decode())
    outline, labels, raw = pickle.loads(message[1:])
    return (
        outline,
        labels,
        None if raw is None else torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8),
    )


def _tell(message: bytes | None, verb: str, src: int, channel: Channel) -> bytes:
    """`src`'s message (None on the others) on every rank: in the frame, or after it where it does not fit."""
    own = [torch.frombuffer(bytearray(message), dtype=torch.uint8)] if message else []
    meeting = channel.meet(call_of(verb), own)
    if meeting is None:
        return _tell_plain(message, src, channel)
    place = channel.collective.place_of(src)
    size = meeting.sizes()[place]
    if size <= ROOM:
        return to_bytes(meeting.data(place, size))
    return _send(own[0] if message else torch.empty(size, dtype=torch.uint8), src, channel)


def _tell_plain(message: bytes | None, src: int, channel: Channel) -> bytes:
    """The same without frames to carry the length."""
    head = (len(message).to_bytes(_HEAD, "little") + message).ljust(FRAME_BYTES, b"\0") if message else b""
    first = torch.frombuffer(bytearray(head[:FRAME_BYTES] or FRAME_BYTES), dtype=torch.uint8)
    told = _send(first, src, channel)
    size, begin = int.from_bytes(told[:_HEAD], "little"), told[_HEAD:]
    if size <= len(begin):
        return begin[:size]
    rest = torch.empty(size - len(begin), dtype=torch.uint8)
    if message:
        rest.copy_(torch.frombuffer(bytearray(message[len(begin) :]), dtype=torch.uint8))
    return begin + _send(rest, src, channel)


def _send(raw: Tensor, src: int, channel: Channel) -> bytes:
    sent = channel.wire.ready(raw)
    channel.collective.broadcast(sent, src)
    return to_bytes(sent.cpu())


def _fill(tensors: list[Tensor], raw: Tensor) -> None:
    """Copy bytes, one tensor's after the other's, into the tensors."""
    at = 0
    for tensor in tensors:
        if tensor.nbytes:
            as_bytes(tensor).copy_(raw[at : at + tensor.nbytes])
            at += tensor.nbytes


def _ship(tensors: list[Tensor], sender: bool, src: int, channel: Channel) -> None:
    """Broadcast the bytes of `tensors` in place. Buckets follow sizes and devices, alike on all ranks."""
    raw = [as_bytes(t) for t in tensors]
    for bucket in buckets(raw):
        parts = [raw[i] for i in bucket]
        home = parts[0].device
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        sent = channel.wire.ready(flat)
        channel.collective.broadcast(sent, src)
        if sender or sent is parts[0]:
            continue
        pieces = sent.to(home).split([p.numel() for p in parts])
        torch._foreach_copy_(parts, list(pieces))
