"""Strategy "dp" in one process: what is split, what comes back, what replicas share, and every refusal."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.environments.local import LocalEnvironment
from fabric.strategies import DataParallelStrategy, ParallelStrategy
from fabric.strategies.data_parallel.layout import DeviceSplit
from fabric.strategies.data_parallel.parts import MicrobatchArgs

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
    parts = [args[0] for args, _ in MicrobatchArgs((x,), {}, count)]
    assert len(parts) == len(MicrobatchArgs((x,), {}, count))
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


def split() -> DeviceSplit:
    """As on two devices; without CUDA torch leaves these to us."""
    made = DeviceSplit(nn.Linear(2, 1), [CPU, CPU])
    made.src_device_obj, made.device_ids = CPU, [0, 0]
    return made


def test_every_leaf_of_a_tree_finds_its_way():
    x, y = torch.arange(5.0), torch.arange(10).reshape(5, 2)
    batch = Batch(x, "train")
    batch.rest = [y, None]
    scale = torch.tensor(3.0)
    given = (batch, Pair(x, {"y": y, "k": 7}), scale, "words", [1, 2, 3])
    (first, second), (first_kw, second_kw) = split().scatter(given, {"z": OrderedDict(a=x)}, [0, 0])
    for args, kwargs, part in ((first, first_kw, slice(0, 3)), (second, second_kw, slice(3, 5))):
        assert type(args[0]) is Batch
        assert torch.equal(args[0].x, x[part])
        assert torch.equal(args[0].rest[0], y[part])
        assert (args[0].name, args[0].rest[1]) == ("train", None)
        assert type(args[1]) is Pair
        assert torch.equal(args[1].left, x[part])
        assert torch.equal(args[1].right["y"], y[part])
        assert args[1].right["k"] == 7
        assert torch.equal(args[2], scale)
        assert args[3:] == ("words", [1, 2, 3])
        assert type(kwargs["z"]) is OrderedDict
        assert torch.equal(kwargs["z"]["a"], x[part])
    assert torch.equal(batch.x, x), "the caller's own objects are left as they are"


@pytest.mark.parametrize("given", [(torch.zeros(0, 3),), (), (3,), (torch.tensor(2.0),), ("a", None)])
def test_where_nothing_can_be_split_there_is_one_call_with_the_very_arguments(given):
    ((args, kwargs),) = MicrobatchArgs(given, {}, 3)
    assert all(one is other for one, other in zip(args, given, strict=True))
    assert kwargs == {}


# What comes back


def test_outputs_keep_their_types(monkeypatch):
    monkeypatch.setattr(nn.DataParallel, "gather", lambda self, column, device: joined(column))
    x = torch.arange(5.0)
    out = split().gather([{"b": Frozen(part), "p": Pair(part.sum(), None)} for part in (x[:3], x[3:])], 0)
    assert type(out["b"]) is Frozen
    assert torch.equal(out["b"].x, x)
    assert type(out["p"]) is Pair
    assert out["p"].left.tolist() == [3, 7]
    assert out["p"].right is None


def joined(column):
    """As torch's, which is there for CUDA."""
    return None if column[0] is None else torch.cat([leaf.reshape(-1) for leaf in column])


@pytest.mark.parametrize("outputs", [[3, 3], [torch.ones(1), (torch.ones(1),)], [torch.ones(1), "a"]])
def test_outputs_that_cannot_be_joined(outputs):
    with pytest.raises(UsageError, match="cannot be joined"):
        split().gather(outputs, 0)


def test_threads_have_the_callers_autocast(monkeypatch):
    monkeypatch.setattr(
        nn.DataParallel, "parallel_apply", lambda self, calls, args, kwargs: [c() for c in calls]
    )
    seen = lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))  # noqa: E731
    with torch.autocast("cpu", torch.float16):
        assert split().parallel_apply([seen], (), ()) == [(True, torch.float16)]
    assert split().parallel_apply([seen], (), ())[0][0] is False


@pytest.mark.parametrize("devices", [1, 3])
def test_on_the_cpu_the_model_sees_the_whole_batch(devices):
    net = Calls(lambda x: x.sum())
    model = start(devices).setup(net)
    assert model._forward_module is net
    assert model(torch.ones(3)).tolist() == 3


# Refusals of arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (torch.ones(6, 2), {"m": [torch.ones(4, 4)]}),
            {},
            ["differ in their number of rows (shapes [6, 2], [4, 4])", "tensor.expand"],
        ),
        ((torch.ones(6),), {"mask": torch.ones(1, 6)}, ["(shapes [6], [1, 6])", "buffer of the model"]),
        ((torch.ones(0, 2), torch.ones(2)), {}, ["(shapes [0, 2], [2])"]),
        ((Batch(torch.ones(2)), torch.ones(3)), {}, ["(shapes [2], [3])"]),
        (
            (pack_padded_sequence(torch.ones(1, 4, 2), [4], batch_first=True),),
            {},
            ["PackedSequence", "pack_padded_sequence in forward"],
        ),
    ],
)
def test_arguments_that_cannot_be_split(args, kwargs, words):
    with pytest.raises(ConfigurationError) as caught:
        split().scatter(args, kwargs, [0, 0])
    for word in words:
        assert word in str(caught.value)


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
    with pytest.raises(ConfigurationError, match="DataParallelStrategy belongs to no Fabric yet"):
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
    assert fabric.strategy.layout.devices == [CPU] * 3


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
    assert (net.norm.num_batches_tracked, other.module.norm.num_batches_tracked) == (1, 2)


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
    assert len(compiled) == 1, "once for all steps"


# CUDA


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
