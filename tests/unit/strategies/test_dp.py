"""Strategy "dp" in one process: what is split, what comes back, what replicas share, and every refusal."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import signal
import types
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.environments.local import LocalEnvironment
from fabric.strategies import DataParallelStrategy, ParallelStrategy
from fabric.strategies.layouts.data_parallel import DeviceSplit, HostSplit, shallow_replica
from fabric.strategies.layouts.parts import CallParts, gather_outputs

CPU = torch.device("cpu")


def start(devices: int = 2, **kwargs) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="dp", **kwargs)
    fabric.launch()
    return fabric


class Calls(nn.Module):
    """Runs a function as its forward, and notes what each replica was given."""

    def __init__(self, function=lambda *args, **kwargs: args[0]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function
        self.seen: list[Any] = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return self.function(*args, **kwargs)


def calls(function=None, devices: int = 2):
    return start(devices).setup(Calls() if function is None else Calls(function))


class Net(nn.Module):
    """Dropout, batch norm, and a second way through."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.body(x))))

    def loss(self, x):
        return self.forward(x).pow(2).mean()


# What is split


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_the_parts_are_those_of_chunk(count, rows):
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    parts = [args[0] for args, _ in CallParts((x,), {}, count)]
    assert len(parts) == len(CallParts((x,), {}, count))
    expected = x.chunk(count) if rows else [x]
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert parts[0].data_ptr() == x.data_ptr()


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "n"
    rest: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


Pair = namedtuple("Pair", "left right")


def test_every_leaf_of_a_tree_finds_its_way():
    x, y = torch.arange(5.0), torch.arange(10).reshape(5, 2)
    batch = Batch(x, "train")
    batch.rest = [y, None]
    scale = torch.tensor(3.0)
    model = calls(lambda *args, **kwargs: args[0].x, devices=2)
    out = model(batch, Pair(x, {"y": y, "k": 7}), scale, "words", [1, 2, 3], flag=True, z=OrderedDict(a=x))
    assert torch.equal(out, x)
    (first, first_kw), (second, second_kw) = model.seen
    for args, kwargs, part in ((first, first_kw, slice(0, 3)), (second, second_kw, slice(3, 5))):
        assert type(args[0]) is Batch
        assert torch.equal(args[0].x, x[part])
        assert torch.equal(args[0].rest[0], y[part])
        assert (args[0].name, args[0].rest[1]) == ("train", None)
        assert type(args[1]) is Pair
        assert torch.equal(args[1].left, x[part])
        assert torch.equal(args[1].right["y"], y[part])
        assert args[1].right["k"] == 7
        assert args[2] is scale
        assert args[3:] == ("words", [1, 2, 3])
        assert kwargs["flag"] is True
        assert type(kwargs["z"]) is OrderedDict
        assert torch.equal(kwargs["z"]["a"], x[part])
    assert torch.equal(batch.x, x), "the caller's own objects are left as they are"


def test_keywords_alone_are_split():
    model = calls(lambda x, y: x + y, devices=3)
    x = torch.arange(7.0)
    assert torch.equal(model(x=x, y=x), 2 * x)
    assert [len(kwargs["x"]) for _, kwargs in model.seen] == [3, 3, 1]


@pytest.mark.parametrize("given", [(torch.zeros(0, 3),), (), (3,), (torch.tensor(2.0),), ("a", None)])
def test_where_nothing_can_be_split_one_replica_runs_with_the_very_arguments(given):
    model = calls(lambda *args: torch.ones(2), devices=3)
    assert model(*given).shape == (2,)
    ((seen, _),) = model.seen
    assert all(a is b for a, b in zip(seen, given, strict=True))


def test_what_forward_writes_into_its_rows_reaches_the_caller():
    model = calls(lambda x: x.mul_(2), devices=2)
    x = torch.ones(5, 2)
    model(x)
    assert torch.equal(x, torch.full((5, 2), 2.0))


def test_rows_may_change_in_place_under_autograd():
    def add(x):
        x += net.weight
        return x

    net = Calls(add)
    model = start(2).setup(net)
    x = torch.ones(5, 2)
    model(x).sum().backward()
    assert net.weight.grad.item() == 10
    assert torch.equal(x, torch.full((5, 2), 2.0))


