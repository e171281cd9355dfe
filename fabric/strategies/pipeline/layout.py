"""`Pipeline`: consecutive blocks of the model on each rank of a pipeline, in rows that see different data.

The mesh has the dimensions "data_parallel" and "pipeline". Each rank keeps the whole tree of modules.
Tensors of other stages are emptied in place: names and the numbers of an optimizer's parameters are the same
on all ranks, and values that are not trained on this rank cannot be read.
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
from fabric.core.backward_listeners import add_step_listener
from fabric.core.compile import is_compiled
from fabric.core.errors import UsageError
from fabric.strategies._torch import call_after_backward
from fabric.strategies.buffers import shared_buffers
from fabric.strategies.deferred_init.materialise import Materialiser
from fabric.strategies.pipeline.cut import check_fits, even_balance, find_blocks, shared_parameters
from fabric.strategies.pipeline.flow import Flow
from fabric.strategies.pipeline.run import Runner
from fabric.strategies.pipeline.stage import Stage
from fabric.strategies.pipeline.states import PipelineStates, Tied, emptied, names_of, tensors_of
from fabric.strategies.pipeline.trial import warn_of_modules
from fabric.strategies.rows import DataParallelMesh, check_rows, make_rows
from fabric.strategies.sharding.split import SPLIT
from fabric.strategies.tensor_sync import average_gradients, broadcast_from_group_root, broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.precision import DtypePolicy
    from fabric.core.topology import Topology
    from fabric.strategies.pipeline.cut import Blocks, Shared
    from fabric.strategies.pipeline.run import Lanes

DIMS = ("data_parallel", "pipeline")


class Pipeline(DataParallelMesh, PipelineStates):
    """Stages of one model on consecutive ranks.

    `no_backward_sync` changes nothing here: each backward averages what is in `.grad` over rows, and the mean
    of means is the same. Gradients of one row alone, which a step must not take, cannot come to be.

    Args:
        balance: Blocks of each stage; None: even stages.
        num_stages: None: as many as `balance` has, or all ranks.
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
        self.asked = (balance, num_stages, num_microbatches, checkpoint)
        self.balance: list[int] | None = None
        """Blocks of each stage, as the last setup has put them."""
        self.across: Channel | None = None
        """The ranks that have the same stage, and average its gradients; None: this one alone."""
        self._ranks: list[int] = [0]
        self._place = 0
        self._flows: weakref.WeakKeyDictionary[Module, Flow] = weakref.WeakKeyDictionary()
        self._lanes: Lanes = (None, None)
        self._numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups and models belong to their process; a spawned rank joins anew.
        return type(self), self.asked

    @property
    def stage(self) -> tuple[int, int]:
        """(number of this rank's stage, of how many)."""
        return self._place, len(self._ranks)

    def stages_of(self, world_size: int) -> int:
        """Return the number of stages for `world_size` ranks.

        Raises:
            ConfigurationError: The ranks cannot be divided into rows of this many stages.
        """
        balance, num_stages, *_ = self.asked
        stages = num_stages or (len(balance) if balance else world_size)
        return check_rows(
            stages, world_size, f"pipelines of {stages} stages", "num_stages= (or a balance= with)"
        )

    def resolve(self, plan: Any) -> None:
        """Check that the ranks can be divided into pipelines."""
        self.stages_of(len(plan.devices) * plan.num_nodes)

    def join(self, strategy: Any) -> None:
        """Make the mesh. All ranks must call this."""
        super().join(strategy)
        topology = strategy.topology
        self.device, self.policy = topology.device, strategy.precision.policy
        self._unwatch = self._unwatch or add_step_listener(self)
        stages = self.stages_of(topology.world_size)
        self.mesh = make_rows(topology, stages, DIMS)
        start = topology.rank - topology.rank % stages
        self._ranks, self._place = list(range(start, start + stages)), topology.rank - start
        self.replica_key = (self._place,)
        transport = self.channel.transport  # type: ignore[union-attr]
        self.pipeline = Channel(TorchCollective(group=self.mesh.get_group(1)), transport)
        own = self.pipeline.collective.group
        apart = topology.device.type != "cpu" and stages > 1
        self._lanes = own, self._group_of(range(stages)) if apart else own
        if self.mesh.size(0) > 1:
            self.across = Channel(TorchCollective(group=self.data_group), transport)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module itself; this rank keeps the blocks of its stage, with rank zero's values. All ranks.

        Raises:
            ConfigurationError: The model has no blocks, fewer than stages, or others than `balance` says.
            UsageError: It cannot be cut; see `find_blocks`.
        """
        blocks, stages = find_blocks(module), len(self._ranks)
        given, _, count, checkpoint = self.asked
        check_fits(given, stages, blocks, type(module).__name__)
        count = count or 2 * stages
        balance = given or even_balance(blocks, stages, tell=topology.rank == 0)
        starts = list(itertools.accumulate([0, *balance]))
        stage_of = [stage for stage, size in enumerate(balance) for _ in range(size)]
        shared = shared_parameters(blocks, stage_of)
        own = [block for block, stage in zip(blocks, stage_of, strict=True) if stage == self._place]
        with self.following(module):
            self._bring(module, blocks, own, topology)
        for number, ((path, block), stage) in enumerate(zip(blocks, stage_of, strict=True)):
            if all([block is not mine for _, mine in own]):
                where = f"Block {number} ({path}) is on stage {stage} (rank {self._ranks[stage]})"
                block.__dict__["forward"] = partial(_refuse_call, f"{where}, and this is stage {self._place}")
        self.balance = balance
        own_stage = Stage(self._place, stages, own, starts[self._place], checkpoint)
        self.names[module] = names_of(module, own)
        runner = Runner(own_stage, self._ranks, self.pipeline, self._lanes)
        if count > 1 and topology.rank == 0:
            warn_of_modules(module)
        self._flows[module] = Flow(
            next(self._numbers),
            module,
            runner,
            self._tie(module, shared, runner),
            count,
            cast("DtypePolicy", self.policy),
            self._after,
        )
        # Its own methods may call self(x).
        module.__dict__["forward"] = self._flows[module]
        return module

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Micro-batches through the stages, in place of the module's own forward."""
        if is_compiled(wrapped):
            raise UsageError(
                "A compiled model cannot be cut into stages. Compile its blocks before fabric.setup: "
                "for block in model: block.compile()."
            )
        return self._flows[wrapped]

    def model_method(self, wrapped: Module, name: str) -> Callable[..., Any] | None:
        """`pipeline_step`, which models have beside their own methods."""
        return self._flows[wrapped].pipeline_step if name == "pipeline_step" else None

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The user's own optimizer; what is on other stages has no gradients here, and is passed over.

        Raises:
            UsageError: It is LBFGS.
        """
        super().setup_optimizer(optimizer)
        for tensor in [t for t in optimizer.state if not t.numel()]:
            del optimizer.state[tensor]
        self.attend(optimizer)
        return optimizer

    def reduced(self) -> set[int]:
        """Ids of the parameters of models as setup left them, and of free parameters."""
        own = [id(p) for model in self.models() for p in model.parameters()]
        return {*own, *(self.free.held() if self.free else ())}

    def teardown(self) -> None:
        """Let go of the groups; models cannot run after this."""
        self._flows.clear()
        self.across, self._lanes = None, (None, None)
        super().teardown()

    def _after(self, flow: Flow) -> None:
        """A backward has ended on all stages of a model: synchronise, once, where autograd's pass ends."""
        running = backward_pass()
        if running == -1:
            self._synchronise(flow)
        elif running != flow.synchronised_in:
            flow.synchronised_in = running
            call_after_backward(partial(self._synchronise, flow))

    def _synchronise(self, flow: Flow) -> None:
        """Sum gradients of tied parameters; over rows average gradients and broadcast buffers."""
        for tied in flow.tied:
            tied.add_up()
        module = flow.module()
        if module is None:
            return
        if self.across is not None:
            self._average(module, flow, self.across)
        if self.after_sync is not None:
            self.after_sync([module])

    def _average(self, module: Module, flow: Flow, across: Channel) -> None:
        blocks = [block for _, block in flow.runner.stage.blocks]
        parameters = dict.fromkeys([p for block in blocks for p in block.parameters()])
        average_gradients(list(parameters), across, "a pipeline with several data parallel rows")
        if module.training:
            broadcast_from_group_root(flow.buffers.tensors(), across)

    def _group_of(self, stages: Iterable[int]) -> ProcessGroup | None:
        """A group of these stages of this pipeline. All ranks make those of all pipelines."""
        firsts = range(0, self.mesh.size(), len(self._ranks))  # type: ignore[union-attr]
        ranks = [[first + stage for stage in stages] for first in firsts]
        group: ProcessGroup | None = dist.new_subgroups_by_enumeration(ranks)[0]
        return group

    def _bring(self, module: Module, blocks: Blocks, own: Blocks, topology: Topology) -> None:
        """Values for all blocks, one after the other; those of other stages are emptied again."""
        maker = Materialiser(module, topology.device)
        # Those without memory are replaced, so only what was there at first says which ones are the same.
        first = [tensors_of(block) for _, block in blocks]
        kept = {id(t) for _, block in own for t in tensors_of(block)}
        done: dict[int, Any] = {}
        absent: dict[int, Tensor] = {}
        for (_, block), before in zip(blocks, first, strict=True):
            maker.fill(block, replay=topology.rank == 0)
            now = tensors_of(block)
            _on_device([t for t in now if id(t) not in done], topology, module)
            for old, tensor in zip(before, now, strict=True):
                if id(old) not in kept and id(tensor) not in done:
                    absent[id(tensor)] = emptied(tensor)
                done[id(tensor)] = tensor
        rest = [buffer for _, buffer in sorted(module.named_buffers()) if id(buffer) not in done]
        _on_device(rest, topology, module)
        self.note_absent(module, absent)

    def _tie(self, module: Module, shared: list[Shared], runner: Runner) -> list[Tied]:
        """Return the parameters that this stage shares with others. All ranks must call this."""
        made = []
        for one in shared:
            group = self._group_of(one)
            if self._place in one:
                parameter = module.get_parameter(one[self._place])
                parameter._fabric_answers = self._place == min(one)  # type: ignore[attr-defined]
                channel = Channel(TorchCollective(group=group), self.pipeline.transport)
                made.append(Tied(parameter, channel, runner.passing))
        return made


def _on_device(tensors: list[Any], topology: Topology, model: Module) -> None:
    """Bring tensors of the model to the device, with rank zero's values. All ranks must call this."""
    for tensor in tensors:
        if tensor.device != topology.device:
            tensor.data = tensor.data.to(topology.device)
    local = {id(b) for b in model.buffers()} - {id(b) for b in shared_buffers(model).values()}
    broadcast_from_zero([tensor for tensor in tensors if id(tensor) not in local])


def _refuse_call(where: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(f"{where}: it has no values here. Call the model itself, model(x), on all ranks.")
