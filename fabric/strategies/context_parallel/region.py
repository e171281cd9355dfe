"""`Region`: a module inside of which a sequence is divided. In place of its forward, and of those in it.

Each belongs to one module, so that copies of the model have their own, and refer to themselves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import backward_pass
from fabric.core.compile import eager
from fabric.core.errors import UsageError
from fabric.strategies.context_parallel.attention import called, divided
from fabric.strategies.context_parallel.call import DividedCall
from fabric.strategies.context_parallel.exchange import SequenceExchange
from fabric.strategies.context_parallel.sequence import SequencePart, current_part, part_sizes
from fabric.strategies.context_parallel.trial import try_parts
from fabric.utilities.random_stream import RandomStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from fabric.collectives.channel import Channel


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
        self._last: list[SequencePart | None] = []
        """What forwards since the last backward had, each once; None: the whole."""
        self._went_back = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # a copy of the model is divided over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.row, self.name)

    def install(self, module: Module) -> None:
        """Take the place of the forwards."""
        for inner in module.modules():
            if inner is module or _may_attend(inner):
                inner.__dict__["forward"] = _Forward(self, inner, inner is module)

    @eager  # torch's compiler would take apart what goes to other ranks; what is compiled inside stays so
    def run(self, module: Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of the module for the whole sequence; on all ranks."""
        channel = self.row.channel
        if channel is None or current_part() is not None:
            return call(*args, **kwargs)
        parts = DividedCall(call, self.name, args, kwargs, self.row.seq_dim, self.row.seq_dims)
        place, count = self.row.place
        if parts.length < 2 * count:
            self._note(None)
            return call(*args, **kwargs)  # all ranks compute all of it
        key = (module.training, parts.spec, tuple([str(dim) for dim in parts.dims]))
        if self._tried[key] < _TRIALS:
            try_parts(module, parts, channel, place, self._tried[key])
            self._tried[key] += 1
        exchange = SequenceExchange(channel, SequencePart(parts.length, place, count))
        self._note(exchange.part)
        part_sizes.add(exchange.part.size)
        own_args, own_kwargs = parts.divided(exchange)
        self.random = self.random or RandomStream(place, channel.transport.device)
        with self.random(), divided(exchange):
            output = call(*own_args, **own_kwargs)
            self.random.update_drawn()
        self.random.advance()
        return parts.join(output, exchange)

    def run_inside(self, module: Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a module inside; if that is in a backward, it computes again what a forward did."""
        channel = self.row.channel
        if current_part() is not None or backward_pass() == -1 or channel is None or not self._last:
            return call(*args, **kwargs)
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
            return call(*args, **kwargs)
        with divided(SequenceExchange(channel, part)):
            return call(*args, **kwargs)

    def _note(self, part: SequencePart | None) -> None:
        """A forward begins through which a backward may go."""
        if backward_pass() != -1:  # or computes again: what is inside belongs to it
            self._last, self._went_back = [part], True
        elif torch.is_grad_enabled():
            if self._went_back:
                self._last, self._went_back = [], False
            if (part and part.length) not in [known and known.length for known in self._last]:
                self._last.append(part)


class _Forward:
    """The forward of a region (`whole`), or of a module inside of one."""

    def __init__(self, region: Region, module: Module, whole: bool) -> None:
        self._run = region.run if whole else region.run_inside
        self._module = module
        self.__wrapped__ = module.forward
        """The user's, whose signature is that of this."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with called():
            return self._run(self._module, self.__wrapped__, args, kwargs)


def _may_attend(module: Module) -> bool:
    """Whether a module may do something along the sequence itself: not so for torch's own layers."""
    return (
        not type(module).__module__.startswith("torch.nn.modules")
        or next(module.children(), None) is not None
    )
