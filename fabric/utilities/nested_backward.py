"""Backward passes that run inside of another one: those of activation checkpoints with `use_reentrant=True`.

DDP and FSDP2 take the first pass that looks complete for the whole, and torch tells nobody of the others. So
`torch.autograd.backward`, which such checkpoints call, is replaced by one that tells those who attend.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Attendant(Protocol):
    """Who wants to know."""

    def after_nested_pass(self) -> None:
        """A pass has ended, and the one around it goes on; in the thread of both."""


class _Here(threading.local):
    outermost = -1


_here = _Here()
_attendants: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


def attend_nested_passes(attendant: Attendant) -> None:
    """From now on `attendant.after_nested_pass()` is called; it is held weakly."""
    global _installed
    _attendants.add(attendant)
    if not _installed:
        _installed = True
        torch.autograd.backward = _telling(torch.autograd.backward)


def outermost_pass() -> int:
    """The number of the outermost backward pass that runs in this thread; passes inside have higher ones.

    -1: none runs.
    """
    return torch._C._current_graph_task_id() if _here.outermost == -1 else _here.outermost


def _telling(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def tell(*args: Any, **kwargs: Any) -> None:
        around = torch._C._current_graph_task_id()
        if around == -1:
            backward(*args, **kwargs)
            return
        before = _here.outermost
        _here.outermost = around if before == -1 else before
        try:
            backward(*args, **kwargs)
            for attendant in list(_attendants):
                attendant.after_nested_pass()
        finally:
            _here.outermost = before

    return tell
