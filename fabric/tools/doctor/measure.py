"""Measurements of all ranks: connections, clocks, messages of pairs, collectives, a matrix product."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.tools.doctor.report import Reading, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECT_S, MB = 3.0, 1e6
LARGEST_MESSAGE, PAIR_S, ROUNDS = 64_000_000, 0.1, 31
"""Most bytes between two ranks, intended seconds of a transfer, rounds of pairs."""
SIZES, COLLECTIVE_S = (1_000, 32_000, 1_000_000, 32_000_000, 256_000_000), 6.0
"""Bytes; seconds for all sizes of one collective: sizes that would exceed them are left out."""
SIDES, PRODUCT_S = {"cpu": 768}, 0.7
"""Rows and columns of the product (8192 on devices); seconds for which it is repeated."""
_HELLO, _SIOCGIFADDR = struct.Struct("!id"), 0x8915


def route_to(target: str) -> str:
    """Return the address of this machine from which it reaches another; sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _cards() -> dict[str, str]:
    """Return the network interfaces by their address (Linux)."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, card in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                told = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", card.encode()))
                found[socket.inet_ntoa(told[20:24])] = card
    return found


def interface_rows(address: str, main_address: str, several_nodes: bool) -> list[Reading]:
    """Return the checks of name resolution and of the interface that gloo uses.

    If other ranks could not reach that interface, the right one is set in this process for later phases.
    """
    own, cards, begin, names, why = socket.gethostname(), _cards(), time.monotonic(), list[str](), ""
    try:
        socket.getaddrinfo(main_address, None)
        names = sorted({str(info[4][0]) for info in socket.getaddrinfo(own, None, socket.AF_INET)})
    except OSError as error:
        why = f"{own} or {main_address} does not resolve: {error.strerror}"
    seconds = time.monotonic() - begin
    rows = [
        Reading(
            "names", -1e9 if why else -seconds, why or f"{own} and {main_address} resolve in {seconds:.2f} s"
        )
    ]
    text, wanted = f"{cards.get(address)} ({address})", os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted and wanted not in cards.values():
        return [*rows, Reading("interface", 0, f"GLOO_SOCKET_IFNAME={wanted}, and the card is {text}")]
    far = [name for name in names if name == address or (name in cards and not name.startswith("127."))]
    if far or wanted or not several_nodes:
        return [*rows, Reading("interface", 1, text)]
    os.environ["GLOO_SOCKET_IFNAME"] = cards.get(address, "")
    return [
        *rows,
        Reading("interface", 0, f"{text}, but gloo takes that of the name {own}: {', '.join(names)}"),
    ]


def listen(rank: int) -> int:
    """Return a port at which a thread of this process sends its rank and its clock to each client."""
    server = socket.create_server(("", 0), backlog=1024)

    def serve() -> None:
        while True:
            with suppress(OSError), server.accept()[0] as client:
                client.sendall(_HELLO.pack(rank, time.time()))

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def connect_all(addresses: Mapping[int, tuple[str, int]], rank: int) -> dict[str, Any]:
    """Return the errors of ranks that did not answer, and the seconds of this clock behind rank zero's."""

    def connect(other: int) -> tuple[int, str, float]:
        begin = time.time()
        try:
            with socket.create_connection(addresses[other], timeout=CONNECT_S) as client:
                found, clock = _HELLO.unpack(client.recv(_HELLO.size, socket.MSG_WAITALL))
            return (
                other,
                "" if found == other else "another program answers",
                clock - (begin + time.time()) / 2,
            )
        except (OSError, struct.error) as error:
            return other, str(error), 0.0

    with ThreadPoolExecutor(16) as pool:
        results = [*pool.map(connect, [other for other in addresses if other != rank])]
    behind = sum([behind for other, _, behind in results if other == 0])
    return {"blocked": {other: why for other, why, _ in results if why}, "behind": behind}


