"""`Exchange`: data across ranks, the part of a Strategy that its group of ranks carries out.

All ranks of the group must make each call here, in the same order; ranks that do not get one
CollectiveMismatch.
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
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.collectives.collective import Collective
    from fabric.core.errors import FabricError
    from fabric.core.topology import Topology


class Exchange:
    """The collective verbs of a strategy, on trees: tensors, numbers, and nestings of them. The arguments are
    those of the verbs of `Fabric`, which say what is raised.

    A group is whatever the engine calls one; None means all ranks of the strategy. `src` and `dst` are global
    ranks.
    """

    topology: Topology
    hooks: dict[str, list[Callable[..., Any]]]
    """By the name of each hook of `Part`, the methods of the parts that override it."""
    compared: Any = None
    """The part whose `facts` the call check of each verb compares; None: there is none."""
    process_group: Any | None = None
    """The ranks of the strategy, where they are not those of the whole job."""

    def __init__(self) -> None:
        self.transport = Exchange.make_transport(self)
        self._channel: Channel | None = None
        self._seen: tuple[Channel, Channel, int] | None = None
        self.shared_data: tuple[tuple[int, int], Any] | None = None
        """`data_rank` and `data_group` of the part that decides them; None: each rank reads its own data."""
        self.joined_parts: list[Any] = []
        """Parts of slices, where there are several ranks: made at launch, by each process for itself."""

    def __getstate__(self) -> dict[str, Any]:
        # These belong to this process.
        own: dict[str, Any] = {
            "_channel": None,
            "_seen": None,
            "compared": None,
            "joined_parts": [],
            "shared_data": None,
        }
        return {**self.__dict__, **own, "hooks": {}}

    @cached_property
    def collective(self) -> Collective:
        """The collective backend; for a single rank, until a strategy of several ranks replaces it."""
        from fabric.collectives.single_device import SingleDeviceCollective

        return SingleDeviceCollective()

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.topology.device

    def make_transport(self) -> Transport:
        """Return the transport of collectives from this rank; called once, after the rank is set up."""
        return Transport(self.root_device, ("cpu", self.root_device.type), self.root_device)

    def group_collective(self, group: Any | None) -> Collective:
        """The collective of a user's `group`: here that of one rank, whatever the group."""
        return self.collective

    @property
    def data_group(self) -> Any | None:
        """The ranks that see different data; None: all of them."""
        return None

    @property
    def model_parallel_size(self) -> int:
        """The number of consecutive ranks that see the same data."""
        return 1

    def root(self, rank: int, group: Any | None) -> int:
        """The global rank that sends or receives; 0, the default, is the first one of the strategy."""
        if rank or group is not None or self.process_group is None:
            return rank
        self.channel().world_size  # noqa: B018 - raises for ranks outside the group
        return self.collective.members[0]

    def channel(self, group: Any | None = None) -> Channel:
        """Return the channel on which the tree verbs of a group run."""
        known = self._channel
        if group is not None:
            made = self.make_channel(group)
            made.facts = self.compared
            return made
        if known is None or known.collective is not self.collective or known.transport is not self.transport:
            known = self._channel = self.make_channel(None)
            known.facts = self.compared
        return known

    def make_channel(self, group: Any | None) -> Channel:
        """The channel of a group; asked once for all ranks."""
        return Channel(self.group_collective(group), self.transport)

    def data_parallel_layout(self) -> tuple[Channel, int]:
        """The ranks that hold the data, and how many of them, one after the other, see the same part."""
        everybody = self.channel()
        if self._seen is None or self._seen[0] is not everybody:
            row = self.model_parallel_size
            self._seen = everybody, self.channel(self.data_group) if row == 1 else everybody, row
        return self._seen[1:]

    def check_barrier(self, verb: str, what: str = "") -> None:
        """Wait until all ranks make the same call of `verb`; the first thing that one of several messages
        does. All ranks must call this.

        `what` must be the same on all ranks, too.

        Raises:
            CollectiveMismatch: It is not; on all ranks.
        """
        self.channel().check_barrier(verb, what)

    def abort_call(self, verb: str, error: FabricError, group: Any | None = None) -> NoReturn:
        """Raise `error` about the arguments of `verb`, after the ranks of `group` that wait in it have heard
        of it.
        """
        self.channel(group).abort_call(verb, error)

    def all_reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", *, async_op: bool = False
    ) -> Any:
        """The tree `tensor` reduced over ranks, in place, and returned. All ranks of `group` must call this.

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
        """The tree `tensor` with leaves of shape (world_size, *shape). All ranks of `group` must call this.

        `sync_grads` and `async_op`: see `Fabric.all_gather`.
        """
        channel = self.channel(group)
        if self.topology.world_size == 1:
            _note_shape()
        if sync_grads:
            from fabric.collectives.grads import all_gather_with_grads

            return all_gather_with_grads(tensor, channel)
        if channel.world_size == 1:
            return _gather_alone(tensor, channel, async_op=async_op)
        from fabric.collectives.gather import gather_tree

        return gather_tree(tensor, channel, async_op=async_op)

    def broadcast(self, obj: Any, src: int = 0, *, group: Any | None = None) -> Any:
        """Rank `src`'s `obj` on every rank. All ranks of `group` must call this."""
        channel = self.channel(group)
        if channel.world_size == 1:
            return obj
        from fabric.collectives.objects import broadcast_tree

        return broadcast_tree(obj, self.root(src, group), channel)

    def all_gather_object(
        self, obj: Any, group: Any | None = None, *, label: str = "all_gather_object"
    ) -> list[Any]:
        """Every rank's `obj`, in rank order; `label` names the call where ranks make different ones. All
        ranks of `group` must call this.
        """
        from fabric.collectives.objects import gather_objects

        return gather_objects(obj, self.channel(group), label)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here. All ranks must call this; `name` must be the same on all."""
        self.channel().check_barrier("barrier()" if name is None else f"barrier({name!r})")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or, with `all=False`, any rank) pass True as `decision`. All ranks must call
        this.
        """
        channel = self.channel()
        if channel.world_size == 1:
            return bool(decision)
        from fabric.collectives.reduce import reduce_tree

        vote = torch.tensor(bool(decision))
        label = "all" if all else "any"
        return bool(reduce_tree(vote, "product" if all else "sum", channel, label=label))


