"""`Exchange`: the collective verbs of a Strategy.

All ranks of the group must make each call, in the same order; otherwise all ranks raise CollectiveMismatch.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fabric.collectives.channel import (
    Channel,
    Transport,
    check_writable,
    op_name,
    reducible,
    to_tensors,
    torch_op,
)
from fabric.core.messages import print_line
from fabric.core.slices import use_slice
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.collectives.collective import Collective
    from fabric.core.errors import FabricError
    from fabric.core.topology import Topology


class Exchange:
    """The collective verbs of a strategy, on trees of tensors and numbers. Arguments and errors are those of
    the verbs of `Fabric`.

    A group is a process group of the engine; None means all ranks of the strategy. `src` and `dst` are global
    ranks.
    """

    topology: Topology
    hooks: dict[str, list[Callable[..., Any]]]
    """{name of a hook of `Part`: methods of the parts that override it}."""
    facts_part: Any = None
    """The part whose `facts` each call check compares, or None."""
    reducing: Callable[..., None] | None = None
    """`Part.reducing` of the strategy's parts; None: no part overrides it."""
    process_group: Any | None = None
    """The process group of the strategy's ranks; None: all ranks of the job."""

    def __init__(self) -> None:
        self.transport = Exchange.make_transport(self)
        self._channel: Channel | None = None
        self._data_parallel: tuple[Channel, Channel, int] | None = None
        self.data_placement: tuple[tuple[int, int], Any] | None = None
        """(`data_rank`, `data_group`) of the part that overrides them; None: each rank reads
        different data.
        """
        self.slice_parts: list[Any] = []
        """Parts of slices, created by each process at launch if there are several ranks."""

    def __getstate__(self) -> dict[str, Any]:
        # Reset: these belong to this process.
        reset: dict[str, Any] = {
            "_channel": None,
            "_data_parallel": None,
            "facts_part": None,
            "reducing": None,
            "slice_parts": [],
            "data_placement": None,
        }
        return {**self.__dict__, **reset, "hooks": {}}

    @cached_property
    def collective(self) -> Collective:
        """The collective backend: that of a single rank, until a strategy of several ranks replaces it."""
        from fabric.collectives.single_device import SingleDeviceCollective

        return SingleDeviceCollective()

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.topology.device

    def make_transport(self) -> Transport:
        """Return the transport of collectives from this rank; called once, when its device is set."""
        return Transport(self.root_device, ("cpu", self.root_device.type), self.root_device)

    def group_collective(self, group: Any | None) -> Collective:
        """Return the collective of `group`, a user's process group: for one rank always the same."""
        return self.collective

    @property
    def data_group(self) -> Any | None:
        """The process group of ranks that read different data; None: all ranks."""
        return None

    @property
    def model_parallel_size(self) -> int:
        """The number of consecutive ranks that read the same data."""
        return 1

    def root(self, rank: int, group: Any | None) -> int:
        """Return the global rank for `rank`, the argument `src` or `dst` of a verb, and its `group`.

        It is `rank` itself, but 0 without a group is the first rank of the strategy.
        """
        if rank or group is not None or self.process_group is None:
            return rank
        self.channel().world_size  # noqa: B018 - raises for ranks outside the group
        return self.collective.members[0]

    def channel(self, group: Any | None = None) -> Channel:
        """Return the channel on which the tree verbs of `group` run; None: all ranks of the strategy."""
        cached = self._channel
        if group is not None:
            channel = self.make_channel(group)
            channel.facts, channel.reducing = self.facts_part, self.reducing
            return channel
        if (
            cached is None
            or cached.collective is not self.collective
            or cached.transport is not self.transport
        ):
            cached = self._channel = self.make_channel(None)
            cached.facts, cached.reducing = self.facts_part, self.reducing
        return cached

    def make_channel(self, group: Any | None) -> Channel:
        """Return a new channel of `group`; None: all ranks of the strategy."""
        return Channel(self.group_collective(group), self.transport)

    def data_parallel_layout(self) -> tuple[Channel, int]:
        """Return (channel of the ranks that read the data, number of consecutive ranks with the
        same shard).
        """
        world = self.channel()
        if self._data_parallel is None or self._data_parallel[0] is not world:
            size = self.model_parallel_size
            self._data_parallel = world, self.channel(self.data_group) if size == 1 else world, size
        return self._data_parallel[1:]

    def check_barrier(self, verb: str, what: str = "") -> None:
        """Wait until all ranks make the same call of `verb`, with the same `what`. A verb of several messages
        calls this first. All ranks must call this.

        Raises:
            CollectiveMismatch: The calls differ; on all ranks.
        """
        self.channel().check_barrier(verb, what)

    def abort_call(self, verb: str, error: FabricError, group: Any | None = None) -> NoReturn:
        """Raise `error` about the arguments of `verb`, and make ranks of `group` that wait in
        `verb` raise.
        """
        self.channel(group).abort_call(verb, error)

    def all_reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", *, async_op: bool = False
    ) -> Any:
        """Reduce the tree `tensor` over ranks in place, and return it. All ranks of `group` must call this.

        `reduce_op` and `async_op`: see `Fabric.all_reduce`.
        """
        channel = self.channel(group)
        if channel.world_size == 1:
            return _reduce_alone(tensor, reduce_op, channel, async_op=async_op)
        from fabric.collectives.reduce import reduce_tree

        return reduce_tree(tensor, reduce_op, channel, async_op=async_op)

    def all_gather(
        self, tensor: Any, group: Any | None = None, sync_grads: bool = False, *, async_op: bool = False
    ) -> Any:
        """Return the tree `tensor` with leaves of shape (world_size, *shape). All ranks of `group` must call
        this.

        `sync_grads` and `async_op`: see `Fabric.all_gather`.
        """
        channel = self.channel(group)
        if self.topology.world_size == 1:
            _log_shape_once()
        if sync_grads:
            return use_slice("gradients").all_gather_with_grads(tensor, channel)
        if channel.world_size == 1:
            return _gather_alone(tensor, channel, async_op=async_op)
        from fabric.collectives.gather import gather_tree

        return gather_tree(tensor, channel, async_op=async_op)

    def broadcast(self, obj: Any, src: int = 0, *, group: Any | None = None) -> Any:
        """Return rank `src`'s `obj` on every rank. All ranks of `group` must call this."""
        channel = self.channel(group)
        if channel.world_size == 1:
            return obj
        from fabric.collectives.objects import broadcast_tree

        return broadcast_tree(obj, self.root(src, group), channel)

    def all_gather_object(
        self, obj: Any, group: Any | None = None, *, label: str = "all_gather_object"
    ) -> list[Any]:
        """Return every rank's `obj`, in rank order. All ranks of `group` must call this.

        `label`: name of the call in errors.
        """
        from fabric.collectives.objects import gather_objects

        return gather_objects(obj, self.channel(group), label)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks call this. All ranks must call this, with the same `name`."""
        self.channel().check_barrier("barrier()" if name is None else f"barrier({name!r})")

    def reduce_boolean_decision(self, decision: bool, all: bool = True, *, label: str = "") -> bool:
        """Whether all ranks pass True as `decision`; with `all=False`: any rank. All ranks must call this.

        `label`: the name of the call in errors, if it is not `all` or `any`.
        """
        channel = self.channel()
        if channel.world_size == 1:
            return bool(decision)
        from fabric.collectives.reduce import reduce_tree

        vote = torch.tensor(bool(decision))
        label = label or ("all" if all else "any")
        return bool(reduce_tree(vote, "product" if all else "sum", channel, label=label))


def _reduce_alone(data: Any, op: Any, channel: Channel, *, async_op: bool = False) -> Any:
    """Return the result of `reduce_tree` on one rank: the tensors of `data` unchanged, numbers as new
    tensors.

    Raises:
        ArgumentTypeError: As on several ranks.
        ConfigurationError: As on several ranks.
    """
    leaves, spec = flatten(data, CONSTANTS)
    op = torch_op("sum" if op is None else op)
    tensors = reducible(leaves, op, channel.transport.device, "all_reduce")
    check_writable(tensors, op)
    return _as_handle(unflatten(tensors, spec, data), f"all_reduce({op_name(op)})", async_op)


def _gather_alone(data: Any, channel: Channel, *, async_op: bool = False) -> Any:
    """Return the result of `gather_tree` on one rank: copies of shape (1, *shape).

    Raises:
        ArgumentTypeError: A leaf that is no tensor and no number.
    """
    leaves, spec = flatten(data, CONSTANTS)
    tensors = to_tensors(leaves, channel.transport.device, "all_gather")
    rows = [t.detach().resolve_conj().resolve_neg()[None] for t in tensors]
    copies = [row.clone(memory_format=torch.contiguous_format) for row in rows]
    return _as_handle(unflatten(copies, spec, data), "all_gather", async_op)


@cache
def _log_shape_once() -> None:
    """Log once per process that the shape differs from Lightning Fabric's, whose loops branch on it."""
    print_line(
        "all_gather adds a first dimension of size world_size, on one process, too: (1, *shape). "
        "Lightning Fabric returns the tensor itself there. Write no branch on fabric.world_size."
    )


def _as_handle(result: Any, verb: str, async_op: bool) -> Any:
    if not async_op:
        return result
    from fabric.collectives.handle import Handle

    return Handle(verb, [], lambda: result)
