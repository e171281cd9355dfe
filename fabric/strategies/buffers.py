"""Buffers of a model that ranks keep alike, by name: compared at setup, broadcast after training backwards.

Called by `setup` and by layouts. Beside the broadcast a step sends nothing.
"""

from __future__ import annotations

import weakref
from fnmatch import filter as matching
from typing import TYPE_CHECKING, Any

from fabric.collectives.frames import PACK_LIMIT, describe_tensor
from fabric.core._torch import BatchNorm
from fabric.core.errors import ConfigurationError, UsageError
from fabric.strategies.tensor_sync import broadcast_from_group_root, differing
from fabric.utilities.init import RANK_LOCAL
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    from fabric.collectives.channel import Channel


def mark_rank_local(model: Module, patterns: Any) -> None:
    """Mark the buffers whose names match one of `patterns` (fnmatch) as rank-local, and no others.

    Raises:
        ConfigurationError: A pattern matches no buffer, or is no string.
    """
    patterns = patterns if isinstance(patterns, list | tuple | set | frozenset) else [patterns]
    names = sorted([name for name, *_ in _slots(model)]) if patterns else []
    for pattern in patterns:
        if not isinstance(pattern, str) or not matching(names, pattern):
            raise ConfigurationError(
                f"rank_local={pattern!r} matches no buffer of {type(model).__name__}. Its buffers are: "
                f"{', '.join(names) or 'none'}. Write these names, or patterns: rank_local=('cache.*',)."
            )
    marked = {name for pattern in patterns for name in matching(names, pattern)}
    for path, part in model.named_modules():
        prefix = f"{path}." * bool(path)
        part.__dict__[RANK_LOCAL] = {own for own in part._buffers if prefix + own in marked}


def is_rank_local(part: Module, name: str) -> bool:
    """Whether a module's own buffer of this name is rank-local."""
    return name in part.__dict__.get(RANK_LOCAL, ())


def rank_local_names(model: Module) -> frozenset[str]:
    """The names of the rank-local buffers of a model."""
    return frozenset([name for name, part, own, _ in _slots(model) if is_rank_local(part, own)])


def shared_buffers(model: Module) -> dict[str, Tensor]:
    """The buffers that ranks keep alike, each once, in the order of their names."""
    named = {name: buffer for name, part, own, buffer in _slots(model) if not is_rank_local(part, own)}
    first = {id(named[name]): name for name in sorted(named, reverse=True)}
    return {name: named[name] for name in sorted(first.values())}


def check_buffers(model: Module, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the buffers of all ranks by `gather`, which gives each rank's object. All ranks must call this.

    Raises:
        UsageError: They differ; it names the first buffer, with each rank's shape.
    """
    slots = [(name, is_rank_local(part, own), buffer) for name, part, own, buffer in _slots(model)]
    ranks = gather({name: "rank_local" if local else describe_tensor(b) for name, local, b in slots})
    for name in sorted(set().union(*ranks)):
        held: dict[str, list[str]] = {}
        for rank, shapes in enumerate(ranks):
            held.setdefault(shapes.get(name, "missing"), []).append(str(rank))
        if len(held) > 1:
            values = " | ".join([f"{', '.join(those)}: {shape}" for shape, those in held.items()])
            raise UsageError(
                f"Buffer {name} of {type(model).__name__} differs between ranks ({values}). All ranks get "
                "rank zero's values of a buffer, which must fit. Register it alike on all ranks; or let each "
                f'rank keep its own: fabric.setup(model, rank_local=("{name}",)).'
            )


class SyncedBuffers:
    """The buffers of a model that ranks keep alike: those of the names, shapes and dtypes that it has now.

    A buffer that is new later, or has another shape or dtype (a cache that grew), is this rank's own. The
    memory that it had before is sent in its place: sizes stay the same on all ranks, and a rank whose cache
    did not grow keeps the values that it has.

    Args:
        model: Compared at setup; it is not kept alive.
    """

    def __init__(self, model: Module) -> None:
        self._model, self._name = weakref.ref(model), type(model).__name__.removeprefix("FSDP")
        shared = {n: b for n, b in shared_buffers(model).items() if not hasattr(b, "device_mesh")}
        self.sent = {name: buffer.data for name, buffer in shared.items()}
        self._stamps = {name: _stamp(buffer) for name, buffer in shared.items()}
        self._normed = {name for name, part, _, _ in _slots(model) if isinstance(part, BatchNorm)}
        self._changed: set[str] = set()
        self.looks = 2 if self.sent.keys() - self._normed else 0
        """In how many of the next broadcasts to look for ranks that differ."""

    def tensors(self) -> list[Tensor]:
        """The memory of the buffers, in the order of their names."""
        model = self._model()
        for name, _, _, buffer in () if model is None else _slots(model):
            sent = self.sent.get(name)
            if sent is not None and sent.shape == buffer.shape and sent.dtype == buffer.dtype:
                if self.looks and self._stamps[name] != _stamp(buffer):
                    self._changed.add(name)
                self.sent[name] = buffer.data
        return list(self.sent.values())

    def look(self, channel: Channel) -> None:
        """Warn of buffers in which ranks differ before a broadcast. All ranks must call this."""
        self.looks -= 1
        small = [tensor if tensor.nbytes <= PACK_LIMIT else None for tensor in self.tensors()]
        found = {name for name, differs in zip(self.sent, differing(small, channel), strict=True) if differs}
        parts = {name.rpartition(".")[0] for name in found - self._normed}
        if not parts:
            return
        self.looks = 0
        # Large ones, and counters that are equal on all ranks, are not those of the whole batch, either.
        found |= {name for name in self._changed if name.rpartition(".")[0] in parts}
        names = tuple(sorted(found - self._normed))
        rank_zero_warn(
            f"forward changed buffers of {self._name} by each rank's part of the batch: {', '.join(names)}. "
            "All ranks got rank zero's values, where one process has those of the whole batch. Reduce what "
            "goes into them in forward (mean = fabric.all_reduce(x.mean(0))); or let each rank keep its own: "
            f"fabric.setup(model, rank_local={names}).",
            category=PossibleUserWarning,
        )


def broadcast_buffers(models: list[SyncedBuffers], channel: Channel | None) -> None:
    """Rank zero's buffers on all ranks; the first times look who differs before. All ranks must call this."""
    for model in models:
        if model.looks and channel is not None and channel.world_size > 1:
            model.look(channel)
    if channel is not None:
        broadcast_from_group_root([tensor for model in models for tensor in model.tensors()], channel)


def _slots(model: Module) -> Iterator[tuple[str, Module, str, Tensor]]:
    """(name in the model, its module, name there, buffer), of shared modules under each name."""
    for path, part in model.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}" if path else name, part, name, buffer


def _stamp(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version
