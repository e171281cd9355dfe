"""Models without memory get the values of a plain construction; full states travel between all layouts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from machine import ACCELERATOR
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.checkpoint.formats.sharded.dcp import consolidate
from fabric.core.errors import CollectiveMismatch, RankError, UsageError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 6)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0] + self.outer(torch.tanh(self.inner(h)))


class Net(nn.Module):
    """Initialised in many ways: by layers, by a second pass over all of them, by hand, by values, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=0)
        self.place = nn.Parameter(torch.randn(1, 3, 6) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(6, 9, bias=False)
        self.gain = nn.Parameter(torch.empty(7))
        self.gain.data.uniform_(0.5, 1.5).mul_(2)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, nn.Linear) and module is not self.head:
            nn.init.trunc_normal_(module.weight, std=0.2)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.weight, 0.9)

    def forward(self, x):
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)) * self.scale * self.gain.mean()


def adam(model):
    # A large eps: some gradients are zero but for rounding, which Adam would blow up to full steps.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def plain_net() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(21)
    with torch.device(ACCELERATOR):
        return Net(), torch.rand(1)


def tensor_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(
            block, mesh["tensor_parallel"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
        )
    return model


def tensor_and_sharded(model, mesh):
    tensor_parallel(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


STRATEGIES = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "one-group": FSDPStrategy,
    "layers": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear, nn.LayerNorm, Block}),
    "hsdp": lambda: FSDPStrategy(device_mesh=(2, 2), auto_wrap_policy={Block}),
    "tp": lambda: ModelParallelStrategy(tensor_parallel, 1, "auto"),
    "tp-dp": lambda: ModelParallelStrategy(tensor_parallel, 2, "auto"),
    "tp-fsdp": lambda: ModelParallelStrategy(tensor_and_sharded, 2, 2),
}


def launched(strategy: str, **settings) -> Fabric:
    fabric = Fabric(
        accelerator=ACCELERATOR, devices=dist.get_world_size(), strategy=STRATEGIES[strategy](), **settings
    )
    fabric.launch()
    return fabric


def assert_states(got, expected) -> None:
    assert list(got) == list(expected)
    one, other = [{key: value.cpu() for key, value in state.items()} for state in (got, expected)]
    torch.testing.assert_close(one, other, atol=0, rtol=0)


# Built without memory


def built_empty(strategy: str, seed_apart: bool = False) -> None:
    fabric = launched(strategy)
    torch.manual_seed(21 + (seed_apart and fabric.global_rank))
    with fabric.init_module(empty_init=True):
        model = Net()
    drawn = torch.rand(1, device=ACCELERATOR)
    assert all(p.is_meta for name, p in model.named_parameters() if name != "place")
    optimizer = adam(model)
    model, optimizer = fabric.setup(model, optimizer)
    expected, after = plain_net()
    assert_states(fabric.strategy.get_module_state_dict(model), expected.state_dict())
    assert model.head.weight is model.embed.weight
    if not seed_apart:
        assert torch.equal(drawn, after)  # the random stream goes on as in a plain script
    part = fabric.strategy.distributed_sampler_kwargs
    tokens = torch.arange(12 * part["num_replicas"]).view(part["num_replicas"], 4, 3)[part["rank"]] % 9
    before = fabric.strategy.get_module_state_dict(model)["gain"].clone()
    fabric.backward(model(fabric.to_device(tokens)).pow(2).mean())
    optimizer.step()
    assert not torch.equal(before, fabric.strategy.get_module_state_dict(model)["gain"])


SPLIT = [
    pytest.param(name, world, marks=[pytest.mark.device] * (world == 2))
    for name in STRATEGIES
    if name not in ("single", "ddp", "zero1")
    for world in ((4,) if name in ("hsdp", "tp-dp", "tp-fsdp") else (1, 2, 4))
]


@pytest.mark.parametrize(("strategy", "world_size"), SPLIT)
def test_values_equal_a_plain_construction_on_any_number_of_ranks(ranks, strategy, world_size):
    ranks.run(built_empty, strategy, world_size=world_size)


@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_rank_zeros_values_count_where_seeds_differ(ranks, strategy):
    ranks.run(built_empty, strategy, True, world_size=2)


