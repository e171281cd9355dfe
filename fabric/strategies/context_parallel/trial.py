"""Trial of context parallelism: compares a module's output for shards and for the full sequence."""

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
from fabric.strategies.context_parallel._torch import groups_inside, without_unshard
from fabric.strategies.context_parallel.attention import sharding_sequence
from fabric.strategies.context_parallel.call import noise
from fabric.strategies.context_parallel.exchange import SequenceExchange
from fabric.strategies.context_parallel.sequence import SequenceShard, viewing
from fabric.strategies.tensor_sync import on_any_rank
from fabric.strategies.trial import difference, preserve_state

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module

    from fabric.collectives.channel import Channel
    from fabric.strategies.context_parallel.call import ShardedCall

_EACH = (3, 5)
"""Positions in each piece of a sequence, in the first and second trial; a rank has two pieces."""
_AT_ONCE = 8
"""Maximum number of random parameters in memory; a function may read one several times."""
_DROPOUT_P = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""Index of `dropout_p` among the arguments."""
_WHY = (
    "Something in it looks along the sequence other than F.scaled_dot_product_attention and "
    "nn.MultiheadAttention: torch.arange(length) (write fabric.utilities.sequence_positions(length)), "
    "attention written by hand, a convolution, a mean over the sequence; or it draws random numbers. "
    "Name modules without these: ContextParallel(blocks={TransformerBlock})."
)


def try_shards(module: Module, call: ShardedCall, channel: Channel, rank: int, number: int) -> None:
    """Compare a forward of the full sequence with one of shards, without dropout. All ranks must call this.

    All state is restored. Parameters and inputs are replaced by random ones, since zeros (of an
    initialisation) would hide differences.

    Args:
        module: The module.
        call: Its arguments.
        channel: The ranks that share the sequence.
        rank: Index of this rank.
        number: Number of earlier trials; each has another length.

    Raises:
        UsageError: The outputs differ on a rank; raised on all of them.
    """
    count = channel.world_size
    short = min(call.length, 2 * count * _EACH[number % len(_EACH)])
    states = groups_inside(module)  # unsharding them needs ranks that may make no trial now
    with torch.no_grad(), _uncompiled(), without_unshard(states) as dtype:
        mode = Trial(module, channel.transport.device, dtype)
        try:
            small = call.subsample(short, stir=True)
            whole = _run(module, small, mode)
        except Exception:  # the module may need this length, or these values
            small = call.subsample(call.length)
            whole = _run(module, small, mode)
        exchange = SequenceExchange(channel, SequenceShard(small.length, rank, count))
        try:
            parts = _run(module, small, mode, exchange)
        except FabricError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            raise UsageError(
                f"{call.name} runs on a sequence of {small.length}, but not on this rank's "
                f"{exchange.part.size} of them: {text}. If an argument has the sequence in another "
                "dimension, write ContextParallel(seq_dims={'name': dim}). Pass tensors of the full sequence "
                "as arguments, or create them from sequence_positions(length)."
            ) from error
        wrong = _first_difference(whole, parts)
    if any(on_any_rank([bool(wrong)], channel)):
        raise UsageError(
            f"{call.name} gives other numbers for the parts of a sequence than for the whole "
            f"({wrong or 'on another rank'}). {_WHY}"
        )


class Trial(TorchFunctionMode):
    """Mode in which functions get random values in place of parameters, and dropout is disabled.

    The values are the same on all ranks. They do not depend on the parameter's, which may be sharded (by
    FSDP2), and few are in memory at a time.

    Args:
        module: The module with the parameters.
        device: Device of the values.
        dtype: Their dtype; None: that of the parameter.
    """

    def __init__(self, module: Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.device, self._dtype = device, dtype
        self._parameters = [p for p in module.parameters() if p.is_floating_point() and p.numel()]
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._cached_value = lru_cache(_AT_ONCE)(self._make_value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with these values."""
        args = self._replaced(args)
        kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        name, place = getattr(func, "__name__", ""), _DROPOUT_P.get(func)
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._replaced(entry) for entry in value])
        number = self._numbers.get(id(value))
        return value if number is None else self._cached_value(number)

    def _make_value(self, number: int) -> Tensor:
        own = self._parameters[number]
        size = own.shape[-1] ** -0.5 if own.dim() > 1 else 0.2
        random = noise(torch.empty(own.shape, dtype=self._dtype or own.dtype, device=self.device), number)
        return size * random if own.dim() > 1 else 1 + size * random  # 1-D parameters scale or shift


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled modules run uncompiled, since function modes cannot be traced."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _run(
    module: Module, call: ShardedCall, mode: Trial, exchange: SequenceExchange | None = None
) -> dict[str, Any]:
    """Return {"": full output, name: attribute or buffer that the call changed}; sharded with an exchange."""
    modules = dict(module.named_modules())
    before = {path: dict(vars(inner)) for path, inner in modules.items()}
    with preserve_state(list(modules.values()), mode.device):
        if exchange is None:
            with viewing(SequenceShard(call.length, 0, 1)), mode:
                output = module.forward(*call.whole[0], **call.whole[1])
        else:
            args, kwargs = call.shard_arguments(exchange)
            with sharding_sequence(exchange), mode:
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
    """Describe the first difference between shards and the full sequence; "" if there is none."""
    for name in sorted(whole.keys() | parts.keys()):
        expected, found = [flatten(values.get(name))[0] for values in (whole, parts)]
        wrong = difference(expected, found, numbers=not name)
        if wrong:
            return f"it keeps {name}, which is that of a shard only: return it" if name else wrong
    return ""
