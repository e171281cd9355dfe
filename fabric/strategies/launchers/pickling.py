"""Whether an object can be sent to another process, and what stands against it. Imports no torch."""

from __future__ import annotations

import contextlib
import pickle
import types
from typing import Any


class _Sink:
    """A file that keeps nothing: a large model is not in memory twice."""

    def write(self, data: Any) -> int:
        return len(data)


class _MainFinder(pickle.Pickler):
    found: str | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            importable = "<" not in obj.__qualname__  # no lambda, nothing local: those pickle nowhere
            self.found = self.found or (obj.__qualname__ if importable else None)
        return NotImplemented


def interactive_name(obj: Any) -> str | None:
    """The first function or class of `__main__` that a pickle of `obj` names. None where there is none."""
    finder = _MainFinder(_Sink())
    with contextlib.suppress(Exception):  # what cannot be pickled at all is explained elsewhere
        finder.dump(obj)
    return finder.found


def why_unpicklable(obj: Any) -> str:
    """What pickle says of an object that it refuses; "": it takes it."""
    try:
        pickle.Pickler(_Sink(), pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # pickle's own, and what a user's __getstate__ or __reduce__ raises
        notes = getattr(error, "__notes__", ())  # from Python 3.14 on: the way to what it refuses
        return "; ".join([f"{type(error).__name__}: {error}", *notes])
    return ""
