"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

One message has a head of fixed size. While shapes stay, the tensors follow it directly, small ones in one
piece with it, and the receiver has asked for them before. When they change, the head says so, and tensors of
the old shapes, which nobody reads, come before the new description.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.frames import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fabric.plugins.collectives.channel import Wire

_KNOWN, _NEW, _FAILED = 0, 1, 2
_HEAD = 24
"""Bytes: kind, size of what follows, flag."""
_PACKED = 1 << 18
"""Bytes up to which a message is one piece on the host: a copy costs less than a second message."""
_ALIGN = 16
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


class Form(NamedTuple):
    """What a tree looks like: enough to make room for it."""

    spec: Any
    leaves: tuple[Leaf | None, ...]
    """None: the leaf is None."""

    def room(self, device: torch.device, host: torch.device) -> list[Tensor | None]:
        """Memory for the leaves; for those of the host on `host`."""
        return [
            None
            if leaf is None
            else torch.empty(leaf.shape, dtype=leaf.dtype, device=host if leaf.on_host else device)
            for leaf in self.leaves
        ]


def form_of(tree: Any) -> tuple[list[Tensor | None], Form]:
    """The leaves of a tree of tensors (and Nones), and its form."""
    leaves, spec = flatten(tree)
    known = [
        None if leaf is None else Leaf(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device.type == "cpu")
        for leaf in leaves
    ]
    return leaves, Form(spec, tuple(known))


class Pack(NamedTuple):
    """Where head and leaves of a form are in one piece of bytes."""

    form: Form
    starts: list[int]
    total: int

    def views(self, piece: Tensor) -> list[Tensor | None]:
        """The leaves in such a piece, sharing its memory."""
        found: list[Tensor | None] = []
        for start, leaf in zip(self.starts, self.form.leaves, strict=True):
            if leaf is None:
                found.append(None)
                continue
            own = piece[start : start + leaf.shape.numel() * leaf.dtype.itemsize]
            found.append(own.view(leaf.dtype).view(leaf.shape))
        return found


def pack_of(form: Form | None) -> Pack | None:
    """How a form is packed; None: it is too large, or not known."""
    if form is None:
        return None
    starts, at = [], -(-_HEAD // _ALIGN) * _ALIGN
    for leaf in form.leaves:
        starts.append(at)
        size = 0 if leaf is None else leaf.shape.numel() * leaf.dtype.itemsize
        at += -(-size // _ALIGN) * _ALIGN
    return Pack(form, starts, at) if at <= _PACKED else None


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
        self._form: Form | None = None
        self._pack: Pack | None = None
        self._expected: tuple[Tensor, Any, list[Any], list[Any]] | None = None
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()
        self.flag = False
        """A bit that rides along; of the last message that was taken."""

    def send(self, tree: Any, flag: bool = False) -> None:
        """Start to send a tree of tensors, or a `Failed`. Its tensors must stay as they are until `flush`.

        A few messages may be on the way; then it waits until the first of them has been taken. (gloo does not
        tell without waiting, and a sender that is far ahead would hold all that it has sent.)
        """
        while len(self._sent) >= _ON_THE_WAY:
            _wait([work for work, _ in self._sent.popleft()])
        self._sent.append([])
        if isinstance(tree, Failed):
            text = pickle.dumps(tuple(tree))
            self._say(_FAILED, flag, text)
            return
        leaves, form = form_of(tree)
        if form != self._form:
            self._say(_NEW, flag, pickle.dumps(form))
            self._know(form)
            self._start_all([leaf for leaf in leaves if leaf is not None])
        elif self._pack is None:
            self._start(self._head(_KNOWN, 0, flag))
            self._start_all([leaf for leaf in leaves if leaf is not None])
        else:
            piece = torch.empty(self._pack.total, dtype=torch.uint8)
            piece[:_HEAD] = as_bytes(self._head(_KNOWN, 0, flag))
            with torch.no_grad():
                for room, leaf in zip(self._pack.views(piece), leaves, strict=True):
                    if room is not None and leaf is not None:
                        room.copy_(leaf)
            self._start(piece)

    def expect(self) -> None:
        """Ask for the next message, so that it comes while something else is computed."""
        if self._expected is not None:
            return
        if self._pack is not None:
            piece = torch.empty(self._pack.total, dtype=torch.uint8)
            head = piece[:_HEAD].view(torch.int64)
            self._expected = head, self._ask([piece]), self._pack.views(piece), []
            return
        head = torch.empty(_HEAD // 8, dtype=torch.int64, device=self._host)
        asked = self._ask([head])
        room = [] if self._form is None else self._room(self._form)
        self._expected = head, asked, room, self._ask(room)

    def take(self) -> Any:
        """The next message: a tree whose leaves require gradients where the sender's do, or a `Failed`."""
        self.expect()
        head, asked, room, rest = self._expected  # type: ignore[misc]
        self._expected = None
        _wait(asked)
        kind, size, flag = head.tolist()
        self.flag = bool(flag)
        _wait(rest)
        if kind != _KNOWN:
            raw = torch.empty(size, dtype=torch.uint8, device=self._host)
            _wait(self._ask([raw]))
            told = pickle.loads(raw.cpu().numpy().tobytes())
            if kind == _FAILED:
                return Failed(*told)
            self._know(told)
            room = self._room(told)
            _wait(self._ask(room))
        form: Any = self._form
        leaves = [
            None
            if leaf is None
            else leaf.to("cpu" if known.on_host else self._wire.device).requires_grad_(known.needs_grad)
            for leaf, known in zip(room, form.leaves, strict=True)
        ]
        return unflatten(leaves, form.spec, None)

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait([work for work, _ in self._sent.popleft()])

    def _know(self, form: Form) -> None:
        """The next messages look like this, until there is word of another form."""
        self._form = form
        self._pack = pack_of(form) if self._wire.via.type == "cpu" else None

    def _room(self, form: Form) -> list[Tensor | None]:
        """Memory from which, and to which, leaves travel: alike at both ends."""
        return form.room(self._wire.via, self._host)

    def _head(self, kind: int, size: int, flag: bool) -> Tensor:
        return torch.tensor([kind, size, flag], dtype=torch.int64, device=self._host)

    def _say(self, kind: int, flag: bool, text: bytes) -> None:
        """Text; before it what the other end has asked for, of the shapes that it knows."""
        head = self._head(kind, len(text), flag)
        if self._pack is not None:
            piece = torch.zeros(self._pack.total, dtype=torch.uint8)
            piece[:_HEAD] = as_bytes(head)
            self._start(piece)
        else:
            self._start(head)
            room = [] if self._form is None else self._room(self._form)
            self._start_all([leaf for leaf in room if leaf is not None])
        self._start(_to_tensor(text, self._host))

    def _start_all(self, leaves: list[Tensor]) -> None:
        for leaf in leaves:
            if leaf.numel():
                self._start(as_bytes(self._wire.ready(leaf)))

    def _start(self, tensor: Tensor) -> None:
        self._sent[-1].append((dist.isend(tensor, self.peer, group=self._group, tag=self._tag), tensor))

    def _ask(self, room: Iterable[Tensor | None]) -> list[Any]:
        wanted = [as_bytes(leaf) for leaf in room if leaf is not None and leaf.numel()]
        return [dist.irecv(leaf, self.peer, group=self._group, tag=self._tag) for leaf in wanted]


def _to_tensor(text: bytes, device: Any) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
