"""Ranks in rows of one size: ranks of a row work on the same data, and rows see different data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.core.topology import Topology


class DataParallelMesh:
    """Base of objects that have a mesh with rows along its first dimension."""

    mesh: DeviceMesh | None

    @property
    def data_rank(self) -> tuple[int, int] | None:
        """(this rank's row, of how many): which part of the data it sees; None before there is a mesh."""
        return None if self.mesh is None else (self.mesh.get_local_rank(0), self.mesh.size(0))

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that see different data."""
        return None if self.mesh is None else self.mesh.get_group(0)


def check_number(name: str, value: Any, least: int = 1) -> None:
    """Raise unless the argument is a whole number.

    Raises:
        ArgumentTypeError: It is none.
        ConfigurationError: It is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ConfigurationError(f"{name}={value!r} must be {least} or more.")


def check_rows(size: int, world_size: int, rows: str, instead: str) -> int:
    """The size of a row.

    Args:
        size: As it was asked for.
        world_size: How many ranks there are.
        rows: What rows of this size are, in words.
        instead: How to write another size.

    Raises:
        ConfigurationError: The ranks cannot be divided into such rows.
    """
    if world_size % size:
        raise ConfigurationError(
            f"{world_size} ranks cannot be divided into {rows}. Write devices= a multiple of {size}, or "
            f"{instead} a number that divides {world_size}."
        )
    return size


def make_rows(topology: Topology, size: int, names: tuple[str, str]) -> DeviceMesh:
    """The mesh of rows x ranks of a row. All ranks must call this."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(topology.device.type, (topology.world_size // size, size), mesh_dim_names=names)
