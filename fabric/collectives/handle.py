"""`Handle`: the result of calls with `async_op=True`. Handles without a `wait()` are reported at exit."""

from __future__ import annotations

import atexit
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from fabric.core.source import user_line

if TYPE_CHECKING:
    from collections.abc import Callable


class Handle:
    """Handle of an asynchronous call, whose `wait()` returns the data.

    Do not read or write tensors of the call before that.

    Args:
        verb: The call, for the report.
        works: The engine's request for each message.
        finish: Waits for all messages, and returns the result.
    """

    def __init__(self, verb: str, works: list[Any], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self.verb, self.line = verb, user_line()
        for key, (line, other) in _unwaited.items():
            if other is not None and other.done():
                _unwaited[key] = line, None
        self._key = next(_numbers)
        _unwaited[self._key] = f"{verb} at {self.line}", self

    def wait(self) -> Any:
        """Wait for the data and return them, the same object on each call. Other ranks need not call it."""
        if self._finish is not None:
            self._result, self._finish, self._works = self._finish(), None, []
            _unwaited.pop(self._key, None)
        return self._result

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return all([work.is_completed() for work in self._works])

    def __repr__(self) -> str:
        state = "waited for" if self._finish is None else "done" if self.done() else "pending"
        return f"<{self.verb} from {self.line}, {state}>"


_unwaited: dict[int, tuple[str, Handle | None]] = {}
"""Verb and line of each call without a `wait()`, and its handle until its messages are done.

The handle references the memory of the messages.
"""
_numbers = itertools.count()


def report_unwaited() -> list[str]:
    """Wait for handles without a `wait()`, print them on stderr, and return the lines.

    Called before the process group is destroyed, and at exit.
    """
    counts: Counter[str] = Counter()
    for key, (line, handle) in list(_unwaited.items()):
        try:
            if handle is not None:
                handle.wait()
        except RuntimeError as error:
            line = f"{line} (failed: {error})"
        _unwaited.pop(key, None)
        counts[line] += 1
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
    if lines:
        from fabric.core.messages import print_line

        print_line(
            f"there was no wait() for the result of {'; '.join(lines)}. Keep the handle and call .wait()."
        )
    return lines


atexit.register(report_unwaited)
