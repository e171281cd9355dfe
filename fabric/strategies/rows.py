"""Meshes of rows of ranks: the ranks of a row share their data, and rows are data parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.core.topology import Topology


class DataParallelMesh:
    """Base class of objects with a mesh whose first dimension is data parallel."""

    mesh: DeviceMesh | None

    @property
    def data_rank(self) -> tuple[int, int] | None:
        """(index of this rank's row, number of rows): its shard of the data; None before `join`."""
        return None if self.mesh is None else (self.mesh.get_local_rank(0), self.mesh.size(0))

    @property
    def data_group(self) -> ProcessGroup | None:
        """The process group of ranks that read different data."""
        return None if self.mesh is None else self.mesh.get_group(0)


def check_number(name: str, value: Any, least: int = 1) -> None:
    """Raise unless the argument `name` is a whole number of at least `least`.

    Raises:
        ArgumentTypeError: It is no whole number.
        ConfigurationError: It is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ConfigurationError(f"{name}={value!r} must be {least} or more.")


def check_divisible(size: int, world_size: int, rows: str, instead: str) -> int:
    """Return `size`, if it divides the number of ranks.

    Args:
        size: Number of ranks per row.
        world_size: Number of ranks.
        rows: Name of such rows, for the error.
        instead: The argument that sets the size, for the error.

    Raises:
        ConfigurationError: `size` does not divide `world_size`.
    """
    if world_size % size:
        raise ConfigurationError(
            f"{world_size} ranks cannot be divided into {rows}. Write devices= a multiple of {size}, or "
            f"{instead} a number that divides {world_size}."
        )
    return size


def make_data_parallel_mesh(topology: Topology, size: int, names: tuple[str, str]) -> DeviceMesh:
    """Return the mesh of shape (rows, ranks per row). All ranks must call this."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(topology.device.type, (topology.world_size // size, size), mesh_dim_names=names)
