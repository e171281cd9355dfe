"""Attention of this rank's queries with the keys and values of all ranks."""

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
from fabric.strategies.context_parallel.sequence import viewing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from fabric.strategies.context_parallel.exchange import SequenceExchange

HEADS = inspect.signature(F.multi_head_attention_forward)


class _GradMode(threading.local):
    enabled = False
    """Whether gradients were enabled at the start of the innermost running module."""


_grad_mode = _GradMode()


@contextmanager
def recording_grad_mode() -> Iterator[None]:
    """Context of the forward of each module that may call attention: records whether gradients are
    enabled.
    """
    before, _grad_mode.enabled = _grad_mode.enabled, torch.is_grad_enabled()
    try:
        yield
    finally:
        _grad_mode.enabled = before


@contextmanager
def sharding_sequence(exchange: SequenceExchange) -> Iterator[None]:
    """Context in which modules compute this rank's shard, and torch's attention uses the full sequence."""
    with viewing(exchange.part), _Attention(exchange):
        yield


class _Attention(TorchFunctionMode):
    """Mode in which torch's attention functions use the keys of the full sequence."""

    def __init__(self, exchange: SequenceExchange) -> None:
        super().__init__()
        self._own: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: partial(_attend, exchange),
            F.multi_head_attention_forward: partial(_attend_in_heads, exchange),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of `func`, or `func` itself."""
        own = self._own.get(func)
        if own is None:
            return func(*args, **(kwargs or {}))
        if _grad_mode.enabled and not torch.is_grad_enabled():
            raise UsageError(
                "Attention was called without gradients, inside of a module that was called with them: under "
                "no_grad, or by torch.utils.checkpoint(function, use_reentrant=True), whose recomputation "
                "ContextParallel cannot detect. Pass checkpoint a module, or call a module under no_grad."
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
    """Return `F.scaled_dot_product_attention` of this rank's queries (..., size, E) with all ranks' keys."""
    part = exchange.part
    query, key, value = [_in_autocast(tensor) for tensor in (query, key, value)]
    _check_lengths("scaled_dot_product_attention", exchange, query, (key, value), -2)
    own = [key, value]
    key, value = exchange.all_gather(own, -2)
    keeps = not packs_saved_tensors()  # with activation checkpointing nothing is saved
    if not is_causal or attn_mask is not None:  # torch raises if both are given
        mask = _local_rows(attn_mask, exchange)
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **kwargs)
    else:
        each, pieces = [], query.split([end - start for start, end in part.own], -2)
        for rows, (start, end) in zip(pieces, part.own, strict=True):
            seen = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
            mask = _causal(end - start, end, query.dtype, query.device)
            each.append(F.scaled_dot_product_attention(rows, *seen, mask, dropout_p, **kwargs))
            if keeps and each[-1].requires_grad and type(mask) is torch.Tensor:
                again = partial(_causal, end - start, end, query.dtype, query.device)
                _free_until_backward([mask], lambda again=again: [again()], each[-1], [rows, *seen])  # type: ignore[misc]
        out = torch.cat(each, -2)
    if keeps and out.requires_grad:
        _free_until_backward([key, value], lambda: exchange.gather(own, -2), out, [key, value])
    return out


def _free_until_backward(
    tensors: list[Tensor], make: Callable[[], list[Tensor]], out: Tensor, of: list[Tensor]
) -> None:
    """Free the memory of `tensors`, which `out` saved for backward. A backward recomputes them by `make`, and
    frees them again when it has the gradients of `of`.
    """
    held = [tensor.data for tensor in tensors]  # .data: no graph, no version counter

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
    """Return `F.multi_head_attention_forward` of queries (size, N, E); each rank projects all keys."""
    given = HEADS.bind(*args, **kwargs)
    given.apply_defaults()
    own = given.arguments
    query, key, value = own["query"], own["key"], own["value"]
    _check_lengths("multi_head_attention_forward", exchange, query, (key, value), 0)
    distinct = [key] if value is key else [key, value]
    seen = exchange.all_gather(distinct, 0)
    own["key"], own["value"] = seen[0], seen[-1]  # equal objects stay one object, which torch projects once
    if own["is_causal"]:
        here = exchange.part.positions(query.device)
        own["attn_mask"] = torch.arange(exchange.part.length, device=query.device) > here[:, None]
        own["is_causal"] = False
    else:
        own["attn_mask"] = _local_rows(own["attn_mask"], exchange)
    padding = own["key_padding_mask"]
    if padding is not None and padding.shape[-1] == exchange.part.size:
        own["key_padding_mask"] = exchange.all_gather([padding], -1)[0]
    return F.multi_head_attention_forward(*given.args, **given.kwargs)


def _check_lengths(
    name: str, exchange: SequenceExchange, query: Tensor, others: tuple[Tensor, Tensor], dim: int
) -> None:
    part, lengths = exchange.part, [tensor.shape[dim] for tensor in (query, *others)]
    if lengths != [part.size] * 3:
        raise UsageError(
            f"{name} was called with sequences of {lengths[0]} queries, {lengths[1]} keys and {lengths[2]} "
            f"values, where this rank has {part.size} of {part.length} positions. ContextParallel supports "
            "self-attention over one sequence. Leave modules with other attention (to another sequence, a "
            "cache, learned tokens) out of blocks=."
        )


def _in_autocast(tensor: Tensor) -> Tensor:
    """Return `tensor` in autocast's dtype, which attention would use; cast before it is sent."""
    kind = tensor.device.type
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _causal(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the causal mask of the last `rows` queries for `keys` keys."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(rows, keys)  # fused kernels need no memory for it
    return torch.full((rows, keys), -torch.inf, dtype=dtype, device=device).triu_(keys - rows + 1)


def _local_rows(mask: Tensor | None, exchange: SequenceExchange) -> Tensor | None:
    """Return the rows of an attention mask (..., queries, keys) for this rank's queries."""
    part = exchange.part
    if mask is None or mask.dim() < 2:
        return mask
    rows, keys = mask.shape[-2:]
    if keys == part.size and rows == 1:  # a mask of keys, which was sharded with the sequence
        return exchange.all_gather([mask], -1)[0]
    if keys not in (1, part.length) or rows not in (1, part.size, part.length):
        raise UsageError(
            f"An attention mask of shape {list(mask.shape)} was made inside of a module that ContextParallel "
            f"shards, where this rank has {part.size} of {part.length} positions. It has no values for the "
            "keys of other ranks. Write is_causal=True, or pass the mask of the full sequence "
            f"({part.length} x {part.length}) to the module as an argument."
        )
    return part.shard_of(mask, -2) if rows == part.length else mask
