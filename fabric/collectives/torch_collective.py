"""`TorchCollective`: operations of a torch.distributed group. Usable without a Fabric."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.channel import torch_op
from fabric.collectives.collective import Collective
from fabric.collectives.frames import for_bools
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.slices import find_slice
from fabric.core.torch_versions import all_to_all, collectives_recorded, start_all_gather_flat

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


default_pg_timeout = timedelta(seconds=1800)


class _Reduction:
    """A reduction of a tensor by operations that every backend supports.

    Some backends have no mean, and some add bools as bytes. All lose NaN in a minimum or maximum, for which
    floats are sent as integers of the same order.
    """

    work: Any = None
    """torch's Work; None: it is done, or this rank is not in the group, of which torch has warned."""

    def __init__(self, tensor: Tensor, op: Any, size: int) -> None:
        self.tensor, self.op, self.size = tensor, torch_op(op), size
        if self.op == dist.ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ArgumentTypeError(
                f"The mean of {tensor.dtype} would round. Use op='sum', or convert first."
            )
        self._ordered = tensor.is_floating_point() and self.op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        self.engine_op = for_bools(self.op) if tensor.dtype is torch.bool else self.op
        if self.op == dist.ReduceOp.AVG:
            self.engine_op = dist.ReduceOp.SUM
        self.sent = self.to_send(tensor)

    def to_send(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the engine reduces in place of `tensor`."""
        if not self._ordered:
            return tensor
        from fabric.collectives.ordered import to_ordered

        return to_ordered(tensor, largest=self.op == dist.ReduceOp.MAX)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        """Wait for the result, and return the tensor with it."""
        if self.work is not None:
            self.work.wait()
        if self._ordered:
            from fabric.collectives.ordered import from_ordered

            self.tensor.copy_(from_ordered(self.sent, self.tensor.dtype))
        elif self.op == dist.ReduceOp.AVG and self.size > 1:
            self.tensor.div_(self.size)
        return self.tensor


class TorchCollective(Collective):
    """Operations of a torch.distributed group; without `create_group`, of the default group. All ranks of it
    must make each call, in the same order: see `Collective`.

    Args:
        group: An existing torch.distributed process group to use.

    Raises:
        UsageError: torch was built without torch.distributed. Methods with `op` also raise a
            ConfigurationError if it is unknown, and an ArgumentTypeError for the mean of integers.
    """

    manages_default_group = False

    def __init__(self, *, group: Any | None = None) -> None:
        if not dist.is_available():
            raise UsageError("This torch was built without torch.distributed. Install a build that has it.")
        super().__init__()
        self._group = group

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            UsageError: There is no default group yet.
        """
        return dist.group.WORLD if self._group is None and dist.is_initialized() else super().group

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def members(self) -> list[int]:
        """The global ranks of the group."""
        return dist.get_process_group_ranks(self.group)

    @property
    def rank_in_group(self) -> int:
        """The rank of this process within the group."""
        return dist.get_rank(self.group)

    def group_rank_of(self, rank: int) -> int:
        """The rank within the group of a global `rank`, from 0.

        Raises:
            ConfigurationError: The rank is not in the group.
        """
        members = self.members
        if rank not in members:
            raise ConfigurationError(
                f"Rank {rank} is not in the group of ranks {', '.join(map(str, members))}. Write one of them."
            )
        return members.index(rank)

    @property
    def guard(self) -> Any | None:
        """The call checker of the group, for calls on trees; None: one rank, or FABRIC_GUARD=off."""
        checker = find_slice("call check")
        return None if checker is None else checker.guard_of(self.group)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Copy `tensor` of rank `src` into `tensor` of every rank, and return it."""
        dist.broadcast(tensor, src, group=self._group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over ranks by `op`, in place on every rank, and return it."""
        reduction = _Reduction(tensor, op, self.world_size)
        dist.all_reduce(reduction.sent, reduction.engine_op, group=self._group)
        return reduction.wait()

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Any:
        """Start an `all_reduce` of `tensor` by `op`. Return its request: `.wait()` completes it."""
        reduction = _Reduction(tensor, op, self.world_size)
        reduction.work = dist.all_reduce(
            reduction.sent, reduction.engine_op, group=self._group, async_op=True
        )
        return reduction

    def reduce(self, tensor: Tensor, dst: int, op: str = "sum") -> Tensor:
        """Reduce `tensor` over ranks by `op`, and return `tensor`, which has the result on rank `dst`."""
        reduction = _Reduction(tensor, op, self.world_size)
        dist.reduce(reduction.sent, dst, reduction.engine_op, group=self._group)
        return reduction.wait() if self.rank == dst else tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Copy `tensor` of every rank into `tensor_list`, in rank order, and return the list."""
        dist.all_gather(tensor_list, tensor, group=self._group)
        return tensor_list

    def start_all_gather_flat(self, output: Tensor, tensor: Tensor) -> Any:
        """Start an `all_gather` of the 1-D `tensor` of each rank into `output`. Return torch's Work.

        `output` has shape (world_size * numel,), in rank order.
        """
        return start_all_gather_flat(output, tensor, self._group)

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Copy `tensor` of every rank into `gather_list` of rank `dst`, and return `gather_list`."""
        dist.gather(tensor, gather_list if self.rank == dst else None, dst, group=self._group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Copy entry r of `scatter_list` of rank `src` into `tensor` of rank r of the group; return it."""
        dist.scatter(tensor, scatter_list if self.rank == src else None, src, group=self._group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str = "sum") -> Tensor:
        """Reduce entry r of `input_list` over ranks by `op`, for rank r of the group.

        Return `output`, into which the result for this rank is written.
        """
        reduction = _Reduction(output, op, self.world_size)
        parts = [reduction.to_send(part) for part in input_list]
        dist.reduce_scatter(reduction.sent, parts, reduction.engine_op, group=self._group)
        return reduction.wait()

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Send `input_tensor_list[r]` to rank r of the group, for each r.

        Return `output_tensor_list`, into which the tensors of all ranks for this one are written.
        """
        all_to_all(output_tensor_list, input_tensor_list, self._group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`, which must call `recv` with the same `tag`."""
        dist.send(tensor, dst, tag=tag, group=self._group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a message with this `tag` from rank `src` (None: from any rank) into `tensor`; return
        `tensor`.
        """
        dist.recv(tensor, src, tag=tag, group=self._group)
        return tensor

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        """Write `obj` of every rank, pickled, into `object_list`, in rank order, and return the list."""
        dist.all_gather_object(object_list, obj, group=self._group)
        return object_list

    def broadcast_object_list(
        self, object_list: list[Any], src: int, device: torch.device | None = None
    ) -> list[Any]:
        """Replace the entries of `object_list` by those of rank `src`, sent as pickles; return the list.

        `device`: the device of the bytes while they are sent; None: torch's choice.
        """
        dist.broadcast_object_list(object_list, src, group=self._group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Write `obj` of every rank, pickled, into `object_gather_list` of rank `dst`; return the list."""
        dist.gather_object(obj, object_gather_list if self.rank == dst else None, dst, group=self._group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        """Send entry r of `scatter_object_input_list` of rank `src`, pickled, to rank r of the group.

        Return `scatter_object_output_list`, whose first entry is the object for this rank.
        """
        dist.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, group=self._group
        )
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait until every rank of the group has called it. `device_ids`: this rank's device, for NCCL."""
        dist.barrier(group=self._group, device_ids=device_ids)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank of the group has called it (gloo only); the error names missing ranks.

        Args:
            timeout: How long to wait; None: the timeout of the group.
            wait_all_ranks: Whether the error names all missing ranks, not only the first.
        """
        dist.monitored_barrier(group=self._group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def setup(self, main_address: str | None = None, main_port: str | None = None, **kwargs: Any) -> Self:
        """Create torch's default group if there is none. All ranks must call this.

        Args:
            main_address: Host name or address of rank zero; None: MASTER_ADDR, else 127.0.0.1.
            main_port: Port on which rank zero listens; None: MASTER_PORT.
            kwargs: For `init_group`. With `init_method` or `store`, address and port are not used.
        """
        if self.is_initialized():
            return self
        address = main_address or os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = main_port or os.environ.get("MASTER_PORT")
        if port is not None and "init_method" not in kwargs and "store" not in kwargs:
            kwargs["init_method"] = f"tcp://{address}:{port}"
        super().setup(**kwargs)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """Destroy the group that this object (or `setup`) created. All ranks of it must call this."""
        if self._group is not None:
            return super().teardown()
        if TorchCollective.manages_default_group and self.is_initialized():
            self.destroy_group(dist.group.WORLD)
            TorchCollective.manages_default_group = False
        return self

    @classmethod
    def is_available(cls) -> bool:
        """Whether torch has torch.distributed."""
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether torch's default group exists."""
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Call torch.distributed.init_process_group with `kwargs`. All ranks must call this."""
        with collectives_recorded():
            dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Call torch.distributed.new_group with `kwargs`, and return the group. All ranks of the default
        group must call this.
        """
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        """Call torch.distributed.destroy_process_group with `group`, if this rank is a member. All ranks of
        it must call this.
        """
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