def small(module) -> None:
    """The initialisation of GPT-2, as its users call it by `model.apply(small)`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.weight.data.uniform_(0.1, 0.2)
        nn.init.constant_(module.bias, 0.5)
    if isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
        module.weight.data[module.padding_idx].fill_(0.25)


def small_in_function(where: str):
    def function(model, mesh):
        if where == "to_empty":
            tensor_parallel(model, mesh).to_empty(device=ACCELERATOR)
            model.head.weight = model.embed.weight  # torch makes two of them
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            for buffer in model.buffers():
                nn.init.ones_(buffer)
            return model
        return (tensor_and_sharded if mesh.size(0) > 1 else tensor_parallel)(model, mesh)

    return function


def initialised_later(strategy: str, where: str) -> None:
    fabric = launched(strategy)
    if where != "before":
        fabric.strategy.layout.parallelize = small_in_function(where)
    torch.manual_seed(21)
    with fabric.init_module(empty_init=True):
        model = Net()
    if where == "before":
        model.apply(small)
    model = fabric.setup(model)
    drawn = torch.rand(1)
    torch.manual_seed(21)
    with torch.device(ACCELERATOR):
        expected = Net()
    if where == "to_empty":
        for parameter in expected.parameters():
            nn.init.normal_(parameter)
        for buffer in expected.buffers():
            nn.init.ones_(buffer)
    else:
        expected.apply(small)
    assert_states(fabric.strategy.get_module_state_dict(model), expected.state_dict())
    assert model.head.weight is model.embed.weight
    assert torch.equal(drawn, torch.rand(1))


LATER = [
    *[(strategy, "before") for strategy in ("zero3", "one-group")],
    *[(strategy, where) for strategy in ("tp", "tp-fsdp") for where in ("before", "to_empty")],
]


@pytest.mark.parametrize(("strategy", "where"), LATER)
def test_what_the_user_initialises_later_counts(ranks, strategy, where):
    ranks.run(initialised_later, strategy, where, world_size=4 if strategy == "tp-fsdp" else 2)


def doubled(model) -> None:
    model.norm.weight = nn.Parameter(model.norm.weight * 2)


def tied_late(model) -> None:
    model.blocks[1].outer.weight = model.blocks[0].outer.weight


IN_FUNCTION = {
    "initialised": (lambda m: m.apply(small), "parallelize_fn changes by .*_ a .*the change would be lost"),
    "list": (lambda m: torch._foreach_mul_(list(m.parameters()), 0.5), "changes by _foreach_mul_ a tensor"),
    "transposed": (
        lambda m: m.blocks[0].inner.weight.t().data.zero_(),
        r"parallelize_fn changes by zero_ a tensor of shape \[6, 8\].*the change would be lost",
    ),
    "local": (lambda m: m.blocks[0].inner.weight.to_local().zero_(), "parallelize_fn changes by zero_"),
    "doubled": (doubled, "parallelize_fn puts another tensor in the place of weight of BatchNorm1d"),
    "tied": (tied_late, "parallelize_fn puts another tensor in the place of weight of Linear"),
    "copied": (
        lambda m: m.norm.weight.data.copy_(m.norm.bias),
        r"parallelize_fn changes by copy_ a tensor of shape \[3\], which has no values yet",
    ),
    "data": (
        lambda m: setattr(m.blocks[0].inner.weight, "data", m.blocks[0].inner.weight.data * 2),
        r"parallelize_fn changes by \.data = other a tensor .*the change would be lost",
    ),
    "values": (lambda m: m.norm.weight.data.copy_(torch.ones(3)), "parallelize_fn changes by copy_"),
    "dtype": (lambda m: m.double(), None),
    "row": (lambda m: m.blocks[0].inner.weight.data[3].fill_(3), "parallelize_fn changes by fill_"),
}


def in_function(name: str) -> None:
    change, message = IN_FUNCTION[name]

    def function(model, mesh):
        change(tensor_parallel(model, mesh))
        return model

    strategy = ModelParallelStrategy(function, 1, 2)
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(21)
    with fabric.init_module(empty_init=True):
        model = Net()
    if message is not None:
        with pytest.raises(UsageError, match=message):
            fabric.setup(model)
        return
    model = fabric.setup(model)
    expected, _ = plain_net()
    with torch.no_grad():
        change(expected)
    assert_states(fabric.strategy.get_module_state_dict(model), expected.state_dict())


@pytest.mark.parametrize("name", IN_FUNCTION)
def test_what_parallelize_fn_does_to_values_counts_or_is_refused(ranks, name):
    ranks.run(in_function, name, world_size=2)


def built_in(precision: str) -> list[torch.dtype]:
    fabric = launched("zero3", precision=precision)
    torch.manual_seed(21)
    with fabric.init_module(empty_init=True):
        model = Net()
    model = fabric.setup(model)
    return sorted({p.dtype for p in model.parameters()}, key=str)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-true", torch.bfloat16), ("64-true", torch.float64), ("bf16-mixed", torch.float32)],
)
def test_an_empty_model_has_the_dtype_of_the_precision(ranks, precision, dtype):
    assert ranks.run(built_in, precision, world_size=2) == [[dtype]] * 2


def states_from_the_start(strategy: str) -> None:
    """Adagrad has states before its first step, of parameters that have no memory yet."""
    fabric = launched(strategy)
    torch.manual_seed(21)
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(21)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    expected = torch.optim.Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
    states = optimizer.state_dict()["state"]
    for number, state in expected.state_dict()["state"].items():
        assert_states(states[number], state)
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    plain(torch.ones(2, 4)).square().mean().backward()
    expected.step()
    assert_states(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("strategy", ["one-group", "layers"])
def test_states_that_are_there_before_a_step_get_their_values_too(ranks, strategy):
    ranks.run(states_from_the_start, strategy, world_size=2)


class Unset(nn.Module):
    """A parameter that nothing initialises, two layers deep."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Module())
        self.body[1].gain = nn.Parameter(torch.empty(4))


