"""Bad input, one case each: the kind of the error, and what its message must say."""

from __future__ import annotations

import functools

import pytest
import torch
from test_resolve import Cards, Custom, Started, refusal
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.accelerators import CPUAccelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.traits import Traits
from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.precision import HalfPrecision, Precision
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

CPU = torch.device("cpu")

# what is refused: (request, machine, kind, every part of the message)

TWO = [CPU, CPU]
REFUSED = {
    "unknown strategy": (
        {"strategy": "dpp"},
        {},
        ConfigurationError,
        ["strategy='dpp'", "or 'ddp'", "ddp_spawn"],
    ),
    "unknown accelerator": ({"accelerator": "cdua"}, {}, ConfigurationError, ["='cdua'", "mean 'cuda'"]),
    "unknown precision": (
        {"precision": "bf16-mix"},
        {},
        ConfigurationError,
        ["'bf16-mix'", "mean 'bf16-mixed'"],
    ),
    "precision of a wrong type": ({"precision": [16]}, {}, ConfigurationError, ["precision=[16]"]),
    "strategy of a wrong type": (
        {"strategy": 3},
        {},
        ArgumentTypeError,
        ["strategy=3", "is a int", "DDPStrategy()"],
    ),
    "strategy class": (
        {"strategy": DDPStrategy},
        {},
        ArgumentTypeError,
        ["must be a name or a Strategy object"],
    ),
    "strategy None": ({"strategy": None}, {}, ArgumentTypeError, ["strategy=None"]),
    "accelerator of a wrong type": ({"accelerator": 1}, {}, ArgumentTypeError, ["accelerator=1"]),
    "no such GPU": (
        {"accelerator": "cuda"},
        {},
        ConfigurationError,
        ['accelerator="cuda"', 'accelerator="cpu"'],
    ),
    "devices zero": ({"devices": 0}, {}, ConfigurationError, ["devices=0"]),
    "devices a float": ({"devices": 2.0}, {}, ArgumentTypeError, ["devices=2.0"]),
    "devices a list on the CPU": (
        {"devices": [0, 1]},
        {},
        ArgumentTypeError,
        ["devices=[0, 1]", "number of processes"],
    ),
    "devices unreadable": ({"devices": "two"}, {}, ConfigurationError, ["devices='two'"]),
    "num_nodes zero": ({"num_nodes": 0}, {}, ConfigurationError, ["num_nodes=0", "1 or more"]),
    "num_nodes a string": ({"num_nodes": "2"}, {}, ConfigurationError, ["num_nodes='2'"]),
    "num_nodes a bool": ({"num_nodes": True}, {}, ConfigurationError, ["num_nodes=True"]),
    "one process, two devices": (
        {"strategy": "single_device", "devices": 2},
        {},
        ConfigurationError,
        ["strategy='single_device'", "devices=2", "Write devices=1", 'strategy="ddp"'],
    ),
    "one process, two machines": (
        {"strategy": SingleDeviceStrategy(), "num_nodes": 2},
        {},
        ConfigurationError,
        ["SingleDeviceStrategy", "num_nodes=2"],
    ),
    "precision as argument and plugin": (
        {"precision": "bf16-true", "plugins": HalfPrecision()},
        {},
        ConfigurationError,
        ["precision is given twice", "precision='bf16-true'", "plugins=HalfPrecision", "Keep one"],
    ),
    "precision as argument and of the strategy": (
        {"precision": 32, "strategy": DDPStrategy(precision=HalfPrecision())},
        {},
        ConfigurationError,
        ["precision is given twice", "precision=32", "DDPStrategy(precision=...)"],
    ),
    "precision as plugin and of the strategy": (
        {"plugins": [Precision()], "strategy": DDPStrategy(precision=HalfPrecision())},
        {},
        ConfigurationError,
        ["precision is given twice", "plugins=Precision", "DDPStrategy(precision=...)"],
    ),
    "plugin of another kind": (
        {"plugins": "fp16"},
        {},
        ArgumentTypeError,
        ["but got 'fp16'. Write Fabric(precision=\"bf16-mixed\")"],
    ),
    "two plugins of a kind": (
        {"plugins": [HalfPrecision(), Precision()]},
        {},
        ConfigurationError,
        ["two of Precision"],
    ),
    "a plugin of no kind": (
        {"plugins": [42]},
        {},
        ArgumentTypeError,
        ["takes Precision, ClusterEnvironment", "42"],
    ),
    "a plugin's class": ({"plugins": HalfPrecision}, {}, ArgumentTypeError, ["objects, but got <class"]),
    "environment twice": (
        {"plugins": Started(), "strategy": DDPStrategy(cluster_environment=Started())},
        {},
        ConfigurationError,
        ["cluster environment is given twice", "plugins=", "DDPStrategy(cluster_environment=...)"],
    ),
    "accelerator twice": (
        {"accelerator": "cpu", "strategy": DDPStrategy(accelerator=CPUAccelerator())},
        {},
        ConfigurationError,
        ["accelerator is given twice", "accelerator='cpu'", "DDPStrategy(accelerator=...)"],
    ),
    "checkpoint IO twice": (
        {"plugins": TorchCheckpointIO(), "strategy": DDPStrategy(checkpoint_io=TorchCheckpointIO())},
        {},
        ConfigurationError,
        ["checkpoint IO is given twice", "plugins=TorchCheckpointIO"],
    ),
    "devices twice": (
        {"devices": 3, "strategy": DDPStrategy(parallel_devices=TWO)},
        {},
        ConfigurationError,
        ["choice of devices is given twice", "devices=3", "cpu, cpu"],
    ),
    "other devices than the strategy's": (
        {"accelerator": Cards(), "devices": [0], "strategy": SingleDeviceStrategy("cuda:1")},
        {},
        ConfigurationError,
        ["devices=[0]", "SingleDeviceStrategy with cuda:1"],
    ),
    "a device that is not there": (
        {"strategy": SingleDeviceStrategy("cuda:0")},
        {},
        ConfigurationError,
        ['accelerator="cuda"'],
    ),
    "a GPU strategy without a GPU": (
        {"strategy": Custom(Traits(accelerators=("cuda",)))},
        {},
        ConfigurationError,
        ["strategy=Custom runs on cuda only", "accelerator='auto' is cpu here", '"ddp" runs on every device'],
    ),
    "a strategy with other precisions": (
        {"strategy": Custom(Traits(precisions=("32-true", "bf16-mixed"))), "precision": "16-mixed"},
        {},
        ConfigurationError,
        ["Custom does not run with precision='16-mixed'", "'32-true', 'bf16-mixed'"],
    ),
    "scripts in a notebook": (
        {"strategy": "ddp", "devices": 2},
        {"interactive": True},
        ConfigurationError,
        ["notebook", 'strategy="ddp_notebook"', "fabric.launch(function)"],
    ),
    "scripts in a notebook, by object": (
        {"strategy": DDPStrategy(), "devices": 2},
        {"interactive": True},
        ConfigurationError,
        ["that strategy=DDPStrategy could run", 'or DDPStrategy(..., start_method="fork")'],
    ),
    "scripts in a notebook, zero2": (
        {"strategy": "zero2", "devices": 2},
        {"interactive": True},
        ConfigurationError,
        ["that strategy='zero2' could run", 'or FSDPStrategy(..., start_method="fork")'],
    ),
    "other processes than were started": (
        {"devices": 3},
        {"environment": Started(2)},
        ConfigurationError,
        ["3 x 1 is not 2"],
    ),
    "one process where two were started": (
        {"devices": 1},
        {"environment": Started(2)},
        ConfigurationError,
        ["1 x 1 is not 2"],
    ),
    "flag against argument": (
        {"devices": 3},
        {"flags": {"devices": "2"}},
        ConfigurationError,
        [
            "Fabric(devices=3) contradicts devices='2'",
            "FABRIC_DEVICES",
            "Remove devices= from the code",
            "--devices",
        ],
    ),
    "flag against number of machines": (
        {"num_nodes": 3},
        {"flags": {"num_nodes": "2"}},
        ConfigurationError,
        ["num_nodes=3", "leave --num-nodes out"],
    ),
    "flag against object": (
        {"strategy": DDPStrategy()},
        {"flags": {"strategy": "ddp"}},
        ConfigurationError,
        ["contradicts strategy='ddp'"],
    ),
    "flag against precision": (
        {"precision": "16-true"},
        {"flags": {"precision": "16"}},
        ConfigurationError,
        ["precision='16-true'"],
    ),
    "flag in other words": (
        {"precision": 16},
        {"flags": {"precision": "16-mixed"}},
        ConfigurationError,
        ["precision=16", "precision='16-mixed' from `fabric run`"],
    ),
    "flag that is no number": (
        {},
        {"flags": {"num_nodes": "two"}},
        ConfigurationError,
        ["num_nodes='two'", "whole number"],
    ),
    "flag that is no name": (
        {},
        {"flags": {"strategy": "dpp"}},
        ConfigurationError,
        ["strategy='dpp'", "or 'ddp'"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    request, machine, kind, parts = REFUSED[case]
    if "accelerator" not in str(parts) and "accelerator" not in request:
        request = {"accelerator": "cpu", **request}
    message = refusal(kind, **request, **machine)
    for part in parts:
        assert part in message


# the verbs of Fabric


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu")


@pytest.fixture
def early():
    """A Fabric of two ranks before launch()."""
    return Fabric(accelerator="cpu", devices=2, strategy="ddp")


def linear():
    return torch.nn.Linear(2, 2)


BEFORE_LAUNCH = {
    "barrier()": lambda f: f.barrier(),
    "broadcast()": lambda f: f.broadcast(1),
    "all_gather()": lambda f: f.all_gather(1.0),
    "all_reduce()": lambda f: f.all_reduce(1.0),
    "rank_zero_first()": lambda f: f.rank_zero_first().__enter__(),
    "setup()": lambda f: f.setup(linear()),
    "setup_optimizers()": lambda f: f.setup_optimizers(torch.optim.SGD(linear().parameters())),
    "setup_dataloaders()": lambda f: f.setup_dataloaders(DataLoader([1, 2])),
    "init_module()": lambda f: f.init_module(),
    "sharded_model()": lambda f: f.sharded_model(),
    "save()": lambda f: f.save("never-written", {}),
    "load()": lambda f: f.load("never-read"),
    "load_raw()": lambda f: f.load_raw("never-read", linear()),
}


@pytest.mark.parametrize("verb", BEFORE_LAUNCH)
def test_verbs_of_all_ranks_wait_for_launch(early, verb):
    with pytest.raises(UsageError) as caught:
        BEFORE_LAUNCH[verb](early)
    assert str(caught.value) == (
        f"fabric.{verb} was used before fabric.launch(): the other ranks have not started yet. "
        f"Write fabric.launch() right after Fabric(...)."
    )


@pytest.mark.parametrize("verb", ["barrier()", "broadcast()", "all_gather()", "all_reduce()", "setup()"])
def test_one_process_needs_no_launch(fabric, verb):
    BEFORE_LAUNCH[verb](fabric)


def nothing():
    pass


def keyword_only(*, fabric):
    pass


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (None, ["needs a function, but got None", "fabric.launch(train), not fabric.launch(train())"]),
        (42, ["needs a function, but got 42"]),
        ("train", ["needs a function, but got 'train'"]),
        (nothing, ["calls nothing(fabric, ...), but nothing takes no argument", "def nothing(fabric)"]),
        (keyword_only, ["but keyword_only takes no argument"]),
        (functools.partial(nothing), ["takes no argument"]),
    ],
)
def test_what_launch_cannot_call(fabric, function, parts):
    with pytest.raises(ArgumentTypeError) as caught:
        fabric.launch(function)
    for part in parts:
        assert part in str(caught.value)


def test_settings_given_to_launch(fabric):
    text = r"launch\(devices=2\) got arguments, but no function .*\. Write Fabric\(devices=2\) for settings"
    with pytest.raises(ArgumentTypeError, match=text):
        fabric.launch(devices=2)


def train(fabric, lr=0.1):
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "parts"),
    [
        ((), {"epochs": 3}, ["train(fabric, epochs=3), but it is def train(fabric, lr=0.1)", "'epochs'"]),
        ((1, 2), {}, ["train(fabric, 1, 2)", "too many positional arguments"]),
        ((1,), {"lr": 2}, ["train(fabric, 1, lr=2)", "multiple values for argument 'lr'"]),
    ],
)
def test_arguments_that_the_launched_function_has_not(fabric, args, kwargs, parts):
    with pytest.raises(ArgumentTypeError) as caught:
        fabric.launch(train, *args, **kwargs)
    for part in [*parts, "Pass the arguments that it has after the Fabric: fabric.launch(train, ...)"]:
        assert part in str(caught.value)


