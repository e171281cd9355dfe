"""`FullyShard`: parameters, gradients and optimizer states sharded over ranks (torch's FSDP2, `fully_shard`).

zero2, zero3, hsdp and CPU offload are settings of this layout. 0-dim parameters are not sharded. `blocks.py`
chooses the groups, `dtensors.py` converts from and to full tensors, and `materialise.py` initialises meta
tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Embedding, EmbeddingBag, ModuleDict, ModuleList, Parameter
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fabric.collectives.frames import call_of
from fabric.core._torch import BatchNorm, is_fsdp
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.precision import POLICIES
from fabric.strategies.buffers import shared_buffers
from fabric.strategies.deferred_init.materialise import Materialiser
from fabric.strategies.sharding._torch import has_hooks, reduce_in_place, unsharded_of
from fabric.strategies.sharding.blocks import check_whole, choose_blocks, innermost_first
from fabric.strategies.sharding.reductions import fill
from fabric.strategies.sharding.sharded import FSDP2Runtime
from fabric.strategies.sharding.split import SPLIT, is_dtensor
from fabric.strategies.tensor_sync import broadcast_from_zero, on_any_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    from fabric.collectives.channel import Channel
    from fabric.core.topology import Topology


@dataclass
class ShardSettings:
    """Arguments of `fully_shard`; the arguments of users are those of `FSDPStrategy`."""

    blocks: Any = None
    """Policy of the modules that form groups: see `choose_blocks`."""
    checkpointed: Any = None
    """Policy of the modules that recompute activations in backward: see `choose_blocks`; None: none."""
    reshard_after_forward: bool | int | None = None
    """Whether parameters are freed between forward and backward; None: all but the root group's."""
    mesh: Any = None
    """(replicate, shard) sizes or a DeviceMesh; None: all ranks, or with `hybrid` (nodes, ranks per node)."""
    hybrid: bool = False
    """Shard within a node, replicate across nodes."""
    whole: bool = False
    """No sharding: a replica on every rank."""
    mixed_precision: Any = None
    """torch's MixedPrecisionPolicy; None: by the precision."""
    offload: bool = False
    """Whether parameters, gradients and optimizer states stay in host memory."""
    ignored: set[Any] = field(default_factory=set)
    """Parameters that are not sharded, and whose gradients are not reduced."""
    unused: bool = False
    """Whether ranks may use different parameters."""
    init: Callable[[Module], Any] | None = None
    """Function that initialises a module's direct parameters on the meta device."""
    prefetch: bool = False
    """Whether the next group is unsharded while one computes."""