def _reduce_alone(data: Any, op: Any, channel: Channel, *, async_op: bool = False) -> Any:
    """Return what `reduce_tree` gives on one rank: the tensors of `data` unchanged, numbers as new tensors.

    Raises:
        ArgumentTypeError: As on several ranks.
        ConfigurationError: As on several ranks.
    """
    leaves, spec = flatten(data, CONSTANTS)
    op = torch_op("sum" if op is None else op)
    tensors = reducible(leaves, op, channel.transport.device, "all_reduce")
    check_writable(tensors, op)
    return _given(unflatten(tensors, spec, data), f"all_reduce({op_name(op)})", async_op)


def _gather_alone(data: Any, channel: Channel, *, async_op: bool = False) -> Any:
    """Return what `gather_tree` gives on one rank: copies of shape (1, *shape).

    Raises:
        ArgumentTypeError: A leaf that is no tensor and no number.
    """
    leaves, spec = flatten(data, CONSTANTS)
    tensors = to_tensors(leaves, channel.transport.device, "all_gather")
    rows = [t.detach().resolve_conj().resolve_neg()[None] for t in tensors]
    copies = [row.clone(memory_format=torch.contiguous_format) for row in rows]
    return _given(unflatten(copies, spec, data), "all_gather", async_op)


@cache
def _note_shape() -> None:
    """Once in a process, on stderr: loops written for Lightning Fabric branch on the world size."""
    print_line(
        "all_gather adds a first dimension of size world_size, on one process, too: (1, *shape). "
        "Lightning Fabric returns the tensor itself there. Write no branch on fabric.world_size."
    )


def _given(result: Any, verb: str, async_op: bool) -> Any:
    if not async_op:
        return result
    from fabric.collectives.handle import Handle

    return Handle(verb, [], lambda: result)
