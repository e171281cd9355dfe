"""`Mesh`: models that the user's function splits over a 2-D mesh: tensor parallel, sequence parallel, FSDP2.

The mesh has the dimensions "data_parallel" and "tensor_parallel". Ranks of one tensor parallel group see the
same data. What the function leaves whole over data parallel ranks is sharded over them, so that gradients
agree.
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
from fabric.strategies.deferred_init.materialise import Materialiser, own_meta
from fabric.strategies.rows import DataParallelMesh
from fabric.strategies.sharding.sharded import FSDP2Runtime
from fabric.strategies.sharding.split import SPLIT, is_dtensor
from fabric.strategies.tensor_sync import broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.core.topology import Topology

Places = list[tuple[Module, dict[str, Any], str, Any]]
"""(module, its table, name in it, tensor without memory that was there at first)."""

DIMS = ("data_parallel", "tensor_parallel")


class Mesh(DataParallelMesh, FSDP2Runtime):
    """A model that a function has split.

    Args:
        parallelize: Called as parallelize(model, device_mesh); changes the model in place and returns it.
        data_parallel_size: Ranks that see different data; "auto": the rest, or the number of nodes.
        tensor_parallel_size: Ranks that share one replica; "auto": the rest, or the devices of a node.
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
        self.asked = (data_parallel_size, tensor_parallel_size)

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups and models belong to their process; a spawned rank joins anew.
        return type(self), (self.parallelize, *self.asked)

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

    def resolve(self, plan: Any) -> None:
        """Check that the mesh sizes fit the devices."""
        self.sizes(len(plan.devices), plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Make the mesh. All ranks must call this."""
        from torch.distributed.device_mesh import init_device_mesh

        super().join(strategy)
        topology = strategy.topology
        sizes = self.sizes(topology.local_world_size, topology.num_nodes)
        self.mesh = init_device_mesh(topology.device.type, sizes, mesh_dim_names=DIMS)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module itself, split by the user's function; rank zero's values count. All ranks.

        Raises:
            ArgumentTypeError: The function did not return the model.
            UsageError: A parameter on the meta device that nothing initialises; tied ones that came apart.
        """
        whole = [*module.parameters(), *shared_buffers(module).values()]
        broadcast_from_zero([t for t in whole if not (t.is_meta or is_dtensor(t))])
        tied = _tied(module)
        with self.recording_replacements(module):
            Materialiser(module, topology.device)
            # As a context: parameters without memory are replaced when the function has placed them.
            places = [(part, *place) for part in module.modules() for place in own_meta(part)]
            with Splitting(places):
                returned = self.parallelize(module, self.mesh)  # type: ignore[arg-type]
            if returned is not module:
                raise ArgumentTypeError(
                    f"parallelize_fn must change the {type(module).__name__} that it is given in place and "
                    "return it, but returned "
                    f"{'another module' if isinstance(returned, Module) else repr(returned)}."
                )
            _check_tied(module, tied)
            self._share_gradients(module)
            self._give_values(places, topology)
        self._note(module)
        split: Module = module
        return split

    def _share_gradients(self, module: Module) -> None:
        """Shard what is left over data parallel ranks, so that their gradients are averaged."""
        from torch.distributed.fsdp import fully_shard

        mesh: Any = self.mesh
        if not is_fsdp(module) and (mesh.size(0) > 1 or any([is_fsdp(part) for part in module.modules()])):
            fully_shard(module, mesh=mesh[DIMS[0]])

    def _give_values(self, places: Places, topology: Topology) -> None:
        from torch.distributed.tensor import DTensor

        made: dict[int, Any] = {}
        sources: dict[int, int] = {}
        filled = dict.fromkeys([slots[name] for _, slots, name, _ in places])
        broadcast_from_zero([t for t in filled if not (t.is_meta or is_dtensor(t))])
        for owner, slots, name, source in places:
            target = slots[name]
            if not target.is_meta:  # the user's function did it, by to_empty()
                continue
            if sources.setdefault(id(target), id(source)) != id(source) or _differs(target, source):
                raise _lost(f"puts another tensor in the place of {name} of {type(owner).__name__}")
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

    def _note(self, module: Any) -> None:
        if is_fsdp(module):
            self.install_call_guard(module, in_lockstep=self.mesh is not None and self.mesh.size(1) > 1)
            return
        hooked = [m for m in module.modules() if has_forward_hooks(m) or _holds_parts(m)]
        self.checks(module, in_lockstep=True).watch(list(dict.fromkeys([module, *hooked])))


class Splitting(TorchFunctionMode):
    """A context in which the user's function splits parameters without memory, and may not change them.

    They get the values that were recorded of them as wholes; what is done to a meta tensor leaves no trace.

    Args:
        places: Where they are; the function finds plain tensors, which torch splits, in their places.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places
        shown: dict[int, Any] = {}
        for _, slots, name, source in places:
            if id(source) not in shown:
                plain, named = source.plain(), isinstance(source, Parameter)
                shown[id(source)] = Parameter(plain, source.requires_grad) if named else plain
            slots[name] = shown[id(source)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function, unless it changes one of them."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        target = _target_of(name, args, kwargs)
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            one, other = args
            # What has values keeps them, and `model.to(dtype)` is repeated.
            lost = other.is_meta and other.dtype == one.dtype and memory_of(other) != memory_of(one)
            target, name = one if lost else None, ".data = other"
        for tensor in flatten(target)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and self._has(tensor):
                raise _lost(f"changes by {name} a tensor of shape {list(tensor.shape)}")
        return func(*args, **kwargs)

    def _has(self, tensor: Tensor) -> bool:
        """Whether it is one of them, a view of one, or a part."""
        held = {memory_of(slots[name]) for _, slots, name, _ in self._places}
        return is_dtensor(tensor) or memory_of(tensor) in held


def _tied(module: Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check_tied(module: Module, tied: list[list[str]]) -> None:
    """torch's `parallelize_module` makes a new parameter for each name."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({held[name] for name in names if name in held}) > 1:
            raise UsageError(
                f"parallelize_fn made several parameters of {' and '.join(names)} of "
                f"{type(module).__name__}, which were one: they would be trained apart. Tie them again after "
                f"parallelize_module, and before fully_shard: model.{names[-1]} = model.{names[0]} (models "
                "of transformers: model.tie_weights())."
            )


def _differs(target: Any, source: Any) -> bool:
    """Whether a tensor that is not split was computed from `source`; `model.to(dtype)` is repeated."""
    return not is_dtensor(target) and target.dtype == source.dtype and memory_of(target) != memory_of(source)


def _lost(what: str) -> UsageError:
    return UsageError(
        f"parallelize_fn {what}, which has no values yet: the change would be lost. Do it before "
        "fabric.setup, on the model that init_module(empty_init=True) has made; or call to_empty(device=...) "
        "on the model first, and then initialise all of it."
    )


def _holds_parts(module: Module) -> bool:
    return any([is_dtensor(parameter) for parameter in module.parameters(recurse=False)])


def _target_of(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the tensor or list of tensors that the function of this name writes into; None if none."""
    inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    assigning = name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in dir(int))
    if inplace or assigning:
        return args[0] if args else kwargs.get("tensor")
    return kwargs.get("out")
