"""LocalEnvironment: what it reads, what it hosts, what it refuses."""

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from ports import free_port
from torch.distributed import HashStore

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.launch import stores
from fabric.launch.rank_env import first_rank_env, first_rank_env_of
from fabric.plugins.environments import LightningEnvironment, LocalEnvironment
from fabric.plugins.environments import rendezvous as meeting
from fabric.plugins.environments.rendezvous import await_ranks

SECOND = timedelta(seconds=1)
LAUNCHED = {
    "FABRIC_LAUNCHED": "cli",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in [*LAUNCHED, "GROUP_RANK", "FABRIC_STORE_FD"]:
        monkeypatch.delenv(name, raising=False)


def place(environment):
    return (
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
        environment.world_size(),
        environment.local_world_size(),
        environment.num_nodes(),
    )


def test_before_any_launch_it_is_alone():
    environment = LocalEnvironment()
    assert place(environment) == (0, 0, 0, 1, None, None)
    assert environment.main_address == "127.0.0.1"
    assert not environment.creates_processes_externally
    assert LightningEnvironment is LocalEnvironment


def test_a_launched_rank_reads_its_variables(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    environment = LocalEnvironment()
    assert environment.creates_processes_externally
    assert place(environment) == (5, 1, 1, 8, 4, 2)
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 1234)


def test_stale_ranks_in_the_environment_of_an_unlaunched_process_mean_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert place(LocalEnvironment())[:4] == (0, 0, 0, 1)


def test_set_world_size_and_rank():
    environment = LocalEnvironment()
    environment.set_world_size(3)
    environment.set_global_rank(2)
    assert (environment.world_size(), environment.global_rank()) == (3, 2)


def test_one_machine_listens_on_a_port_of_the_kernel_on_the_loopback_only():
    first, other = first_rank_env_of(LocalEnvironment(), 2, 1), first_rank_env_of(LocalEnvironment(), 2, 1)
    with first[1], other[1]:
        port = first[0].main_port
        assert port != other[0].main_port
        addresses = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()}
        assert f"0100007F:{port:04X}" in addresses


def own_address():
    """An address of this machine that is no loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        any_socket.connect(("192.0.2.1", 9))  # nothing is sent
        return any_socket.getsockname()[0]
    pytest.skip("this machine has no address but the loopback")


EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        (["127.0.0.1"], EVERYWHERE),  # of Debian: another machine has another address for this name
        (["192.0.2.7"], EVERYWHERE),  # of the host around a container
        (["127.0.0.1", "127.0.0.2"], EVERYWHERE),
    ],
)
def test_a_name_that_is_no_single_address_of_this_machine_is_listened_for_everywhere(
    monkeypatch, resolved, expected
):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in resolved]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with stores.listen("node7", 0, one_interface=True) as listener:
        assert listener.getsockname()[0] == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "own"])
def test_several_machines_listen_on_the_main_address(address):
    given = own_address() if address == "own" else address
    with stores.listen(given, 0, one_interface=True) as listener:
        assert listener.getsockname()[0] == (given if address == "own" else "127.0.0.1")


def test_a_job_of_one_machine_has_a_secret_of_its_own(monkeypatch):
    monkeypatch.delenv("FABRIC_JOB_SECRET", raising=False)
    found = [first_rank_env_of(LocalEnvironment(), 2, 1) for _ in range(2)]
    for _, listener in found:
        listener.close()
    first, other = [place for place, _ in found]
    assert first.secret != other.secret
    assert first.variables({}, "cli")["FABRIC_JOB_SECRET"] == first.with_local_rank(1).secret == first.secret
    assert first.secret not in repr(first)
    monkeypatch.setenv("FABRIC_JOB_SECRET", "of a scheduler")
    place, listener = first_rank_env_of(LocalEnvironment(), 2, 1)
    listener.close()
    assert place.secret == "of a scheduler"


def test_launchers_of_several_machines_make_no_secret_of_their_own(monkeypatch):
    monkeypatch.delenv("FABRIC_JOB_SECRET", raising=False)
    place, _ = first_rank_env(2, 2, 1, "node1", 29400)
    assert "FABRIC_JOB_SECRET" not in place.variables({}, "cli")


def test_an_explicit_port_is_honoured_and_named_when_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: another process .* uses the port"):
            first_rank_env_of(LocalEnvironment(), 2, 1)
    place, listener = first_rank_env_of(LocalEnvironment(), 2, 1)
    listener.close()
    assert place.main_port == port


@pytest.mark.parametrize("value", ["abc", "1.5"])
def test_a_variable_that_is_no_number(monkeypatch, value):
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(ConfigurationError, match=r"MASTER_PORT=.* must be a whole number"):
        first_rank_env_of(LocalEnvironment(), 2, 1)


def test_a_port_out_of_range(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(ConfigurationError, match=r"port 70000 is not in 0\.\.65535"):
        first_rank_env_of(LocalEnvironment(), 2, 1)


def test_one_process_meets_nobody_and_takes_no_port():
    assert isinstance(LocalEnvironment().make_store(0, 1, SECOND), HashStore)


def test_a_handed_over_socket_becomes_the_store_and_later_groups_share_it(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for name, value in {
        "FABRIC_LAUNCHED": "cli",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": str(port),
        "FABRIC_STORE_FD": str(handed := listener.detach()),
    }.items():
        monkeypatch.setenv(name, value)
    os.set_inheritable(handed, True)  # as `fabric run` does
    first = LocalEnvironment().make_store(0, 2, SECOND)
    assert not os.get_inheritable(handed), "children of the rank would keep the port"
    assert "FABRIC_STORE_FD" not in os.environ, "another file may have this number later"
    first.set("a", "1")
    second = LocalEnvironment().make_store(0, 2, SECOND)
    assert not second.check(["a"])  # a fresh prefix: no stale keys
    first.set("b", "2")


def test_nobody_at_the_address(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(LaunchError, match=f"found no rank zero within 1 s at 127.0.0.1:{port}"):
        LocalEnvironment().make_store(1, 2, SECOND)


def test_missing_ranks_are_named():
    store = LocalEnvironment().make_store(0, 3, SECOND)
    with pytest.raises(LaunchError, match=r"1 of 3 ranks arrived within 1 s; missing: ranks 1-2\."):
        await_ranks(store, 0, 3, SECOND)


def test_variables_that_a_launcher_may_have_left_are_named(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = LocalEnvironment().make_store(0, 2, SECOND)
    with pytest.raises(LaunchError, match=r" The environment has LOCAL_RANK=0\. Unset what "):
        await_ranks(store, 0, 2, SECOND)


def test_rank_zero_says_early_who_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "_NOTICE_AFTER", SECOND / 10)
    store = LocalEnvironment().make_store(0, 2, SECOND)
    with pytest.raises(LaunchError, match=r"within 1 s; missing: rank 1\."):
        await_ranks(store, 0, 2, SECOND)
    assert "1 of 2 ranks arrived within 0.1 s; missing: rank 1." in capsys.readouterr().err


def test_settings_that_contradict_the_launcher(monkeypatch):
    LocalEnvironment().validate_settings(4, 1)
    monkeypatch.setenv("FABRIC_LAUNCHED", "cli")
    monkeypatch.setenv("WORLD_SIZE", "2")
    LocalEnvironment().validate_settings(2, 1)
    with pytest.raises(
        ConfigurationError, match="asks for 4 processes, but the launcher started WORLD_SIZE=2"
    ):
        LocalEnvironment().validate_settings(4, 1)
