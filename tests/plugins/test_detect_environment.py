"""Which environment wins, and what the foreign ones read. No processes."""

import json
import os
import warnings

import pytest

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.plugins.environments import (
    ENVIRONMENT_REGISTRY,
    LocalEnvironment,
    ProcessGroupEnvironment,
    TorchElasticEnvironment,
)
from fabric.plugins.environments.detect import PRECEDENCE, find_environment
from fabric.utilities.rank_zero import rank_zero_only
from fabric.utilities.warnings import PossibleUserWarning

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in [*TORCHRUN, "FABRIC_LAUNCHED", "FABRIC_ENVIRONMENT", "NODE_RANK"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_local_is_what_remains():
    assert type(find_environment().environment) is LocalEnvironment


FOREIGN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def foreign(monkeypatch):
    """What a `Fabric` of a rank sets is restored."""
    monkeypatch.setattr(rank_zero_only, "rank", rank_zero_only.rank, raising=False)
    for name, value in {**FOREIGN, "FABRIC_JOINED": ""}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({}, {}),  # no LOCAL_RANK: as another program sets them
        ({}, {"devices": 2, "strategy": "ddp"}),  # each would start a job of two
        ({"LOCAL_RANK": "1"}, {}),
        ({"LOCAL_RANK": "0"}, {"num_nodes": 2}),  # no NODE_RANK: all would be rank zero
    ],
)
def test_ranks_that_no_launcher_started_are_warned_of(foreign, variables, arguments):
    for name, value in variables.items():
        foreign.setenv(name, value)
    text = r"has RANK=1 and WORLD_SIZE=2, but no launcher that .* FABRIC_ENVIRONMENT=torchelastic, LOCAL_RANK"
    with pytest.warns(PossibleUserWarning, match=text):
        Fabric(**{"accelerator": "cpu", "devices": 1, **arguments})


JOINED = '1:{"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}'


class Foreign(LocalEnvironment):
    """A user's own, which reads these variables."""


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"WORLD_SIZE": "1", "RANK": "0"}, {}),
        ({"FABRIC_ENVIRONMENT": "local"}, {}),
        ({}, {"plugins": [LocalEnvironment()]}),
        ({}, {"plugins": [Foreign()]}),
        ({"LOCAL_RANK": "1"}, {"devices": 2, "strategy": "ddp"}),
        ({"NODE_RANK": "1"}, {"num_nodes": 2}),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, {"num_nodes": 2}),
        ({"FABRIC_LAUNCHED": "script", "LOCAL_RANK": "1"}, {"devices": 2}),
        ({"NODE_RANK": "1"}, {"devices": 2, "num_nodes": 2, "strategy": "ddp"}),  # some count machines
        ({"FABRIC_JOINED": JOINED, "LOCAL_RANK": "1"}, {}),  # started by such a rank
    ],
)
def test_healthy_ranks_are_not_warned_of(foreign, variables, arguments):
    for name, value in variables.items():
        foreign.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fabric(**{"accelerator": "cpu", "devices": 1, **arguments})


def test_a_rank_of_another_program_marks_itself_for_its_subprocesses(foreign):
    foreign.setenv("LOCAL_RANK", "1")
    Fabric(accelerator="cpu", devices=2, strategy="ddp")
    process, _, variables = os.environ["FABRIC_JOINED"].partition(":")
    assert process == str(os.getpid())
    assert json.loads(variables) == FOREIGN


@pytest.mark.usefixtures("torchrun")
def test_torchrun_is_recognised():
    environment = find_environment().environment
    assert type(environment) is TorchElasticEnvironment
    assert environment.creates_processes_externally
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (1, 1, 0)
    assert (environment.world_size(), environment.local_world_size(), environment.num_nodes()) == (2, 2, 1)
    assert (environment.main_address, environment.main_port) == ("localhost", 29500)
    environment.set_world_size(9)
    environment.set_global_rank(9)
    assert (environment.world_size(), environment.global_rank()) == (2, 1)


