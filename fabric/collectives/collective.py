"""`Collective`: operations of one group of ranks on single tensors. channel.py handles trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


CollectibleGroup: TypeAlias = Any
"""An engine's group object."""


class CompletedWork:
    """A completed request, for a message that was sent synchronously."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class Collective(ABC):
    """Operations on tensors across one group of ranks. All ranks must make each call, in the same order.

    `src` and `dst` are global ranks, as in torch.distributed. Reductions (`op`) are named "sum", "mean"
    ("avg"), "min", "max", "product". Tensors have the same shape and dtype on all ranks (except in
    `all_to_all`). A list of tensors has one tensor per rank of the group, in rank order.
    """

    def __init__(self) -> None:
        self._group: Any | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """The global rank of this process."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks in the group."""

    @property
    def members(self) -> list[int]:
        """The global ranks of the group."""
        return [*range(self.world_size)]

    @property
    def rank_in_group(self) -> int:
        """The rank of this process within the group."""
        return self.rank

    def group_rank_of(self, rank: int) -> int:
        """The rank within the group of a global `rank`, from 0."""
        return rank

    @property
    def guard(self) -> Any | None:
        """The call checker that compares calls on trees before they run; None: no check."""
        return None

    @property
    def group(self) -> Any:
        """The engine's group object.

        Raises:
            UsageError: Neither `setup` nor `create_group` was called.
        """
        if self._group is None:
            raise UsageError(
                f"{type(self).__name__} has no process group: none was made yet, or it was destroyed. Write "
                ".setup() or .create_group() before this call, or fabric.launch(). Remove calls of "
                "destroy_process_group()."
            )
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Copy `tensor` of rank `src` into `tensor` of every rank, and return it."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over ranks by `op`, in place on every rank, and return it."""

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Any:
        """Start an `all_reduce` of `tensor` by `op`. Return a request with `.wait()`, like torch's Work."""
        self.all_reduce(tensor, op)
        return CompletedWork()

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: str = "sum") -> Tensor:
        """Reduce `tensor` over ranks by `op`, and return `tensor`, which has the result on rank `dst`."""

    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Copy `tensor` of every rank into `tensor_list`, in rank order, and return the list."""

    def start_all_gather_flat(self, output: Tensor, tensor: Tensor) -> Any:
        """Start an `all_gather` of the 1-D `tensor` of each rank. Return a request with `.wait()`.

        `output`, of shape (world_size * numel,), has the result after `.wait()`, in rank order.
        """
        self.all_gather(list(output.view(self.world_size, -1)), tensor)
        return CompletedWork()

    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Copy `tensor` of every rank into `gather_list` of rank `dst`, and return `gather_list`."""

    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Copy entry r of `scatter_list` of rank `src` into `tensor` of rank r of the group; return it."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str = "sum") -> Tensor:
        """Reduce entry r of `input_list` over ranks by `op`, for rank r of the group.

        Return `output`, into which the result for this rank is written.
        """

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Send `input_tensor_list[r]` to rank r of the group, for each r.

        Return `output_tensor_list`, into which the tensors of all ranks for this one are written.
        """

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`, which must call `recv` with the same `tag`."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a message with this `tag` from rank `src` (None: from any rank) into `tensor`; return
        `tensor`.
        """

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait until every rank of the group has called it. `device_ids`: this rank's device, for NCCL."""

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether the engine is installed."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Whether the engine's default group exists."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Create the engine's default group; `kwargs` are the engine's. All ranks must call this."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Create and return another group; `kwargs` are the engine's. All ranks of the default group must
        call this.
        """

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None:
        """Destroy `group`, an engine's group object. All ranks of it must call this."""

    def setup(self, **kwargs: Any) -> Self:
        """Make the default group if there is none, and use it; `kwargs` are for `init_group`. All ranks must
        call this.
        """
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Make a further group and use it; `kwargs` are for `new_group`. All ranks must call this.

        Raises:
            UsageError: This collective has a group already.
        """
        if self._group is not None:
            raise UsageError(
                f"{type(self).__name__} has a group already. Write a second {type(self).__name__}() for "
                "another group."
            )
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Destroy the group. All ranks of it must call this.

        Raises:
            UsageError: There is no group.
        """
        self.destroy_group(self.group)
        self._group = None
        return self