# What comes back


@pytest.mark.parametrize(("devices", "rows", "expected"), [(2, 6, [3, 3]), (4, 6, [2, 2, 2]), (4, 1, [1])])
def test_scalar_outputs_become_a_vector(devices, rows, expected):
    model = calls(lambda x: x.sum(), devices)
    out = model(torch.ones(rows))
    assert out.tolist() == expected


def test_one_device_is_the_module_itself():
    net = Calls(lambda x: x.sum())
    model = start(1).setup(net)
    assert model._forward_module is net
    assert model(torch.ones(3)).dim() == 0


def test_outputs_keep_their_types():
    def forward(x):
        made = Batch(x * 2, "out")
        made.rest = (x.sum(), None, 3, [x.new_ones(len(x), 2)])
        return {"b": made, "p": Pair(x, "same"), "f": Frozen(x), "o": OrderedDict(z=x, a=x > 1)}

    x = torch.arange(5.0)
    out = calls(forward, devices=2)(x)
    assert list(out) == ["b", "p", "f", "o"]
    assert type(out["b"]) is Batch
    assert torch.equal(out["b"].x, x * 2)
    total, none, three, (ones,) = out["b"].rest
    assert total.tolist() == [3, 7]
    assert (out["b"].name, none, three, tuple(ones.shape)) == ("out", None, 3, (5, 2))
    assert type(out["p"]) is Pair
    assert out["p"].right == "same"
    assert type(out["f"]) is Frozen
    assert torch.equal(out["f"].x, x)
    assert type(out["o"]) is OrderedDict
    assert torch.equal(out["o"]["a"], x > 1)


def test_one_part_gives_the_same_types_as_several():
    assert gather_outputs([{"loss": torch.tensor(2.0), "k": 1}]) == {"loss": torch.tensor([2.0]), "k": 1}


SHARED = object()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (len, ["differ between the replicas", "3, 2", "Return them as tensors"]),
        (lambda x: {"n": [0, len(x)]}, ["at output['n'][1]", "3, 2"]),
        (lambda x: Batch(x, str(len(x))), ["at output.name", "'3', '2'"]),
        (lambda x: x.new_ones(2, len(x)), ["joined along dim 0", "shape [2, 3], shape [2, 2]", "pad"]),
        (lambda x: x if len(x) > 2 else x.sum(), ["shape [3], shape []"]),
        (lambda x: x if len(x) > 2 else None, ["shape [3], None"]),
        (list, ["a list with [0], [1], [2]", "replica 1 a list with [0], [1]:", "one tensor"]),
        (lambda x: {"a": x} if len(x) > 2 else (x,), ["a dict with ['a']", "replica 1 a tuple with [0]"]),
        (lambda x: x if len(x) > 2 else {"a": x}, ["Replica 0 returned a Tensor", "a dict with ['a']"]),
        (lambda x: numpy.zeros(2), ["differ between the replicas", "array([0., 0.])"]),
        (lambda x: float("nan"), ["nan, nan"]),
        (
            lambda x: pack_padded_sequence(torch.ones(len(x), 3, 1), [3] * len(x), batch_first=True),
            ["PackedSequence", "pad_packed_sequence"],
        ),
    ],
)
def test_outputs_that_cannot_be_joined(function, words):
    model = calls(function)
    with pytest.raises(UsageError) as caught:
        model(torch.ones(5))
    for word in words:
        assert word in str(caught.value)


def test_values_that_are_equal_on_all_replicas_come_back_once():
    out = calls(lambda x: (SHARED, "a", 2, None, numpy.float32(1), torch.float32))(torch.ones(5))
    assert out == (SHARED, "a", 2, None, 1.0, torch.float32)


