"""`ContextParallel`: sequences sharded over the ranks of a row, with any data parallel layout.

Gradients of the ranks of a row are scaled such that the layout's mean over all ranks is correct
(exchange.py). So parameters, optimizers and state dicts are unchanged.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.collectives.channel import Channel
from fabric.collectives.torch_collective import TorchCollective
from fabric.core._torch import BatchNorm, backward_pass
from fabric.core.compile import eager
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.parts import Part
from fabric.core.tree import flatten
from fabric.strategies.context_parallel.region import Region
from fabric.strategies.context_parallel.sequence import SequenceGroup
from fabric.strategies.input_check import InputConsistencyCheck
from fabric.strategies.rows import DataParallelMesh, check_divisible, check_number, make_data_parallel_mesh
from fabric.strategies.sharding.blocks import check_policy, choose_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module


DIMS = ("data_parallel", "context_parallel")


class ContextParallel(DataParallelMesh, Part):
    """Long sequences sharded over ranks: `DDPStrategy(context_parallel=ContextParallel(2))`.

    The ranks of a row, `size` consecutive ranks, get the same batch (from loaders that are set up). Inside of
    the sharded modules each rank computes its shard of the sequence: two pieces, one from each half.
    Attention (`F.scaled_dot_product_attention`, `nn.MultiheadAttention`) gathers the keys and values of all
    ranks. Outputs are gathered on all ranks. So the loop is unchanged, and results are those of one process.
    All ranks of a row must make each forward and backward. Seed all ranks alike.

    All other operations in these modules must treat positions independently. Positions must be those of
    `fabric.utilities.sequence_positions`, or an argument. The first forward compares shards with the full
    sequence on a few positions, and raises if they differ. A sequence of less than 2 x size positions is not
    sharded. Hooks on tensors inside get gradients of a shard, multiplied by `size`.

    Args:
        size: Number of ranks that share a sequence; None: all. With more ranks there are several rows, which
            read different data.
        blocks: The sharded modules, outermost ones: module classes, or a function (module) -> bool. None: the
            model. Inputs and outputs of each are full sequences on all ranks.
        seq_dim: Dimension of the sequence in their inputs and outputs. Arguments of the first argument's
            length in this dimension are sharded; masks (length x length) are not.
        seq_dims: Dimension of the sequence in single arguments, by name; None: not sharded.

    Raises:
        ConfigurationError: A size or dimension is too small; `size` does not divide the number of ranks (in
            `Fabric(...)`); `blocks` match nothing (at setup).
        ArgumentTypeError: An argument has the wrong type.

    Source: Llama 3, section 3.3.2, all-gather context parallelism (https://arxiv.org/abs/2407.21783)
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        blocks: type[Module] | set[type[Module]] | list[type[Module]] | Callable[..., bool] | None = None,
        seq_dim: int = 1,
        seq_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        if size is not None:
            check_number("size", size)
        check_number("seq_dim", seq_dim, least=0)
        check_policy(blocks, "blocks")
        if isinstance(blocks, set | frozenset | list | tuple) and not blocks:
            raise ConfigurationError(
                "blocks is empty, so no module would be sharded. Write blocks={TransformerBlock}."
            )
        for name, dim in dict(seq_dims or {}).items():
            if dim is not None:
                check_number(f"seq_dims[{name!r}]", dim, least=0)
        self.size, self.blocks = size, blocks
        self.group = SequenceGroup(seq_dim, dict(seq_dims or {}))
        """The ranks that share a sequence with this one."""
        self.mesh = None
        self._matched = False
        self._numbers = itertools.count()

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group belongs to its process; a spawned rank calls `join` itself.
        group = self.group
        made = partial(ContextParallel, blocks=self.blocks, seq_dim=group.seq_dim, seq_dims=group.seq_dims)
        return made, (self.size,)

    def size_of(self, world_size: int) -> int:
        """Return the number of ranks, of `world_size`, that share a sequence.

        Raises:
            ConfigurationError: The size does not divide the number of ranks.
        """
        size = self.size or world_size
        return check_divisible(
            size, world_size, f"rows of {size} that share a sequence", "ContextParallel(size) with"
        )

    def resolve(self, plan: Any) -> None:
        """Check that the ranks of `plan` can be divided into rows."""
        self.size_of(len(plan.devices) * plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Create the process groups for the ranks of `strategy`. All ranks must call this."""
        topology = strategy.topology
        size = self.size_of(topology.world_size)
        self.mesh = make_data_parallel_mesh(topology, size, DIMS)
        self.group.rank_and_size = (topology.rank % size, size)
        if size > 1:
            self.group.channel = Channel(TorchCollective(group=self.mesh.get_group(1)), strategy.transport)

    def setup(self, module: Module, wrap: Callable[[Module], Module]) -> Module:
        """Choose the parts of `module` to shard, wrap it by `wrap`, and install the sharding. All ranks must
        call this.

        The sharding is installed last, so that hooks of the layout get full inputs.

        Raises:
            ConfigurationError: As for `regions`.
            UsageError: As for `regions`.
        """
        regions = self.regions(module)
        wrapped = wrap(module)
        self.install(module, regions)
        return wrapped

    def regions(self, module: Module) -> dict[Module, str]:
        """Return the parts of `module` whose inputs are sharded, with their names for errors.

        Call it before wrapping.

        Raises:
            ConfigurationError: `blocks` matches nothing.
            UsageError: A chosen module has batch norm.
        """
        if self.group.channel is None:
            return {}
        kind = type(module).__name__
        found = {module: kind}
        if self.blocks is not None:
            chosen = choose_blocks(module, self.blocks, "blocks", self._matched, alone=False)
            inside = {part for block in chosen for part in block.modules() if part is not block}
            self._matched = self._matched or bool(chosen)
            named = [(name, part) for name, part in module.named_modules() if part in {*chosen} - inside]
            found = {part: f"{kind}.{name} ({type(part).__name__})" for name, part in named}
        for part, name in found.items():
            _check_modules(part, name)
        return found

    def install(self, module: Module, regions: dict[Module, str]) -> None:
        """Install the sharding of `regions` in `module`, the wrapped model."""
        if self.group.channel is None:
            return
        entrance = _InputCheckHook(
            InputConsistencyCheck(self.group.channel, next(self._numbers), type(module).__name__)
        )
        module.register_forward_pre_hook(entrance, with_kwargs=True)
        for part, name in regions.items():
            Region(self.group, name).install(part)

    def teardown(self) -> None:
        """Release the process groups."""
        self.group.channel = self.mesh = None
        self.group.shard_sizes.clear()


class _InputCheckHook:
    """Forward pre-hook of a model: the ranks of a row compare their inputs."""

    def __init__(self, check: InputConsistencyCheck | None) -> None:
        self._check = check

    @eager
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._check is not None and backward_pass() == -1:
            self._check.compare("forward", *flatten((args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _InputCheckHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _InputCheckHook, (None,)


def _check_modules(module: Module, name: str) -> None:
    for path, inner in module.named_modules():
        if isinstance(inner, BatchNorm) or getattr(inner, "scale_grad_by_freq", False):
            raise UsageError(
                f"{name} has batch norm or scale_grad_by_freq ({path}), which would use each rank's shard of "
                "a sequence. Leave it out, or name modules without it in ContextParallel(blocks=)."
            )
