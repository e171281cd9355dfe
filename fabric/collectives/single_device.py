"""`SingleDeviceCollective`: the operations of `Collective` for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.collectives.collective import Collective
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


class SingleDeviceCollective(Collective):
    """Operations of a group of one rank: reductions and gathers return its own tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._group = object()

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def create_group(self, **kwargs: Any) -> Self:
        """Return this object, whose group of one rank needs no setup; `kwargs` are ignored."""
        self._group = self._group or self.new_group(**kwargs)
        return self

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return `tensor`. Arguments as for `Collective.broadcast`."""
        return tensor

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return `tensor`. Arguments as for `Collective.all_reduce`."""
        return tensor

    def reduce(self, tensor: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
        """Return `tensor`. Arguments as for `Collective.reduce`."""
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Copy `tensor` into `tensor_list[0]`, and return `tensor_list`."""
        tensor_list[0].copy_(tensor)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Copy `tensor` into `gather_list[0]`, and return `gather_list`. Arguments as for
        `Collective.gather`.
        """
        gather_list[0].copy_(tensor)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Copy `scatter_list[0]` into `tensor`, and return it. Arguments as for `Collective.scatter`."""
        return tensor.copy_(scatter_list[0])

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str = "sum") -> Tensor:
        """Copy `input_list[0]` into `output`, and return it. Arguments as for `Collective.reduce_scatter`."""
        return output.copy_(input_list[0])

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Copy `input_tensor_list[0]` into `output_tensor_list[0]`, and return `output_tensor_list`."""
        output_tensor_list[0].copy_(input_tensor_list[0])
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Raise: there is no other rank to send to. Arguments as for `Collective.send`.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"send(dst={dst}) in a world of one rank: there is no rank {dst}. Start more processes."
        )

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Raise: there is no other rank to receive from. Arguments as for `Collective.recv`.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"recv(src={src}) in a world of one rank: no other rank can send. Start more processes."
        )

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Return at once: there is one rank. `device_ids` is ignored."""

    @classmethod
    def is_available(cls) -> bool:
        """Always True."""
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        """Always True: a world of one needs no group."""
        return True

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Do nothing: there is no default group. `kwargs` are ignored."""

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Return an object that represents the group of one rank; `kwargs` are ignored."""
        return object()

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        """Do nothing: a `group` of one rank has no resources."""
