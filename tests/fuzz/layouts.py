"""The strategies that programs run under, and what each asks of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """`make` is the strategy's text in the program; `weight` says how often it is chosen."""

    name: str
    make: str
    worlds: tuple[int, ...] = (2, 2, 2, 3, 4)
    weight: int = 2
    kinds: tuple[str, ...] = ()
    """Models that it takes; none named: all."""
    without: tuple[str, ...] = ()
    """Models that mean something else on parts of a batch."""
    devices: int | None = None
    """What Fabric is told, where it is not the number of ranks."""
    imports: str = ""
    before: str = ""
    """Functions that `make` names."""
    extra: str = ""
    """Further arguments of Fabric."""
    precision: str | None = None
    """The only one that it has; "": what the default is."""
    avoids: str = ""
    """A pattern of what means something else there."""
    idle: int = 0
    """How many of the first ranks are outside of the strategy's process group, and do nothing."""
    zeros: bool = False
    """Whether what nobody uses has zeros for a gradient, as the strategy says."""

    def takes(self, kind: str) -> bool:
        """Whether it is for models of this kind."""
        return (not self.kinds or kind in self.kinds) and kind not in self.without

    @property
    def shares_data(self) -> bool:
        """Whether several ranks get the same rows."""
        return self.name.startswith(("pipeline", "tensor", "context"))

    @property
    def splits(self) -> bool:
        """Whether no rank has a whole model: what goes by one is refused."""
        return self.name.startswith(
            ("zero2", "fsdp", "hsdp", "mesh", "tensor", "pipeline", "context-fsdp", "deepspeed-3")
        )


POLICY = "auto_wrap_policy={nn.Linear, nn.Embedding, Block}"
HIDDEN = ("normal", "object", "closure", "list")
"""Models whose outputs cannot be put together from parts of a batch."""
CHAINS = ("mlp", "deep", "leaky")

BY_HAND = '''
def parallelize(model, mesh):
    """Split in blocks, as users write it for ModelParallelStrategy."""
    for module in list(model.modules())[1:]:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])
'''
TENSOR = '''
def parallelize(model, mesh):
    """Two layers over the ranks of a tensor parallel group, the rest by fully_shard."""
    tensor = mesh["tensor_parallel"]
    parallelize_module(model, tensor, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data_parallel"])
'''
MACHINES = '''
class MachineEach(ProcessGroupEnvironment):
    """Every rank as a machine of its own (in the pool; a script needs torchrun and machines)."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()

    def local_world_size(self) -> int:
        return 1
'''
SCALED = '''
class Scaled(MixedPrecision):
    """A loss scaler without half precision, whose scale grows at each update: numbers stay as they are."""

    policy = POLICIES["32-true"]

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        super().__init__("16-mixed", "cpu", scaler, output_dtype=None)

    def forward_context(self) -> Any:
        return contextlib.nullcontext()

    def convert_input(self, data: Any) -> Any:
        return data
'''
GROUP = '''
def some_ranks():
    """All ranks but the first (in the pool; a script needs torchrun)."""
    dist.is_initialized() or dist.init_process_group("gloo")
    return dist.new_group(list(range(1, dist.get_world_size())))
'''
TREE = '''
def in_tree(fan_out, strategy):
    """The strategy, with a tree of connections between the ranks, as large groups have it."""
    CallChecker.fan_out, CallChecker.gather_up_to = fan_out, 1
    return strategy
'''
FULLY_SHARD = "from torch.distributed.fsdp import fully_shard"
TENSOR_IMPORTS = (
    FULLY_SHARD
    + "\nfrom torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
)

