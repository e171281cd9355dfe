"""Whether a module gives on parts of a sequence what it gives on the whole: tried once, on few positions."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import FabricError, UsageError
from fabric.core.tree import flatten
from fabric.strategies.layouts.context.attention import Attention, Still
from fabric.strategies.layouts.context.call import noise
from fabric.strategies.layouts.context.exchange import Exchange
from fabric.strategies.layouts.stand_ins import groups_inside, stand_ins
from fabric.utilities.random_stream import fork_rng
from fabric.utilities.sequence import Part, enter_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

    from fabric.plugins.collectives.channel import Channel
    from fabric.strategies.layouts.context.call import DividedCall

_EACH = (3, 5)
"""Positions in each piece of a sequence, in the first trial and in the second; two belong to a rank."""
_WHY = (
    "Something in it looks along the sequence otherwise than by F.scaled_dot_product_attention or "
    "nn.MultiheadAttention: positions that are counted inside (write fabric.utilities.sequence_positions("
    "length) for torch.arange(length)), attention written by hand, a convolution, a mean over the sequence; "
    "or it draws random numbers of its own. Name the modules that do not: "
    "ContextParallel(blocks={TransformerBlock})."
)


def try_parts(module: Module, call: DividedCall, channel: Channel, place: int, number: int) -> None:
    """Compare a forward of the whole with one of parts, dropping nothing out. Leaves no trace. All ranks.

    Parameters and inputs are changed a little for it: what is zero at first would hide things.

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
    kept = _Kept(module)
    split = groups_inside(module)  # gathering them needs ranks that may try nothing now
    with torch.no_grad(), _untouched(kept, call), _stirred(module, split), stand_ins(split):
        tries = [call.some(short, stir=True), call.some(short), call.some(call.length)]
        whole, small = _first_that_runs(module, tries, kept)
        seen = kept.restore()
        exchange = Exchange(channel, Part(small.length, place, count))
        try:
            parts = _run_parts(module, small, exchange)
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
        wrong = _difference(flatten(whole)[0], flatten(parts)[0], numbers=True)
        wrong = wrong or _kept_otherwise(seen, kept.restore())
    told = torch.tensor([float(bool(wrong))], device=channel.wire.via)
    channel.collective.all_reduce(told)
    if wrong or told.item():
        raise UsageError(
            f"{call.name} gives other numbers for the parts of a sequence than for the whole "
            f"({wrong or 'on another rank'}). {_WHY}"
        )


class _Kept:
    """What the modules in a module keep: buffers, and attributes of their own."""

    def __init__(self, module: Module) -> None:
        self._modules = dict(module.named_modules())
        self._slots = [(m._buffers, n, b) for m in self._modules.values() for n, b in m._buffers.items()]
        self._values = [(b, b._version, b.clone()) for _, _, b in self._slots if b is not None]
        self._attributes = {path: _attributes(m) for path, m in self._modules.items()}

    def restore(self) -> dict[str, Any]:
        """Make them as they were; gives what they were, of buffers that are saved and attributes that are
        new.
        """
        found: dict[str, Any] = {}
        for path, module in self._modules.items():
            before = self._attributes[path]
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{path}.{name}".strip(".")] = buffer.clone()
            for name, value in _attributes(module).items():
                if name not in before or value is not before[name]:
                    found[f"{path}.{name}".strip(".")] = value
                    del module.__dict__[name]
            module.__dict__.update(before)
        for held, name, buffer in self._slots:
            held[name] = buffer
        for buffer, version, value in self._values:
            if buffer._version != version:
                buffer.data.copy_(value)
        return found


