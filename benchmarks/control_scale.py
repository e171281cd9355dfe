"""What the call check, its reports and a sharded save cost at thousands of ranks: `at_scale.py --control`.

One process plays the ranks whose work decides, with the classes of the package and real sockets between them.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fabric.guard.control_connections import FAN_OUT, ControlConnections, _Connection, neighbours
from fabric.guard.deadlocks import DeadlockDetector
from fabric.guard.messages import KEY_BYTES, RankReport
from fabric.guard.mismatch import decode_report, encode_report, mismatch_text

RANKS = (64, 1024, 4096, 16384)
ROUNDS = 50
HELD = ("RSS MB", "of its own MB", "descriptors")
TEXT = 40_000
"""Bytes of the description of a large tree, in a mismatch."""
TENSORS = 900
"""Tensors of a sharded save, each with a chunk on every rank."""
CHUNKS = 200_000


def path_to(place: int, count: int) -> list[int]:
    """Return the places from a rank of a group of `count` up to the first one."""
    path = [place]
    while (above := neighbours(path[-1], count, FAN_OUT)[0]) is not None:
        path.append(above)
    return path


class Node:
    """One rank of a group, with connections to its neighbours, whose other ends this process holds, too."""

    def __init__(self, place: int, count: int) -> None:
        above, blocks = neighbours(place, count, FAN_OUT)
        pairs = [_pair(block.start) for block in blocks]
        self.blocks, self.below = blocks, [other for _, other in pairs]
        line, self.above = (None, None) if above is None else _pair(above)
        self.own = ControlConnections(line, [own for own, _ in pairs], range(count), place)
        self.seconds = 0.0
        """Processor time of the rank so far."""

    def up(self, own: bytes, messages: list[tuple[int, bytes]], key: int | None = KEY_BYTES) -> Any:
        """Return what the rank sends up, of its own message and of those from below; None: the first rank."""
        for other, message in zip(self.below, messages, strict=True):
            other.send(*message)
        begin = time.thread_time()
        self.turn = self.own.start(own, key)
        self.own.advance(self.turn, 0.0)
        self.seconds += time.thread_time() - begin
        return None if self.above is None else _message(self.above)

    def down(self, answer: tuple[int, bytes] | None) -> tuple[int, bytes]:
        """Return what the rank sends down, of the answer from above."""
        if self.above is not None:
            self.above.send(*answer)
            begin = time.thread_time()
            self.own.advance(self.turn, 0.0)
            self.seconds += time.thread_time() - begin
        got = [_message(other) for other in self.below]
        return got[0] if got else answer

    def close(self) -> None:
        self.own.drop("the benchmark is over")
        for other in [*self.below, *[self.above] * (self.above is not None)]:
            other.socket.close()


def _pair(place: int) -> tuple[_Connection, _Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = socket.create_connection(listening.getsockname())
        own, _ = listening.accept()
    return _Connection(own, place), _Connection(other, place)


def _message(line: _Connection) -> tuple[int, bytes]:
    while (message := line.receive()) is None:
        line.send()
    return message


def frame(count: int) -> float:
    """Return the seconds of a call whose frames have keys only: of the ranks on the longest path."""
    nodes = [Node(place, count) for place in path_to(count - 1, count)]
    own, times = bytes(KEY_BYTES), []
    for _ in range(ROUNDS):
        for node in nodes:
            node.seconds = 0.0
            node.up(own, [(len(own), own)] * len(node.blocks))
        answer = None
        for node in reversed(nodes):
            answer = node.down(answer)
        times.append(sum([node.seconds for node in nodes]))
    for node in nodes:
        node.close()
    return median(times)


def judge(count: int) -> float:
    """Return the seconds of all ranks together in which they see that one of them is late, and no more."""
    store = dist.HashStore()
    ranks = [DeadlockDetector(store, rank, count) for rank in range(count)]
    members = [*range(count)]
    for rank in ranks[1:]:
        rank.counts["0"], rank.members["0"] = 7, members
        report = RankReport(rank.rank, "all_reduce(mean) #7", "float32[]", "train.py:12")
        rank.waiting = rank.status(report, 0.0, group="0", number=7)
        rank.publish_status(rank.waiting)
    begin = time.process_time()
    for _ in range(2):
        for rank in ranks[1:]:
            rank.publish_status(rank.waiting)
            rank.detect_deadlock()
    return time.process_time() - begin


def mismatch(count: int) -> tuple[int, float]:
    """Return the bytes that the first rank sends where one makes another call; and the seconds of a rank."""
    odd = count * 2 // 3
    same = encode_report(RankReport(0, "all_reduce(mean) #2", "x" * TEXT, "train.py:12"))
    other = encode_report(RankReport(0, "broadcast(src=0) #2", "y" * TEXT, "train.py:30"))
    below, message = None, None
    for place in path_to(odd, count):
        node = Node(place, count)
        messages = [message if block.start == below else (len(same), same) for block in node.blocks]
        message, below = node.up(other if place == odd else same, messages, None), place
        if message is not None:
            node.close()
    _, rows = node.down(None)
    sent = (16 + len(rows)) * len(node.blocks)
    begin = time.process_time()
    each = node.turn.rows_by_rank(count)
    known = {row: decode_report(0, row) for row in {*each}}
    text = mismatch_text([known[row]._replace(rank=rank) for rank, row in enumerate(each)])
    seconds = time.process_time() - begin
    node.close()
    assert f"  {odd} " in text.splitlines()[2], text[:1000]
    return sent, seconds


def descriptors(count: int) -> int:
    """Return the descriptors of the first rank for the call check of one group."""
    node = Node(0, count)
    node.close()
    return len(node.blocks) + 1


def plan(count: int) -> tuple[list[int], float]:
    """Return the bytes that each rank sends to rank zero for the plan of a sharded save of `TENSORS` tensors.

    And the seconds in which rank zero reads and describes one chunk, of at most `CHUNKS` chunks.
    """
    from fabric.checkpoint.formats.sharded.plan import Chunk, describe, pack_chunks, unpack_chunks

    names = [f"model.layers.{n // 9}.self_attn.{n % 9}_proj.weight" for n in range(TENSORS)]
    kind = f"float32[{16 * count}, 4096]"

    def message(rank: int, names: list[str]) -> bytes:
        return pack_chunks([Chunk(name, kind, [16 * rank, 0], [16, 4096]) for name in names])

    sent = [len(message(rank, names)) for rank in range(count)]
    few = names[: max(1, CHUNKS // count)]
    messages = [message(rank, few) for rank in range(count)]
    values = {name: torch.empty(16 * count, 4096, device="meta") for name in few}
    begin = time.process_time()
    _, keys = describe(values, map(unpack_chunks, messages))
    return sent, (time.process_time() - begin) / sum(map(len, keys))


def soak(minutes: float, count: int) -> None:
    """Run real ranks of this machine for some minutes; print once a minute what grows in them."""
    from fabric import Fabric

    # Forked: `count` processes that import torch each do not fit into a small machine.
    fabric = Fabric(accelerator="cpu", devices=count, strategy="ddp_fork")
    fabric.launch(_soak, minutes)


def _soak(fabric: Any, minutes: float) -> None:
    from fabric.core.errors import CollectiveMismatch

    torch.set_num_threads(1)
    rank, model = fabric.global_rank, torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group = dist.new_group([*range(0, fabric.world_size, 2)])
    if rank == fabric.world_size - 1:
        time.sleep(6)  # what the first wait of a rank loads, once, is no growth
    fabric.barrier()
    begin = time.monotonic()
    for minute in range(1 + round(minutes)):
        steps = 0
        while fabric.broadcast(time.monotonic() - begin) < 60 * minute or not steps:
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            fabric.any(rank == 3)
            fabric.agree(steps)
            fabric.all_reduce({"loss": float(rank)})
            fabric.all_gather_object(rank)
            if not rank % 2:
                fabric.all_reduce(1.0, group=group)
            if not steps % 20:
                with suppress(CollectiveMismatch):
                    fabric.all_reduce(torch.ones(1 + (rank == 5)))
            steps += 1
        each = fabric.all_gather_object(_held())
        if fabric.is_global_zero:
            text = f"minute {minute}: {steps} steps"
            for what, found in zip(HELD, zip(*each, strict=True), strict=True):
                others = f"{min(found[1:]):.0f} to {max(found[1:]):.0f}"
                text += f"; {what} rank zero {found[0]:.0f}, others {others}"
            print(text, flush=True)


def _held() -> tuple[float, float, int]:
    """Return this process's resident memory, what of it no other process has, and its open descriptors."""
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, _ = line.split()
        sizes[name] = int(size) / 1000
    own = sizes["Private_Clean:"] + sizes["Private_Dirty:"]
    return sizes["Rss:"], own, len([*Path("/proc/self/fd").iterdir()])


def lines() -> list[str]:
    """Return one line for each number."""
    found = []
    for count in RANKS:
        found.append(f"frame {count} ranks {frame(count) * 1e3:.1f} ms")
        found.append(f"judge {count} ranks {judge(count):.2f} s")
        sent, seconds = mismatch(count)
        found.append(f"mismatch {count} ranks {sent / 1e6:.1f} MB, {seconds * 1e3:.0f} ms")
        found.append(f"descriptors {count} ranks {descriptors(count)} of the call check")
        sent, each = plan(count)
        found.append(
            f"plan {count} ranks {TENSORS} tensors {sum(sent) / 1e6:.2f} MB to rank zero, "
            f"{max(sent) / 1e3:.1f} kB from each rank, {each * 1e6:.1f} us a chunk on rank zero"
        )
    return found


def main() -> None:
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
