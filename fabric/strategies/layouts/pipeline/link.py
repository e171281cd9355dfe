"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

A message says what it is in a head of fixed size; its tensors follow, one by one.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.tree import flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Wire

_HEAD = 1024
"""Bytes of a head: a size, and as much of what is told as there is room for; the rest follows."""
_SIZE = 8
_ON_THE_WAY = 2
"""Messages. With one or more, no stages wait in a circle: each comes to what it has not taken yet."""


class Failed(NamedTuple):
    """In place of a tree: what went wrong, and where."""

    rank: int
    text: str


class Leaf(NamedTuple):
    """What a tensor looks like. One of the host stays one: it travels as such, where the group can do it."""

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool
    on_host: bool


class Link:
    """One direction between two ranks. What one end sends, the other must receive, in the same order.

    Args:
        peer: Global rank at the other end.
        group: The process group.
        wire: What can be sent from here.
        tag: Tells messages of several links between the same ranks apart.
    """

    def __init__(self, peer: int, group: Any, wire: Wire, tag: int) -> None:
        self.peer, self._group, self._wire, self._tag = peer, group, wire, tag
        self._host = torch.device("cpu") if "cpu" in wire.sendable else wire.via
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, tree: Any) -> None:
        """Start to send a tree of tensors (and Nones), or a `Failed`.

        A few messages may be on the way; then it waits until the first of them has been taken. (gloo does not
        tell without waiting, and a sender that is far ahead would hold all that it has sent.)
        """
        while len(self._sent) >= _ON_THE_WAY:
            _wait(self._sent.popleft())
        leaves, spec = ([], None) if isinstance(tree, Failed) else flatten(tree)
        forms = [None if leaf is None else _form_of(leaf) for leaf in leaves]
        what = pickle.dumps(tree if isinstance(tree, Failed) else (spec, forms))
        raw = bytearray((len(what).to_bytes(_SIZE, "little") + what).ljust(_HEAD, b"\0"))
        told = torch.frombuffer(raw, dtype=torch.uint8).to(self._host)
        sent = [told[:_HEAD], told[_HEAD:]]
        for leaf, form in zip(leaves, forms, strict=True):
            if form is not None:
                room, place = self._room(form)
                place.copy_(leaf.detach())
                sent.append(room)
        pieces = [piece for piece in sent if len(piece)]
        self._sent.append([(dist.isend(p, self.peer, self._group, self._tag), p) for p in pieces])

    def take(self) -> Any:
        """The next message: a tree whose leaves require gradients where the sender's do, or a `Failed`."""
        told = self._take_bytes(_HEAD)
        end = _SIZE + int.from_bytes(told[:_SIZE], "little")
        if end > _HEAD:
            told += self._take_bytes(end - _HEAD)
        what = pickle.loads(told[_SIZE:end])
        if isinstance(what, Failed):
            return what
        spec, forms = what
        return unflatten([None if form is None else self._take_tensor(form) for form in forms], spec, None)

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait(self._sent.popleft())

    def _room(self, form: Leaf) -> tuple[Tensor, Tensor]:
        """The bytes that travel of a tensor, and the tensor."""
        raw = torch.empty(
            form.shape.numel() * form.dtype.itemsize,
            dtype=torch.uint8,
            device=self._host if form.on_host else self._wire.via,
        )
        return raw, raw.view(form.dtype).view(form.shape)

    def _take_bytes(self, size: int) -> bytes:
        raw = torch.empty(size, dtype=torch.uint8, device=self._host)
        dist.recv(raw, self.peer, self._group, self._tag)
        return raw.cpu().numpy().tobytes()

    def _take_tensor(self, form: Leaf) -> Tensor:
        raw, tensor = self._room(form)
        if len(raw):
            dist.recv(raw, self.peer, self._group, self._tag)
        return tensor.to("cpu" if form.on_host else self._wire.device).requires_grad_(form.needs_grad)


def _form_of(leaf: Tensor) -> Leaf:
    return Leaf(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device.type == "cpu")


def _wait(works: list[tuple[Any, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
