"""`PendingSave`: a save in a background thread, from a copy in host memory. One at a time."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - see below
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.state import WRITING, finish_writing, together
from fabric.launch.signals import flush_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.core.types import PathLike


# At exit Python first shuts down executors, which drivers of object stores use, and then joins threads. A
# function that is registered after the executors (by their import, above) runs before them.
with suppress(
    AttributeError, RuntimeError
):  # another Python has no such function; or the interpreter is shutting down
    threading._register_atexit(finish_writing)  # type: ignore[attr-defined]


class PendingSave:
    """The handle of a save that `fabric.save(..., wait=False)` has started.

    Its error is raised by `wait()`, or else by the next save or load; a process that ends without any of
    them waits for the file, prints the error, and ends with exit code 1.

    Args:
        strategy: The strategy that saves.
        path: File or directory of the checkpoint, for errors.
        write: Writes the copy of the state; None: this rank writes nothing.
    """

    def __init__(self, strategy: Any, path: PathLike, write: Callable[[], None] | None) -> None:
        self._strategy, self._path, self._write = strategy, path, write
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            atexit.register(self._at_exit)
            self._thread = threading.Thread(target=self._run, name="fabric-save")
            self._thread.start()
            WRITING[self._thread] = None

    def done(self) -> bool:
        """Whether this rank has finished writing. No communication."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all ranks have written the checkpoint. All ranks must call this.

        Raises:
            OSError: It could not be written; other ranks raise a RankError that quotes it.
        """
        if self._strategy.pending is not self:  # already waited for
            return
        self._strategy.pending = None
        with together(self._strategy, f"saving {self._path}"):
            self._end()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._write()  # type: ignore[misc]
        except Exception as error:
            self._error = error
        self._write = None  # free the copy

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
            WRITING.pop(self._thread, None)
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._end()
        if self._error is not None:
            rank = self._strategy.topology.rank
            kind = type(self._error).__name__
            print(
                f"fabric: rank {rank} failed while saving {self._path}: {kind}: {self._error}",
                file=sys.stderr,
            )
            atexit._run_exitfuncs()  # the remaining ones, which os._exit would skip
            flush_output()
            os._exit(1)