# Refusals of arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (torch.ones(6, 2), {"m": [torch.ones(4, 4)]}),
            {},
            ["argument 0 has 6 (shape [6, 2])", "argument 1['m'][0] has 4 (shape [4, 4])", "tensor.expand"],
        ),
        ((torch.ones(6),), {"mask": torch.ones(1, 6)}, ["mask has 1 (shape [1, 6])", "buffer of the model"]),
        ((torch.ones(0, 2), torch.ones(2)), {}, ["argument 0 has 0"]),
        ((Batch(torch.ones(2)), torch.ones(3)), {}, ["argument 0.x has 2"]),
        (
            (pack_padded_sequence(torch.ones(1, 4, 2), [4], batch_first=True),),
            {},
            ["PackedSequence", "pack_padded_sequence in forward"],
        ),
    ],
)
def test_arguments_that_cannot_be_split(args, kwargs, words):
    model = calls()
    with pytest.raises(ConfigurationError) as caught:
        model(*args, **kwargs)
    for word in words:
        assert word in str(caught.value)
    assert model.seen == []


def test_several_machines_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="dp")
    for word in ('strategy="dp" is one process', "devices=2", "num_nodes=2", '"ddp2"'):
        assert word in str(caught.value)


class StartedTwice(LocalEnvironment):
    creates_processes_externally = True

    def world_size(self) -> int:
        return 2


def test_several_processes_are_refused():
    with pytest.raises(ConfigurationError, match="2 were started") as caught:
        Fabric(accelerator="cpu", devices=2, strategy="dp", plugins=StartedTwice())
    assert '"ddp" (a process for each device)' in str(caught.value)


def test_a_strategy_that_no_fabric_holds():
    with pytest.raises(ConfigurationError, match="DataParallelStrategy is not bound yet"):
        DataParallelStrategy().setup_environment()


# One process


def test_one_rank_sees_all_data():
    fabric = start(3)
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank) == (1, 0, 0, 0)
    assert isinstance(fabric.strategy, ParallelStrategy)
    assert fabric.strategy.parallel_devices == [CPU] * 3
    assert fabric.strategy.distributed_sampler_kwargs is None
    assert (fabric.strategy.num_processes, fabric.strategy.launcher) == (1, None)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert fabric.launch(lambda fabric, x: x + fabric.world_size, 4) == 5
    fabric.barrier()
    assert torch.equal(fabric.all_gather(torch.ones(2)), torch.ones(1, 2))
    assert fabric.broadcast("x") == "x"


def test_devices_given_to_the_strategy():
    fabric = Fabric(accelerator="cpu", strategy=DataParallelStrategy(parallel_devices=[CPU] * 3))
    model = fabric.setup(Calls())
    model(torch.ones(6))
    assert len(model.seen) == 3


def test_it_works_at_a_prompt(monkeypatch):
    monkeypatch.setattr("fabric.resolve.sys.ps1", ">>> ", raising=False)
    assert start(2).setup(Calls())(torch.ones(2)).tolist() == [1, 1]


# The user's module


def test_names_and_states_are_the_users_own(tmp_path):
    fabric, net = start(2), Net()
    keys, names = list(net.state_dict()), [name for name, _ in net.named_parameters()]
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert model.module is net
    assert list(model.state_dict()) == keys == list(fabric.strategy.get_module_state_dict(model))
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model._forward_module.named_parameters()] == names
    assert fabric.strategy.layout.unwrap(model._forward_module) is net
    fabric.save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)["model"]) == keys
    plain = Net()
    nn.init.zeros_(plain.head.weight)
    Fabric(accelerator="cpu", devices=1).load(tmp_path / "x.pt", {"model": plain})
    assert torch.equal(plain.head.weight, net.head.weight)


def test_other_methods_are_not_split():
    net = Net(dropout=0)
    model = start(3).setup(net)
    x = torch.randn(7, 4)
    assert torch.equal(model.loss(x), copy.deepcopy(net).loss(x))
    model.mark_forward_method("loss")
    assert torch.equal(model.loss(x), copy.deepcopy(net).loss(x))