@pytest.mark.usefixtures("torchrun")
def test_an_existing_group_beats_torchrun(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert type(find_environment().environment) is ProcessGroupEnvironment


@pytest.mark.usefixtures("torchrun")
def test_one_variable_overrules(monkeypatch):
    monkeypatch.setenv("FABRIC_ENVIRONMENT", "local")
    assert type(find_environment().environment) is LocalEnvironment
    monkeypatch.setenv("FABRIC_ENVIRONMENT", "torchrum")
    with pytest.raises(ConfigurationError, match=r"='torchrum' is not known\. Did you mean 'torchrun'"):
        find_environment()


def test_the_last_one_always_says_yes():
    assert ENVIRONMENT_REGISTRY.entry(PRECEDENCE[-1]).load().detect()


def test_names():
    assert ENVIRONMENT_REGISTRY.names() == [
        *("horovod", "kubeflow", "local", "lsf", "mpi", "process_group", "ray", "slurm", "torchelastic"),
        "torchrun",
    ]


@pytest.mark.usefixtures("torchrun")
def test_the_same_number_on_other_machines(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    TorchElasticEnvironment().validate_settings(1, 2)
    with pytest.raises(ConfigurationError, match="GROUP_WORLD_SIZE=2, LOCAL_WORLD_SIZE=1"):
        TorchElasticEnvironment().validate_settings(2, 1)


@pytest.mark.usefixtures("torchrun")
def test_a_world_size_that_differs_from_devices():
    environment = TorchElasticEnvironment()
    environment.validate_settings(2, 1)
    with pytest.raises(ConfigurationError) as caught:
        environment.validate_settings(4, 1)
    assert str(caught.value) == (
        "devices=4 x num_nodes=1 asks for 4 processes, 4 on each machine, but torchrun started 2 "
        '(WORLD_SIZE=2, GROUP_WORLD_SIZE=1, LOCAL_WORLD_SIZE=2). Write devices="auto" and num_nodes=1 in the '
        "script, or start torchrun with --nnodes 1 --nproc-per-node 4."
    )


def test_a_broken_torchrun_environment(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigurationError, match="variable RANK='x' must be a whole number"):
        find_environment().environment.global_rank()


def test_an_existing_group_tells_the_place(ranks):
    assert ranks.run(_in_group, world_size=2) == [(0, 0, 2, 2, 1), (1, 1, 2, 2, 1)]


def _in_group():
    environment = find_environment().environment
    assert type(environment) is ProcessGroupEnvironment
    environment.validate_settings(2, 1)
    with pytest.raises(ConfigurationError, match=r"but init_process_group started 2 .* do not call"):
        environment.validate_settings(4, 1)
    return (
        environment.global_rank(),
        environment.local_rank(),
        environment.world_size(),
        environment.local_world_size(),
        environment.num_nodes(),
    )


def test_ranks_of_a_process_group_by_variables_need_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("LOCAL_RANK", 1), ("GROUP_RANK", 2), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(number))
    environment = ProcessGroupEnvironment()
    found = environment.local_rank(), environment.node_rank(), environment.local_world_size()
    assert found == (1, 2, 4)


RANK = {
    "FABRIC_LAUNCHED": "script",
    "FABRIC_STORE_FD": "3",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
}


CHANGED = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


@pytest.mark.parametrize(
    ("process", "marked", "kept"),
    [
        ("own", {"MASTER_PORT": "7"}, {*RANK}),  # a rank that makes a second Fabric
        ("", {}, {*RANK}),  # a rank that is a child of what the launcher has started
        ("1", {"MASTER_PORT": "7"}, set()),
        ("1", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "7"}, set()),
        ("1", {"MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "a,b=1:2"}, set()),  # which the child has removed
        ("1", {"MASTER_PORT": "8"}, CHANGED),  # of a launcher in between
        ("1", {"RANK": "1"}, CHANGED),  # that rank had no port
        ("1", {"RANK": "0", "MASTER_PORT": "7"}, CHANGED),  # that rank started another one
        ("1", {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "7"}, CHANGED),  # or another job
        ("1", 29500, CHANGED),  # of another version
    ],
)
def test_a_process_that_a_rank_started_is_no_rank(monkeypatch, process, marked, kept):
    for name, value in {**RANK, "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    own = str(os.getpid()) if process == "own" else process
    monkeypatch.setenv("FABRIC_JOINED", f"{own}:{json.dumps(marked)}" if own else "")
    found = find_environment()
    assert {name for name in RANK if name in os.environ} == kept
    assert found.environment.creates_processes_externally == bool(kept)
    assert ("a rank (process 1) started this process" in found.reason) == (process == "1")


@pytest.mark.parametrize(
    "changed",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "8"},
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": None},
        {"WORLD_SIZE": None, "RANK": "0", "LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0"},
    ],
)
def test_a_process_that_a_rank_starts_alone_or_on_another_device_is_no_rank(monkeypatch, changed):
    marked = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**RANK, **marked, "LOCAL_WORLD_SIZE": "2", **changed}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setenv("FABRIC_JOINED", f"1:{json.dumps(marked)}")
    assert not find_environment().environment.creates_processes_externally
    assert "RANK" not in os.environ


def test_torchrun_with_one_rank_inside_of_a_rank_starts_a_rank(monkeypatch):
    marked = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "none"}
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "8"}
    for name, value in {**TORCHRUN, **own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FABRIC_JOINED", f"1:{json.dumps(marked)}")
    assert type(find_environment().environment) is TorchElasticEnvironment