def test_a_decorator_may_pass_other_arguments(fabric):
    def with_lr(function):
        @functools.wraps(function)
        def call(fabric):
            return function(fabric, 0.1)

        return call

    assert fabric.launch(with_lr(lambda fabric, lr: lr)) == 0.1


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_a_function_launcher_needs_a_function(strategy):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"function"):
        fabric.launch()


def test_a_forked_rank_cannot_share_cuda(monkeypatch):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is initialised") as caught:
        fabric.launch(print)
    assert "spawn" in str(caught.value)


def test_what_cannot_be_pickled_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].act = lambda x: x
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    with pytest.raises((TypeError, RuntimeError), match=r"Sequential .*<lambda>"):
        fabric.launch(print, model)


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({}, "clip_val=None and max_norm=None"),
        ({"clip_val": 1, "max_norm": 2.0}, "clip_val=1 and max_norm=2.0"),
    ],
)
def test_clipping_needs_one_limit(fabric, limits, shown):
    model, optimizer = fabric.setup(module := linear(), torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError) as caught:
        fabric.clip_gradients(model, optimizer, **limits)
    assert shown in str(caught.value)
    assert "clip_val=0.5" in str(caught.value)
    assert "max_norm=1.0" in str(caught.value)


def twice_a_model(fabric):
    fabric.setup(fabric.setup(linear()))


