"""`Pipeline`: consecutive blocks of the model on each rank of a pipeline; pipelines are data parallel.

The mesh has the dimensions "data_parallel" and "pipeline". Each rank keeps all modules. Tensors of other
stages are emptied in place. So parameter names and indices in optimizers are the same on all ranks, and
values that this rank does not train cannot be read.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch.distributed as dist

from fabric.collectives.channel import Channel
from fabric.collectives.torch_collective import TorchCollective
from fabric.core._torch import backward_pass
from fabric.core.backward_listeners import add_backward_listener, add_step_listener
from fabric.core.compile import is_compiled
from fabric.core.errors import UsageError
from fabric.strategies._torch import call_after_backward
from fabric.strategies.buffers import shared_buffers
from fabric.strategies.deferred_init.materialise import Materialiser
from fabric.strategies.pipeline.cut import check_fits, even_balance, find_blocks, shared_parameters
from fabric.strategies.pipeline.flow import PipelinedModule
from fabric.strategies.pipeline.run import Runner
from fabric.strategies.pipeline.stage import Stage
from fabric.strategies.pipeline.states import (
    PipelineStates,
    TiedParameter,
    empty_,
    key_prefixes,
    parameters_and_buffers,
)
from fabric.strategies.pipeline.trial import warn_batch_dependent
from fabric.strategies.rows import DataParallelMesh, check_divisible, make_data_parallel_mesh
from fabric.strategies.sharding.split import SPLIT
from fabric.strategies.tensor_sync import average_gradients, broadcast_from_group_root, broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.topology import Topology
    from fabric.precision.precision import Precision
    from fabric.strategies.pipeline.cut import Blocks, SharedTensor
    from fabric.strategies.pipeline.run import P2PGroups

DIMS = ("data_parallel", "pipeline")


class Pipeline(DataParallelMesh, PipelineStates):
    """Stages of one model on consecutive ranks.

    `no_backward_sync` has no effect: each backward averages `.grad` over the data parallel dimension, and a
    mean of means is the mean. So `.grad` never holds the gradients of one pipeline alone.

    Args:
        balance: Number of blocks of each stage; None: about as many parameters per stage.
        num_stages: None: the length of `balance`, or all ranks.
        num_microbatches: None: twice the number of stages.
        checkpoint: One of `CHECKPOINT`.
    """

    traits = replace(
        SPLIT,
        places_models=True,
        needs_launch=True,
        data_parallel=True,
        precisions=("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed"),
        precisions_why="torch's loss scaling would skip a step on one stage and not on another",
    )

    def __init__(
        self, balance: list[int] | None, num_stages: int | None, num_microbatches: int | None, checkpoint: str
    ) -> None:
        super().__init__()
        self.arguments = (balance, num_stages, num_microbatches, checkpoint)
        self.balance: list[int] | None = None
        """Number of blocks of each stage, of the model that was set up last."""
        self.replicas: Channel | None = None
        """The ranks with the same stage, which average its gradients; None: only this rank."""
        self._ranks: list[int] = [0]
        self._stage_index = 0
        self._pipelined: weakref.WeakKeyDictionary[Module, PipelinedModule] = weakref.WeakKeyDictionary()
        self._p2p_groups: P2PGroups = (None, None)
        self._model_numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        # Process groups and models belong to one process; a spawned rank calls `join` itself.
        return type(self), self.arguments

    @property
    def stage(self) -> tuple[int, int]:
        """(index of this rank's stage, number of stages)."""
        return self._stage_index, len(self._ranks)

    def stages_of(self, world_size: int) -> int:
        """Return the number of stages for `world_size` ranks.

        Raises:
            ConfigurationError: The number of ranks is no multiple of the number of stages.
        """
        balance, num_stages, *_ = self.arguments
        stages = num_stages or (len(balance) if balance else world_size)
        return check_divisible(
            stages, world_size, f"pipelines of {stages} stages", "num_stages= (or a balance= with)"
        )

    def resolve(self, plan: Any) -> None:
        """Check that the ranks can be divided into pipelines."""
        self.stages_of(len(plan.devices) * plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Create the mesh and the process groups. All ranks must call this."""
        super().join(strategy)
        topology = strategy.topology
        self.device, self.precision = topology.device, strategy.precision
        self._remove_step_listener = self._remove_step_listener or add_step_listener(self)
        add_backward_listener(self)
        stages = self.stages_of(topology.world_size)
        self.mesh = make_data_parallel_mesh(topology, stages, DIMS)
        start = topology.rank - topology.rank % stages
        self._ranks, self._stage_index = list(range(start, start + stages)), topology.rank - start
        self.replica_key = (self._stage_index,)
        transport = self.channel.transport  # type: ignore[union-attr]
        self.pipeline = Channel(TorchCollective(group=self.mesh.get_group(1)), transport)
        group = self.pipeline.collective.group
        second = topology.device.type != "cpu" and stages > 1
        self._p2p_groups = group, self._group_of(range(stages)) if second else group
        if self.mesh.size(0) > 1:
            self.replicas = Channel(TorchCollective(group=self.data_group), transport)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module, of which this rank keeps the blocks of its stage, with rank zero's values. All
        ranks must call this.

        Raises:
            ConfigurationError: The model has no blocks, fewer than stages, or not the number in `balance`.
            UsageError: It cannot be divided into stages; see `find_blocks`.
        """
        blocks, stages = find_blocks(module), len(self._ranks)
        balance, _, count, checkpoint = self.arguments
        check_fits(balance, stages, blocks, type(module).__name__)
        count = count or 2 * stages
        balance = balance or even_balance(blocks, stages, log=topology.rank == 0)
        starts = list(itertools.accumulate([0, *balance]))
        stage_of = [stage for stage, size in enumerate(balance) for _ in range(size)]
        shared = shared_parameters(blocks, stage_of)
        local = [block for block, stage in zip(blocks, stage_of, strict=True) if stage == self._stage_index]
        with self.recording_replacements(module):
            self._materialise_blocks(module, blocks, local, topology)
        for number, ((path, block), owner) in enumerate(zip(blocks, stage_of, strict=True)):
            if all([block is not other for _, other in local]):
                where = f"Block {number} ({path}) is on stage {owner} (rank {self._ranks[owner]})"
                where += f", and this is stage {self._stage_index}"
                block.__dict__["forward"] = partial(_raise_other_stage, where)
        self.balance = balance
        stage = Stage(self._stage_index, stages, local, starts[self._stage_index], checkpoint)
        self.key_prefixes[module] = key_prefixes(module, local)
        runner = Runner(stage, self._ranks, self.pipeline, self._p2p_groups)
        if count > 1 and topology.rank == 0:
            warn_batch_dependent(module)
        self._pipelined[module] = PipelinedModule(
            next(self._model_numbers),
            module,
            runner,
            self._tie_parameters(module, shared, runner),
            count,
            cast("Precision", self.precision),
            self._backward_ended,
        )
        # Methods of the model may call self(x).
        module.__dict__["forward"] = self._pipelined[module]
        return module

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Return the function that runs micro-batches through the stages, in place of `forward`."""
        if is_compiled(wrapped):
            raise UsageError(
                "A compiled model cannot be cut into stages. Compile its blocks before fabric.setup: "
                "for block in model: block.compile()."
            )
        return self._pipelined[wrapped]

    def model_method(self, wrapped: Module, name: str) -> Callable[..., Any] | None:
        """Return `pipeline_step`, the one method that a model gains by setup; None for other names."""
        return self._pipelined[wrapped].pipeline_step if name == "pipeline_step" else None

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the user's optimizer. Its steps skip the parameters of other stages: they have no gradients.

        Raises:
            UsageError: It is LBFGS.
        """
        super().setup_optimizer(optimizer)
        for tensor in [t for t in optimizer.state if not t.numel()]:
            del optimizer.state[tensor]
        self.reject_own_state_dict(optimizer)
        return optimizer

    def reduced_parameters(self) -> set[int]:
        """Ids of the parameters of models as setup left them, and of free parameters."""
        set_up = [id(p) for model in self.models() for p in model.parameters()]
        return {*set_up, *(self.free_parameters.alive() if self.free_parameters else ())}

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward."""
        run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Do nothing: stages are no nested passes."""

    def after_grad(self, inputs: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Refuse gradients of parameters by `torch.autograd.grad`, whose graph ends at the stages.

        Raises:
            UsageError: The inputs have a parameter of a model.
        """
        asked = {id(tensor) for tensor in inputs}
        for model in self.models():
            for name in [name for name, p in model.named_parameters() if id(p) in asked]:
                raise UsageError(
                    f"torch.autograd.grad was called for the gradient of {name}, of a model in a pipeline: "
                    "the graph of a loss has no path to the stages. Write fabric.backward(loss), and read "
                    "p.grad."
                )

    def teardown(self) -> None:
        """Release the process groups; models cannot run after this."""
        self._pipelined.clear()
        self.replicas, self._p2p_groups = None, (None, None)
        super().teardown()

    def _backward_ended(self, flow: PipelinedModule) -> None:
        """Synchronise once per backward of autograd; called when it has ended on all stages of a model."""
        running = backward_pass()
        if running == -1:
            self._synchronise(flow)
        elif running != flow.synchronised_in:
            flow.synchronised_in = running
            call_after_backward(partial(self._synchronise, flow))

    def _synchronise(self, flow: PipelinedModule) -> None:
        """Sum gradients of tied parameters over stages; over replicas average gradients, broadcast
        buffers.
        """
        for tied in flow.tied:
            tied.reduce()
        module = flow.module()
        if module is None:
            return
        if self.replicas is not None:
            self._average(module, flow, self.replicas)
        if self.after_sync is not None:
            self.after_sync([module])

    def _average(self, module: Module, flow: PipelinedModule, replicas: Channel) -> None:
        blocks = [block for _, block in flow.runner.stage.blocks]
        parameters = dict.fromkeys([p for block in blocks for p in block.parameters()])
        average_gradients(list(parameters), replicas, "a pipeline with several data parallel rows")
        if module.training:
            broadcast_from_group_root(flow.buffers.tensors(), replicas)

    def _group_of(self, stages: Iterable[int]) -> ProcessGroup | None:
        """Return a process group of these stages of this pipeline. All ranks must call this: each creates
        the groups of all pipelines.
        """
        firsts = range(0, self.mesh.size(), len(self._ranks))  # type: ignore[union-attr]
        ranks = [[first + stage for stage in stages] for first in firsts]
        group: ProcessGroup | None = dist.new_subgroups_by_enumeration(ranks)[0]
        return group

    def _materialise_blocks(self, module: Module, blocks: Blocks, local: Blocks, topology: Topology) -> None:
        """Initialise all blocks, one after the other, and empty the tensors of other stages again."""
        maker = Materialiser(module, topology.device)
        # Meta tensors are replaced, so tied tensors are found by the tensors before it.
        first = [parameters_and_buffers(block) for _, block in blocks]
        kept = {id(t) for _, block in local for t in parameters_and_buffers(block)}
        done: dict[int, Any] = {}
        metas: dict[int, Tensor] = {}
        for (_, block), before in zip(blocks, first, strict=True):
            maker.fill(block, replay=topology.rank == 0)
            now = parameters_and_buffers(block)
            _move_and_broadcast([t for t in now if id(t) not in done], topology, module)
            for old, tensor in zip(before, now, strict=True):
                if id(old) not in kept and id(tensor) not in done:
                    metas[id(tensor)] = empty_(tensor)
                done[id(tensor)] = tensor
        rest = [buffer for _, buffer in sorted(module.named_buffers()) if id(buffer) not in done]
        _move_and_broadcast(rest, topology, module)
        self.record_emptied(module, metas)

    def _tie_parameters(
        self, module: Module, shared: list[SharedTensor], runner: Runner
    ) -> list[TiedParameter]:
        """Return the parameters that this stage shares with others. All ranks must call this."""
        tied = []
        for paths in shared:
            group = self._group_of(paths)
            if self._stage_index in paths:
                parameter = module.get_parameter(paths[self._stage_index])
                parameter._fabric_counts_in_norm = self._stage_index == min(paths)  # type: ignore[attr-defined]
                channel = Channel(TorchCollective(group=group), self.pipeline.transport)
                tied.append(TiedParameter(parameter, channel, runner.in_stage_backward))
        return tied


def _move_and_broadcast(tensors: list[Any], topology: Topology, model: Module) -> None:
    """Move tensors of the model to the device, and broadcast rank zero's values. All ranks must call this."""
    for tensor in tensors:
        if tensor.device != topology.device:
            tensor.data = tensor.data.to(topology.device)
    local = {id(b) for b in model.buffers()} - {id(b) for b in shared_buffers(model).values()}
    broadcast_from_zero([tensor for tensor in tensors if id(tensor) not in local])


def _raise_other_stage(where: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(f"{where}. Its tensors are empty on this rank. Call the model, model(x), on all ranks.")
