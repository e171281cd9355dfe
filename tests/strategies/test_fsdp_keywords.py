"""Every keyword of FSDPStrategy in every form it takes: accepted, with the effect that it names."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.strategies import FSDPStrategy
from fabric.strategies.sharding._torch import fsdp_groups

STEPS = 3


class Block(nn.Module):
    """Notes how often it is computed, and in which dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)
        self.calls = 0
        self.dtype = None

    def forward(self, x):
        self.calls += 1
        self.dtype = self.inner.weight.dtype
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def start(**keywords) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=FSDPStrategy(**keywords))
    fabric.launch()
    return fabric


def batches(world: int) -> torch.Tensor:
    return torch.randn(STEPS, world, 6, 4, generator=torch.Generator().manual_seed(5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def plain(world: int, make=Net) -> dict[str, torch.Tensor]:
    """The oracle: the joined batch on one process."""
    optimizer = sgd(model := make())
    for batch in batches(world):
        optimizer.zero_grad()
        model(batch.flatten(0, 1)).pow(2).mean().backward()
        optimizer.step()
    return model.state_dict()


def train(fabric: Fabric, raw: nn.Module, tolerance: float = 1e-6) -> None:
    """Train as `plain` does, and compare the weights."""
    expected = plain(fabric.world_size, type(raw))
    model = fabric.setup_module(raw)
    optimizer = fabric.setup_optimizers(sgd(model))
    for batch in batches(fabric.world_size):
        optimizer.zero_grad()
        fabric.backward(model(batch[fabric.global_rank]).pow(2).mean())
        optimizer.step()
    got = fabric.strategy.get_module_state_dict(model)
    assert list(got) == list(expected)
    torch.testing.assert_close(dict(got), dict(expected), atol=tolerance, rtol=tolerance)


def groups(raw: nn.Module) -> list[str]:
    return [name for name, module in raw.named_modules() if isinstance(module, FSDPModule)]


def shape_here(weight: torch.Tensor) -> tuple[int, ...]:
    return tuple(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)


# auto_wrap_policy, activation_checkpointing, activation_checkpointing_policy


def large_enough(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, Block)


POLICIES = {
    "a set": lambda: {Block},
    "a list": lambda: [Block],
    "a class": lambda: Block,
    "a function": lambda: lambda module: isinstance(module, Block),
    "a function of three": lambda: large_enough,
    "a size": lambda: functools.partial(size_based_auto_wrap_policy, min_num_params=50),
    "torch's for transformers": lambda: functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    "ModuleWrapPolicy": lambda: ModuleWrapPolicy({Block}),
    "CustomPolicy": lambda: CustomPolicy(lambda module: isinstance(module, Block)),
}
BLOCKS = ["", "blocks.0", "blocks.1"]


def grouped(policy: str) -> list[str]:
    fabric, raw = start(auto_wrap_policy=POLICIES[policy]()), Net()
    train(fabric, raw)
    return groups(raw)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_makes_groups(ranks, policy):
    assert ranks.run(grouped, policy, world_size=2) == [BLOCKS] * 2


def one_group(policy) -> list[str]:
    train(start(auto_wrap_policy=policy), raw := Net())
    return groups(raw)


@pytest.mark.parametrize("policy", [None, set()])
def test_no_policy_on_a_small_model_and_an_empty_one_make_one_group(ranks, policy):
    assert ranks.run(one_group, policy, world_size=2) == [[""]] * 2


def recomputed(name: str, policy: str) -> list[int]:
    fabric, raw = start(**{name: POLICIES[policy]()}), Net()
    train(fabric, raw)
    return [block.calls for block in raw.blocks]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("activation_checkpointing", "a class"),
        ("activation_checkpointing", "a list"),
        *[("activation_checkpointing_policy", policy) for policy in POLICIES],
    ],
)
def test_checkpointed_blocks_are_computed_twice(ranks, name, policy):
    assert ranks.run(recomputed, name, policy, world_size=2) == [[2 * STEPS] * 2] * 2


