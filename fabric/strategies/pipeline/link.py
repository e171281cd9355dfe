"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

A message is one piece: a head of fixed size, and the tensors of the form that both ends know, so that the
receiver has asked for it before. (Two pieces, where tensors of a device are sent separately.) When the form
changes, a head announces it, and the new form follows. That head still has room for tensors of the old form,
which nobody reads.
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

_KNOWN, _NEW, _FAILED = 0, 1, 2
_HEAD = 32
"""Bytes: kind, size of what follows, flag, nothing."""
_ALIGN = 16
_ON_THE_WAY = 2
"""Messages. With one or more, no stages wait in a circle: each comes to what it has not taken yet."""


class Failed(NamedTuple):
    """In place of a tree: what went wrong, and where."""

    rank: int
    text: str


class Leaf(NamedTuple):
    """Shape, dtype and place of a tensor. A host tensor is sent as one, if the group supports that."""

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool
    on_host: bool


class Form(NamedTuple):
    """Structure and leaves of a tree: enough to allocate memory for it."""

    spec: Any
    leaves: tuple[Leaf | None, ...]
    """None: the leaf is None."""


class Message(NamedTuple):
    """A tree that can be sent."""

    leaves: list[Tensor | None]
    form: Form
    told: PickledObject | None
    """The form, if it is another one than before."""


_NOTHING = Form(None, ())


class Room:
    """Memory of one message, alike at both ends.

    Args:
        form: Of its tensors.
        host: Where the head is, and what is on the host.
        staging: Where the other tensors travel.
    """

    def __init__(self, form: Form, host: torch.device, staging: torch.device) -> None:
        sizes = {host: _HEAD, staging: _HEAD if staging == host else 0}
        spans = []
        for leaf in form.leaves:
            where = host if leaf is None or leaf.on_host else staging
            size = 0 if leaf is None else leaf.shape.numel() * leaf.dtype.itemsize
            spans.append((where, slice(sizes[where], sizes[where] + size)))
            sizes[where] -= -size // _ALIGN * _ALIGN
        pieces = {where: torch.empty(size, dtype=torch.uint8, device=where) for where, size in sizes.items()}
        self.pieces = [piece for piece in pieces.values() if len(piece)]
        """What travels."""
        self.head = pieces[host][:_HEAD].view(torch.int64)
        self.leaves = [
            None if leaf is None else pieces[where][span].view(leaf.dtype).view(leaf.shape)
            for leaf, (where, span) in zip(form.leaves, spans, strict=True)
        ]


def form_of(tree: Any) -> tuple[list[Tensor | None], Form]:
    """The leaves of a tree of tensors (and Nones), and its form."""
    leaves, spec = flatten(tree)
    known = [
        None if leaf is None else Leaf(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device.type == "cpu")
        for leaf in leaves
    ]
    return leaves, Form(spec, tuple(known))


class Link:
    """One direction between two ranks. What one end sends, the other must receive, in the same order.

    Args:
        peer: Global rank at the other end.
        group: The process group.
        transport: What can be sent from here.
        tag: Tells messages of several links between the same ranks apart.
    """

    def __init__(self, peer: int, group: Any, transport: Transport, tag: int) -> None:
        self.peer, self._group, self._transport, self._tag = peer, group, transport, tag
        self._host = torch.device("cpu") if "cpu" in transport.sendable else transport.staging_device
        self._form = _NOTHING
        """Of the next messages, until there is word of another one."""
        self._expected: tuple[Room, list[Any]] | None = None
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()
        self.flag = False
        """A bit that rides along; of the last message that was taken."""

    def message(self, tree: Any) -> Message:
        """Return the argument of `send` for a tree of tensors (and Nones), if that tree is the next one.

        Raises:
            ArgumentTypeError: Its containers cannot be pickled.
        """
        leaves, form = form_of(tree)
        told = None if form == self._form else PickledObject(form, "pipeline", "what goes to the next stage")
        return Message(leaves, form, told)

    def send(self, message: Message | Failed, flag: bool = False) -> None:
        """Start to send a message.

        A few messages may be on the way; then it waits until the first of them has been taken. (gloo does not
        tell without waiting, and a sender that is far ahead would hold all that it has sent.)
        """
        while len(self._sent) >= _ON_THE_WAY:
            _wait(self._sent.popleft())
        self._sent.append([])
        if isinstance(message, Failed):
            self._tell(_FAILED, flag, PickledObject(tuple(message), "pipeline"))
            return
        if message.told is not None:
            self._tell(_NEW, flag, message.told)
            self._form = message.form
        self._start(_KNOWN, 0, flag, message.leaves)

    def expect(self) -> None:
        """Ask for the next message, so that it comes while something else is computed."""
        if self._expected is None:
            room = Room(self._form, self._host, self._transport.staging_device)
            self._expected = room, [self._ask(piece) for piece in room.pieces]

    def take(self) -> Any:
        """The next message: a tree whose leaves require gradients where the sender's do, or a `Failed`."""
        self.expect()
        (room, asked), self._expected = self._expected, None  # type: ignore[misc]
        _wait(asked)
        kind, size, flag, _ = room.head.tolist()
        self.flag = bool(flag)
        if kind != _KNOWN:
            raw = torch.empty(size, dtype=torch.uint8, device=self._host)
            _wait([self._ask(raw)])
            told = ReceivedObject(raw.cpu()).load_inline(self._host)
            if kind == _FAILED:
                return Failed(*told)
            self._form = told
            return self.take()
        # .data: each counts its changes in place by itself, as they share memory, and nothing in it.
        found = [
            None
            if leaf is None or known is None
            else leaf.data.to("cpu" if known.on_host else self._transport.device).requires_grad_(
                known.needs_grad
            )
            for leaf, known in zip(room.leaves, self._form.leaves, strict=True)
        ]
        return unflatten(found, self._form.spec, None)

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait(self._sent.popleft())

    def _tell(self, kind: int, flag: bool, what: PickledObject) -> None:
        raw = what.message().to(self._host)
        self._start(kind, len(raw), flag, [])
        self._give(raw)

    @torch.no_grad()
    def _start(self, kind: int, size: int, flag: bool, leaves: list[Tensor | None]) -> None:
        """Send a message of the form that is known."""
        room = Room(self._form, self._host, self._transport.staging_device)
        room.head.copy_(torch.tensor([kind, size, flag, 0]))
        for place, leaf in zip(room.leaves, leaves, strict=False):
            if place is not None and leaf is not None:
                place.copy_(leaf)
        for piece in room.pieces:
            self._give(piece)

    def _give(self, piece: Tensor) -> None:
        work = dist.isend(piece, self.peer, group=self._group, tag=self._tag)
        self._sent[-1].append((work, piece))

    def _ask(self, piece: Tensor) -> tuple[Any, Tensor]:
        return dist.irecv(piece, self.peer, group=self._group, tag=self._tag), piece


def _wait(works: list[tuple[Any, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
