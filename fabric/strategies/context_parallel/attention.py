"""Attention where each rank has its part of the queries, and asks for the keys of all."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fabric.core.errors import UsageError
from fabric.strategies.context_parallel._torch import packs_saved_tensors
from fabric.strategies.context_parallel.sequence import seeing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from fabric.strategies.context_parallel.exchange import SequenceExchange

HEADS = inspect.signature(F.multi_head_attention_forward)


class _Called(threading.local):
    wanted = False
    """Whether gradients were wanted where the innermost module began that runs now."""


_called = _Called()


@contextmanager
def called() -> Iterator[None]:
    """Context of a module's forward, of which all that may call attention have one."""
    before, _called.wanted = _called.wanted, torch.is_grad_enabled()
    try:
        yield
    finally:
        _called.wanted = before


@contextmanager
def divided(exchange: SequenceExchange) -> Iterator[None]:
    """Context in which modules work on this rank's part, and torch's attention looks at the whole."""
    with seeing(exchange.part), _Attention(exchange):
        yield


class _Attention(TorchFunctionMode):
    """While this is entered, torch's attention looks at the whole sequence."""

    def __init__(self, exchange: SequenceExchange) -> None:
        super().__init__()
        self._own: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: partial(_attend, exchange),
            F.multi_head_attention_forward: partial(_attend_in_heads, exchange),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of `func`, or `func` itself where it has none."""
        own = self._own.get(func)
        if own is None:
            return func(*args, **(kwargs or {}))
        if _called.wanted and not torch.is_grad_enabled():
            raise UsageError(
                "Attention was called without gradients, inside of a module that was called with them: by "
                "torch.utils.checkpoint(function, use_reentrant=True), which calls the function again where "
                "ContextParallel cannot see it, or under no_grad. Give checkpoint a module, or call a module "
                "under no_grad."
            )
        return own(*args, **(kwargs or {}))


def _attend(
    exchange: SequenceExchange,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention` of this rank's queries (..., size, E) with the keys of all ranks."""
    part = exchange.part
    query, key, value = [_in_autocast(tensor) for tensor in (query, key, value)]
    _check_lengths("scaled_dot_product_attention", exchange, query, (key, value), -2)
    own = [key, value]
    key, value = exchange.see(own, -2)
    keeps = not packs_saved_tensors()  # else nothing is kept, or it is elsewhere
    if not is_causal or attn_mask is not None:  # both together torch refuses, in its own words
        mask = _own_rows(attn_mask, exchange)
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **kwargs)
    else:
        each, pieces = [], query.split([end - start for start, end in part.own], -2)
        for rows, (start, end) in zip(pieces, part.own, strict=True):
            seen = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
            mask = _causal(end - start, end, query.dtype, query.device)
            each.append(F.scaled_dot_product_attention(rows, *seen, mask, dropout_p, **kwargs))
            if keeps and each[-1].requires_grad and type(mask) is torch.Tensor:
                again = partial(_causal, end - start, end, query.dtype, query.device)
                _lend([mask], lambda again=again: [again()], each[-1], [rows, *seen])  # type: ignore[misc]
        out = torch.cat(each, -2)
    if keeps and out.requires_grad:
        _lend([key, value], lambda: exchange.gather(own, -2), out, [key, value])
    return out


def _lend(tensors: list[Tensor], make: Callable[[], list[Tensor]], out: Tensor, of: list[Tensor]) -> None:
    """Let the memory go of tensors of which `out` was made: a backward makes them again for itself, until
    the gradients of `of` are there.
    """
    held = [tensor.data for tensor in tensors]  # without the graph, and without counting changes

    def empty(*_: Any) -> None:
        for tensor in held:
            tensor.untyped_storage().resize_(0)

    def fill(_: Any) -> None:
        for tensor, again in zip(held, make(), strict=True):
            tensor.untyped_storage().resize_(again.nbytes)
            tensor.copy_(again)

    empty()
    out.register_hook(fill)
    for tensor in of:
        if tensor.requires_grad:
            tensor.register_hook(empty)


def _attend_in_heads(exchange: SequenceExchange, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward` of queries (size, N, E); keys are projected on each rank, for all."""
    given = HEADS.bind(*args, **kwargs)
    given.apply_defaults()
    own = given.arguments
    query, key, value = own["query"], own["key"], own["value"]
    _check_lengths("multi_head_attention_forward", exchange, query, (key, value), 0)
    distinct = [key] if value is key else [key, value]
    seen = exchange.see(distinct, 0)
    own["key"], own["value"] = seen[0], seen[-1]  # one object where it was one: torch projects it once
    if own["is_causal"]:
        here = exchange.part.positions(query.device)
        own["attn_mask"] = torch.arange(exchange.part.length, device=query.device) > here[:, None]
        own["is_causal"] = False
    else:
        own["attn_mask"] = _own_rows(own["attn_mask"], exchange)
    padding = own["key_padding_mask"]
    if padding is not None and padding.shape[-1] == exchange.part.size:
        own["key_padding_mask"] = exchange.see([padding], -1)[0]
    return F.multi_head_attention_forward(*given.args, **given.kwargs)


def _check_lengths(
    name: str, exchange: SequenceExchange, query: Tensor, others: tuple[Tensor, Tensor], dim: int
) -> None:
    part, lengths = exchange.part, [tensor.shape[dim] for tensor in (query, *others)]
    if lengths != [part.size] * 3:
        raise UsageError(
            f"{name} was called with sequences of {lengths[0]} queries, {lengths[1]} keys and {lengths[2]} "
            f"values, where this rank has {part.size} of {part.length} positions. ContextParallel divides "
            "self-attention over one sequence: leave modules that attend to something else (another "
            "sequence, a cache, tokens of their own) out of blocks=."
        )


def _in_autocast(tensor: Tensor) -> Tensor:
    """Return `tensor` in the dtype of autocast, which attention would use: cast once, before it is sent."""
    kind = tensor.device.type
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _causal(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Each of the last `rows` queries sees the keys up to its own."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(rows, keys)  # the fused kernels know it, and need no memory for it
    return torch.full((rows, keys), -torch.inf, dtype=dtype, device=device).triu_(keys - rows + 1)


def _own_rows(mask: Tensor | None, exchange: SequenceExchange) -> Tensor | None:
    """The rows of an attention mask (..., queries, keys) that are this rank's queries, with all keys."""
    part = exchange.part
    if mask is None or mask.dim() < 2:
        return mask
    rows, keys = mask.shape[-2:]
    if keys == part.size and rows == 1:  # a mask of keys, which was divided with the sequence
        return exchange.see([mask], -1)[0]
    if keys not in (1, part.length) or rows not in (1, part.size, part.length):
        raise UsageError(
            f"An attention mask of shape {list(mask.shape)} was made inside of what ContextParallel divides, "
            f"where this rank has {part.size} of {part.length} positions: it does not say what these queries "
            "see of the whole. Write is_causal=True, or give the mask of the whole sequence "
            f"({part.length} x {part.length}) to the module from outside."
        )
    return part.take(mask, -2) if rows == part.length else mask