def test_train_and_eval_reach_every_replica():
    net = nn.Sequential(nn.Dropout(0.9))
    model = start(3).setup(net)
    x = torch.ones(6, 50)
    assert torch.equal(model.eval()(x), x)
    assert not net.training
    out = model.train()(x)
    assert all((part == 0).any() for part in out.chunk(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent_and_compute_the_same(copied):
    net = Net(dropout=0)
    model = start(2).setup(net)
    x = torch.randn(6, 4)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    other(x).sum().backward()
    assert net.head.weight.grad is None
    assert other.module.head.weight.grad is not None
    assert other.module is other._forward_module.module
    assert (net.norm.num_batches_tracked, other.module.norm.num_batches_tracked) == (1, 2)


# Replicas


def test_replica_zero_is_the_module_and_others_share_its_parameters():
    seen = []

    class Looks(Net):
        def forward(self, x):
            seen.append((self, self.head.weight, self.norm.running_mean))
            return super().forward(x)

    net = Looks()
    start(3).setup(net)(torch.randn(6, 4))
    assert seen[0][0] is net
    assert [m is net for m, _, _ in seen] == [True, False, False]
    assert all(type(m) is Looks and weight is net.head.weight for m, weight, _ in seen)
    assert len({mean.data_ptr() for _, _, mean in seen}) == 3


def test_buffers_are_those_of_replica_zero():
    net, alone = Net(dropout=0), Net(dropout=0)
    x = torch.randn(7, 4)
    out = start(2).setup(net)(x)
    assert torch.equal(out[:4], alone(x[:4]))
    for (name, got), want in zip(net.named_buffers(), alone.buffers(), strict=True):
        assert torch.equal(got, want), name


def test_what_a_replica_sets_on_itself():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = None
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.last = x.tolist()
            self.total = self.total + x.sum()
            self.total += 1
            return x + self.total

    net = Counts()
    out = start(2).setup(net)(torch.arange(4.0))
    assert net.last == [0, 1]
    assert net.total == 2
    assert out.tolist() == [2, 3, 2 + 6, 3 + 6], "each replica starts from the buffers before the call"


def test_parts_that_refer_to_their_module():
    def scaled(self, x):
        return x * self.scale + self.body.bias

    net = nn.Module()
    net.body = nn.Linear(2, 2)
    net.register_buffer("scale", torch.ones(2))
    net.forward = types.MethodType(scaled, net)
    replica = shallow_replica(net)
    assert replica.forward.__self__ is replica
    assert replica.scale is not net.scale
    x = torch.randn(5, 2)
    assert torch.equal(start(2).setup(net)(x), x + net.body.bias)


def test_a_module_used_twice_and_a_buffer_under_two_names_stay_one():
    net = nn.Module()
    net.a = net.b = nn.BatchNorm1d(2)
    net.a.other = net.a
    net.register_buffer("one", torch.ones(2))
    net.register_buffer("two", net.one)
    net.register_parameter("none", None)
    net.empty = None
    replica = shallow_replica(net)
    assert replica.a is replica.b
    assert replica.a is not net.a
    assert replica.one is replica.two
    assert replica.one is not net.one
    assert replica.none is None
    assert (replica.a.weight is net.a.weight, replica.a.running_mean is net.a.running_mean) == (True, False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_sequences_are_packed_inside_a_replica():
    net = Recurrent()
    x, lengths = torch.randn(5, 6, 3), torch.tensor([6, 2, 5, 1, 3])
    torch.testing.assert_close(start(2).setup(net)(x, lengths), net(x, lengths))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights(norm):
    layer = nn.Linear(4, 4)
    getattr(nn.utils.parametrizations, norm)(layer)
    net = nn.Sequential(layer).eval()  # spectral_norm moves its buffers while training
    x = torch.randn(5, 4)
    other = copy.deepcopy(net)
    start(2).setup(net)(x).sum().backward()
    other(x).sum().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_hooks_run_for_each_replica():
    net, rows = nn.Sequential(nn.Linear(2, 2)), []
    net[0].register_forward_hook(lambda module, args, out: rows.append(len(out)))
    start(2).setup(net)(torch.ones(5, 2))
    assert rows == [3, 2]


def test_functional_call_reaches_every_replica():
    net = nn.Linear(2, 1)
    model = start(2).setup(net)
    x = torch.ones(4, 2)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, zeros, (x,)), torch.zeros(4, 1))

    def loss(parameters, module):
        return torch.func.functional_call(module, parameters, (x,)).pow(2).mean()

    parameters = dict(net.named_parameters())
    got, want = torch.func.grad(loss)(parameters, model), torch.func.grad(loss)(parameters, net)
    assert torch.equal(got["weight"], want["weight"])
    assert want["weight"].abs().sum() > 0


# What holds around the call


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_the_callers_state_holds_in_every_replica(context):
    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
            torch.get_num_threads(),
        )

    seen = []
    model = calls(lambda x: seen.append(state()) or x)
    x = torch.ones(4)
    with context():
        expected = state()
        model(x)
    assert seen == [expected] * 2


