"""Listeners on every backward pass of this process, nested ones included; on steps of all its optimizers; and
on torch's gradient clips.

DDP prepares its reducer in forward only, and FSDP2 has no hook for a pass that failed. Both mistake the first
nested pass that completes (checkpoints with `use_reentrant=True`) for the outermost one. torch has no hook
for this. Therefore `torch.autograd.backward`, which every pass calls, is replaced by a function that calls
the listeners.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.core._torch import after_grads, backward_pass, before_clips
from fabric.core.compile import eager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# By number: listeners run collectives, whose order must be the same on all ranks.
_backward_listeners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_backward_patched = _clips_patched = False
_clip_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_step_listeners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
optimizer_owners: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()
"""The strategy that has set up an optimizer, which may outlive its `Fabric`, and a number of `setups`."""
setups = itertools.count(1)
"""Numbers the setups of optimizers and the step checks of strategies in the order in which they are made."""
_in_trial = False
_step_hook: Any = None
"""The handle of torch's hook that calls `_step_listeners`; None: there are no listeners."""


def add_backward_listener(listener: Any) -> None:
    """Call `listener` in each pass from now on, in the order of registration; referenced weakly.

    Its `around_pass(run, tensors, *args, **kwargs)` runs an outermost pass: `run(tensors, *args, **kwargs)`.
    Its `after_nested_pass()` is called after a nested pass, in the thread of that pass. Its
    `after_grad(inputs, grads)`, if it has one, is called after each `torch.autograd.grad` outside of a pass.
    """
    global _backward_patched
    if not any([known is listener for known in _backward_listeners.values()]):
        _backward_listeners[next(_numbers)] = listener
    if not _backward_patched:
        _backward_patched = True
        torch.autograd.backward = _with_listeners(torch.autograd.backward)
        after_grads(_after_grad)


def _after_grad(inputs: Any, grads: Any) -> None:
    if backward_pass() == -1:
        for listener in list(_backward_listeners.values()):
            if (after_grad := getattr(listener, "after_grad", None)) is not None:
                after_grad(inputs, grads)


def _with_listeners(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def call(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled step: messages of listeners cannot be traced
            eager(call)(*args, **kwargs)
            return
        if backward_pass() != -1:
            backward(*args, **kwargs)
            for listener in list(_backward_listeners.values()):
                listener.after_nested_pass()
            return
        if (inputs := kwargs.get("inputs")) is not None:  # a tuple for listeners, as torch makes of it
            one = isinstance(inputs, torch.Tensor | GradientEdge)
            kwargs["inputs"] = (inputs,) if one else tuple(inputs)
        run = backward
        for listener in list(_backward_listeners.values()):
            run = functools.partial(listener.around_pass, run)
        run(*args, **kwargs)

    return call


def add_step_listener(part: Any) -> Callable[[], None]:
    """Call `part.before_step(optimizer, args, kwargs)` before each step from now on; referenced weakly.

    `args` begins with the optimizer. The call may raise an error, which prevents the step.

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
    if torch.compiler.is_compiling():  # a compiled step; `eager` costs each step a call
        eager(_before_step)(optimizer, args, kwargs)
        return
    for part in [] if _in_trial else list(_step_listeners.values()):
        part.before_step(optimizer, args, kwargs)


@contextmanager
def trial_of_steps() -> Iterator[None]:
    """Context in which steps are not reported to listeners: those of copies of an optimizer."""
    global _in_trial
    before, _in_trial = _in_trial, True
    try:
        yield
    finally:
        _in_trial = before


def _remove_step_listener(number: int) -> None:
    _step_listeners.pop(number, None)
    remove_idle_hook()


def remove_idle_hook() -> None:
    """Remove torch's hook if there are no step listeners.

    The finaliser of a listener must not call this: torch may be iterating over its hooks at that moment.
    """
    global _step_hook
    if not _step_listeners and _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


def add_clip_listener(listener: Any) -> None:
    """Call `listener.before_clip(gradients)` before torch's functions clip gradients, from now on.

    The call may raise an error, which prevents the clip. The listener is referenced weakly.
    """
    global _clips_patched
    _clip_listeners.add(listener)
    if not _clips_patched:
        _clips_patched = True
        before_clips(_before_clip)


@eager
def _before_clip(gradients: list[Any]) -> None:
    for listener in list(_clip_listeners):
        listener.before_clip(gradients)


def leaves_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield each leaf tensor that a backward from these tensors computes a gradient of."""
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
    """Return an optimizer's parameters in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