def computed_once() -> list[int]:
    train(start(auto_wrap_policy={Block}), raw := Net())
    return [block.calls for block in raw.blocks]


def test_other_blocks_are_computed_once(ranks):
    assert ranks.run(computed_once, world_size=2) == [[STEPS] * 2] * 2


# sharding_strategy, reshard_after_forward, device_mesh

WHOLE, HALF, QUARTER = (8, 4), (4, 4), (2, 4)


def shape_gathered(raw, layer) -> tuple | None:
    """Of a layer's weight, what torch holds beside its part."""
    for state in raw._get_fsdp_state()._state_ctx.all_states:
        for group in fsdp_groups([state]):
            for part in group.fsdp_params:
                if part._module_info.module is layer and part._module_info.param_name == "weight":
                    kept = part._unsharded_param if group.is_unsharded else None
                    kept = part._sharded_post_forward_param if group.is_sharded_post_forward else kept
                    return None if kept is None else shape_here(kept)
    raise AssertionError("no such layer")


def held(keywords: dict) -> tuple:
    """Shapes of a weight in memory: before a forward, after it, after the backward; and of the mesh."""
    fabric, raw = start(auto_wrap_policy={Block}, **keywords), Net()
    model = fabric.setup(raw)
    weight = raw.blocks[0].inner
    before = shape_here(weight.weight)
    loss = model(torch.ones(2, 4)).sum()
    assert shape_here(weight.weight) == before, "a model's parameters are its parts"
    between = shape_gathered(raw, weight) or before
    fabric.backward(loss)
    assert shape_gathered(raw, weight) is None
    return before, between, shape_here(weight.weight), tuple(fabric.device_mesh.shape)


SHARDED = {
    "FULL_SHARD": ((QUARTER, QUARTER, QUARTER, (4,)), {}),
    "SHARD_GRAD_OP": ((QUARTER, WHOLE, QUARTER, (4,)), {}),
    "HYBRID_SHARD": ((HALF, HALF, HALF, (2, 2)), {"device_mesh": (2, 2)}),
    "_HYBRID_SHARD_ZERO2": ((HALF, WHOLE, HALF, (2, 2)), {"device_mesh": (2, 2)}),
    "NO_SHARD": ((WHOLE, WHOLE, WHOLE, (4, 1)), {}),
}


@pytest.mark.parametrize("as_enum", [False, True])
@pytest.mark.parametrize("name", SHARDED)
def test_sharding_strategy_decides_what_a_rank_holds(ranks, name, as_enum):
    expected, further = SHARDED[name]
    strategy = getattr(ShardingStrategy, name) if as_enum else name
    assert ranks.run(held, {"sharding_strategy": strategy, **further}) == [expected] * 4


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"reshard_after_forward": True}, (QUARTER, QUARTER, QUARTER, (4,))),
        ({"reshard_after_forward": False}, (QUARTER, WHOLE, QUARTER, (4,))),
        ({"reshard_after_forward": 2}, (QUARTER, HALF, QUARTER, (4,))),
        ({"reshard_after_forward": None}, (QUARTER, QUARTER, QUARTER, (4,))),
        ({"device_mesh": (2, 2)}, (HALF, HALF, HALF, (2, 2))),
        ({"device_mesh": [1, 4]}, (QUARTER, QUARTER, QUARTER, (1, 4))),
        ({"device_mesh": (4,)}, (QUARTER, QUARTER, QUARTER, (4,))),
        # On one machine a node is all ranks.
        ({"sharding_strategy": "HYBRID_SHARD"}, (QUARTER, QUARTER, QUARTER, (4,))),
    ],
    ids=str,
)
def test_what_a_rank_holds(ranks, keywords, expected):
    assert ranks.run(held, keywords) == [expected] * 4