def connection_rows(by_rank: Mapping[int, Any], nodes: Mapping[int, str]) -> list[Reading]:
    """Return the checks of the connections of all pairs, and of the clock that differs most from rank 0's."""
    rows, total = [], len(by_rank) * (len(by_rank) - 1)
    for rank, blocked in [(rank, each["blocked"]) for rank, each in by_rank.items() if each["blocked"]]:
        ends = f"{format_ranks([rank], nodes)} cannot connect to {format_ranks(map(int, blocked), nodes)}"
        rows.append(Reading("ports", 0, f"{ends}: {next(iter(blocked.values()))}"))
    rank = max(by_rank, key=lambda rank: abs(by_rank[rank]["behind"]))
    behind = by_rank[rank]["behind"]
    way = "behind" if behind > 0 else "ahead of"
    text = f"{format_ranks([rank], nodes)} is {abs(behind):.3f} s {way} rank 0"
    rows = rows or [Reading("ports", 1, f"{total} of {total} connections between ranks")]
    return [
        *rows,
        Reading("clock", -abs(behind), f"{text}, at most" if rank else "all are that of rank 0"),
    ]


def measure_pairs(device: torch.device) -> list[tuple[int, int, float, float]]:
    """Return (rank, rank, microseconds, MB/s) of this rank's pairs. All ranks must call this."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    rounds = range(1, 1 << (size - 1).bit_length())
    for number in rounds[:: -(-len(rounds) // ROUNDS)]:
        dist.barrier()
        if (other := rank ^ number) < size:
            seconds, speed = _measure_pair(rank, other, device)
            found += [(rank, other, seconds * 1e6, speed)] if rank < other else []
    return found


def _measure_pair(rank: int, other: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a small message one way, and MB/s there and back, on both ranks."""

    def exchange(data: torch.Tensor) -> float:
        begin = time.perf_counter()
        for send in (rank < other, rank > other):
            (dist.send if send else dist.recv)(data, other)
        _wait(device)
        return (time.perf_counter() - begin) / 2

    small, probe = torch.zeros(1, device=device), torch.zeros(64_000, dtype=torch.uint8, device=device)
    latency = median([exchange(small) for _ in range(25)][5:])
    exchange(probe)
    wanted = min(max(64_000, int(64_000 * PAIR_S / exchange(probe))), LARGEST_MESSAGE)
    length = torch.tensor([wanted if rank < other else 0], device=device)
    exchange(length)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    return latency, len(data) / MB / min(exchange(data), exchange(data))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def pair_rows(pairs: list[tuple[int, int, float, float]], nodes: Mapping[int, str]) -> list[Reading]:
    """Return latency and bandwidth of the slowest pairs against the fastest, on machines and between them."""

    def ends(pair: tuple[int, int, float, float]) -> str:
        return " and ".join([format_ranks([rank], nodes) for rank in pair[:2]])

    rows = []
    for kind, inside in (("on one machine", True), ("between machines", False)):
        own = [each for each in pairs if (not nodes or nodes[each[0]] == nodes[each[1]]) == inside]
        if not own:
            continue
        slowest, fastest = min(own, key=lambda each: each[3]), max(each[3] for each in own)
        text = f"{slowest[3]:,.0f} MB/s between {ends(slowest)}; fastest pair {fastest:,.0f} MB/s"
        slow = [set(each[:2]) for each in own if each[3] < fastest / 2]
        if len(slow) > 1 and (common := set.intersection(*slow)):
            text += f"; {len(slow)} of {len(own)} pairs are slow, all with {format_ranks(common, nodes)}"
        rows.append(Reading(f"bandwidth {kind}", slowest[3] / fastest, text))
        rows += (
            []
            if inside
            else [Reading("wire speed", fastest, f"{fastest:,.0f} MB/s between machines at best")]
        )
    if pairs:
        latest = max(pairs, key=lambda each: each[2])
        rows.append(Reading("latency", -latest[2], f"{latest[2]:,.0f} us between {ends(latest)}, at most"))
    return rows


