"""The connections of a group whose ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from fabric.guard.control_connections import FAN_OUT, ControlConnections, Listener, connect, neighbours

SECONDS = 20.0
KEY = b"key of the group"


@contextmanager
def connected(
    size: int, fan_out: int = FAN_OUT
) -> Iterator[tuple[list[ControlConnections], ThreadPoolExecutor]]:
    """The connections of each rank of a group (10, 11, ...), and threads to run the ranks in.

    A star if `fan_out` is at least `size` - 1.
    """
    ranks = range(10, 10 + size)
    near = [neighbours(place, size, fan_out) for place in range(size)]
    with ThreadPoolExecutor(size) as threads, ExitStack() as stack:
        listeners = [stack.enter_context(Listener([block.start for block in below])) for _, below in near]

        def make(place: int) -> ControlConnections:
            parent, below = near[place]
            up = (
                parent if parent is None else connect(place, parent, "localhost", listeners[parent].port, KEY)
            )
            down = listeners[place].accept(KEY) if below else []
            return ControlConnections(up, down, ranks, place, fan_out)

        made = list(threads.map(make, range(size), timeout=SECONDS))
        yield made, threads
        for one in made:
            one.close("the test is over")


def exchange(one: ControlConnections, message: bytes, *more) -> list[bytes]:
    """Run a round on one rank; return the messages of all ranks."""
    control_round = one.start(message, *more)
    assert control_round.wait(SECONDS)
    return control_round.rows_by_rank(len(one._ranks))