class FullyShard(FSDP2Runtime):
    """FSDP2 on all ranks or on a mesh.

    Args:
        settings: See `ShardSettings`.
    """

    traits = replace(SPLIT, needs_launch=True, data_parallel=True, places_models=True)

    def __init__(self, settings: ShardSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or ShardSettings()
        if self.settings.offload:
            unscaled = tuple([name for name, policy in POLICIES.items() if not policy.loss_scale])
            why = "torch's loss scaling does not reach gradients in host memory (cpu_offload)"
            self.traits = replace(self.traits, late_optimizers=True, precisions=unscaled, precisions_why=why)
        self._matched: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # Process groups and models belong to one process; a spawned rank calls `join` itself.
        return type(self), (self.settings,)

    def resolve(self, plan: Any) -> None:
        """Check that the mesh sizes fit the devices."""
        self.sizes(len(plan.devices), plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Create the mesh. All ranks must call this.

        Raises:
            ConfigurationError: The sizes of the mesh do not multiply to the number of ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh

        super().join(strategy)
        topology = strategy.topology
        sizes = self.sizes(topology.local_world_size, topology.num_nodes)
        self.mesh = self.settings.mesh
        if not hasattr(self.mesh, "mesh_dim_names"):
            names = ("replicate", "shard")[-len(sizes) :]
            self.mesh = init_device_mesh(topology.device.type, sizes, mesh_dim_names=names)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module, sharded group by group, with rank zero's values. All ranks must call this.

        Submodules that another model has, too, stay in that model's groups.

        Raises:
            ConfigurationError: Fewer elements than ranks, or a policy that matches nothing.
            UsageError: A meta parameter is never initialised.
        """
        size = sum([p.numel() for p in module.parameters() if not is_dtensor(p)])
        if size == 0:
            check_whole(module)
            with self.recording_replacements(module):
                self._move_and_broadcast(module, topology)
            return module
        if size < topology.world_size:
            raise ConfigurationError(
                f"{type(module).__name__} has {size} parameter elements for {topology.world_size} ranks: "
                f'some would hold nothing. Write devices={max(size, 1)}, or strategy="ddp".'
            )
        self._check_parameters(module)
        blocks = self._choose(module, "auto_wrap_policy", self.settings.blocks)
        if self.settings.checkpointed is not None:
            _recompute(self._choose(module, "activation_checkpointing_policy", self.settings.checkpointed))
        self._agree(module, blocks)
        with self.recording_replacements(module):
            self._split(module, set(blocks), topology)
        self.add_free_parameters([p for p in module.parameters() if self._stays_whole(p)])
        self._finish(module, blocks)
        return module

    def _stays_whole(self, tensor: Any) -> bool:
        """Whether each rank has the whole parameter: it has no dimension to split, such as a temperature."""
        scalar = isinstance(tensor, Parameter) and not tensor.dim()
        return scalar and not is_dtensor(tensor) and tensor not in self.settings.ignored

    def _is_reduced(self, parameter: Tensor) -> bool:
        return is_dtensor(parameter) or parameter in self.settings.ignored

    def _choose(self, module: Module, name: str, policy: Any) -> list[Module]:
        """Return the modules that a policy chooses. It must match in one of the models that are set up."""
        may_be_empty = name in self._matched or next(module.children(), None) is None
        chosen = choose_blocks(module, policy, name, may_be_empty)
        if chosen:
            self._matched.add(name)
        theirs = {part for model in self.models() for part in model.modules()}
        return [block for block in chosen if block not in theirs]

    def _check_parameters(self, module: Module) -> None:
        if isinstance(module, ModuleList | ModuleDict) and type(module).forward is ModuleList.forward:
            raise UsageError(
                f"A {type(module).__name__} has no forward, and a sharded model gathers its parameters in "
                "its forward. Set up each module in it: first = fabric.setup_module(first), then optimizer "
                "= fabric.setup_optimizers(optimizer); or write a module whose forward calls them."
            )
        for name, part in module.named_modules():
            weight = part.weight if isinstance(part, Embedding | EmbeddingBag) and part.sparse else None
            if weight is not None and weight.requires_grad and weight not in self.settings.ignored:
                raise UsageError(
                    f"{name or type(part).__name__} has sparse=True, and a sharded model cannot reduce "
                    'sparse gradients. Write sparse=False, or strategy="ddp" or "zero1".'
                )
        for name, parameter in module.named_parameters():
            if parameter in self.settings.ignored or is_dtensor(parameter):
                continue
            if self._current_parameter(parameter) is not parameter:
                raise UsageError(
                    f"{name} is a parameter of another model, too, whose setup replaced it by its shard. "
                    "Share the module that it belongs to between both models, and call that; or write "
                    'strategy="ddp".'
                )
            if not parameter.is_contiguous():
                raise UsageError(
                    f"{name} (shape {list(parameter.shape)}, stride {list(parameter.stride())}) is a view "
                    "with gaps, or transposed, and cannot be split. Write nn.Parameter(tensor.contiguous())."
                )
            if has_hooks(parameter):
                raise UsageError(
                    f"{name} has a hook on its gradient, which setup would lose, since it replaces the "
                    "parameter by its shard. Register hooks after fabric.setup, on model.named_parameters()."
                )

    def _agree(self, module: Module, blocks: list[Module]) -> None:
        """Raise on all ranks if policies chose different groups on them."""
        if self.channel is not None:
            inside = {part: name for name, part in module.named_modules()}
            names = ", ".join([inside[block] for block in blocks])
            self.channel.check_call(
                call_of("setup", f"{type(module).__name__} in {len(blocks)} groups: {names}")
            )

    def sizes(self, local_world_size: int, num_nodes: int) -> tuple[int, ...]:
        """Return the (replicate, shard) sizes of the mesh, or (shard,).

        Raises:
            ConfigurationError: They do not multiply to the number of ranks.
        """
        wanted, world = self.settings.mesh, local_world_size * num_nodes
        if wanted is not None:
            sizes = tuple(getattr(wanted, "shape", wanted))
        elif self.settings.whole:
            sizes = (world, 1)
        else:
            sizes = (num_nodes, local_world_size) if self.settings.hybrid and num_nodes > 1 else (world,)
        if len(sizes) > 2 or torch.Size(sizes).numel() != world:
            raise ConfigurationError(
                f"device_mesh={sizes} has {torch.Size(sizes).numel()} ranks in {len(sizes)} dimensions, but "
                f"there are {world} ranks. Write (replicate, shard) sizes that multiply to {world}, such as "
                f"device_mesh=({num_nodes}, {local_world_size})."
            )
        return sizes

    def _split(self, module: Module, blocks: set[Module], topology: Topology) -> None:
        """Initialise and shard one group after the other, inner ones first: one is unsharded at a time."""
        maker = Materialiser(module, topology.device, self.settings.init)
        for part in innermost_first(module):
            if part in blocks or part is module:
                self._split_block(part, maker, topology)

    def _split_block(self, block: Module, maker: Materialiser, topology: Topology) -> None:
        from torch.distributed.fsdp import fully_shard

        maker.fill(block, replay=topology.rank == 0)
        on_host = self._move_and_broadcast(block, topology)
        maker.release(block)
        settings = self.settings
        ignored = {*settings.ignored, *filter(self._is_no_part, block.parameters())}
        _check_dtypes(block, ignored)
        try:
            fully_shard(
                block,
                mesh=self.mesh,
                reshard_after_forward=settings.reshard_after_forward,
                mp_policy=self.precision_policy(block),
                offload_policy=_offload_policy(settings.offload, topology.device),
                ignored_params=ignored or None,
            )
        except RuntimeError as error:
            _explain(error, block)
            raise
        # An optimizer that was created before setup has references to them until all blocks are sharded.
        for parameter, values in on_host:
            parameter.data = values

    def _is_no_part(self, parameter: Tensor) -> bool:
        """Whether a parameter is split already, or stays whole."""
        return is_dtensor(parameter) or self._stays_whole(parameter)

    def _move_and_broadcast(self, block: Module, topology: Topology) -> list[tuple[Tensor, Tensor]]:
        """Move the block's full tensors to the device, and broadcast rank zero's values. All ranks must call
        this.

        Returns (parameter, its data before it was moved) of parameters that will be replaced by shards.
        """
        held: dict[int, Tensor] = {}
        moved: list[tuple[Tensor, Tensor]] = []
        for part in _own_modules(block):
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is None or is_dtensor(tensor):
                    continue
                ignored = tensor in self.settings.ignored or self._stays_whole(tensor)
                if tensor.device != topology.device:
                    if isinstance(tensor, Parameter) and not ignored:
                        moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(topology.device)
                if not ignored:
                    held[id(tensor)] = tensor
        shared = [buffer for buffer in shared_buffers(block).values() if id(buffer) in held]
        broadcast_from_zero([*[t for t in held.values() if isinstance(t, Parameter)], *shared])
        return moved

    def precision_policy(self, block: Module | None = None) -> Any:
        """Return torch's MixedPrecisionPolicy for a group: that of the settings, or of the precision."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given, policy = self.settings.mixed_precision, self.policy
        if given is not None or policy is None or not policy.autocast:
            return given or MixedPrecisionPolicy()
        # All-gather in half precision, reduce in single; autocast around the forward casts the rest, as on
        # one rank. Batch norm does not support half parameters with single inputs: its group is not cast.
        normed = block is not None and any([isinstance(part, BatchNorm) for part in _own_modules(block)])
        half = None if normed else policy.compute
        return MixedPrecisionPolicy(half, policy.reduce, cast_forward_inputs=False)

    def _finish(self, module: Any, blocks: list[Module]) -> None:
        if self.settings.prefetch:
            for block, following in itertools.pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        self.install_call_guard(module)
        if self.settings.unused and self.channel is not None:
            reduce_in_place(module, partial(_reduce_used, channel=self.channel))


def _reduce_used(reduce: Callable[[], None], group: Any, number: int, channel: Channel) -> None:
    """Reduce a group's gradients, with zeros for ranks that have none. All ranks must call this.

    torch's `set_reduce_scatter_unused_params` also writes zeros for parameters that no rank used. Weight
    decay and momentum would then change them.
    """
    wholes = [
        whole
        for part in group.fsdp_params
        if (whole := unsharded_of(part)) is not None and whole.requires_grad
    ]
    used = on_any_rank([whole.grad is not None for whole in wholes], channel)
    fill([whole for whole, any_has in zip(wholes, used, strict=True) if any_has and whole.grad is None])
    reduce()


def _own_modules(block: Module) -> Iterator[Module]:
    """Yield the block and its submodules, except those that are sharded already."""
    yield block
    for child in block.children():
        if not is_fsdp(child):
            yield from _own_modules(child)


def _check_dtypes(block: Module, ignored: set[Any]) -> None:
    """Raise ConfigurationError if a group has trainable parameters of several dtypes.

    torch would raise in the first forward, and name no parameter.
    """
    names: dict[torch.dtype, str] = {}
    for name, p in block.named_parameters():
        if p.requires_grad and p not in ignored:
            names.setdefault(p.dtype, name)
    if len(names) > 1:
        found = " and ".join(
            [f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in names.items()]
        )
        raise ConfigurationError(
            f"{type(block).__name__} has trainable parameters of {found}, and a block of a sharded model has "
            "those of one dtype. Convert the model before fabric.setup, or name the classes of the layers "
            'with another dtype in FSDPStrategy(auto_wrap_policy={...}), or write Fabric(strategy="ddp").'
        )


def _explain(error: RuntimeError, block: Module) -> None:
    """Raise ConfigurationError if `fully_shard` failed because this torch cannot shard integers."""
    integers = [
        name for name, p in block.named_parameters() if not p.is_floating_point() and not p.is_complex()
    ]
    if integers and "floating point" in str(error):
        raise ConfigurationError(
            f"{type(block).__name__} has parameters of integers ({', '.join(integers)}), which torch "
            f"{torch.__version__} cannot shard. Use torch 2.13 or newer, or make them buffers: "
            "module.register_buffer(name, tensor)."
        ) from error


def _offload_policy(offload: bool, device: torch.device) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()


def _recompute(modules: list[Module]) -> None:
    for module in modules:
        module.forward = partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward whose activations are recomputed in each backward."""
    # No early stop: RReLU writes into a tensor after saving it, and must run to its end.
    with set_checkpoint_early_stop(False):
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
