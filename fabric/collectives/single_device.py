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
        """Return this object, whose group of one rank needs no setup."""
        self._group = self._group or self.new_group(**kwargs)
        return self

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The tensor itself."""
        return tensor

    def reduce(self, tensor: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """A copy of the tensor in `tensor_list[0]`."""
        tensor_list[0].copy_(tensor)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """A copy of the tensor in `gather_list[0]`."""
        gather_list[0].copy_(tensor)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """A copy of `scatter_list[0]`."""
        return tensor.copy_(scatter_list[0])

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str = "sum") -> Tensor:
        """A copy of `input_list[0]`."""
        return output.copy_(input_list[0])

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """A copy of `input_tensor_list[0]`."""
        output_tensor_list[0].copy_(input_tensor_list[0])
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Raise: there is no other rank to send to.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"send(dst={dst}) in a world of one rank: there is no rank {dst}. Start more processes."
        )

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Raise: there is no other rank to receive from.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"recv(src={src}) in a world of one rank: no other rank can send. Start more processes."
        )

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Return at once: there is one rank."""

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
        """Do nothing: there is no default group."""

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Return an object that represents the group of one rank."""
        return object()

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        """Do nothing: there is no group."""