def own_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    fabric = start(device_mesh=mesh, auto_wrap_policy={Block})
    assert fabric.device_mesh is mesh
    train(fabric, raw := Net())
    assert shape_here(raw.blocks[0].inner.weight) == HALF


def test_a_device_mesh_of_ones_own(ranks):
    ranks.run(own_mesh)


def trained(keywords: dict) -> None:
    train(start(auto_wrap_policy={Block}, **keywords), Net())


@pytest.mark.parametrize(
    "keywords",
    [
        {"reshard_after_forward": 2},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, 2)},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": (2, 2)},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        # what FSDP2 decides by itself, in the values that it has
        {
            "use_orig_params": True,
            "limit_all_gathers": True,
            "sync_module_states": True,
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
            "device_id": 0,
            "state_dict_type": "full",
            "process_group_backend": "gloo",
        },
    ],
    ids=str,
)
def test_training_equals_plain_torch(ranks, keywords):
    ranks.run(trained, keywords)


# mixed_precision


def mixed(keywords: dict) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtype of computation, of the gradient, and whether its values came through bfloat16."""
    fabric, raw = start(auto_wrap_policy={Block}, **keywords), Net()
    model = fabric.setup(raw)
    fabric.backward(model(batches(2)[0, fabric.global_rank]).pow(2).mean())
    grad = raw.blocks[0].inner.weight.grad.full_tensor()
    assert fabric.strategy.mixed_precision_config.reduce_dtype in (None, torch.bfloat16, torch.float32)
    return raw.blocks[0].dtype, grad.dtype, torch.equal(grad, grad.bfloat16().float())


F32, BF16 = torch.float32, torch.bfloat16
MIXED = {
    "nothing": (None, (F32, F32, False)),
    "MixedPrecision": (MixedPrecision(param_dtype=BF16), (BF16, F32, True)),
    "MixedPrecisionPolicy": (MixedPrecisionPolicy(BF16, BF16), (BF16, F32, True)),
    "MixedPrecisionPolicy, sums in single": (MixedPrecisionPolicy(BF16, F32), (BF16, F32, False)),
    "MixedPrecision of sums": (MixedPrecision(reduce_dtype=BF16), (F32, F32, True)),
    "MixedPrecisionPolicy of sums": (MixedPrecisionPolicy(reduce_dtype=BF16), (F32, F32, True)),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixed_precision_decides_dtypes(ranks, case):
    given, expected = MIXED[case]
    assert ranks.run(mixed, {"mixed_precision": given}, world_size=2) == [expected] * 2


# cpu_offload


def offloaded(value) -> bool:
    """Whether parameters stay in host memory. Numbers are equal."""
    fabric = start(cpu_offload=value, auto_wrap_policy={Block})
    train(fabric, Net())
    return fabric.strategy.layout.settings.offload


OFFLOADS = {
    "True": (True, True),
    "False": (False, False),
    "None": (None, False),
    "CPUOffload": (CPUOffload(offload_params=True), True),
    "CPUOffload of nothing": (CPUOffload(), False),
    "CPUOffloadPolicy": (CPUOffloadPolicy(pin_memory=False), True),
    "OffloadPolicy": (OffloadPolicy(), False),
}


@pytest.mark.parametrize("case", OFFLOADS)
def test_cpu_offload_in_every_form(ranks, case):
    value, expected = OFFLOADS[case]
    assert ranks.run(offloaded, value, world_size=2) == [expected] * 2


# ignored_modules, ignored_states


def ignoring(how: str) -> list[str]:
    """Ignored parameters are plain ones with this rank's own gradient; the others are split and averaged."""
    raw = Net()
    keywords = {
        "ignored_modules": {"ignored_modules": [raw.head]},
        "ignored_states, a module": {"ignored_states": [raw.head]},
        "ignored_states, parameters": {"ignored_states": raw.head.parameters()},
        "both": {"ignored_modules": [raw.blocks[0].inner], "ignored_states": [raw.head.weight]},
    }[how]
    fabric = start(auto_wrap_policy={Block}, **keywords)
    model = fabric.setup(raw)
    data = batches(2)[0]
    fabric.backward(model(data[fabric.global_rank]).pow(2).mean())
    own, joined = Net(), Net()
    own(data[fabric.global_rank]).pow(2).mean().backward()
    joined(data.flatten(0, 1)).pow(2).mean().backward()
    left = []
    for (name, p), mine, ours in zip(
        raw.named_parameters(), own.parameters(), joined.parameters(), strict=True
    ):
        if isinstance(p, DTensor):
            torch.testing.assert_close(p.grad.full_tensor(), ours.grad, atol=1e-6, rtol=1e-5, msg=name)
        else:
            left.append(name)
            torch.testing.assert_close(p.grad, mine.grad, atol=1e-6, rtol=1e-5, msg=name)
    return left


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("ignored_modules", ["head.weight", "head.bias"]),
        ("ignored_states, a module", ["head.weight", "head.bias"]),
        ("ignored_states, parameters", ["head.weight", "head.bias"]),
        ("both", ["blocks.0.inner.weight", "blocks.0.inner.bias", "head.weight"]),
    ],
)
def test_ignored_parameters_stay_whole_and_local(ranks, how, left):
    assert ranks.run(ignoring, how, world_size=2) == [left] * 2