def measure_collectives(device: torch.device, memory: float) -> dict[str, list[tuple[int, float, float]]]:
    """Return (bytes, milliseconds, MB/s on the bus) by collective. All ranks must call this.

    Source: "Performance" of NCCL tests, for the bandwidth of the bus.
    """
    size, found, least = dist.get_world_size(), dict[str, Any](), torch.tensor(memory, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    for name, factor in (("all_reduce", 2), ("all_gather", 1)):
        found[name], spent, each = [], 0.0, 0.0
        for wanted in SIZES:
            length = max(1, wanted // (4 * size)) * 4 * size
            if 3 * length > float(least) or spent + 3 * each * length > COLLECTIVE_S:
                break
            data, part = (
                torch.zeros(length // 4, device=device),
                torch.zeros(length // 4 // size, device=device),
            )
            gather = partial(dist.all_gather, [*data.chunk(size)], part)
            run = partial(dist.all_reduce, data) if factor == 2 else gather
            first = _slowest(run, 1, device)
            count = max(1, min(20, int(0.2 / first)))
            again = _slowest(run, count, device)
            spent, each = spent + first + again, again / count / length
            found[name].append((wanted, 1e3 * again / count, factor * (size - 1) / size / each / MB))
    return found


def _slowest(run: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the seconds of so many calls, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    _wait(device)
    seconds = torch.tensor(time.perf_counter() - begin, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def collective_rows(found: Mapping[str, list[tuple[int, float, float]]], fastest: float) -> list[Reading]:
    """Return the times of collectives, and their bandwidth against the fastest pair."""
    rows = []
    for name, sizes in [each for each in found.items() if each[1]]:  # no memory for the smallest
        text = "; ".join([f"{length / 1e6:g} MB {ms:.3g} ms" for length, ms, _ in sizes])
        best = max([speed for _, _, speed in sizes])
        text += f"; at best {best:,.0f} MB/s, {best / fastest:.0%} of the fastest pair"
        rows.append(Reading(name, best / fastest, text))
    return rows


def measure_product(device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of the product and the number of its wrong rows.

    Factors are whole numbers so small that all sums are exact in single precision, in any order.
    """
    side = SIDES.get(device.type, 8192)
    most, index = math.isqrt(2**24 // side) - 1, torch.arange(side)
    grid = index[:, None] * index + 31 * index
    left, right = [(each % (2 * most + 1) - most).float() for each in (grid, grid.T + 17 * index)]
    one, two, vector = left.to(device), right.to(device), 1 + index.double() % 7
    expected, times = left.double() @ (right.double() @ vector), list[float]()
    wrong, end = 0, time.perf_counter() + PRODUCT_S
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        result = one @ two
        _wait(device)
        times.append(time.perf_counter() - begin)
        wrong = max(wrong, int((result.cpu().double() @ vector != expected).sum()))
    return {"ms": 1e3 * min(times), "wrong": wrong, "side": side, "device": str(device)}


def product_rows(by_rank: Mapping[int, Any], nodes: Mapping[int, str]) -> list[Reading]:
    """Return the checks of the product: ranks slower than the median, and ranks with wrong results."""
    times = {rank: each["ms"] for rank, each in by_rank.items()}
    middle, slowest = median_low(times.values()), max(times, key=lambda rank: times[rank])
    slow = [rank for rank in times if times[rank] > 1.5 * middle] or [slowest]
    text = f"{times[slowest]:.3g} ms on {format_ranks([slowest], nodes)}, median {middle:.3g} ms"
    text += f"; slow: {format_ranks(slow, nodes)}" if len(slow) > 1 else ""
    rows = [Reading("product, time", middle / times[slowest], text)]
    for rank, each in by_rank.items():
        where = f"{format_ranks([rank], nodes)} ({each['device']})"
        text = f"{each['wrong']} of {each['side']} rows of the product are wrong on {where}"
        rows += [Reading("product, bits", 0, text)] if each["wrong"] else []
    right = Reading("product, bits", 1, f"exact on {len(by_rank)} of {len(by_rank)} ranks")
    return rows if len(rows) > 1 else [*rows, right]
