"""What forked ranks print, where this process's stdout is no file: in a notebook it belongs into the cell.

Imports no torch.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DRAIN_S = 2.0
"""Seconds for what is under way after the ranks' end; a subprocess of one may hold a pipe for longer."""
_pipes: dict[str, tuple[int, int]] = {}
"""By the stream's name: the ends of the pipe from the ranks, as they inherit them."""


@contextlib.contextmanager
def relayed_output(method: str) -> Iterator[Callable[[], None]]:
    """While ranks run that are forked from here, write what they print to `sys.stdout` and `sys.stderr`.

    Gives what is to be called once all are forked: threads begin there.

    Only where those are no files: a kernel's streams send each write of a forked process by a connection of
    its own, so that lines mix and change places.
    """
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr") if method == "fork"}
    relayed = {name: s for name, s in streams.items() if s and not isinstance(s, io.TextIOWrapper)}
    threads = []
    for name, stream in relayed.items():
        _pipes[name] = os.pipe()
        end = _pipes[name][0]
        threads.append(threading.Thread(target=_copy, args=(end, stream), daemon=True, name="fabric-output"))

    def begin() -> None:
        for thread in threads:
            thread.start()

    try:
        yield begin
    finally:
        for _, writer in _pipes.values():
            os.close(writer)
        _pipes.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_DRAIN_S)
        for stream in relayed.values():
            stream.flush()


def take_output() -> None:
    """In a forked rank: print into the pipes, also what is not Python's."""
    for name, (reader, writer) in _pipes.items():
        number = 1 if name == "stdout" else 2
        os.dup2(writer, number)
        os.close(reader)
        os.close(writer)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115
    _pipes.clear()


def flush_output() -> None:
    """Pass on what stdout and stderr of this process still hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, gone, or closed
            stream.flush()


def _copy(reader: int, stream: Any) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65536):
            with contextlib.suppress(Exception):  # a rank whose pipe nobody reads cannot print any more
                stream.write(decoder.decode(chunk))
