"""Backward passes, whoever starts them: `fabric.backward`, a plain `loss.backward()`, one inside of another.

DDP is armed by its forward only, FSDP2 has no word for a pass that failed, and both take the first pass
inside of another (checkpoints with `use_reentrant=True`) that looks complete for the whole. torch tells
nobody. So `torch.autograd.backward`, which all of them call, is replaced by one that tells
those who attend.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fabric.core.torch_internals import backward_pass

if TYPE_CHECKING:
    from collections.abc import Callable


class Attendant(Protocol):
    """Who wants to know."""

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run an outermost pass: `run(tensors, *args, **kwargs)`."""

    def after_nested_pass(self) -> None:
        """A pass has ended, and the one around it goes on; in the thread of both."""


class _Here(threading.local):
    outermost = -1
    """The number of the pass around all; -1: there is none, or none inside of it."""


here = _Here()
# By number: attendants send messages, whose order must be the same on all ranks.
_attendants: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_installed = False


def attend_passes(attendant: Attendant) -> None:
    """From now on tell `attendant` of each pass, in the order of these requests; it is held weakly."""
    global _installed
    if not any([known is attendant for known in _attendants.values()]):
        _attendants[next(_numbers)] = attendant
    if not _installed:
        _installed = True
        torch.autograd.backward = _telling(torch.autograd.backward)


def outermost_pass() -> int:
    """The number of the outermost backward pass that runs in this thread; -1: none runs.

    torch counts passes up, so that those inside of it have higher numbers, and those before it lower ones.
    """
    return backward_pass() if here.outermost == -1 else here.outermost


def _telling(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def tell(*args: Any, **kwargs: Any) -> None:
        around = backward_pass()
        if around == -1:
            run = backward
            for attendant in list(_attendants.values()):
                run = functools.partial(attendant.around_pass, run)
            run(*args, **kwargs)
            return
        before = here.outermost
        here.outermost = around if before == -1 else before
        try:
            backward(*args, **kwargs)
            for attendant in list(_attendants.values()):
                attendant.after_nested_pass()
        finally:
            here.outermost = before

    return tell
