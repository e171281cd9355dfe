"""`Mesh`: models that a user's function parallelises on a 2-D mesh: tensor parallel, sequence parallel,
FSDP2.

The mesh has the dimensions "data_parallel" and "tensor_parallel". Ranks of one tensor parallel group read the
same data. Parameters that the function does not shard over data parallel ranks are sharded over them
afterwards, so that their gradients are averaged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from fabric.core._torch import is_fsdp, memory_of
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.tree import flatten
from fabric.strategies._torch import has_forward_hooks
from fabric.strategies.buffers import shared_buffers
from fabric.strategies.deferred_init.materialise import Materialiser, meta_slots
from fabric.strategies.rows import DataParallelMesh
from fabric.strategies.sharding.sharded import FSDP2Runtime
from fabric.strategies.sharding.split import SPLIT, is_dtensor
from fabric.strategies.tensor_sync import broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.core.topology import Topology

MetaSlots = list[tuple[Module, dict[str, Any], str, Any]]
"""(module, its dictionary, name in it, meta tensor before the user's function)."""

DIMS = ("data_parallel", "tensor_parallel")


class Mesh(DataParallelMesh, FSDP2Runtime):
    """A model that a user's function parallelises.

    Args:
        parallelize: Called as parallelize(model, device_mesh); changes the model in place and returns it.
        data_parallel_size: Number of ranks that read different data; "auto": the number of ranks divided by
            the other size, or the number of nodes.
        tensor_parallel_size: Number of ranks that share one replica; "auto": as above, or the devices of a
            node.
    """

    traits = replace(
        SPLIT,
        needs_launch=True,
        data_parallel=True,
        precisions=("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed"),
        precisions_why="torch's loss scaling does not take parameters that are split beside whole ones",
    )

    def __init__(
        self,
        parallelize: Callable[[Any, DeviceMesh], Any],
        data_parallel_size: Any,
        tensor_parallel_size: Any,
    ) -> None:
        super().__init__()
        self.parallelize = parallelize
        self.arguments = (data_parallel_size, tensor_parallel_size)

    def __reduce__(self) -> tuple[Any, ...]:
        # Process groups and models belong to one process; a spawned rank calls `join` itself.
        return type(self), (self.parallelize, *self.arguments)

    def sizes(self, local_world_size: int, num_nodes: int) -> tuple[int, int]:
        """Return the (data parallel, tensor parallel) sizes.

        Raises:
            ConfigurationError: They do not multiply to the number of ranks.
        """
        world = local_world_size * num_nodes
        data, tensor = self.arguments
        for name, size in zip(("data_parallel_size", "tensor_parallel_size"), self.arguments, strict=True):
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
                f"data_parallel_size={self.arguments[0]!r} x tensor_parallel_size={self.arguments[1]!r} does "
                f"not make {world} ranks ({num_nodes} nodes of {local_world_size}). Write sizes that "
                f"multiply to {world}, such as data_parallel_size={num_nodes}, "
                f"tensor_parallel_size={local_world_size}."
            )
        return data, tensor

    def resolve(self, plan: Any) -> None:
        """Check that the mesh sizes fit the devices."""
        self.sizes(len(plan.devices), plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Create the mesh. All ranks must call this."""
        from torch.distributed.device_mesh import init_device_mesh

        super().join(strategy)
        topology = strategy.topology
        sizes = self.sizes(topology.local_world_size, topology.num_nodes)
        self.mesh = init_device_mesh(topology.device.type, sizes, mesh_dim_names=DIMS)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module, parallelised by the user's function, with rank zero's values. All ranks must
        call this.

        Raises:
            ArgumentTypeError: The function did not return the model.
            UsageError: A meta parameter is never initialised, or tied parameters are not tied any more.
        """
        whole = [*module.parameters(), *shared_buffers(module).values()]
        broadcast_from_zero([t for t in whole if not (t.is_meta or is_dtensor(t))])
        tied = _tied(module)
        with self.recording_replacements(module):
            Materialiser(module, topology.device)
            # Meta parameters are replaced by initialised ones after the function.
            slots_of_metas = [(part, *place) for part in module.modules() for place in meta_slots(part)]
            with Splitting(slots_of_metas):
                returned = self.parallelize(module, self.mesh)  # type: ignore[arg-type]
            if returned is not module:
                raise ArgumentTypeError(
                    f"parallelize_fn must change its argument, a {type(module).__name__}, in place and "
                    "return it, but returned "
                    f"{'another module' if isinstance(returned, Module) else repr(returned)}."
                )
            _check_tied(module, tied)
            self._shard_data_parallel(module)
            self._materialise(slots_of_metas, topology)
            if is_fsdp(module):  # before it is registered as a model whose gradients are all reduced
                self.add_free_parameters(_scalars(module))
        self._install_checks(module)
        split: Module = module
        return split

    def _shard_data_parallel(self, module: Module) -> None:
        """Shard the remaining parameters over data parallel ranks, so that their gradients are averaged."""
        from torch.distributed.fsdp import fully_shard

        mesh: Any = self.mesh
        if not is_fsdp(module) and (mesh.size(0) > 1 or any([is_fsdp(part) for part in module.modules()])):
            fully_shard(module, mesh=mesh[DIMS[0]], ignored_params={*_scalars(module)} or None)

    def _materialise(self, slots_of_metas: MetaSlots, topology: Topology) -> None:
        from torch.distributed.tensor import DTensor

        made: dict[int, Any] = {}
        sources: dict[int, int] = {}
        filled = dict.fromkeys([slots[name] for _, slots, name, _ in slots_of_metas])
        broadcast_from_zero([t for t in filled if not (t.is_meta or is_dtensor(t))])
        for owner, slots, name, source in slots_of_metas:
            target = slots[name]
            if not target.is_meta:  # the user's function did it, by to_empty()
                continue
            if sources.setdefault(id(target), id(source)) != id(source) or _differs(target, source):
                raise _lost_change_error(
                    f"puts another tensor in the place of {name} of {type(owner).__name__}"
                )
            if id(source) not in made:
                full = source.recorder.make(source, replay=topology.rank == 0).to(target.dtype)
                broadcast_from_zero([full])
                made[id(source)] = full
                if isinstance(target, DTensor):
                    from fabric.strategies.sharding.dtensors import local_shard

                    made[id(source)] = local_shard(full, target, name)
                if isinstance(target, Parameter):
                    made[id(source)] = Parameter(made[id(source)], target.requires_grad)
            slots[name] = made[id(source)]

    def _install_checks(self, module: Any) -> None:
        if is_fsdp(module):
            self.install_call_guard(module, in_lockstep=self.mesh is not None and self.mesh.size(1) > 1)
            return
        hooked = [m for m in module.modules() if has_forward_hooks(m) or _has_dtensors(m)]
        self.checks(module, in_lockstep=True).watch(list(dict.fromkeys([module, *hooked])))


class Splitting(TorchFunctionMode):
    """Mode in which the user's function shards meta parameters, and may not change their values.

    They are initialised later by the recorded operations on the full parameters; changes of meta tensors are
    not recorded.

    Args:
        slots_of_metas: Where the parameters are; for the function they are replaced by plain meta tensors.
    """

    def __init__(self, slots_of_metas: MetaSlots) -> None:
        super().__init__()
        self._slots = slots_of_metas
        shown: dict[int, Any] = {}
        for _, slots, name, source in slots_of_metas:
            if id(source) not in shown:
                plain, named = source.unrecorded(), isinstance(source, Parameter)
                shown[id(source)] = Parameter(plain, source.requires_grad) if named else plain
            slots[name] = shown[id(source)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; raise if it changes one of these parameters."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        target = _target_of(name, args, kwargs)
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            one, other = args
            # Allowed: tensors with values, and `model.to(dtype)`, which is repeated.
            lost = other.is_meta and other.dtype == one.dtype and memory_of(other) != memory_of(one)
            target, name = one if lost else None, ".data = other"
        for tensor in flatten(target)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and self._has(tensor):
                raise _lost_change_error(f"changes by {name} a tensor of shape {list(tensor.shape)}")
        return func(*args, **kwargs)

    def _has(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these parameters, a view of one, or a shard."""
        held = {memory_of(slots[name]) for _, slots, name, _ in self._slots}
        return is_dtensor(tensor) or memory_of(tensor) in held


def _scalars(module: Module) -> list[Any]:
    """Return the 0-dim parameters, which each rank has whole, in an order that is equal on all ranks."""
    return [p for p in module.parameters() if not p.dim() and not is_dtensor(p)]


def _tied(module: Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check_tied(module: Module, tied: list[list[str]]) -> None:
    """Raise if tied parameters are not tied any more: `parallelize_module` creates one for each name."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({held[name] for name in names if name in held}) > 1:
            raise UsageError(
                f"parallelize_fn made several parameters of {' and '.join(names)} of "
                f"{type(module).__name__}, which were one: they would be trained separately. Tie them again "
                f"after parallelize_module, and before fully_shard: model.{names[-1]} = model.{names[0]} "
                "(models of transformers: model.tie_weights())."
            )


def _differs(target: Any, source: Any) -> bool:
    """Whether a tensor that is no DTensor was computed from `source`, by other means than
    `model.to(dtype)`.
    """
    return not is_dtensor(target) and target.dtype == source.dtype and memory_of(target) != memory_of(source)


def _lost_change_error(what: str) -> UsageError:
    return UsageError(
        f"parallelize_fn {what}, which has no values yet: the change would be lost. Do it before "
        "fabric.setup, on the model from init_module(empty_init=True); or call to_empty(device=...) on the "
        "model first, and then initialise all of it."
    )


def _has_dtensors(module: Module) -> bool:
    return any([is_dtensor(parameter) for parameter in module.parameters(recurse=False)])


def _target_of(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the tensor or list of tensors that the function of this name writes into, or None."""
    inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    assigning = name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in dir(int))
    if inplace or assigning:
        return args[0] if args else kwargs.get("tensor")
    return kwargs.get("out")