def _attributes(module: Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _kept_otherwise(whole: dict[str, Any], parts: dict[str, Any]) -> str:
    """Which of what modules keep is of a part only; "" where nothing is."""
    for name in sorted(whole.keys() | parts.keys()):
        differs = name not in whole or name not in parts
        if differs or _difference(flatten(whole[name])[0], flatten(parts[name])[0]):
            return f"it keeps {name}, which is that of a part only: return it, or compute it outside"
    return ""


def _first_that_runs(module: Module, tries: list[DividedCall], kept: _Kept) -> tuple[Any, DividedCall]:
    """The output of the whole, of the first of these calls that the module takes."""
    for small in tries[:-1]:
        try:
            return _run_whole(module, small), small
        except Exception:  # perhaps it takes this length, or such numbers, only
            kept.restore()
    return _run_whole(module, tries[-1]), tries[-1]


@contextmanager
def _stirred(module: Module, split: list[Any]) -> Iterator[None]:
    """Context in which parameters have other values, on all ranks alike, but for those of `split` groups."""
    inside = {id(p) for state in split for part in state._modules for p in part.parameters()}
    floats = [p for p in module.parameters() if id(p) not in inside and p.is_floating_point() and p.numel()]
    values = [p.detach().clone() for p in floats]
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or the forward would use the casts of these values
    for number, tensor in enumerate(floats):
        size = 0.5 * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1
        tensor.data.add_(noise(tensor, number).mul_(size))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for tensor, value in zip(floats, values, strict=True):
            tensor.data.copy_(value)


def _run_whole(module: Module, call: DividedCall) -> Any:
    args, kwargs = call.whole
    before = enter_part(None)
    try:
        with Still():
            return module.forward(*args, **kwargs)
    finally:
        enter_part(before)


def _run_parts(module: Module, call: DividedCall, exchange: Exchange) -> Any:
    args, kwargs = call.divided(exchange)
    before = enter_part(exchange.part)
    try:
        with Attention(exchange, still=True):
            return call.join(module.forward(*args, **kwargs), exchange)
    finally:
        enter_part(before)


@contextmanager
def _untouched(kept: _Kept, call: DividedCall) -> Iterator[None]:
    """Context that leaves random generators and what modules keep as they were."""
    devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    with ExitStack() as forks, warnings.catch_warnings():
        for device in devices or {torch.device("cpu")}:
            forks.enter_context(fork_rng(device))
        warnings.simplefilter("ignore")  # of what is meant for training, and is not so here
        try:
            yield
        finally:
            kept.restore()


def _difference(whole: list[Any], parts: list[Any], numbers: bool = False) -> str:
    """How two outputs differ; "" where they do not. `numbers`: those that are no tensors count, too."""
    if len(whole) != len(parts):
        return f"{len(parts)} outputs in place of {len(whole)}"
    for one, other in zip(whole, parts, strict=True):
        if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
            return f"{type(other).__name__} in place of {type(one).__name__}"
        if not isinstance(one, torch.Tensor):
            if numbers and isinstance(one, int | float) and not _same_number(one, other):
                return f"{other} in place of {one}"
            continue
        if one.shape != other.shape:
            return f"shape {list(other.shape)} in place of {list(one.shape)}"
        off, limit = _distance(one, other), _limit(one)
        if not off <= limit:
            return f"they differ by {off:.1e} of their size, where rounding makes {limit:.0e} at most"
    return ""


def _same_number(one: float, other: Any) -> bool:
    return isinstance(other, int | float) and (one == other or math.isclose(one, other, rel_tol=1e-4))


def _distance(one: Tensor, other: Tensor) -> float:
    if one.dtype is torch.bool or not (one.is_floating_point() or one.is_complex()):
        return float((one != other).any())
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return float("inf")
    one, other = one[finite].double(), other[finite].double()
    size = one.norm()
    return float((one - other).norm() / size) if size else float((one - other).norm())


def _limit(tensor: Tensor) -> float:
    if tensor.dtype is torch.float64:
        return 1e-9
    reduced = torch.is_autocast_enabled(tensor.device.type) or tensor.itemsize < 4
    if reduced:
        return 1.5e-2
    coarse = tensor.device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return 2e-3 if coarse or (tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32) else 2e-5