LAYOUTS = [
    Layout("single", "SingleDeviceStrategy()", (1,), 1),
    Layout("ddp", "DDPStrategy()", (1, 2, 2, 3, 4), 5),
    Layout("ddp-unused", "DDPStrategy(find_unused_parameters=True)"),
    Layout("ddp-static", "DDPStrategy(static_graph=True)", weight=1),
    Layout("ddp-copies", "DDPStrategy(gradient_as_bucket_view=False)", weight=1),
    Layout("zero1", "ZeRO1Strategy()", weight=3),
    Layout("zero2", "FSDPStrategy(sharding_strategy='SHARD_GRAD_OP')", weight=4),
    Layout("zero2-layers", f"FSDPStrategy(sharding_strategy='SHARD_GRAD_OP', {POLICY})"),
    Layout("fsdp", "FSDPStrategy()", (1, 2, 2, 3, 4), weight=5),
    Layout("fsdp-layers", f"FSDPStrategy({POLICY})", weight=3),
    Layout("fsdp-freed", f"FSDPStrategy({POLICY}, reshard_after_forward=True)", weight=1),
    Layout("fsdp-unused", "FSDPStrategy(find_unused_parameters=True)", weight=1, zeros=True),
    Layout(
        "fsdp-checkpointed",
        "FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing=Block)",
        kinds=("deep", "tied", "checked", "leaky"),
        weight=1,
    ),
    Layout("fsdp-offload", "FSDPStrategy(cpu_offload=True)", weight=1),
    Layout("hsdp", "FSDPStrategy(sharding_strategy='HYBRID_SHARD', device_mesh=(2, 2))", (4,), 1),
    Layout(
        "mesh",
        "ModelParallelStrategy(parallelize, 'auto', 1)",
        (2, 3),
        1,
        imports=FULLY_SHARD,
        before=BY_HAND,
    ),
    Layout(
        "tensor",
        "ModelParallelStrategy(parallelize, 1, 2)",
        (2,),
        1,
        ("mlp",),
        imports=TENSOR_IMPORTS,
        before=TENSOR,
    ),
    Layout(
        "tensor-data",
        "ModelParallelStrategy(parallelize, 2, 2)",
        (4,),
        1,
        ("mlp",),
        imports=TENSOR_IMPORTS,
        before=TENSOR,
    ),
    Layout("pipeline", "PipelineStrategy(num_microbatches=2)", (2, 3), 2, CHAINS),
    Layout("pipeline-rows", "PipelineStrategy(num_stages=2, num_microbatches=3)", (4,), 1, CHAINS),
    Layout("context", "DDPStrategy(context_parallel=ContextParallel(2))", (2, 4), 1, ("attention",)),
    Layout("context-fsdp", "FSDPStrategy(context_parallel=ContextParallel(2))", (2, 4), 1, ("attention",)),
    Layout("dp", "DataParallelStrategy()", (1,), 1, without=("batched", *HIDDEN), devices=2),
    Layout(
        "ddp2",
        "DDP2Strategy()",
        (2, 3),
        1,
        without=("batched", *HIDDEN),
        devices=2,
        imports="from fabric.plugins.environments.process_group import ProcessGroupEnvironment",
        before=MACHINES,
        extra=", num_nodes=dist.get_world_size(), plugins=MachineEach()",
    ),
]
LAYOUTS += [
    Layout(
        f"{name}-group",
        f"{kind}(process_group=some_ranks())",
        (3, 3, 4),
        1,
        without=("ordered",),
        before=GROUP,
        avoids=r"global_rank|src=0|dst=0|own_ddp|'group'|'all'",  # which count the ranks of the job
        idle=1,
    )
    for name, kind in {"ddp": "DDPStrategy", "zero1": "ZeRO1Strategy"}.items()
]
LAYOUTS += [
    Layout(
        name,
        f"in_tree({fan_out}, {strategy}())",
        (4,),
        1,
        imports="from fabric.guard.call_checker import CallChecker",
        before=TREE,
    )
    for name, fan_out, strategy in (("tree", 1, "DDPStrategy"), ("fsdp-tree", 2, "FSDPStrategy"))
]
SCALED_IMPORTS = (
    "from fabric.core.precision import POLICIES\nfrom fabric.plugins.precision import MixedPrecision"
)
LAYOUTS += [
    replace(
        layout,
        name=f"{layout.name}-scaled",
        weight=1,
        imports=SCALED_IMPORTS,
        before=SCALED,
        extra=", plugins=Scaled()",
        precision="",
        avoids=r"grads\(|by_hand\(fabric|LBFGS|closure|\.backward\(\)",  # who reads gradients sees the scale
    )
    for layout in LAYOUTS
    if layout.name in ("single", "ddp", "ddp-unused", "zero1", "zero2", "fsdp-layers", "context")
]
ENGINES = [
    Layout(
        f"deepspeed-{name}",
        f"DeepSpeedStrategy({arguments})",
        (2,),
        imports="from fabric.integrations.deepspeed import DeepSpeedStrategy",
        precision="32-true",
        avoids=r"\.grad\b|grads\(|by_hand|Adagrad|LBFGS|setup_optimizers|\.backward\(\)|own_ddp|compiled",
        zeros=True,
    )
    for name, arguments in {
        "1": "stage=1",
        "2": "stage=2",
        "2-offload": "stage=2, offload_optimizer=True",
        "3": "stage=3",
        "3-offload": "stage=3, offload_optimizer=True, offload_parameters=True",
    }.items()
]
"""By `--layout` only, with the interpreter of an engine's environment (`make test-engines`)."""
BY_NAME = {layout.name: layout for layout in [*LAYOUTS, *ENGINES]}
