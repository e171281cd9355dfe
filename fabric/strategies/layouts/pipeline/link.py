"""`Link`: trees of tensors from one rank of a pipeline to another, of any shapes, and word of a failure.

A message begins with a head of fixed size; what does not fit there follows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.plugins.collectives.frames import buckets, pack
from fabric.plugins.collectives.objects import Arrived, receive

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel
    from fabric.plugins.collectives.objects import Dumped

_HEAD = 1024
"""Bytes of a head: a size, and as much of what is told as there is room for."""
_SIZE = 16
_ON_THE_WAY = 2
"""Messages. With one or more, no stages wait in a circle: each comes to what it has not taken yet."""


class Failed(NamedTuple):
    """In place of a tree: what went wrong, and where."""

    rank: int
    text: str


class Link:
    """One direction between two ranks. What one end sends, the other must receive, in the same order.

    Args:
        peer: Global rank at the other end.
        group: The process group.
        channel: What can be sent from here.
        tag: Tells messages of several links between the same ranks apart.
    """

    def __init__(self, peer: int, group: Any, channel: Channel, tag: int) -> None:
        self._end = (peer, group, tag)
        self._channel, wire = channel, channel.wire
        self._host = torch.device("cpu") if "cpu" in wire.sendable else wire.via
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, dumped: Dumped) -> None:
        """Start to send a tree of tensors, or a `Failed`.

        A few messages may be on the way; then it waits until the first of them has been taken. (gloo does not
        tell without waiting, and a sender that is far ahead would hold all that it has sent.)
        """
        while len(self._sent) >= _ON_THE_WAY:
            _wait(self._sent.popleft())
        told = dumped.message()
        told = torch.cat([torch.tensor([len(told), 0]).view(torch.uint8), told])
        told = torch.nn.functional.pad(told, (0, max(0, _HEAD - len(told)))).to(self._host)
        sent = [told[:_HEAD], told[_HEAD:]]
        for bucket in [] if dumped.inline else buckets(dumped.labels, mixed=True):
            flat = self._channel.wire.ready(pack([dumped.tensors[i] for i in bucket]).view(-1))
            sent.append(flat.clone())  # blocks may change what they returned before it has been taken
        peer, group, tag = self._end
        self._sent.append([(dist.isend(piece, peer, group, tag), piece) for piece in sent if len(piece)])

    def take(self) -> Any:
        """The next message: a tree whose leaves require gradients where the sender's do, or a `Failed`."""
        told = self._take_bytes(_HEAD)
        end = _SIZE + int(told[:_SIZE].view(torch.int64)[0])
        if end > _HEAD:
            told = torch.cat([told, self._take_bytes(end - _HEAD)])
        came = Arrived(told[_SIZE:end])
        if came.inline:
            return came.whole(self._channel.wire.device)
        return came.around(receive(came.labels, self._channel, lambda raw, _: self._fill(raw)))

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sent:
            _wait(self._sent.popleft())

    def _take_bytes(self, size: int) -> Tensor:
        return self._fill(torch.empty(size, dtype=torch.uint8, device=self._host)).cpu()

    def _fill(self, raw: Tensor) -> Tensor:
        peer, group, tag = self._end
        dist.recv(raw, peer, group, tag)
        return raw


def _wait(works: list[tuple[Any, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