def twice_a_model_alone(fabric):
    fabric.setup_module(fabric.setup(linear()))


def twice_an_optimizer(fabric):
    _, optimizer = fabric.setup(module := linear(), torch.optim.SGD(module.parameters()))
    fabric.setup_optimizers(optimizer)


def twice_a_loader(fabric):
    fabric.setup_dataloaders(fabric.setup_dataloaders(DataLoader([1, 2])))


def the_same_optimizer(fabric):
    optimizer = torch.optim.SGD((module := linear()).parameters())
    fabric.setup(module, optimizer, optimizer)


def anothers_parameters(fabric):
    fabric.setup(linear(), torch.optim.SGD(linear().parameters()))


SETUP = {
    twice_a_model: (ConfigurationError, ["this Linear is set up already", "once"]),
    twice_a_model_alone: (ConfigurationError, ["fabric.setup_module:", "this Linear is set up already"]),
    twice_an_optimizer: (ConfigurationError, ["this SGD is set up already"]),
    twice_a_loader: (ConfigurationError, ["DataLoader is set up already"]),
    the_same_optimizer: (ConfigurationError, ["same optimizer was passed twice"]),
    anothers_parameters: (ConfigurationError, ["2 of 2 parameters of SGD", "(2, 2)", ".parameters()"]),
    lambda f: f.setup("model"): (ArgumentTypeError, ["torch's Module", "str"]),
    lambda f: f.setup(linear(), "sgd"): (ArgumentTypeError, ["torch's Optimizer", "str"]),
    lambda f: f.setup_optimizers(): (ConfigurationError, ["at least one Optimizer"]),
    lambda f: f.setup_dataloaders(): (ConfigurationError, ["at least one DataLoader"]),
    lambda f: f.setup_dataloaders([1]): (ArgumentTypeError, ["torch's DataLoader", "list"]),
    lambda f: f.no_backward_sync(linear()): (UsageError, ["model = fabric.setup(model)"]),
    lambda f: f.broadcast(1, src=1): (ConfigurationError, ["src=1", "from 0 to 0"]),
    lambda f: f.broadcast(1, src=-1): (ConfigurationError, ["src=-1"]),
    lambda f: f.broadcast(1, src="0"): (ArgumentTypeError, ["src='0'", "is no rank"]),
    lambda f: f.all_reduce(1.0, reduce_op="avrg"): (
        ConfigurationError,
        ["'avrg'", "mean 'avg'", "'product'"],
    ),
    lambda f: f.all_reduce(1.0, reduce_op=3): (ArgumentTypeError, ["reduce_op=3 is a int"]),
    lambda f: f.all_reduce("text"): (ArgumentTypeError, ["a leaf is str: 'text'", "fabric.broadcast"]),
    lambda f: f.all_reduce({"a": {1}}): (ArgumentTypeError, ["a leaf is set: {1}", "fabric.broadcast"]),
    lambda f: f.all_reduce(2): (ArgumentTypeError, ["mean", "torch.int64", "would round", "reduce_op='sum'"]),
    lambda f: f.all_gather(None): (ArgumentTypeError, ["a leaf is NoneType"]),
    lambda f: f.load_raw("x", {}): (ArgumentTypeError, ["fabric.load"]),
    lambda f: f.seed_everything(-1): (ConfigurationError, ["seed=-1"]),
    lambda f: f.run(): (UsageError, ["Fabric has no run()", "def run(self"]),
    lambda f: f.logger: (UsageError, ["no logger", "CSVLogger"]),
    lambda f: f.log("loss", torch.ones(2)): (ConfigurationError, ["shape (2,)"]),
    lambda f: f.log(3, 4): (ArgumentTypeError, ["3 (int) is not a name", 'fabric.log("loss", value)']),
    lambda f: f.log_dict({None: 1.0}, 2): (ArgumentTypeError, ["None (NoneType)"]),
}


