"""Buffers of a model that are equal on all ranks: compared at setup, broadcast after each training backward.

Called by `setup` and by layouts. The broadcast is the only communication per step.
"""

from __future__ import annotations

import weakref
from fnmatch import filter as matching
from typing import TYPE_CHECKING, Any

from fabric.collectives.frames import PACK_LIMIT, describe_tensor
from fabric.core._torch import BatchNorm
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.messages import by_value
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
    """Mark the buffers whose names match one of `patterns` (fnmatch) as rank-local; unmark all others.

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
    for path, module in model.named_modules():
        prefix = f"{path}." * bool(path)
        module.__dict__[RANK_LOCAL] = {name for name in module._buffers if prefix + name in marked}


def is_rank_local(module: Module, name: str) -> bool:
    """Whether the module's direct buffer of this name is rank-local."""
    return name in module.__dict__.get(RANK_LOCAL, ())


def rank_local_names(model: Module) -> frozenset[str]:
    """Return the names of the rank-local buffers of a model."""
    return frozenset([path for path, module, name, _ in _slots(model) if is_rank_local(module, name)])


def shared_buffers(model: Module) -> dict[str, Tensor]:
    """Return the buffers that are not rank-local, each once, in the order of their names."""
    named = {path: buffer for path, module, name, buffer in _slots(model) if not is_rank_local(module, name)}
    first = {id(named[name]): name for name in sorted(named, reverse=True)}
    return {name: named[name] for name in sorted(first.values())}


def check_buffers(model: Module, gather: Callable[[Any], list[Any]]) -> None:
    """Compare names, shapes and dtypes of buffers between ranks. All ranks must call this.

    Args:
        model: The user's module.
        gather: Returns the objects of all ranks.

    Raises:
        UsageError: They differ; the error names the first buffer, with each rank's shape.
    """
    slots = [(path, is_rank_local(module, name), buffer) for path, module, name, buffer in _slots(model)]
    gathered = gather({path: "rank_local" if local else describe_tensor(b) for path, local, b in slots})
    for path in sorted(set().union(*gathered)):
        texts = {rank: row.get(path, "missing") for rank, row in enumerate(gathered)}
        if len(set(texts.values())) > 1:
            raise UsageError(
                f"Buffer {path} of {type(model).__name__} differs between ranks ({by_value(texts)}). Rank "
                "zero's values are broadcast, so shapes must be equal. Register it with the same shape on "
                f'all ranks, or exclude it from the broadcast: fabric.setup(model, rank_local=("{path}",)).'
            )


class SyncedBuffers:
    """The buffers of a model that are broadcast, with their names, shapes and dtypes at setup.

    A buffer that is added later, or changes its shape or dtype (a cache that grows), becomes rank-local. Its
    former memory is sent in its place, so that message sizes stay equal on all ranks.

    Args:
        model: The user's module, held by a weak reference.
    """

    def __init__(self, model: Module) -> None:
        self._model, self._name = weakref.ref(model), type(model).__name__.removeprefix("FSDP")
        shared = {n: b for n, b in shared_buffers(model).items() if not hasattr(b, "device_mesh")}
        self.synced = {name: buffer.data for name, buffer in shared.items()}
        self._versions = {name: _version(buffer) for name, buffer in shared.items()}
        self._batch_norms = {path for path, module, *_ in _slots(model) if isinstance(module, BatchNorm)}
        self._changed: set[str] = set()
        self.checks_left = 2 if self.synced.keys() - self._batch_norms else 0
        """Number of further broadcasts before which differences between ranks are detected."""

    def tensors(self) -> list[Tensor]:
        """Return the memory of the buffers, in the order of their names."""
        model = self._model()
        for name, _, _, buffer in () if model is None else _slots(model):
            synced = self.synced.get(name)
            if synced is not None and synced.shape == buffer.shape and synced.dtype == buffer.dtype:
                if self.checks_left and self._versions[name] != _version(buffer):
                    self._changed.add(name)
                self.synced[name] = buffer.data
        return list(self.synced.values())

    def warn_if_different(self, channel: Channel) -> None:
        """Warn of buffers that differ between ranks before a broadcast. All ranks must call this."""
        self.checks_left -= 1
        small = [tensor if tensor.nbytes <= PACK_LIMIT else None for tensor in self.tensors()]
        differs = dict(zip(self.synced, differing(small, channel), strict=True))
        found = {name for name, different in differs.items() if different}
        modules = {name.rpartition(".")[0] for name in found - self._batch_norms}
        if not modules:
            return
        self.checks_left = 0
        # Buffers of the same module that are large, or equal on all ranks (counters), are wrong too.
        found |= {name for name in self._changed if name.rpartition(".")[0] in modules}
        names = tuple(sorted(found - self._batch_norms))
        rank_zero_warn(
            f"forward changed buffers of {self._name} by each rank's part of the batch: {', '.join(names)}. "
            "All ranks got rank zero's values; one process has those of the whole batch. Reduce the update "
            "over ranks in forward (mean = fabric.all_reduce(x.mean(0))), or exclude the buffers from the "
            f"broadcast: fabric.setup(model, rank_local={names}).",
            category=PossibleUserWarning,
        )


def broadcast_buffers(models: list[SyncedBuffers], channel: Channel | None) -> None:
    """Broadcast rank zero's buffers; the first broadcasts warn of differences. All ranks must call this."""
    for model in models:
        if model.checks_left and channel is not None and channel.world_size > 1:
            model.warn_if_different(channel)
    if models and channel is not None:  # without one a strategy that has ended may call this
        broadcast_from_group_root([tensor for model in models for tensor in model.tensors()], channel)


def _slots(model: Module) -> Iterator[tuple[str, Module, str, Tensor]]:
    """Yield (name in the model, module, name in the module, buffer); shared modules under each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}" if path else name, module, name, buffer


def _version(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version
