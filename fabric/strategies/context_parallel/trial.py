"""Whether a module gives on parts of a sequence what it gives on the whole: tried on few positions."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fabric.core.errors import FabricError, UsageError
from fabric.core.tree import flatten
from fabric.strategies.context_parallel._torch import groups_inside, ungathered
from fabric.strategies.context_parallel.attention import divided
from fabric.strategies.context_parallel.call import noise
from fabric.strategies.context_parallel.exchange import SequenceExchange
from fabric.strategies.context_parallel.sequence import SequencePart, seeing
from fabric.strategies.tensor_sync import on_any_rank
from fabric.strategies.trial import difference, preserve_state

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module

    from fabric.collectives.channel import Channel
    from fabric.strategies.context_parallel.call import DividedCall

_EACH = (3, 5)
"""Positions in each piece of a sequence, in the first trial and in the second; two belong to a rank."""
_AT_ONCE = 8
"""Parameters that have made-up values at one time: a function asks for some of theirs several times."""
_DROPOUT_P = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""The place of `dropout_p` among the arguments."""
_WHY = (
    "Something in it looks along the sequence otherwise than by F.scaled_dot_product_attention or "
    "nn.MultiheadAttention: positions that are counted inside (write fabric.utilities.sequence_positions("
    "length) for torch.arange(length)), attention written by hand, a convolution, a mean over the sequence; "
    "or it draws random numbers of its own. Name the modules that do not: "
    "ContextParallel(blocks={TransformerBlock})."
)


def try_parts(module: Module, call: DividedCall, channel: Channel, place: int, number: int) -> None:
    """Compare a forward of the whole with one of parts, dropping nothing out. Leaves no trace. All ranks.

    Parameters and inputs are other ones: what is zero at first would hide things.

    Args:
        module: What is tried.
        call: What it was called with.
        channel: The ranks that share the sequence.
        place: Of this rank.
        number: How many trials there were; each has another length.

    Raises:
        UsageError: They differ, on any rank; raised on all of them.
    """
    count = channel.world_size
    short = min(call.length, 2 * count * _EACH[number % len(_EACH)])
    states = groups_inside(module)  # gathering them needs ranks that may try nothing now
    with torch.no_grad(), _uncompiled(), ungathered(states) as dtype:
        mode = Trial(module, channel.transport.device, dtype)
        try:
            small = call.some(short, stir=True)
            whole = _run(module, small, mode)
        except Exception:  # perhaps it takes this length, or such numbers, only
            small = call.some(call.length)
            whole = _run(module, small, mode)
        exchange = SequenceExchange(channel, SequencePart(small.length, place, count))
        try:
            parts = _run(module, small, mode, exchange)
        except FabricError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            raise UsageError(
                f"{call.name} runs on a sequence of {small.length}, but not on this rank's "
                f"{exchange.part.size} of them: {text}. If an argument has the sequence in another "
                "dimension, write ContextParallel(seq_dims={'name': dim}). Tensors that the module makes "
                "for the whole sequence must come as arguments, or be made for sequence_positions(length)."
            ) from error
        wrong = _first_difference(whole, parts)
    if any(on_any_rank([bool(wrong)], channel)):
        raise UsageError(
            f"{call.name} gives other numbers for the parts of a sequence than for the whole "
            f"({wrong or 'on another rank'}). {_WHY}"
        )


class Trial(TorchFunctionMode):
    """While this is entered, functions get made-up values in the place of parameters, and drop nothing out.

    They are the same on all ranks, know nothing of the parameter's own, which may be split (by FSDP2), and
    there are a few at a time.

    Args:
        module: Whose parameters are meant.
        device: Where values are wanted.
        dtype: Of those values; None: the parameter's.
    """

    def __init__(self, module: Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.device, self._dtype = device, dtype
        self._parameters = [p for p in module.parameters() if p.is_floating_point() and p.numel()]
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._made = lru_cache(_AT_ONCE)(self._make)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` of these values."""
        args = self._swapped(args)
        kwargs = {name: self._swapped(value) for name, value in (kwargs or {}).items()}
        name, place = getattr(func, "__name__", ""), _DROPOUT_P.get(func)
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)

    def _swapped(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._swapped(entry) for entry in value])
        number = self._numbers.get(id(value))
        return value if number is None else self._made(number)

    def _make(self, number: int) -> Tensor:
        own = self._parameters[number]
        size = own.shape[-1] ** -0.5 if own.dim() > 1 else 0.2
        random = noise(torch.empty(own.shape, dtype=self._dtype or own.dtype, device=self.device), number)
        return size * random if own.dim() > 1 else 1 + size * random  # what scales or shifts


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled modules run as they are written: modes may not be traced."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _run(
    module: Module, call: DividedCall, mode: Trial, exchange: SequenceExchange | None = None
) -> dict[str, Any]:
    """The whole output, under "", and what modules keep of the call, by name: in parts, if there is an
    exchange.
    """
    modules = dict(module.named_modules())
    before = {path: dict(vars(inner)) for path, inner in modules.items()}
    with preserve_state(list(modules.values()), mode.device):
        if exchange is None:
            with seeing(SequencePart(call.length, 0, 1)), mode:
                output = module.forward(*call.whole[0], **call.whole[1])
        else:
            args, kwargs = call.divided(exchange)
            with divided(exchange), mode:
                output = module.forward(*args, **kwargs)
            output = call.join(output, exchange)
        kept: dict[str, Any] = {"": output}
        for path, inner in modules.items():
            changed = [name for name, value in vars(inner).items() if value is not before[path].get(name)]
            new = {name: vars(inner)[name] for name in changed if name[0] != "_"}
            saved = inner._buffers.keys() - inner._non_persistent_buffers_set
            new |= {name: inner._buffers[name].clone() for name in saved}
            kept |= {f"{path}.{name}".strip("."): value for name, value in new.items()}
        return kept


def _first_difference(whole: dict[str, Any], parts: dict[str, Any]) -> str:
    """Describe the first difference of the parts from the whole; "" if there is none."""
    for name in sorted(whole.keys() | parts.keys()):
        expected, found = [flatten(values.get(name))[0] for values in (whole, parts)]
        wrong = difference(expected, found, numbers=not name)
        if wrong:
            return f"it keeps {name}, which is that of a part only: return it" if name else wrong
    return ""