def never_initialised(strategy: str) -> None:
    fabric = launched(strategy)
    with fabric.init_module(empty_init=True):
        model = Unset()
    with pytest.raises(
        UsageError, match=r"Unset has no initial values for body\.1\.gain of Module: .*reset_parameters"
    ):
        fabric.setup(model)


@pytest.mark.parametrize("strategy", ["one-group", "tp"])
def test_what_nothing_initialises_is_named(ranks, strategy):
    ranks.run(never_initialised, strategy, world_size=2)


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Parent(nn.Module):
    """A root that initialises its children's parameters as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.gain = nn.Parameter(torch.ones(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 3)
        for layer in self.layers:
            nn.init.normal_(layer.weight)


def users_own_meta(kind: str) -> None:
    fabric = launched("layers" if kind != "tp" else "tp")
    torch.manual_seed(4)
    if kind == "forgetful":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), Forgetful(4, 4))
        with pytest.raises(
            UsageError, match=r"no initial values for 1\.bias of Forgetful: .* reset_parameters"
        ):
            fabric.setup(model)
        return
    if kind == "tp":
        fabric.strategy.layout.parallelize = lambda model, mesh: model
    with torch.device("meta"):
        model = Parent()
    model = fabric.setup(model)
    torch.manual_seed(4)
    assert_states(fabric.strategy.get_module_state_dict(model), Parent().state_dict())


@pytest.mark.device
@pytest.mark.parametrize("kind", ["parent", "forgetful", "tp"])
def test_a_users_meta_model_is_initialised_by_its_own_functions(ranks, kind):
    ranks.run(users_own_meta, kind, world_size=2)


def given_function() -> None:
    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(param_init_fn=init))
    fabric.launch()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = fabric.setup(model)
    assert all(bool((value == 0.25).all()) for value in fabric.strategy.get_module_state_dict(model).values())


def test_param_init_fn_initialises_meta_parameters(ranks):
    ranks.run(given_function, world_size=2)


def reads_what_is_not_there() -> None:
    fabric = launched("zero3")
    with fabric.init_module(empty_init=True):
        layer = nn.Linear(2, 2)
        with pytest.raises(UsageError, match=r"item reads a tensor of shape \[\] that has no values yet"):
            layer.weight.data.div_(layer.weight.norm().item())


def test_a_constructor_that_reads_deferred_values_is_told_so(ranks):
    ranks.run(reads_what_is_not_there, world_size=2)


def loads_before_setup(folder) -> None:
    plain, _ = plain_net()
    fabric = launched("zero3")
    if fabric.is_global_zero:
        torch.save({"model": plain.state_dict()}, folder / "plain")
    fabric.barrier()
    torch.manual_seed(99)
    with fabric.init_module(empty_init=True):
        model = Net()
    fabric.load(folder / "plain", {"model": model})
    assert model.head.weight is model.embed.weight
    model = fabric.setup(model)
    assert_states(fabric.strategy.get_module_state_dict(model), plain.state_dict())


def test_a_checkpoint_loaded_before_setup_counts(ranks, tmp_path):
    ranks.run(loads_before_setup, tmp_path, world_size=2)


# Saved under one layout, loaded under another


def trained(fabric: Fabric, steps: int, seed: int = 21):
    torch.manual_seed(seed)
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    model.norm.eval()
    for step in range(steps):
        optimizer.zero_grad()
        fabric.backward(model((torch.arange(12).view(4, 3) + step) % 9).pow(2).mean())
        optimizer.step()
    return model, optimizer


def saved(strategy: str, path) -> None:
    fabric = launched(strategy)
    model, optimizer = trained(fabric, 2)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2}, format="full")


def loaded(strategy: str, path) -> tuple[dict, dict, dict]:
    fabric = launched(strategy)
    model, optimizer = trained(fabric, 0, seed=5)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 2
    weights, moments = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.norm.eval()
    fabric.backward(model((torch.arange(12).view(4, 3) + 2) % 9).pow(2).mean())
    optimizer.step()
    return weights, moments, fabric.strategy.get_module_state_dict(model)


def oracle(steps: int) -> tuple[dict, dict]:
    model, _ = plain_net()
    model.norm.eval()
    optimizer = adam(model)
    for step in range(steps):
        optimizer.zero_grad()
        model((torch.arange(12).view(4, 3) + step) % 9).pow(2).mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


PLACES = [
    ("single", 1),
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 4),
    ("hsdp", 4),
    ("tp", 2),
    ("tp-fsdp", 4),
]
TRIPS = [
    (a, b)
    for a in PLACES
    for b in PLACES
    if a != b and (a == ("zero3", 4) or b in (("zero3", 4), ("single", 1)))
]


@pytest.mark.parametrize(("source", "target"), TRIPS, ids=str)
def test_states_travel_between_layouts(ranks, tmp_path, source, target):
    path = tmp_path / "checkpoint"
    ranks.run(saved, source[0], path, world_size=source[1])
    weights, moments = oracle(2)
    plain = torch.load(path, weights_only=True)
    assert list(plain["model"]) == list(weights)
    torch.testing.assert_close(dict(plain["model"]), dict(weights), atol=1e-6, rtol=1e-5)
    for got, held, after in ranks.run(loaded, target[0], path, world_size=target[1]):
        assert list(got) == list(weights)
        torch.testing.assert_close(dict(got), dict(plain["model"]), atol=0, rtol=0)
        assert held["param_groups"] == moments["param_groups"]
        torch.testing.assert_close(held["state"], plain["optimizer"]["state"], atol=0, rtol=0)
        torch.testing.assert_close(held["state"], moments["state"], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(dict(after), dict(oracle(3)[0]), atol=1e-6, rtol=1e-4)


def saved_by_hand(strategy: str, path) -> None:
    fabric = launched(strategy)
    model, optimizer = trained(fabric, 2)
    parts = {"model": model.module.state_dict(), "optimizers": [optimizer.optimizer.state_dict()]}
    state = {**parts, "whole": {"model": model, "optimizers": [optimizer]}}
    fabric.save(path, state, format="full")
    fabric.save(f"{path}-parts", state, format="sharded")


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "tp"])
def test_what_the_user_took_from_his_own_objects_is_saved_whole(ranks, tmp_path, strategy):
    path = tmp_path / "checkpoint"
    ranks.run(saved_by_hand, strategy, path, world_size=2)
    plain = torch.load(path, weights_only=True)
    consolidate(tmp_path / "checkpoint-parts", tmp_path / "one")
    one = torch.load(tmp_path / "one", weights_only=True)
    (names,) = one["whole"]["optimizers"][0].pop("param_names")
    assert plain["whole"]["optimizers"][0].pop("param_names") == [names]
    assert names == [name for name, _ in Net().named_parameters()]
    torch.testing.assert_close(one, plain, atol=0, rtol=0)
    torch.testing.assert_close(dict(plain["model"]), dict(plain["whole"]["model"]), atol=0, rtol=0)
    assert plain["model"]._metadata == plain["whole"]["model"]._metadata
    states = [held["optimizers"][0]["state"] for held in (plain, plain["whole"])]
    torch.testing.assert_close(*states, atol=0, rtol=0)
    for held in (plain["model"], plain["whole"]["model"]):  # tied weights are one tensor, in the file too
        assert held["head.weight"].data_ptr() == held["embed.weight"].data_ptr()


def saved_on_one_rank(path) -> None:
    fabric = launched("zero3")
    model, _ = trained(fabric, 0)
    for state, what in (
        ({"model": model}, "1 models and optimizers, 0 split tensors"),
        ({"model": model.module.state_dict()}, r"0 models and optimizers, \d+ split tensors"),
    ):
        with pytest.raises(CollectiveMismatch, match=what):
            fabric.save(path, state if fabric.is_global_zero else {})
    assert not path.exists()
    fabric.save(path, {"model": model} | ({"step": 2} if fabric.is_global_zero else {}))


def test_split_values_that_only_one_rank_saves_are_an_error_on_all(ranks, tmp_path):
    ranks.run(saved_on_one_rank, tmp_path / "checkpoint", world_size=2)


def who_keeps(path) -> list[bool]:
    fabric = launched("zero3")
    model, _ = trained(fabric, 0)
    seen: list[bool] = []

    def keep(name, value):
        seen.append(value.is_meta)
        return value.dim() == 2

    fabric.save(path, {"model": model}, filter={"model": keep}, format="full")
    return sorted(set(seen))


def test_only_rank_zero_keeps_full_values_while_saving(ranks, tmp_path):
    first, second = ranks.run(who_keeps, tmp_path / "c", world_size=2)
    assert first == [False]
    assert second == [False, True]  # buffers are whole on every rank


def wrong_checkpoint(path) -> str:
    fabric = launched("zero3")
    model, _ = trained(fabric, 0)
    state = model.state_dict()
    state["blocks.0.inner.weight"] = torch.zeros(3, 3)
    if fabric.is_global_zero:
        torch.save({"model": state}, path)
    fabric.barrier()
    with pytest.raises((UsageError, RankError)) as raised:
        fabric.load(path, {"model": model})
    return str(raised.value)


def test_a_shape_that_does_not_fit_is_named_on_all_ranks(ranks, tmp_path):
    for text in ranks.run(wrong_checkpoint, tmp_path / "c", world_size=2):
        assert "blocks.0.inner.weight has shape [3, 3] in the checkpoint and [8, 6] in the model" in text


def missing_key(path) -> None:
    fabric = launched("zero3")
    model, _ = trained(fabric, 0)
    state = model.state_dict()
    del state["gain"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"gain\""):
        fabric.strategy.load_module_state_dict(model, state)
    fabric.strategy.load_module_state_dict(model, state, strict=False)


def test_missing_keys_are_errors_unless_not_strict(ranks, tmp_path):
    ranks.run(missing_key, tmp_path, world_size=2)


class Factored(torch.optim.Optimizer):
    """In the manner of other factored optimizers: a row and a column of squares, and a plain history."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state[p]
            if not state:
                state["history"] = torch.zeros(17)
                if p.dim() == 2:
                    state["row"], state["column"] = torch.zeros_like(p[:, 0]), torch.zeros_like(p[0])
            state["history"][0] += 1
            if p.dim() == 2:
                state["row"].lerp_(p.grad.square().mean(1), 0.5)
                state["column"].lerp_(p.grad.square().mean(0), 0.5)
                scale = (torch.outer(state["row"], state["column"]) + 1e-4).sqrt()
                p.sub_(p.grad / scale, alpha=0.01 * float(state["history"].sum()))


def factored(kind, strategy, folder, format):
    """Parameters after two steps, a load into the same or a new optimizer, and two more steps."""
    torch.manual_seed(3)
    fabric = None
    if strategy:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    optimizer = kind(model.parameters(), lr=0.05)
    x = torch.arange(48.0).view(8, 6).sin()
    if fabric:
        model, optimizer = fabric.setup(model, optimizer)
        x = x[fabric.global_rank :: 2]
    for step in range(6):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        fabric.backward(loss) if fabric else loss.backward()
        optimizer.step()
        if fabric and step in (1, 3):
            fabric.save(f"{folder}/{step}", {"optimizer": optimizer, "model": model}, format=format)
            if step == 3:
                optimizer = fabric.setup_optimizers(kind(model.parameters(), lr=0.05))
            fabric.load(f"{folder}/{step}", {"optimizer": optimizer, "model": model})
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Factored])
def test_factors_of_states_are_loaded_as_torch_computes_them(ranks, tmp_path, kind, strategy, format):
    want = factored(kind, None, None, None)
    for found in ranks.run(factored, kind, strategy, str(tmp_path), format, world_size=2):
        torch.testing.assert_close([p.detach() for p in found], want)