def test_default_dtype_and_context_variables_hold_in_every_replica():
    variable = contextvars.ContextVar("variable", default=0)
    seen = []
    model = calls(lambda x: seen.append((torch.get_default_dtype(), variable.get())) or x)
    token = variable.set(5)
    torch.set_default_dtype(torch.float64)
    try:
        model(torch.ones(4))
    finally:
        torch.set_default_dtype(torch.float32)
        variable.reset(token)
    assert seen == [(torch.float64, 5)] * 2


def test_modes_and_saved_tensor_hooks_hold_in_every_replica():
    net = nn.Linear(3, 2)
    model = start(2).setup(net)
    x = torch.ones(4, 3)
    counts = []
    for module in (net, model):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(len(t)) or t, lambda t: t):
        model(x).sum().backward()
    assert packed.count(2) == 2, "each replica saves its two rows"


def test_inference_gives_inference_tensors():
    model = start(2).setup(nn.Linear(3, 2))
    with torch.inference_mode():
        assert model(torch.ones(4, 3)).is_inference()
    with torch.no_grad():
        assert not model(torch.ones(4, 3)).requires_grad


# Random draws


def draws(devices: int, seed: int, rows: int = 8) -> torch.Tensor:
    model = start(devices).setup(Net())
    torch.manual_seed(seed)
    return model(torch.ones(rows, 4))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_seed_decides_every_draw(devices):
    first = draws(devices, 1)
    assert all(torch.equal(draws(devices, 1), first) for _ in range(5))
    assert not torch.equal(draws(devices, 2), first)


def test_replicas_draw_in_order_from_one_stream():
    model = start(3).setup(nn.Dropout(0.5))
    x = torch.ones(6, 16)
    torch.manual_seed(1)
    got = model(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    want = torch.cat([nn.functional.dropout(part, 0.5) for part in x.chunk(3)])
    assert torch.equal(got, want)
    assert torch.equal(after, torch.rand(1)), "the stream goes on where the last replica left it"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_activation_checkpoints_draw_again_what_was_drawn(where, reentrant):
    class Blocks(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)])
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.checkpointed else block(x)
            return x

    grads = []
    for checkpointed in (False, True):
        net = Blocks(checkpointed and where == "inside")
        model = start(3).setup(net)
        x = torch.ones(7, 4, requires_grad=True)
        torch.manual_seed(2)
        around = checkpointed and where == "around"
        out = checkpoint(model, x, use_reentrant=reentrant) if around else model(x)
        out.pow(2).sum().backward()
        grads.append([p.grad for p in net.parameters()])
    for given, again in zip(*grads, strict=True):  # autograd decides the order of replicas' gradients
        torch.testing.assert_close(again, given)
    assert grads[0][0].abs().sum() > 0


# Errors in replicas


