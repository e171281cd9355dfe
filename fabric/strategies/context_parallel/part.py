"""`ContextParallel`: ranks that share one sequence, each with its part of it. Goes with any data parallel
layout.

Gradients of a row's ranks are kept so that the mean over all ranks, which those layouts take, is right
(exchange.py), so nothing in them changes: parameters, optimizers and state dicts are as without this.
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
from fabric.strategies.context_parallel.region import Region, Row
from fabric.strategies.context_parallel.sequence import part_sizes
from fabric.strategies.input_check import InputConsistencyCheck
from fabric.strategies.rows import DataParallelMesh, check_divisible, check_number, make_data_parallel_mesh
from fabric.strategies.sharding.blocks import check_policy, choose_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module


DIMS = ("data_parallel", "context_parallel")


class ContextParallel(DataParallelMesh, Part):
    """Long sequences divided over ranks: `DDPStrategy(context_parallel=ContextParallel(2))`.

    Ranks in rows of `size` get the same batch (loaders that are set up see to it). Inside of the modules that
    are divided each works on its part of the sequence, two pieces from either end; attention
    (`F.scaled_dot_product_attention`, `nn.MultiheadAttention`) collects the keys and values of all. Outputs
    come back whole, on all ranks, which go on alike: the loop is unchanged, and the numbers are those of one
    process. All ranks of a row must make each forward and backward. Seed all ranks alike.

    Everything else in these modules must work on each position by itself; positions come from
    `fabric.utilities.sequence_positions`, or as arguments. The first forward compares parts with the whole on
    a few positions, and raises if they differ. A sequence of less than 2 x size positions is computed whole.
    Hooks on tensors inside see gradients of a part, times `size`.

    Args:
        size: Ranks that share a sequence; None: all. Further ranks make further rows, with other data.
        blocks: Which modules are divided, outermost ones: module classes, or a function (module) -> bool.
            None: the model, from its inputs to its outputs. Inputs and outputs of each are whole on all
            ranks.
        seq_dim: The dimension of the sequence in their inputs and outputs. Arguments are divided that have
            the length of the first one there; masks (length x length) stay whole.
        seq_dims: The dimension in single arguments, by name; None: whole on all ranks.

    Raises:
        ConfigurationError: A size or dimension below what there is; ranks that cannot be divided into rows
            (when `Fabric` is made); `blocks` that match nothing (at setup).
        ArgumentTypeError: An argument of the wrong kind.

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
                "blocks is empty, so nothing would be divided. Write {TransformerBlock}."
            )
        for name, dim in dict(seq_dims or {}).items():
            if dim is not None:
                check_number(f"seq_dims[{name!r}]", dim, least=0)
        self.size, self.blocks = size, blocks
        self.row = Row(seq_dim, dict(seq_dims or {}))
        """The ranks that share a sequence with this one."""
        self.mesh = None
        self._matched = False
        self._numbers = itertools.count()

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups belong to their process; a spawned rank joins anew.
        row = self.row
        made = partial(ContextParallel, blocks=self.blocks, seq_dim=row.seq_dim, seq_dims=row.seq_dims)
        return made, (self.size,)

    def size_of(self, world_size: int) -> int:
        """Return the number of ranks, of `world_size`, that share a sequence.

        Raises:
            ConfigurationError: The ranks cannot be divided into rows of so many.
        """
        size = self.size or world_size
        return check_divisible(
            size, world_size, f"rows of {size} that share a sequence", "ContextParallel(size) with"
        )

    def resolve(self, plan: Any) -> None:
        """Check that the ranks of `plan` can be divided into rows."""
        self.size_of(len(plan.devices) * plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Make the groups. All ranks must call this."""
        topology = strategy.topology
        size = self.size_of(topology.world_size)
        self.mesh = make_data_parallel_mesh(topology, size, DIMS)
        self.row.place = (topology.rank % size, size)
        if size > 1:
            self.row.channel = Channel(TorchCollective(group=self.mesh.get_group(1)), strategy.transport)

    def setup(self, module: Module, wrap: Callable[[Module], Module]) -> Module:
        """Choose the modules that are divided, wrap, and divide them: hooks of a layout see whole inputs.
        All ranks must call this.

        Raises:
            ConfigurationError: As `regions`.
            UsageError: As `regions`.
        """
        regions = self.regions(module)
        wrapped = wrap(module)
        self.install(module, regions)
        return wrapped

    def regions(self, module: Module) -> dict[Module, str]:
        """Return the modules whose inputs are divided, with their names in errors. Call before wrapping.

        Raises:
            ConfigurationError: `blocks` names nothing there.
            UsageError: What it names has batch norm.
        """
        if self.row.channel is None:
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
        """Divide `regions` in a model that a layout has wrapped: hooks of its own see what is whole."""
        if self.row.channel is None:
            return
        entrance = _Entrance(
            InputConsistencyCheck(self.row.channel, next(self._numbers), type(module).__name__)
        )
        module.register_forward_pre_hook(entrance, with_kwargs=True)
        for part, name in regions.items():
            Region(self.row, name).install(part)

    def teardown(self) -> None:
        """Let go of the groups."""
        self.row.channel = self.mesh = None
        part_sizes.clear()


class _Entrance:
    """Hook where a model begins: ranks of a row compare what they were called with."""

    def __init__(self, alike: InputConsistencyCheck | None) -> None:
        self._alike = alike

    @eager
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._alike is not None and backward_pass() == -1:
            self._alike.compare("forward", *flatten((args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entrance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entrance, (None,)


def _check_modules(module: Module, name: str) -> None:
    for path, inner in module.named_modules():
        if isinstance(inner, BatchNorm) or getattr(inner, "scale_grad_by_freq", False):
            raise UsageError(
                f"{name} has batch norm or scale_grad_by_freq ({path}), which would go by each rank's part "
                "of a sequence. Leave it out, or name modules without it in ContextParallel(blocks=)."
            )
