"""Bad input to strategies that shard, split or divide: what each message says, on every rank."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from test_resolve import Started
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


def unchanged(model, mesh):
    return model


def made(strategy, **settings) -> Fabric:
    return Fabric(accelerator="cpu", devices=2, strategy=strategy, **settings)


def parallel(*sizes, **settings) -> Fabric:
    return made(ModelParallelStrategy(unchanged, *sizes), **settings)


# Refused when the strategy or the Fabric is made: no rank is started

KINDS = ["set of module classes or a function", "{TransformerBlock}"]
SIZES = ['"auto" or a whole number, 1 or more']
MESH = ["must be (replicate, shard) sizes", "device_mesh=(2, 4) for 2 replicas that are split over 4"]
SHARDINGS = "one of 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', '_HYBRID_SHARD_ZERO2', 'NO_SHARD'."
AT_ONCE = {
    "policy a string": (
        lambda: FSDPStrategy(auto_wrap_policy="Block"),
        ArgumentTypeError,
        ["auto_wrap_policy='Block'", *KINDS],
    ),
    "policy a module": (
        lambda: FSDPStrategy(auto_wrap_policy=nn.Tanh()),
        ArgumentTypeError,
        ["auto_wrap_policy=Tanh()", *KINDS],
    ),
    "policy a set of names": (
        lambda: FSDPStrategy(auto_wrap_policy={"Block"}),
        ArgumentTypeError,
        ["auto_wrap_policy={'Block'}", *KINDS],
    ),
    "policy a class of no modules": (
        lambda: FSDPStrategy(auto_wrap_policy=[dict]),
        ArgumentTypeError,
        ["auto_wrap_policy=[<class 'dict'>]", *KINDS],
    ),
    "checkpointing a string": (
        lambda: FSDPStrategy(activation_checkpointing="Block"),
        ArgumentTypeError,
        ["activation_checkpointing='Block'", *KINDS],
    ),
    "checkpointing a list of numbers": (
        lambda: FSDPStrategy(activation_checkpointing=[3]),
        ArgumentTypeError,
        ["activation_checkpointing=[3] must be a set of module classes"],
    ),
    "checkpointing policy a number": (
        lambda: FSDPStrategy(activation_checkpointing_policy=3),
        ArgumentTypeError,
        ["activation_checkpointing_policy=3 must be"],
    ),
    "checkpointing twice": (
        lambda: FSDPStrategy(activation_checkpointing=nn.Linear, activation_checkpointing_policy={nn.Linear}),
        ConfigurationError,
        ["activation_checkpointing and activation_checkpointing_policy", "mean the same", "Keep the policy"],
    ),
    "mesh larger than the ranks": (
        lambda: made(FSDPStrategy(device_mesh=(2, 3))),
        ConfigurationError,
        [
            "device_mesh=(2, 3) has 6 ranks in 2 dimensions, but there are 2 ranks",
            "such as device_mesh=(1, 2)",
        ],
    ),
    "mesh smaller than two machines": (
        lambda: made(FSDPStrategy(device_mesh=(1, 2)), num_nodes=2),
        ConfigurationError,
        ["device_mesh=(1, 2) has 2 ranks in 2 dimensions, but there are 4", "device_mesh=(2, 2)"],
    ),
    "mesh of a number": (lambda: FSDPStrategy(device_mesh=2), ConfigurationError, ["device_mesh=2", *MESH]),
    "mesh of a string": (
        lambda: FSDPStrategy(device_mesh="22"),
        ConfigurationError,
        ["device_mesh='22'", *MESH],
    ),
    "mesh with a bool": (
        lambda: FSDPStrategy(device_mesh=(True, 2)),
        ConfigurationError,
        ["device_mesh=(True, 2)", *MESH],
    ),
    "mesh with nothing": (lambda: FSDPStrategy(device_mesh=(0, 2)), ConfigurationError, ["(0, 2)", *MESH]),
    "mesh of three": (lambda: FSDPStrategy(device_mesh=(1, 1, 2)), ConfigurationError, ["(1, 1, 2)", *MESH]),
    "mesh and no sharding": (
        lambda: FSDPStrategy(sharding_strategy="NO_SHARD", device_mesh=(1, 2)),
        ConfigurationError,
        ["'NO_SHARD' keeps a replica", "device_mesh=(1, 2)", "Leave one of the two out"],
    ),
    "sizes that do not multiply": (
        lambda: parallel(2, 2),
        ConfigurationError,
        [
            "data_parallel_size=2 x tensor_parallel_size=2 does not make 2 ranks",
            "size=1, tensor_parallel_size=2",
        ],
    ),
    "a size that does not divide": (
        lambda: parallel("auto", 3),
        ConfigurationError,
        ["data_parallel_size='auto' x tensor_parallel_size=3 does not make 2 ranks", "multiply to 2"],
    ),
    "size 0": (lambda: parallel(0, 2), ConfigurationError, ["data_parallel_size=0", *SIZES]),
    "size negative": (lambda: parallel(-1, -2), ConfigurationError, ["data_parallel_size=-1", *SIZES]),
    "size a bool": (lambda: parallel(1, True), ConfigurationError, ["tensor_parallel_size=True", *SIZES]),
    "size a string": (lambda: parallel("2", 1), ConfigurationError, ["data_parallel_size='2'", *SIZES]),
    "size a float": (lambda: parallel(1, 2.0), ConfigurationError, ["tensor_parallel_size=2.0", *SIZES]),
    "fp16 with tensor parallel": (
        lambda: parallel(precision="16-mixed"),
        ConfigurationError,
        ["ModelParallelStrategy does not run with precision='16-mixed'", "'bf16-mixed'"],
    ),
    "fp16 with offload": (
        lambda: made(FSDPStrategy(cpu_offload=True), precision="16-mixed"),
        ConfigurationError,
        ["FSDPStrategy does not run with precision='16-mixed'", "'bf16-mixed'"],
    ),
    "fp16 with offload by name": (
        lambda: made("fsdp_cpu_offload", precision=16),
        ConfigurationError,
        ["FSDPStrategy does not run with precision='16-mixed'"],
    ),
    "a keyword of the signature misspelt": (
        lambda: FSDPStrategy(sharding_stategy="FULL_SHARD"),
        ConfigurationError,
        ["no keyword 'sharding_stategy'. Did you mean 'sharding_strategy'?"],
    ),
    "a further keyword misspelt": (
        lambda: FSDPStrategy(forward_prefech=True),
        ConfigurationError,
        ["no keyword 'forward_prefech'. Did you mean 'forward_prefetch'"],
    ),
    "use_orig_params": (
        lambda: FSDPStrategy(use_orig_params=False),
        ConfigurationError,
        ["use_orig_params=False must be True, which is how FSDP2 works"],
    ),
    "limit_all_gathers": (
        lambda: FSDPStrategy(limit_all_gathers=False),
        ConfigurationError,
        ["limit_all_gathers=False must be True, which is how FSDP2 works"],
    ),
    "sync_module_states": (
        lambda: FSDPStrategy(sync_module_states=False),
        ConfigurationError,
        ["sync_module_states=False must be True, which is how FSDP2 works"],
    ),
    "sharding_strategy": (
        lambda: FSDPStrategy(sharding_strategy="FULL"),
        ConfigurationError,
        [f"sharding_strategy='FULL' must be {SHARDINGS}"],
    ),
    "sharding_strategy a number": (
        lambda: FSDPStrategy(sharding_strategy=3),
        ConfigurationError,
        [f"sharding_strategy=3 must be {SHARDINGS}"],
    ),
    "state_dict_type": (
        lambda: FSDPStrategy(state_dict_type="both"),
        ConfigurationError,
        ["state_dict_type='both' must be 'full' or 'sharded'"],
    ),
    "start_method": (
        lambda: FSDPStrategy(start_method="threads"),
        ConfigurationError,
        ["start_method='threads' is unknown. Write one of 'popen', 'spawn', 'fork', 'forkserver'"],
    ),
    "timeout a number": (
        lambda: FSDPStrategy(timeout=60),
        ArgumentTypeError,
        ["timeout=60 is not a timedelta. Write timeout=datetime.timedelta(seconds=60)."],
    ),
    "startup_timeout None": (
        lambda: ModelParallelStrategy(unchanged, startup_timeout=None),
        ArgumentTypeError,
        ["startup_timeout=None is not a timedelta"],
    ),
    "start_method of a mesh": (
        lambda: ModelParallelStrategy(unchanged, start_method="threads"),
        ConfigurationError,
        ["start_method='threads' is unknown. Write one of 'popen', 'spawn', 'fork', 'forkserver'"],
    ),
    "mixed_precision a name": (
        lambda: FSDPStrategy(mixed_precision="bf16"),
        ConfigurationError,
        ["mixed_precision='bf16' must be a MixedPrecision or", 'write Fabric(precision="bf16-mixed")'],
    ),
    "mixed_precision of buffers": (
        lambda: FSDPStrategy(mixed_precision=MixedPrecision(buffer_dtype=torch.float16)),
        ConfigurationError,
        [
            "buffer_dtype=torch.float16 is not supported: FSDP2 does not cast buffers",
            "cast buffers in the model",
        ],
    ),
    "mixed_precision of gradients": (
        lambda: FSDPStrategy(mixed_precision=MixedPrecision(keep_low_precision_grads=True)),
        ConfigurationError,
        ["keep_low_precision_grads=True is not supported", 'write Fabric(precision="bf16-true")'],
    ),
    "cpu_offload": (
        lambda: FSDPStrategy(cpu_offload="yes"),
        ConfigurationError,
        ["cpu_offload='yes' must be True, False or a CPUOffload(offload_params=...)"],
    ),
    "ignored_modules one": (
        lambda: FSDPStrategy(ignored_modules=nn.Linear(1, 1)),
        ConfigurationError,
        ["ignored_modules=Linear(", "must be a list of submodules of the model", "=[model.head]"],
    ),
    "ignored_modules names": (
        lambda: FSDPStrategy(ignored_modules=["head"]),
        ConfigurationError,
        ["ignored_modules=['head'] must be a list of submodules"],
    ),
    "ignored_states names": (
        lambda: FSDPStrategy(ignored_states="head"),
        ConfigurationError,
        ["ignored_states='head' must be a list of submodules"],
    ),
    "ignored_modules without values": (
        lambda: FSDPStrategy(ignored_modules=[nn.Linear(1, 1, device="meta")]),
        ConfigurationError,
        ["Ignored parameters are on the meta device", "Initialise them before"],
    ),
    "param_init_fn": (
        lambda: FSDPStrategy(param_init_fn=3),
        ConfigurationError,
        ["param_init_fn=3 must be a function (module)"],
    ),
    "reshard_after_forward": (
        lambda: FSDPStrategy(reshard_after_forward="yes"),
        ConfigurationError,
        ["reshard_after_forward='yes' must be True (", "False (", "a number of ranks above 1"],
    ),
    "forward_prefetch": (
        lambda: FSDPStrategy(forward_prefetch="yes"),
        ConfigurationError,
        ["forward_prefetch='yes' must be True or False"],
    ),
    "find_unused_parameters": (
        lambda: FSDPStrategy(find_unused_parameters="yes"),
        ConfigurationError,
        ["find_unused_parameters='yes' must be True or False"],
    ),
    "parallelize_fn no function": (
        lambda: ModelParallelStrategy("tensor_parallel"),
        ArgumentTypeError,
        ["parallelize_fn must be a function (model, device_mesh) -> model", "is 'tensor_parallel'"],
    ),
    "parallelize_fn None": (lambda: ModelParallelStrategy(None), ArgumentTypeError, ["but is None"]),
    "mesh before launch": (
        lambda: made("fsdp").device_mesh,
        UsageError,
        [
            "fabric.device_mesh was used before fabric.launch()",
            "Write fabric.launch() right after Fabric(...)",
        ],
    ),
    "mesh of whole parameters": (
        lambda: Fabric(accelerator="cpu").device_mesh,
        UsageError,
        ["SingleDeviceStrategy keeps whole parameters and has no mesh", "Choose a strategy that shards"],
    ),
    "dp on two machines": (
        lambda: made("dp", num_nodes=2),
        ConfigurationError,
        ['strategy="dp" is one process that holds all devices=2, but num_nodes=2', '"ddp"', '"ddp2"'],
    ),
    "dp in started processes": (
        lambda: made("dp", plugins=Started(2)),
        ConfigurationError,
        ['strategy="dp" is one process', "but 2 were started", '"ddp"'],
    ),
    "ddp2 in two processes a machine": (
        lambda: made("ddp2", plugins=Started(2)),
        ConfigurationError,
        ["DDP2Strategy runs one process per machine", "2 were started", "--nproc-per-node 1", '"ddp"'],
    ),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_what_is_refused_before_anything_starts(case):
    call, kind, parts = AT_ONCE[case]
    with pytest.raises(kind) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


# Refused where the ranks are: all of them raise the same, and can go on together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def start(strategy, **settings) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **settings)
    fabric.launch()
    return fabric


def setup(make=Net, parallelize=None, sizes=(1, "auto"), **keywords):
    """A call that sets `make()` up under FSDP with keywords, or with a function under tensor parallel."""

    def call():
        strategy = (
            FSDPStrategy(**keywords) if parallelize is None else ModelParallelStrategy(parallelize, *sizes)
        )
        return start(strategy).setup(make())

    return call


def shards_parts_only(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return model


def replaces_the_head(model, mesh):
    model.head = nn.Linear(4, 2)
    return model


def optimizer_of_what_was_replaced():
    start(ModelParallelStrategy(replaces_the_head)).setup(model := Net(), sgd(model))


def sharded_whole():
    return fully_shard(Net())


def sharded_in_part():
    fully_shard((model := Net()).blocks[0])
    return model


def mesh_of_one_rank():
    start(FSDPStrategy(device_mesh=DeviceMesh("cpu", [0])))


def mesh_of_three_dimensions():
    start(FSDPStrategy(device_mesh=init_device_mesh("cpu", (1, 1, dist.get_world_size()))))


large = functools.partial(size_based_auto_wrap_policy, min_num_params=10**6)
HAS = "matches no module inside Net, which has Block, Linear, Sequential."
CHOSEN = "Name classes of these, or leave auto_wrap_policy out."
WHOLE = ["sharded already", "fully_shard was called on it. ", "ModelParallelStrategy(parallelize_fn)"]
AT_SETUP = {
    "fewer elements than ranks": (
        setup(lambda: nn.Linear(1, 1, bias=False)),
        ConfigurationError,
        ["Linear has 1 parameter elements for {world} ranks", 'Write devices=1, or strategy="ddp"'],
    ),
    "a set that matches nothing": (
        setup(auto_wrap_policy={nn.Conv2d}),
        ConfigurationError,
        ["auto_wrap_policy={{<class 'torch.nn.modules.conv.Conv2d'>}} " + HAS, CHOSEN],
    ),
    "a function that matches nothing": (
        setup(auto_wrap_policy=lambda module: False),
        ConfigurationError,
        ["auto_wrap_policy=<function ", HAS, CHOSEN],
    ),
    "a size that nothing has": (
        setup(auto_wrap_policy=large),
        ConfigurationError,
        ["auto_wrap_policy=functools.partial(<function size_based_auto_wrap_policy", HAS, CHOSEN],
    ),
    "a ModuleWrapPolicy that matches nothing": (
        setup(auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d})),
        ConfigurationError,
        ["auto_wrap_policy=<torch.distributed.fsdp.wrap.ModuleWrapPolicy", HAS, CHOSEN],
    ),
    "a CustomPolicy with settings": (
        setup(auto_wrap_policy=CustomPolicy(lambda module: {"forward_prefetch": True})),
        ConfigurationError,
        ["CustomPolicy gives settings for single modules ({{'forward_prefetch': True}})", "Return True"],
    ),
    "a class that no checkpoint is for": (
        setup(activation_checkpointing=nn.Conv2d),
        ConfigurationError,
        [f"conv.Conv2d'> {HAS} Name classes of these, or leave activation_checkpointing"],
    ),
    "a list that no checkpoint is for": (
        setup(activation_checkpointing=[nn.Conv2d, nn.ReLU]),
        ConfigurationError,
        [f"=[<class 'torch.nn.modules.conv.Conv2d'>, <class 'torch.nn.modules.activation.ReLU'>] {HAS}"],
    ),
    "a checkpointing function that matches nothing": (
        setup(activation_checkpointing_policy=lambda module: False),
        ConfigurationError,
        ["activation_checkpointing_policy=<function ", f"{HAS} Name classes of these, or leave act"],
    ),
    "a checkpointing size that nothing has": (
        setup(activation_checkpointing_policy=large),
        ConfigurationError,
        ["activation_checkpointing_policy=functools.partial(<function size_based", HAS],
    ),
    "a checkpointing ModuleWrapPolicy that matches nothing": (
        setup(activation_checkpointing_policy=ModuleWrapPolicy({nn.Conv2d})),
        ConfigurationError,
        ["activation_checkpointing_policy=<torch.distributed.fsdp.wrap.ModuleWrapPolicy", HAS],
    ),
    "a function that returns nothing": (
        setup(parallelize=lambda model, mesh: None),
        ArgumentTypeError,
        ["parallelize_fn must change its argument, a Net, in place and return it", "returned None"],
    ),
    "a function that returns another model": (
        setup(parallelize=lambda model, mesh: Net()),
        ArgumentTypeError,
        ["must change its argument, a Net", "returned another module"],
    ),
    "a model that is sharded": (setup(sharded_whole), UsageError, ["This model (Net) is", *WHOLE]),
    "a model that is sharded in part": (setup(sharded_in_part), UsageError, ["blocks.0 (Block) is", *WHOLE]),
    "a ModuleDict": (
        lambda: start("fsdp").setup(nn.ModuleDict({"a": nn.Linear(4, 4)})),
        UsageError,
        ["A ModuleDict has no forward", "Set up each module in it: first = fabric.setup_module(first)"],
    ),
    "an optimizer of parameters that are gone": (
        optimizer_of_what_was_replaced,
        UsageError,
        [
            "SGD trains 2 parameters (shapes (2, 4), (2,)) that fabric.setup has not set up",
            "make the optimizer from model.parameters()",
        ],
    ),
    "mesh under ddp": (
        lambda: start("ddp").device_mesh,
        UsageError,
        [
            "fabric.device_mesh: DDPStrategy keeps whole parameters and has no mesh",
            "Choose a strategy that shards",
        ],
    ),
    "a DeviceMesh of one rank": (
        mesh_of_one_rank,
        ConfigurationError,
        ["device_mesh=(1,) has 1 ranks", "there are {world} ranks", "sizes that multiply to {world}"],
    ),
    "a DeviceMesh of three dimensions": (
        mesh_of_three_dimensions,
        ConfigurationError,
        ["device_mesh=(1, 1, {world}) has {world} ranks in 3 dimensions", "(replicate, shard)"],
    ),
    "a part that does not divide the ranks": (
        setup(reshard_after_forward=3),
        ValueError,
        ["reshard_after_forward", "factor of {world}, not 3"],
    ),
}


def refused(case: str) -> str:
    call, kind, _ = AT_SETUP[case]
    with pytest.raises(kind) as caught:
        call()
    after = torch.ones(1)  # no rank stands in a collective that the others left out
    dist.all_reduce(after)
    assert after.item() == dist.get_world_size()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", AT_SETUP)
def test_what_all_ranks_refuse(ranks, case, world_size):
    for message in ranks.run(refused, case, world_size=world_size):
        for part in AT_SETUP[case][2]:
            assert part.format(world=world_size) in message


def policy_in_the_second_model() -> None:
    fabric = start(FSDPStrategy(auto_wrap_policy={Block}))
    fabric.setup(Net())
    fabric.setup(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_a_policy_need_not_match_in_every_model(ranks):
    ranks.run(policy_in_the_second_model, world_size=2)


def root_is_completed(size: int) -> set[str]:
    """The strategy shards what the function left whole over data parallel ranks, so that there is a root."""
    model = start(ModelParallelStrategy(shards_parts_only, size, "auto")).setup(Net())
    return {type(parameter.data).__name__ for parameter in model.parameters()}


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_function_leaves_whole_is_sharded_over_data_parallel_ranks(ranks, size):
    assert ranks.run(root_is_completed, size, world_size=2) == [{"DTensor"}] * 2
