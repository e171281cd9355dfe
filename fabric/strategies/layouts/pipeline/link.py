"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

One message has a head of fixed size. While shapes stay, the tensors follow it directly and the receiver has
asked for them before; when they change, the head says so, and tensors of the old shapes, which nobody reads,
come before the new description.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.channel import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fabric.plugins.collectives.channel import Wire

_KNOWN, _NEW, _FAILED = 0, 1, 2
_ON_THE_WAY = 2
"""Messages. With one or more, no stages wait in a circle: each comes to what it has not taken yet."""


class Failed(NamedTuple):
    """In place of a tree: what went wrong, and where."""

    rank: int
    text: str


class Form(NamedTuple):
    """What a tree looks like: enough to make room for it."""

    spec: Any
    leaves: tuple[tuple[torch.Size, torch.dtype, bool] | None, ...]
    """(shape, dtype, whether it requires a gradient) of each tensor; None: the leaf is None."""

    def room(self, device: torch.device) -> list[Tensor | None]:
        """Memory for the leaves."""
        return [
            None if leaf is None else torch.empty(leaf[0], dtype=leaf[1], device=device)
            for leaf in self.leaves
        ]


def form_of(tree: Any) -> tuple[list[Tensor | None], Form]:
    """The leaves of a tree of tensors (and Nones), and its form."""
    leaves, spec = flatten(tree)
    return leaves, Form(
        spec,
        tuple([None if leaf is None else (leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves]),
    )


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
        self._host = "cpu" if "cpu" in wire.sendable else wire.via
        self._form: Form | None = None
        self._text = b""
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
            self._head(_FAILED, len(text), flag)
            self._fill()
            self._start(_to_tensor(text, self._host))
            return
        leaves, form = form_of(tree)
        if form == self._form:
            self._head(_KNOWN, 0, flag)
        else:
            text = pickle.dumps(form)
            self._head(_NEW, len(text), flag)
            self._fill()
            self._start(_to_tensor(text, self._host))
            self._form = form
        for leaf in leaves:
            if leaf is not None and leaf.numel():
                self._start(as_bytes(self._wire.ready(leaf)))

    def expect(self) -> None:
        """Ask for the next message, so that it comes while something else is computed."""
        if self._expected is not None:
            return
        head = torch.empty(3, dtype=torch.int64, device=self._host)
        asked = self._ask([head])
        room = [] if self._form is None else self._form.room(self._wire.via)
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
            self._form = told
            room = told.room(self._wire.via)
            _wait(self._ask(room))
        form: Any = self._form
        leaves = [
            None if leaf is None else leaf.to(self._wire.device).requires_grad_(known[2])
            for leaf, known in zip(room, form.leaves, strict=True)
        ]
        return unflatten(leaves, form.spec, None)

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait([work for work, _ in self._sent.popleft()])

    def _head(self, kind: int, size: int, flag: bool) -> None:
        self._start(torch.tensor([kind, size, flag], dtype=torch.int64, device=self._host))

    def _fill(self) -> None:
        """What the other end has asked for, of the shapes that it knows."""
        if self._form is not None:
            for leaf in self._form.room(self._wire.via):
                if leaf is not None and leaf.numel():
                    self._start(as_bytes(leaf))

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