# forward_prefetch, param_init_fn, find_unused_parameters


def prefetching(enabled: bool) -> list[int]:
    """How many groups each group gathers ahead of its own."""
    train(start(auto_wrap_policy={Block}, forward_prefetch=enabled), raw := Net())
    return [len(block._get_fsdp_state()._states_to_forward_prefetch) for block in raw.blocks]


@pytest.mark.parametrize(("enabled", "ahead"), [(True, [1, 0]), (False, [0, 0])])
def test_forward_prefetch_gathers_the_next_group(ranks, enabled, ahead):
    assert ranks.run(prefetching, enabled, world_size=2) == [ahead] * 2


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


def initialised() -> set[float]:
    fabric = start(auto_wrap_policy={Block}, param_init_fn=fill)
    with torch.device("meta"):
        model = Net()
    model = fabric.setup(model)
    return {float(v) for w in fabric.strategy.get_module_state_dict(model).values() for v in w.flatten()}


def test_param_init_fn_gives_values_to_meta_parameters(ranks):
    assert ranks.run(initialised, world_size=2) == [{0.25}] * 2


class Choice(nn.Module):
    """One of three ways; nobody takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([Block(), Block(), Block()])
        self.mix = nn.Linear(4, 4)

    def forward(self, x, way):
        return self.mix(self.ways[way](x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([Choice(), Choice()])

    def forward(self, x, way):
        for part in self.parts:
            x = part(x, way)
        return x


def branching(keywords: dict, plain_backward: bool) -> None:
    """Rank r takes way r, then the other: equal to the mean of both losses in one process."""
    fabric = start(find_unused_parameters=True, **keywords)
    model, optimizer = fabric.setup(raw := Branches(), sgd(raw))
    step = sgd(one := Branches())
    for number, batch in enumerate(batches(2)):
        optimizer.zero_grad()
        loss = model(batch[fabric.global_rank], (fabric.global_rank + number) % 2).pow(2).mean()
        loss.backward() if plain_backward else fabric.backward(loss)
        assert raw.parts[0].ways[2].inner.weight.grad is None, "used on no rank"
        optimizer.step()
        step.zero_grad()
        losses = [one(part, (rank + number) % 2).pow(2).mean() for rank, part in enumerate(batch)]
        torch.stack(losses).mean().backward()
        step.step()
    got = fabric.strategy.get_module_state_dict(model)
    torch.testing.assert_close(dict(got), dict(one.state_dict()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"auto_wrap_policy": {Choice}},  # ways differ inside a group that all ranks call
        {"auto_wrap_policy": {Choice}, "reshard_after_forward": True},
    ],
    ids=str,
)
def test_ranks_may_take_different_branches(ranks, keywords, plain_backward):
    ranks.run(branching, keywords, plain_backward, world_size=2)


class Large(nn.Module):
    """Ways that an automatic choice would make groups of."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(400, 300), nn.Linear(400, 300)])

    def forward(self, x, way):
        return self.ways[way](x)