class Odd(Exception):
    """Its constructor takes more than a message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code, reason)
        self.reason = reason


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    "make", [lambda: ValueError("no"), lambda: Odd(3, reason="r"), lambda: SystemExit(4), StopIteration]
)
def test_an_exception_reaches_the_caller_with_the_replica_named(failing, make):
    error, ran = make(), []

    def forward(x):
        ran.append(int(x[0]))
        if x[0] == failing:
            raise error
        return x

    model = calls(forward, devices=3)
    with pytest.raises(type(error)) as caught:
        model(torch.arange(3.0))
    assert caught.value is error
    assert f"raised by replica {failing} of 3" in error.__notes__[0]
    assert "forward" in [frame.name for frame in caught.traceback], "the replica's own lines are shown"
    assert ran == list(range(failing + 1)), "later replicas do not start"
    assert model(torch.arange(3.0) + 3).tolist() == [3, 4, 5], "the model goes on"


def test_an_interrupt_reaches_the_caller():
    def forward(x):
        signal.raise_signal(signal.SIGINT)
        return x

    model = calls(forward)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(4, 2))


def test_a_map_over_samples_is_one_call():
    net = Calls(lambda x: (x * torch.arange(3.0)).sum())
    model = start(2).setup(net)
    assert torch.vmap(model)(torch.ones(5, 3)).tolist() == [[3.0]] * 5
    assert len(net.seen) == 1


def test_memory_of_a_forward_is_free_at_once():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def forward(self, x, fail=False):
            made = x * 2
            self.seen.append(weakref.ref(made))
            if fail:
                raise ValueError("no")
            return made + 1

    model = start(2).setup(Holds())
    gc.disable()
    try:
        model(torch.ones(4))
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(4), fail=True)
        assert [reference() for reference in model.seen[:2]] == [None, None]
    finally:
        gc.enable()


# torch.compile


def gradients(model, net, x) -> list[torch.Tensor]:
    net.zero_grad()
    model(x).pow(2).mean().backward()
    return [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]


@pytest.mark.parametrize("where", ["around", "a part", "in place", "a part in place"])
def test_compiled_models_compute_the_same(where):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def net():
        return nn.Sequential(Net(dropout=0), nn.Linear(2, 1))

    x = torch.randn(6, 4)
    plain, own = net(), net()
    own.load_state_dict(plain.state_dict())
    model = own
    if where == "around":
        model = torch.compile(own, backend=backend)
    elif where == "a part":
        own[0] = torch.compile(own[0], backend=backend)
    else:
        (own if where == "in place" else own[0]).compile(backend=backend)
    reference, model = start(2).setup(plain), start(2).setup(model)
    for step in range(3):
        got, want = gradients(model, own, x), gradients(reference, plain, x)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True)), step
    assert len(compiled) == (0 if where == "around" else 1), "once for all replicas and steps"


def test_a_layer_that_cannot_be_replicated_says_so():
    model = start(2).setup(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(RuntimeError, match="dummy forward pass"):
        model(torch.ones(4, 3))


def test_scripted_parts_are_shared():
    if not hasattr(torch.jit, "trace"):
        pytest.skip("this torch has no TorchScript")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still in users' models
        part = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
        net = nn.Sequential(part, nn.Linear(2, 1))
    x = torch.randn(5, 3)
    torch.testing.assert_close(start(2).setup(net)(x), net(x))


# CUDA


def test_what_cuda_replicas_are_given_and_give_back():
    split = DeviceSplit(nn.Linear(2, 1), [CPU, CPU])  # without CUDA torch leaves these two to us
    split.src_device_obj, split.device_ids = CPU, [0, 0]
    x = torch.arange(5.0)
    args, kwargs = split.scatter((Batch(x), 3), {"y": {"z": x}}, [0, 0])
    assert [a[0].x.tolist() for a in args] == [[0, 1, 2], [3, 4]]
    assert [(a[1], k["y"]["z"].tolist()) for a, k in zip(args, kwargs, strict=True)] == [
        (3, [0, 1, 2]),
        (3, [3, 4]),
    ]
    out = split.gather([Frozen(x[:3]), Frozen(x[3:])], 0)
    assert type(out) is Frozen
    assert torch.equal(out.x, x)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_two_cuda_devices_equal_one(precision):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    outputs = []
    for devices, strategy in ((2, "dp"), (1, "single_device")):
        fabric = Fabric(accelerator="cuda", devices=devices, strategy=strategy, precision=precision)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x in torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            fabric.backward(model(fabric.to_device(x)).pow(2).mean())
            optimizer.step()
        outputs.append([p.detach() for p in net.parameters()])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)


def test_the_splitting_module_by_itself():
    split = HostSplit(nn.Linear(2, 1), 3)
    assert split.count == 3
    assert split(torch.ones(4, 2)).shape == (4, 1)
    assert list(split.named_parameters(recurse=False)) == []
