"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

One message has a head of fixed size. While shapes stay, the tensors follow it directly, small ones in one
piece with it, and the receiver has asked for them before. When they change, the head says so, and tensors of
the old shapes, which nobody reads, come before the new description.
"""

from __future__ import annotations

import itertools
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


_NOTHING = Form(None, ())


class Room(NamedTuple):
    """Memory of one message."""

    pieces: list[Tensor]
    """What travels, each at once: bytes."""
    head: Tensor
    leaves: list[Tensor | None]
    """In one piece with the head, or in pieces of their own."""


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
        wire: What can be sent from here.
        tag: Tells messages of several links between the same ranks apart.
    """

    def __init__(self, peer: int, group: Any, wire: Wire, tag: int) -> None:
        self.peer, self._group, self._wire, self._tag = peer, group, wire, tag
        self._host = torch.device("cpu") if "cpu" in wire.sendable else wire.via
        self._starts: list[int] = []
        """Where the leaves begin, and where the last one ends, that travel in one piece with the head."""
        self._know(_NOTHING)
        self._expected: tuple[Room, list[Any]] | None = None
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
            self._start(_pieces(self._ready(leaves)))
        else:
            self._start(self._room([_KNOWN, 0, flag], leaves).pieces)

    def expect(self) -> None:
        """Ask for the next message, so that it comes while something else is computed."""
        if self._expected is None:
            room = self._room()
            self._expected = room, self._ask(room.pieces)

    def take(self) -> Any:
        """The next message: a tree whose leaves require gradients where the sender's do, or a `Failed`."""
        self.expect()
        (room, asked), self._expected = self._expected, None  # type: ignore[misc]
        _wait(asked)
        kind, size, flag = room.head.tolist()
        self.flag = bool(flag)
        leaves = room.leaves
        if kind != _KNOWN:
            raw = torch.empty(size, dtype=torch.uint8, device=self._host)
            _wait(self._ask([raw]))
            told = pickle.loads(raw.cpu().numpy().tobytes())
            if kind == _FAILED:
                return Failed(*told)
            self._know(told)
            leaves = self._empty()
            _wait(self._ask(_pieces(leaves)))
        found = [
            None
            if leaf is None or known is None
            else leaf.to("cpu" if known.on_host else self._wire.device).requires_grad_(known.needs_grad)
            for leaf, known in zip(leaves, self._form.leaves, strict=True)
        ]
        return unflatten(found, self._form.spec, None)

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait([work for work, _ in self._sent.popleft()])

    def _know(self, form: Form) -> None:
        """The next messages look like this, until there is word of another form."""
        self._form = form
        sizes = [_HEAD, *[_bytes_of(leaf) for leaf in form.leaves]]
        starts = list(itertools.accumulate([-(-size // _ALIGN) * _ALIGN for size in sizes]))
        self._starts = starts if self._wire.via.type == "cpu" and starts[-1] <= _PACKED else []

    def _room(self, head: list[int] | None = None, leaves: list[Tensor | None] | None = None) -> Room:
        """Memory of a message of the form that is known, alike at both ends; with what is given in it."""
        numbers = head or [0] * (_HEAD // 8)
        if not self._starts:
            first = torch.tensor(numbers, dtype=torch.int64, device=self._host)
            rest = self._empty() if leaves is None else self._ready(leaves)
            return Room([as_bytes(first), *_pieces(rest)], first, rest)
        piece = torch.zeros(self._starts[-1], dtype=torch.uint8)
        first = piece[:_HEAD].view(torch.int64)
        first.copy_(torch.tensor(numbers))
        rest = [
            None if leaf is None else piece[start : start + _bytes_of(leaf)].view(leaf.dtype).view(leaf.shape)
            for start, leaf in zip(self._starts[:-1], self._form.leaves, strict=True)
        ]
        with torch.no_grad():
            for place, leaf in zip(rest, leaves or (), strict=False):
                if place is not None and leaf is not None:
                    place.copy_(leaf)
        return Room([piece], first, rest)

    def _empty(self) -> list[Tensor | None]:
        """Memory for leaves that travel by themselves; for those of the host on the host, where that goes."""
        return [
            None
            if leaf is None
            else torch.empty(
                leaf.shape, dtype=leaf.dtype, device=self._host if leaf.on_host else self._wire.via
            )
            for leaf in self._form.leaves
        ]

    def _ready(self, leaves: list[Tensor | None]) -> list[Tensor | None]:
        return [None if leaf is None else self._wire.ready(leaf) for leaf in leaves]

    def _say(self, kind: int, flag: bool, text: bytes) -> None:
        """Text; before it what the other end has asked for, of the shapes that it knows."""
        raw = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._host)
        self._start([*self._room([kind, len(text), flag]).pieces, raw])

    def _start(self, pieces: list[Tensor]) -> None:
        for piece in pieces:
            work = dist.isend(piece, self.peer, group=self._group, tag=self._tag)
            self._sent[-1].append((work, piece))

    def _ask(self, pieces: list[Tensor]) -> list[Any]:
        return [dist.irecv(piece, self.peer, group=self._group, tag=self._tag) for piece in pieces]


def _pieces(leaves: list[Tensor | None]) -> list[Tensor]:
    """What travels of leaves: their bytes, where there are some."""
    return [as_bytes(leaf) for leaf in leaves if leaf is not None and leaf.numel()]


def _bytes_of(leaf: Leaf | None) -> int:
    return 0 if leaf is None else leaf.shape.numel() * leaf.dtype.itemsize


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