@pytest.mark.parametrize("call", SETUP, ids=lambda call: call.__name__)
def test_verbs_refuse(fabric, call):
    kind, parts = SETUP[call]
    with pytest.raises(kind) as caught:
        call(fabric)
    for part in parts:
        assert part in str(caught.value)


def test_torchrun_with_other_numbers_than_the_script(monkeypatch):
    environ = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"devices=4 .* torchrun started 2 .*--nproc-per-node 4"):
        Fabric(accelerator="cpu", devices=4)


def test_a_strategy_object_belongs_to_one_fabric():
    strategy = SingleDeviceStrategy()
    Fabric(strategy=strategy)
    with pytest.raises(ConfigurationError, match=r"belongs to another Fabric.*Create a strategy"):
        Fabric(strategy=strategy)


def test_a_number_instead_of_the_loss():
    with pytest.raises(
        ArgumentTypeError, match=r"got float. Write fabric.backward\(loss\) without .item\(\)"
    ):
        Fabric().backward(1.0)


def test_the_same_raw_model_twice():
    fabric, model = Fabric(accelerator="cpu"), torch.nn.Linear(1, 1)
    first = fabric.setup(model)
    with pytest.raises(ConfigurationError, match="this Linear is set up already"):
        fabric.setup_module(model)
    del first


