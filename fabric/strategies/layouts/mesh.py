"""`Mesh`: models that the user's function splits over a 2-D mesh: tensor parallel, sequence parallel, FSDP2.

The mesh has the dimensions "data_parallel" and "tensor_parallel". Ranks of one tensor parallel group see the
same data. What the function leaves whole over data parallel ranks is sharded over them, so that gradients
agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module, Parameter

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.traits import Traits
from fabric.strategies.layouts.hooked import broadcast_from_zero
from fabric.strategies.layouts.materialise import Materialiser
from fabric.strategies.layouts.rows import across_rows, row_of
from fabric.strategies.layouts.sharded import Sharded
from fabric.strategies.layouts.split import is_split

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.core.policy import DtypePolicy
    from fabric.core.topology import Topology

DIMS = ("data_parallel", "tensor_parallel")


class Mesh(Sharded):
    """A model that a function has split.

    Args:
        parallelize: Called as parallelize(model, device_mesh); changes the model in place and returns it.
        data_parallel_size: Ranks that see different data; "auto": the rest, or the number of nodes.
        tensor_parallel_size: Ranks that share one replica; "auto": the rest, or the devices of a node.
    """

    traits = Traits(
        needs_launch=True,
        data_parallel=True,
        precisions=("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed"),
        precisions_why="torch's loss scaling does not take parameters that are split beside whole ones",
        start_methods=("popen", "spawn", "fork", "forkserver"),
    )

    def __init__(
        self,
        parallelize: Callable[[Any, DeviceMesh], Any],
        data_parallel_size: Any,
        tensor_parallel_size: Any,
    ) -> None:
        super().__init__()
        self.parallelize = parallelize
        self.asked = (data_parallel_size, tensor_parallel_size)

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups and models belong to their process; a spawned rank joins anew.
        return type(self), (self.parallelize, *self.asked)

    @property
    def data_rank(self) -> tuple[int, int] | None:
        """This rank's part of the data, of how many: the place along "data_parallel"."""
        return row_of(self.mesh)

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that see different data."""
        return across_rows(self.mesh)

    def sizes(self, local_world_size: int, num_nodes: int) -> tuple[int, int]:
        """(data parallel, tensor parallel) sizes.

        Raises:
            ConfigurationError: They do not multiply to the number of ranks.
        """
        world = local_world_size * num_nodes
        data, tensor = self.asked
        for name, size in zip(("data_parallel_size", "tensor_parallel_size"), self.asked, strict=True):
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigurationError(f'{name}={size!r} must be "auto" or a whole number, 1 or more.')
        if data == "auto" and tensor == "auto":
            data, tensor = num_nodes, local_world_size
        elif data == "auto":
            data = world // tensor
        elif tensor == "auto":
            tensor = world // data
        if data * tensor != world:
            raise ConfigurationError(
                f"data_parallel_size={self.asked[0]!r} x tensor_parallel_size={self.asked[1]!r} does not "
                f"make {world} ranks ({num_nodes} nodes of {local_world_size}). Write sizes that multiply to "
                f"{world}, such as data_parallel_size={num_nodes}, tensor_parallel_size={local_world_size}."
            )
        return data, tensor

    def join(self, topology: Topology, policy: DtypePolicy) -> None:
        """Make the mesh. All ranks must call this."""
        from torch.distributed.device_mesh import init_device_mesh

        super().join(topology, policy)
        sizes = self.sizes(topology.local_world_size, topology.num_nodes)
        self.mesh = init_device_mesh(topology.device.type, sizes, mesh_dim_names=DIMS)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module itself, split by the user's function; rank zero's values count. All ranks.

        Raises:
            ArgumentTypeError: The function did not return the model.
            UsageError: A parameter on the meta device that nothing initialises.
        """
        maker = Materialiser(module, topology.device, self.deferred)
        if maker.resets:  # a module's own function wants it whole
            _each(module, maker.reset)
            maker.fill(module, replay=True)
        whole = [t for t in (*module.parameters(), *module.buffers()) if not (t.is_meta or is_split(t))]
        broadcast_from_zero(whole)
        with self.following(module):
            # As a context: parameters without memory are replaced when the function has placed them.
            places = [(m, n, p) for m in module.modules() for n, p in _tensors(m) if p.is_meta]
            returned = self.parallelize(module, self.mesh)  # type: ignore[arg-type]
            if returned is not module:
                raise ArgumentTypeError(
                    f"parallelize_fn must change the {type(module).__name__} that it is given in place and "
                    "return it, but returned "
                    f"{'another module' if isinstance(returned, Module) else repr(returned)}."
                )
            self._share_gradients(module)
            self._give_values(places, maker, topology)
        self._note(module)
        split: Module = module
        return split

    def _share_gradients(self, module: Module) -> None:
        """Shard what is left over data parallel ranks, so that their gradients are averaged."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh: Any = self.mesh
        parts = any([isinstance(part, FSDPModule) for part in module.modules()])
        if (mesh.size(0) > 1 or parts) and not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh[DIMS[0]])

    def _give_values(
        self, places: list[tuple[Module, str, Any]], maker: Materialiser, topology: Topology
    ) -> None:
        from torch.distributed.tensor import DTensor

        made: dict[int, Any] = {}
        for owner, name, source in places:
            slots = owner._parameters if name in owner._parameters else owner._buffers
            target = slots[name]
            if id(source) not in made:
                full = maker.value(source, replay=topology.rank == 0)
                broadcast_from_zero([full])
                made[id(source)] = full
                if isinstance(target, DTensor):
                    from fabric.strategies.layouts.dtensors import own_part

                    made[id(source)] = own_part(full, target, name)
                if isinstance(target, Parameter):
                    made[id(source)] = Parameter(made[id(source)], target.requires_grad)
            slots[name] = made[id(source)]

    def _note(self, module: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(module, FSDPModule):
            self.open_gate(module)


def _tensors(module: Module) -> list[tuple[str, Any]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _each(module: Module, call: Callable[[Module], None]) -> None:
    """Call on every module once, inner ones first."""
    seen: set[Module] = set()

    def visit(part: Module) -> None:
        if part not in seen:
            seen.add(part)
            for child in part.children():
                visit(child)
            call(part)

    visit(module)
