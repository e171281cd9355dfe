"""`Region`: a module inside of which a sequence is sharded. Replaces its forward, and those of its
submodules.

Each replacement belongs to one module, so that copies of the model have their own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import backward_pass
from fabric.core.compile import eager
from fabric.core.errors import UsageError
from fabric.strategies.context_parallel.attention import recording_grad_mode, sharding_sequence
from fabric.strategies.context_parallel.call import ShardedCall
from fabric.strategies.context_parallel.exchange import SequenceExchange
from fabric.strategies.context_parallel.sequence import SequenceGroup, SequenceShard, current_shard
from fabric.strategies.context_parallel.trial import try_shards
from fabric.utilities.random_stream import RandomStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


_TRIALS = 2
"""Number of first forwards that are compared: a single batch may be equal at all positions."""


class Region:
    """Shards the arguments of a module, and gathers its output.

    Args:
        group: The ranks and the dimension of the sequence.
        name: Name of the module, for errors.
    """

    def __init__(self, group: SequenceGroup, name: str) -> None:
        self.group, self.name = group, name
        self.random: RandomStream | None = None
        self._tried: Counter[Any] = Counter()
        self._recent_shards: list[SequenceShard | None] = []
        """Different shards of forwards since the last backward; None: the full sequence."""
        self._backward_began = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # a copy of the model is sharded over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.group, self.name)

    def install(self, module: Module) -> None:
        """Replace the forwards of a module and its submodules."""
        for inner in module.modules():
            if inner is module or _may_attend(inner):
                inner.__dict__["forward"] = _Forward(self, inner, inner is module)

    @eager  # torch.compile must not trace the messages; compiled submodules stay compiled
    def run(self, module: Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of the module for the full sequence. All ranks of the group must call this."""
        channel = self.group.channel
        if channel is None or current_shard() is not None:
            return call(*args, **kwargs)
        sharded = ShardedCall(call, self.name, args, kwargs, self.group.seq_dim, self.group.seq_dims)
        rank, count = self.group.rank_and_size
        if sharded.length < 2 * count:
            self._record_forward(None)
            return call(*args, **kwargs)  # not sharded: all ranks compute the full sequence
        key = (module.training, sharded.spec, tuple([str(dim) for dim in sharded.dims]))
        if self._tried[key] < _TRIALS:
            try_shards(module, sharded, channel, rank, self._tried[key])
            self._tried[key] += 1
        exchange = SequenceExchange(channel, SequenceShard(sharded.length, rank, count))
        self._record_forward(exchange.part)
        self.group.shard_sizes.add(exchange.part.size)
        local_args, local_kwargs = sharded.shard_arguments(exchange)
        self.random = self.random or RandomStream(rank, channel.transport.device)
        with self.random(), sharding_sequence(exchange):
            output = call(*local_args, **local_kwargs)
            self.random.update_drawn()
        self.random.advance()
        return sharded.join(output, exchange)

    def run_inside(self, module: Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a submodule; in a backward, a recomputation, with the shard of its forward."""
        channel = self.group.channel
        if current_shard() is not None or backward_pass() == -1 or channel is None or not self._recent_shards:
            return call(*args, **kwargs)
        self._backward_began = True
        part = self._recent_shards[-1]
        tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        sizes = [size for leaf in tensors for size in leaf.shape]
        if len(self._recent_shards) > 1 or (part is not None and not {part.size, part.length} & {*sizes}):
            lengths = ", ".join(["a short one" if p is None else str(p.length) for p in self._recent_shards])
            raise UsageError(
                f"{type(module).__name__} in {self.name} is computed again for a backward, and it is "
                f"ambiguous for which of several forwards (lengths: {lengths}). Run the backward of each "
                "forward before the next one with another length, or checkpoint the whole module that "
                "ContextParallel shards."
            )
        if part is None or part.size not in sizes:
            return call(*args, **kwargs)
        with sharding_sequence(SequenceExchange(channel, part)):
            return call(*args, **kwargs)

    def _record_forward(self, part: SequenceShard | None) -> None:
        """Record the shard of a forward, for recomputations in its backward."""
        if backward_pass() != -1:  # this forward is a recomputation
            self._recent_shards, self._backward_began = [part], True
        elif torch.is_grad_enabled():
            if self._backward_began:
                self._recent_shards, self._backward_began = [], False
            if (part and part.length) not in [recent and recent.length for recent in self._recent_shards]:
                self._recent_shards.append(part)


class _Forward:
    """The forward of a region (`whole`), or of a submodule."""

    def __init__(self, region: Region, module: Module, whole: bool) -> None:
        self._run = region.run if whole else region.run_inside
        self._module = module
        self.__wrapped__ = module.forward
        """The user's forward, for `inspect.signature`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with recording_grad_mode():
            return self._run(self._module, self.__wrapped__, args, kwargs)


def _may_attend(module: Module) -> bool:
    """Whether a module may call attention: False for torch's layers without children."""
    return (
        not type(module).__module__.startswith("torch.nn.modules")
        or next(module.children(), None) is not None
    )