def test_an_output_that_is_a_parameter_collects_no_hooks():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale, self.scale

    fabric = Fabric(accelerator="cpu", precision="16-mixed")
    model = fabric.setup(Scaled())
    for _ in range(3):
        model(torch.ones(2))
    assert not model.scale._backward_hooks


def test_a_list_of_ranks_is_no_process_group():
    with pytest.raises(ArgumentTypeError, match=r"process_group=\[0, 1\] is not a process group\. Write pro"):
        DDPStrategy(process_group=[0, 1])


@pytest.mark.parametrize(
    ("kind", "given", "hint"),
    [
        (DDPStrategy, "find_unused", "Did you mean 'find_unused_parameters'?"),
        (DDPStrategy, "backend", "It takes accelerator, "),
        (FSDPStrategy, "time_out", "Did you mean 'timeout'"),
        (FSDPStrategy, "start_methd", "Did you mean 'start_method'"),
        (FSDPStrategy, "limit_all_gather", "Did you mean 'limit_all_gathers'"),
        (FSDPStrategy, "zzqq", "It takes accelerator, "),
    ],
)
def test_a_keyword_that_a_strategy_does_not_take(kind, given, hint):
    with pytest.raises(ConfigurationError) as caught:
        kind(**{given: True})
    assert str(caught.value).startswith(f"{kind.__name__} has no keyword {given!r}. {hint}")
