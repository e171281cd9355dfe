"""Backward passes, whoever starts them: `fabric.backward`, a plain `loss.backward()`, one inside another.
And steps of any optimizer of this process, those that nobody set up among them.

DDP is armed by its forward only, and FSDP2 has no hook for a pass that failed. Both mistake the first
complete pass inside of another (checkpoints with `use_reentrant=True`) for the whole. torch has no hook for
this. So `torch.autograd.backward`, which all of them call, is replaced by one that calls the listeners.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.core._torch import backward_pass, before_clips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# By number: attendants send messages, whose order must be the same on all ranks.
_attendants: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_installed = _sees_clips = False
_clip_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_step_listeners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_step_hook: Any = None
"""The handle of the one hook of torch that calls them; None: there are none."""


def add_backward_listener(attendant: Any) -> None:
    """Call `attendant` in each pass from now on, in the order of these requests; it is held weakly.

    Its `around_pass(run, tensors, *args, **kwargs)` runs an outermost pass: `run(tensors, *args, **kwargs)`.
    Its `after_nested_pass()` is called when a pass has ended and the one around it goes on, in their thread.
    """
    global _installed
    if not any([known is attendant for known in _attendants.values()]):
        _attendants[next(_numbers)] = attendant
    if not _installed:
        _installed = True
        torch.autograd.backward = _with_listeners(torch.autograd.backward)


def _with_listeners(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def call(*args: Any, **kwargs: Any) -> None:
        if backward_pass() != -1:
            backward(*args, **kwargs)
            for attendant in list(_attendants.values()):
                attendant.after_nested_pass()
            return
        run = backward
        for attendant in list(_attendants.values()):
            run = functools.partial(attendant.around_pass, run)
        run(*args, **kwargs)

    return call


def add_step_listener(part: Any) -> Callable[[], None]:
    """Call `part.before_step(optimizer, args, kwargs)` before each step from now on, with its arguments (the
    optimizer is the first one); it may raise to refuse the step. Held weakly.

    Returns:
        The function that removes it.
    """
    global _step_hook
    number = next(_numbers)
    _step_listeners[number] = part
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_step)
    return functools.partial(_remove_step_listener, number)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for part in list(_step_listeners.values()):
        part.before_step(optimizer, args, kwargs)


def _remove_step_listener(number: int) -> None:
    _step_listeners.pop(number, None)
    remove_idle_hook()


def remove_idle_hook() -> None:
    """Remove torch's hook if nothing listens to steps. Not when a listener is garbage: torch may be iterating
    over its hooks then.
    """
    global _step_hook
    if not _step_listeners and _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


def add_clip_listener(watcher: Any) -> None:
    """From now on call `watcher.before_clip(gradients)` before torch's own functions clip any; it may raise
    to refuse it. Held weakly.
    """
    global _sees_clips
    _clip_watchers.add(watcher)
    if not _sees_clips:
        _sees_clips = True
        before_clips(_look_at_clip)


def _look_at_clip(gradients: list[Any]) -> None:
    for watcher in list(_clip_watchers):
        watcher.before_clip(gradients)


def leaves_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield each leaf of which a backward from these tensors makes gradients."""
    nodes, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [after for after, _ in node.next_functions]


def parameters_of(optimizer: Any) -> list[Any]:
    """An optimizer's parameters, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