def large_branches(find: bool) -> list[str]:
    fabric = start(find_unused_parameters=find)
    fabric.setup(raw := Large())
    return groups(raw)


def test_branches_are_no_groups_unless_a_policy_says_so(ranks):
    assert ranks.run(large_branches, True, world_size=2) == [[""]] * 2
    assert ranks.run(large_branches, False, world_size=2) == [["", "ways.0", "ways.1"]] * 2


# The signature itself


def test_the_rest_of_the_signature_reaches_the_strategy():
    strategy = FSDPStrategy(
        process_group_backend="gloo",
        timeout=timedelta(seconds=7),
        startup_timeout=timedelta(seconds=8),
        start_method="spawn",
        state_dict_type="full",
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    assert fabric.strategy.process_group_backend == "gloo"
    assert fabric.strategy.process_group_timeout == timedelta(seconds=7)
    assert fabric.strategy.startup_timeout == timedelta(seconds=8)
    assert fabric.strategy.start_method == "spawn"
    assert fabric.strategy.state_dict_type == "full"
    assert (fabric.strategy.num_nodes, fabric.strategy.num_processes) == (1, 2)


def test_the_positions_of_arguments_are_those_of_the_public_api():
    public = [
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "precision",
        "process_group_backend",
        "timeout",
        "cpu_offload",
        "mixed_precision",
        "auto_wrap_policy",
        "activation_checkpointing",
        "activation_checkpointing_policy",
        "sharding_strategy",
        "state_dict_type",
        "device_mesh",
    ]
    parameters = inspect.signature(FSDPStrategy).parameters
    assert [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == public
    assert (parameters["sharding_strategy"].default, parameters["state_dict_type"].default) == (
        "FULL_SHARD",
        "sharded",
    )


def test_settings_are_there_as_they_were_given():
    made = FSDPStrategy(sharding_strategy="HYBRID_SHARD", cpu_offload=True)
    assert (made.sharding_strategy, made.cpu_offload) == ("HYBRID_SHARD", True)
    assert made.mixed_precision_config.param_dtype is None
    given = ShardingStrategy.SHARD_GRAD_OP
    assert FSDPStrategy(sharding_strategy=given).sharding_strategy is given


class MixedDtypes(nn.Module):
    """A layer in single precision in a model in double precision, as norms in half-precision models."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.narrow = nn.LayerNorm(4)

    def forward(self, x):
        return self.narrow(self.wide(x).float()).square().mean()


def with_mixed_dtypes(strategy):
    world = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy if world > 1 else "auto")
    fabric.launch()
    torch.manual_seed(3)
    model = MixedDtypes()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.arange(12.0).double().view(3, 4)))
    optimizer.step()
    with fabric.whole(model) as whole:
        return [] if whole is None else [p.detach().clone() for p in whole.parameters()]


def test_parameters_of_several_dtypes_name_the_layers_to_wrap(ranks):
    for error in ranks.run_expecting_errors(with_mixed_dtypes, "fsdp", world_size=2):
        assert isinstance(error, ConfigurationError)
        expected = "MixedDtypes has trainable parameters of float64 (wide.weight) and float32 (narrow.weight)"
        assert str(error).startswith(expected)
        assert "auto_wrap_policy={...}" in str(error)


def test_layers_of_another_dtype_are_blocks(ranks):
    expected = with_mixed_dtypes("auto")
    strategy = FSDPStrategy(auto_wrap_policy={nn.LayerNorm})
    for value, other in zip(ranks.run(with_mixed_dtypes, strategy, world_size=2)[0], expected, strict=True):
        torch.testing.assert_close(value, other)
