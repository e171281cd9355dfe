"""`Link`: point-to-point messages between two ranks of a pipeline: trees of tensors, or a failure.

A message is one buffer: a header of fixed size, then the tensors. (Two buffers if device tensors are sent
separately.) Both ends keep the metadata of the last tree, so the receiver can post its receive before the
message is sent. When the metadata changes, a header with the kind `_NEW_META` is sent first, and the pickled
metadata after it. The buffer of that header has the old size; its tensors are not read.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.collectives.objects import PickledObject, ReceivedObject
from fabric.core.tree import flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.collectives.channel import Transport

_TENSORS, _NEW_META, _FAILURE = 0, 1, 2
_HEADER = 32
"""Bytes of the header, four int64: kind, size of the pickle that follows, flag, padding."""
_ALIGN = 16
_MAX_IN_FLIGHT = 2
"""Messages per link. With one or more, stages cannot deadlock: each reaches its next receive."""


class StageFailure(NamedTuple):
    """The rank and the text of an error, sent in place of a tree."""

    rank: int
    text: str


class TensorMeta(NamedTuple):
    """Shape, dtype and device of a tensor. Host tensors are sent from the host if the group supports it."""

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool
    on_host: bool


class TreeMeta(NamedTuple):
    """Structure of a tree and metadata of its leaves: enough to allocate memory for it."""

    spec: Any
    leaves: tuple[TensorMeta | None, ...]
    """None: the leaf is None."""


class Message(NamedTuple):
    """A tree, prepared for `Link.send`."""

    leaves: list[Tensor | None]
    meta: TreeMeta
    new_meta: PickledObject | None
    """The pickled metadata, if it differs from that of the message before."""


_EMPTY = TreeMeta(None, ())


class MessageBuffer:
    """Memory of one message, of the same layout at both ends.

    Args:
        meta: Metadata of its tensors.
        host: Device of the header and of host tensors.
        staging: Device from which other tensors are sent.
    """

    def __init__(self, meta: TreeMeta, host: torch.device, staging: torch.device) -> None:
        sizes = {host: _HEADER, staging: _HEADER if staging == host else 0}
        spans = []
        for leaf in meta.leaves:
            device = host if leaf is None or leaf.on_host else staging
            size = 0 if leaf is None else leaf.shape.numel() * leaf.dtype.itemsize
            spans.append((device, slice(sizes[device], sizes[device] + size)))
            sizes[device] -= -size // _ALIGN * _ALIGN
        flat = {dev: torch.empty(size, dtype=torch.uint8, device=dev) for dev, size in sizes.items()}
        self.tensors = [tensor for tensor in flat.values() if len(tensor)]
        """Flat bytes, one tensor per device."""
        self.header = flat[host][:_HEADER].view(torch.int64)
        self.leaves = [
            None if leaf is None else flat[device][span].view(leaf.dtype).view(leaf.shape)
            for leaf, (device, span) in zip(meta.leaves, spans, strict=True)
        ]


def tree_meta(tree: Any) -> tuple[list[Tensor | None], TreeMeta]:
    """Return the leaves of a tree of tensors (and Nones), and its metadata."""
    leaves, spec = flatten(tree)
    metas = [
        None if t is None else TensorMeta(t.shape, t.dtype, t.requires_grad, t.device.type == "cpu")
        for t in leaves
    ]
    return leaves, TreeMeta(spec, tuple(metas))


class Link:
    """One direction of communication between two ranks. The peer must receive each message, in order.

    Args:
        peer: Global rank at the other end.
        group: The process group.
        transport: Devices from which this rank can send.
        tag: Distinguishes messages of several links between the same ranks.
    """

    def __init__(self, peer: int, group: Any, transport: Transport, tag: int) -> None:
        self.peer, self._group, self._transport, self._tag = peer, group, transport, tag
        self._host = torch.device("cpu") if "cpu" in transport.sendable else transport.staging_device
        self._meta = _EMPTY
        """Metadata of the next message, unless its header announces new metadata."""
        self._expected: tuple[MessageBuffer, list[Any]] | None = None
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()
        self.flag = False
        """A bit in the header of each message; that of the last message received."""

    def message(self, tree: Any) -> Message:
        """Return the argument of `send` for a tree of tensors (and Nones). It must be sent next.

        Raises:
            ArgumentTypeError: A container in it cannot be pickled.
        """
        leaves, meta = tree_meta(tree)
        new_meta = (
            None if meta == self._meta else PickledObject(meta, "pipeline", "the output for the next stage")
        )
        return Message(leaves, meta, new_meta)

    def send(self, message: Message | StageFailure, flag: bool = False) -> None:
        """Send a message asynchronously.

        Waits for the oldest message if `_MAX_IN_FLIGHT` are pending. This bounds the memory of a sender that
        is ahead. (gloo has no call that polls for completion.)
        """
        while len(self._sent) >= _MAX_IN_FLIGHT:
            _wait(self._sent.popleft())
        self._sent.append([])
        if isinstance(message, StageFailure):
            self._send_object(_FAILURE, flag, PickledObject(tuple(message), "pipeline"))
            return
        if message.new_meta is not None:
            self._send_object(_NEW_META, flag, message.new_meta)
            self._meta = message.meta
        self._send_tensors(_TENSORS, 0, flag, message.leaves)

    def post_recv(self) -> None:
        """Post the receive of the next message, so that it overlaps with computation."""
        if self._expected is None:
            buffer = MessageBuffer(self._meta, self._host, self._transport.staging_device)
            self._expected = buffer, [self._irecv(tensor) for tensor in buffer.tensors]

    def recv(self) -> Any:
        """Return the next message: a tree, or a `StageFailure`. Leaves require gradients if the
        sender's do.
        """
        self.post_recv()
        (buffer, works), self._expected = self._expected, None  # type: ignore[misc]
        _wait(works)
        kind, size, flag, _ = buffer.header.tolist()
        self.flag = bool(flag)
        if kind != _TENSORS:
            raw = torch.empty(size, dtype=torch.uint8, device=self._host)
            _wait([self._irecv(raw)])
            content = ReceivedObject(raw.cpu()).load_inline(self._host)
            if kind == _FAILURE:
                return StageFailure(*content)
            self._meta = content
            return self.recv()
        # .data: views of one buffer would share a version counter; each leaf needs its own.
        received = [
            None
            if leaf is None or meta is None
            else leaf.data.to("cpu" if meta.on_host else self._transport.device).requires_grad_(
                meta.needs_grad
            )
            for leaf, meta in zip(buffer.leaves, self._meta.leaves, strict=True)
        ]
        return unflatten(received, self._meta.spec, None)

    def flush(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            _wait(self._sent.popleft())

    def _send_object(self, kind: int, flag: bool, dumped: PickledObject) -> None:
        raw = dumped.message().to(self._host)
        self._send_tensors(kind, len(raw), flag, [])
        self._isend(raw)

    @torch.no_grad()
    def _send_tensors(self, kind: int, size: int, flag: bool, leaves: list[Tensor | None]) -> None:
        """Send a header and `leaves`, which have the current metadata."""
        buffer = MessageBuffer(self._meta, self._host, self._transport.staging_device)
        buffer.header.copy_(torch.tensor([kind, size, flag, 0]))
        for target, leaf in zip(buffer.leaves, leaves, strict=False):
            if target is not None and leaf is not None:
                target.copy_(leaf)
        for tensor in buffer.tensors:
            self._isend(tensor)

    def _isend(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self.peer, group=self._group, tag=self._tag)
        self._sent[-1].append((work, tensor))

    def _irecv(self, tensor: Tensor) -> tuple[Any, Tensor]:
        return dist.irecv(tensor, self.peer, group=self._group, tag=self._tag), tensor


def _wait(works: list[tuple[Any, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
