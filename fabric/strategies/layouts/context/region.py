"""`Region`: a module inside of which a sequence is divided. Hooks on the module and on those in it.

Hooks, and not a forward of ours, so that copies of the model have them too, and refer to themselves.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import UsageError
from fabric.core.torch_internals import backward_pass
from fabric.strategies.layouts.context.attention import Attention
from fabric.strategies.layouts.context.call import DividedCall
from fabric.strategies.layouts.context.exchange import Exchange
from fabric.strategies.layouts.context.trial import try_parts
from fabric.utilities.random_stream import RandomStream
from fabric.utilities.sequence import Part, current_part, enter_part

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.nn import Module

    from fabric.plugins.collectives.channel import Channel


@dataclass
class Row:
    """The ranks that share a sequence, and where it is in what modules are called with."""

    seq_dim: int
    seq_dims: dict[str, int | None]
    channel: Channel | None = None
    """None: there are no others."""
    place: tuple[int, int] = (0, 1)
    """(number of this rank's part, of how many)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self.seq_dim, self.seq_dims)  # groups belong to their process


_TRIALS = 2
"""Forwards that are tried first; one alone may have been of a batch that is the same everywhere."""


class _Entry(NamedTuple):
    """A call that is running."""

    module: Module
    call: DividedCall | None
    """None: it runs on what it was given."""
    exchange: Exchange | None = None
    entered: tuple[AbstractContextManager[Any], ...] = ()
    before: Part | None = None
    wanted: bool = False
    """Whether gradients were wanted when it began."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.trying = False
        """Whether a trial runs, in which nothing but its own call is divided."""


_stack = _Stack()


class Region:
    """Divides what a module is called with, and joins what it returns.

    Args:
        row: The ranks and the dimension of the sequence.
        name: Of the module, for messages.
    """

    def __init__(self, row: Row, name: str) -> None:
        self.row, self.name = row, name
        self.random: RandomStream | None = None
        self._tried: Counter[Any] = Counter()
        self._last: list[Part | None] = []
        """What forwards since the last backward had, each once; None: the whole."""
        self._went_back = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # a copy of the model is divided over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.row, self.name)

    def install(self, module: Module) -> None:
        """Put the hooks in place."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
        for inner in module.modules():
            if inner is not module and _may_attend(inner):
                inner.register_forward_pre_hook(self.before_again, with_kwargs=True)
                inner.register_forward_hook(self.after_again, with_kwargs=True, always_call=True)

    def before(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the module begins."""
        stack, channel = _stack.entries, self.row.channel
        stack.append(_Entry(module, None, wanted=torch.is_grad_enabled()))
        if channel is None or _stack.trying or current_part() is not None:
            return None
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise _compiled(self.name)
        call = DividedCall(module, self.name, args, kwargs, self.row.seq_dim, self.row.seq_dims)
        place, count = self.row.place
        if call.length < 2 * count:
            self._note(None)
            return None  # all ranks compute all of it
        self._try(module, call)
        exchange = Exchange(channel, Part(call.length, place, count))
        self._note(exchange.part)
        own = call.divided(exchange)
        contexts = (self._stream()(), Attention(exchange, may_go_back=_may_go_back))
        grad = torch.is_grad_enabled()
        stack[-1] = _Entry(module, call, exchange, contexts, enter_part(exchange.part), grad)
        for context in contexts:
            context.__enter__()
        return own

    def after(self, module: Module, args: Any, kwargs: Any, output: Any) -> Any:
        """It has ended, with an output or with an error."""
        entry = _pop(module)
        if entry is None or entry.call is None or entry.exchange is None:
            if entry is not None:
                _leave(entry)
            return None
        random = self._stream()
        random.look()
        _leave(entry)
        random.go_on()
        return None if output is None else entry.call.join(output, entry.exchange)

    def before_again(self, module: Module, args: Any, kwargs: Any) -> None:
        """A module inside begins: if that is in a backward, it computes again what it did in a forward."""
        if current_part() is not None:
            _stack.entries.append(_Entry(module, None, wanted=torch.is_grad_enabled()))
            return
        channel = self.row.channel
        if backward_pass() == -1 or _stack.trying or channel is None or not self._last:
            return
        self._went_back = True
        part = self._last[-1]
        given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        sizes = [size for leaf in given for size in leaf.shape]
        if len(self._last) > 1 or (part is not None and not {part.size, part.length} & {*sizes}):
            lengths = ", ".join(["a short one" if p is None else str(p.length) for p in self._last])
            raise UsageError(
                f"{type(module).__name__} in {self.name} is computed again for a backward, and it cannot be "
                f"told for which of several forwards (lengths: {lengths}). Run the backward of each forward "
                "before the next one with another length, or checkpoint the whole of what ContextParallel "
                "divides."
            )
        if part is None or part.size not in sizes:
            return
        exchange = Exchange(channel, part)
        mode = Attention(exchange, may_go_back=_may_go_back)
        _stack.entries.append(
            _Entry(module, None, exchange, (mode,), enter_part(part), torch.is_grad_enabled())
        )
        mode.__enter__()  # type: ignore[no-untyped-call]

    def after_again(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module inside has ended."""
        if _stack.entries and _stack.entries[-1].module is module:
            _leave(_stack.entries.pop())

    def _note(self, part: Part | None) -> None:
        """A forward begins through which a backward may go."""
        if backward_pass() != -1:  # or computes again: what is inside belongs to it
            self._last, self._went_back = [part], True
        elif torch.is_grad_enabled():
            if self._went_back:
                self._last, self._went_back = [], False
            if (part and part.length) not in [known and known.length for known in self._last]:
                self._last.append(part)

    def _try(self, module: Module, call: DividedCall) -> None:
        key = (module.training, call.spec, tuple([str(dim) for dim in call.dims]))
        if self._tried[key] >= _TRIALS or self.row.channel is None:
            return
        _stack.trying = True
        try:
            try_parts(module, call, self.row.channel, self.row.place[0], self._tried[key])
        finally:
            _stack.trying = False
        self._tried[key] += 1

    def _stream(self) -> RandomStream:
        if self.random is None:
            self.random = RandomStream(self.row.place[0], self.row.channel.wire.device)  # type: ignore[union-attr]
        return self.random


def _may_go_back() -> bool:
    """Whether gradients were wanted where the innermost module began that runs now."""
    entries = _stack.entries
    return bool(entries) and entries[-1].wanted


def _pop(module: Module) -> _Entry | None:
    """The entry of the module that has ended; those above it are left over from an error."""
    entries = _stack.entries
    if not any([entry.module is module for entry in entries]):
        return None
    while entries[-1].module is not module:
        _leave(entries.pop())
    return entries.pop()


def _leave(entry: _Entry) -> None:
    if entry.exchange is not None:
        for context in reversed(entry.entered):
            context.__exit__(None, None, None)
        enter_part(entry.before)


def _may_attend(module: Module) -> bool:
    """Whether a module may do something along the sequence itself: not so for torch's own layers."""
    return (
        not type(module).__module__.startswith("torch.nn.modules")
        or next(module.children(), None) is not None
    )


def _compiled(name: str) -> UsageError:
    return UsageError(
        f"{name} is compiled, and ContextParallel cannot divide it: attention goes to other ranks inside. "
        "Compile modules without attention in it (block.mlp.compile()), or leave torch.compile out."
    )
