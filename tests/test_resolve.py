"""Request and Machine to Plan, rule by rule. Nothing here starts a process."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import resolve as module
from fabric.accelerators import Accelerator, CPUAccelerator
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.traits import Traits
from fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
from fabric.resolve import Machine, Request, resolve
from fabric.strategies import STRATEGY_REGISTRY, DDPStrategy, SingleDeviceStrategy, Strategy
from fabric.strategies.layout import Layout

CPU = torch.device("cpu")


class Started(ClusterEnvironment):
    """Processes that something else started: `nodes` machines with `local` processes each."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self, local: int = 2, nodes: int = 1) -> None:
        self.local, self.nodes = local, nodes

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.local * self.nodes

    def local_world_size(self) -> int:
        return self.local

    def num_nodes(self) -> int:
        return self.nodes

    def global_rank(self) -> int:
        return 0

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise ConfigurationError(f"{num_devices} x {num_nodes} is not {self.world_size()}")


class Cards(Accelerator):
    """Four pretended devices."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True


class Custom(Strategy):
    """A strategy of one process with other traits."""

    def __init__(self, traits: Traits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layout = Layout()
        self.layout.traits = traits


def plan(*, flags: dict[str, str] | None = None, interactive=False, environment=None, **request: Any) -> Any:
    machine = Machine(environment or LocalEnvironment(), flags or {}, interactive)
    return resolve(Request(**request), machine)


def refusal(kind=ConfigurationError, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        plan(**kwargs)
    return str(caught.value)


# what comes out


def test_nothing_given_runs_on_one_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = plan()
    assert type(made.strategy) is SingleDeviceStrategy
    assert type(made.precision) is Precision
    assert len(made.devices) == made.num_nodes == 1
    assert isinstance(made.environment, LocalEnvironment)
    assert made.checkpoint_io is None


@pytest.mark.parametrize(
    ("request_", "machine", "strategy", "processes", "nodes"),
    [
        ({}, {}, "SingleDeviceStrategy", 1, 1),
        ({"devices": 1}, {}, "SingleDeviceStrategy", 1, 1),
        ({"devices": 2}, {}, "popen", 2, 1),
        ({"devices": "2"}, {}, "popen", 2, 1),
        ({"num_nodes": 2}, {}, "popen", 1, 2),
        ({"devices": 2}, {"interactive": True}, "fork", 2, 1),
        ({"devices": 1}, {"interactive": True}, "SingleDeviceStrategy", 1, 1),
        ({"strategy": "ddp"}, {}, "popen", 1, 1),
        ({"strategy": "ddp", "devices": 3}, {}, "popen", 3, 1),
        ({"strategy": "DDP", "accelerator": "CPU", "devices": 3}, {}, "popen", 3, 1),
        ({"strategy": "DDP_Spawn", "devices": 2}, {"flags": {"strategy": "ddp_spawn"}}, "spawn", 2, 1),
        ({"strategy": "AUTO"}, {}, "SingleDeviceStrategy", 1, 1),
        ({"strategy": "ddp_spawn", "devices": 2}, {}, "spawn", 2, 1),
        ({"strategy": "ddp_fork", "devices": 2}, {}, "fork", 2, 1),
        ({"strategy": "ddp_notebook", "devices": 2}, {"interactive": True}, "fork", 2, 1),
        ({"strategy": "ddp", "devices": 1}, {"interactive": True}, "popen", 1, 1),
        ({"strategy": "ddp_find_unused_parameters_true", "devices": 2}, {}, "popen", 2, 1),
        ({"strategy": "single_device"}, {}, "SingleDeviceStrategy", 1, 1),
        ({"strategy": "single_device", "accelerator": Cards()}, {}, "SingleDeviceStrategy", 1, 1),
        ({"accelerator": Cards()}, {}, "popen", 4, 1),
        ({"accelerator": Cards(), "devices": [1, 3]}, {}, "popen", 2, 1),
        # who started the processes says how many there are
        ({}, {"environment": Started(2)}, "popen", 2, 1),
        ({}, {"environment": Started(2, 3)}, "popen", 2, 3),
        ({"devices": " auto "}, {"environment": Started(2)}, "popen", 2, 1),
        ({"devices": 2, "num_nodes": 3}, {"environment": Started(2, 3)}, "popen", 2, 3),
        ({}, {"environment": Started(1)}, "SingleDeviceStrategy", 1, 1),
        ({"accelerator": Cards()}, {"environment": Started(2)}, "popen", 2, 1),
        ({"devices": 2}, {"environment": Started(2), "interactive": True}, "popen", 2, 1),
        ({"strategy": "single_device"}, {"environment": Started(2)}, "SingleDeviceStrategy", 1, 1),
        (
            {"strategy": "single_device", "devices": 1},
            {"environment": Started(2)},
            "SingleDeviceStrategy",
            1,
            1,
        ),
        # one process that holds several devices, on this machine or on each
        ({"strategy": "dp", "devices": 3}, {}, "", 3, 1),
        ({"strategy": "dp"}, {}, "", 1, 1),
        ({"strategy": "dp", "accelerator": Cards()}, {}, "", 4, 1),
        ({"strategy": "dp", "devices": 2}, {"interactive": True}, "", 2, 1),
        ({"strategy": "ddp2", "devices": 3}, {}, "popen", 3, 1),
        ({"strategy": "ddp2", "devices": 3, "num_nodes": 2}, {}, "popen", 3, 2),
        ({"strategy": "ddp2", "devices": 3}, {"interactive": True}, "popen", 3, 1),
        ({"strategy": "ddp2", "devices": 3, "num_nodes": 2}, {"environment": Started(1, 2)}, "popen", 3, 2),
        ({"strategy": "ddp2", "devices": 3}, {"environment": Started(1, 2)}, "popen", 3, 2),
        ({"strategy": "ddp2", "accelerator": Cards()}, {"environment": Started(1, 2)}, "popen", 4, 2),
        # as many per machine as were started; num_nodes=1 is only the default
        ({"devices": 2}, {"environment": Started(2, 3)}, "popen", 2, 3),
        # what `fabric run` was given
        ({}, {"flags": {"devices": "2"}}, "popen", 2, 1),
        ({}, {"flags": {"devices": "2", "num_nodes": "2"}}, "popen", 2, 2),
        ({"devices": 2}, {"flags": {"devices": "2"}}, "popen", 2, 1),
        ({"devices": 2}, {"flags": {"devices": "auto"}}, "popen", 2, 1),
        ({"accelerator": Cards(), "devices": [0, 1]}, {"flags": {"devices": "[0, 1]"}}, "popen", 2, 1),
        ({"devices": 2, "strategy": "ddp_spawn"}, {"flags": {"strategy": "ddp_spawn"}}, "spawn", 2, 1),
        ({"devices": 2}, {"flags": {"strategy": "ddp_fork", "accelerator": "cpu"}}, "fork", 2, 1),
    ],
)
def test_strategy_and_devices(request_, machine, strategy, processes, nodes):
    if "accelerator" not in request_ and "accelerator" not in machine.get("flags", {}):
        request_ = {"accelerator": "cpu", **request_}
    made = plan(**request_, **machine)
    assert getattr(made.strategy, "start_method", type(made.strategy).__name__) == strategy
    assert len(made.devices) == processes
    assert made.num_nodes == nodes


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        (None, Precision, "32-true"),
        (32, Precision, "32-true"),
        ("bf16", MixedPrecision, "bf16-mixed"),
        (16, MixedPrecision, "16-mixed"),
        ("16-true", HalfPrecision, "16-true"),
    ],
)
def test_precision(value, kind, name):
    made = plan(precision=value)
    assert type(made.precision) is kind
    assert made.precision.precision == name


def test_precision_from_every_place():
    own = HalfPrecision("bf16-true")
    assert plan(plugins=own).precision is own
    assert plan(plugins=[own]).precision is own
    assert plan(strategy=DDPStrategy(precision=own)).precision is own
    assert plan(flags={"precision": "bf16-true"}).precision.precision == "bf16-true"
    assert plan(precision=16, flags={"precision": "16"}).precision.precision == "16-mixed"


def test_plugins_are_sorted_whatever_their_order():
    precision, environment, io = HalfPrecision(), LightningEnvironment(), TorchCheckpointIO()
    for plugins in ([precision, environment, io], (io, precision, environment)):
        made = plan(plugins=plugins)
        assert (made.precision, made.environment, made.checkpoint_io) == (precision, environment, io)


def test_the_environment_of_a_strategy():
    own = Started(2)
    made = plan(strategy=DDPStrategy(cluster_environment=own), accelerator="cpu")
    assert made.environment is own
    assert len(made.devices) == 2


def test_devices_of_a_strategy():
    two = [CPU, CPU]
    assert plan(strategy=DDPStrategy(parallel_devices=two), accelerator="cpu").devices == two
    assert plan(strategy=DDPStrategy(parallel_devices=two), accelerator="cpu", devices=2).devices == two
    one = SingleDeviceStrategy("cuda:1")
    assert plan(strategy=one, accelerator=Cards()).devices == [torch.device("cuda:1")]
    assert plan(strategy=one, accelerator=Cards(), devices=1).devices == [torch.device("cuda:1")]


def test_the_accelerator_of_a_strategy():
    own = Cards()
    assert plan(strategy=DDPStrategy(accelerator=own)).accelerator is own


def test_auto_accelerator_heeds_what_the_strategy_runs_on(monkeypatch):
    monkeypatch.setattr(
        module, "select_accelerator", lambda choice, *_: Cards() if choice == "auto" else CPUAccelerator()
    )
    assert plan().accelerator.name() == "cards"
    assert plan(strategy=Custom(Traits(accelerators=("cuda", "cpu")))).accelerator.name() == "cpu"
    assert plan(strategy=Custom(Traits(accelerators=("cards",)))).accelerator.name() == "cards"


def test_a_strategy_that_splits_batches_over_devices_gets_all_of_them():
    made = plan(strategy=Custom(Traits(data_parallel=True)), accelerator=Cards())
    assert len(made.devices) == 4


def test_a_machine_has_one_process_or_one_for_each_device():
    traits = [STRATEGY_REGISTRY.get(name).traits for name in ("dp", "ddp2", "ddp")]
    assert [each.processes(3) for each in traits] == [1, 1, 3]


def test_a_strategy_of_machines_with_several_processes_on_one():
    message = refusal(strategy="ddp2", accelerator="cpu", devices=2, environment=Started(2, 2))
    assert "2 were started on this machine" in message
    assert "--nproc-per-node 1" in message
    message = refusal(strategy="ddp2", accelerator="cpu", devices=2, num_nodes=3, environment=Started(1, 2))
    assert message == "1 x 3 is not 2"


def test_resolving_is_repeatable_and_changes_no_argument():
    request, machine = Request(devices=2, precision="bf16"), Machine(LocalEnvironment(), {"devices": "2"})
    first, second = resolve(request, machine), resolve(request, machine)
    assert first.devices == second.devices
    assert first.strategy is not second.strategy
    assert request == Request(devices=2, precision="bf16")
    assert machine.flags == {"devices": "2"}


def test_the_machine_as_it_is(monkeypatch):
    monkeypatch.setenv("FABRIC_DEVICES", "3")
    monkeypatch.setenv("FABRIC_NUM_NODES", "")
    seen = Machine.detect()
    assert seen.flags == {"devices": "3"}, "an empty variable says nothing"
    assert isinstance(seen.environment, LocalEnvironment)
    assert not seen.interactive
    monkeypatch.setattr(module.sys, "ps1", ">>> ", raising=False)
    assert Machine.detect().interactive


def test_torchrun_says_how_many(monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    machine = Machine.detect()
    assert isinstance(machine.environment, TorchElasticEnvironment)
    made = resolve(Request(accelerator="cpu"), machine)
    assert (len(made.devices), made.num_nodes, type(made.strategy)) == (2, 3, DDPStrategy)
    with pytest.raises(ConfigurationError) as caught:
        resolve(Request(accelerator="cpu", devices=4), machine)
    assert "devices=4 x num_nodes=1 asks for 4 processes, 4 on each machine, but torchrun started 6" in str(
        caught.value
    )
    assert 'devices="auto"' in str(caught.value)
    with pytest.raises(ConfigurationError, match="asks for 12 processes"):
        resolve(Request(strategy=DDPStrategy(parallel_devices=[CPU] * 4), accelerator="cpu"), machine)


def test_a_registered_strategy_must_make_a_strategy():
    STRATEGY_REGISTRY.register("not_one", dict)
    try:
        assert "its factory made {}" in refusal(ArgumentTypeError, strategy="not_one")
    finally:
        STRATEGY_REGISTRY.remove("not_one")


def test_a_registered_strategy_of_a_third_party():
    STRATEGY_REGISTRY.register("mine", Custom, traits=Traits(precisions=("64-true",)))
    try:
        assert "'64-true'" in refusal(strategy="mine")
        assert isinstance(plan(strategy="mine", precision=64).strategy, Custom)
    finally:
        STRATEGY_REGISTRY.remove("mine")


def test_every_rule_is_short():
    source = Path(inspect.getsourcefile(module)).read_text()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = body[-1].end_lineno - body[0].lineno + 1
            assert lines <= 15, f"{function.name} has {lines} lines"


def test_a_strategy_without_a_fabric_is_the_only_rank():
    for strategy in (SingleDeviceStrategy(), DDPStrategy()):
        assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (0, 0, 0)
        assert strategy.world_size == 1
