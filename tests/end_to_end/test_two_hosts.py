"""Two hosts on this machine (namespaces.py) with a cable between them, which can be cut."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from jobs import PYTHON, SCRIPTS, Job, alive, check_facts, environ, facts, until
from namespaces import Host, connected_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN, ENDLESS = str(SCRIPTS / "train.py"), str(SCRIPTS / "endless.py")
TIMEOUT = 8
"""Seconds that a collective of scripts/endless.py waits for the other ranks."""
MARGIN = 30
"""Seconds more in which a rank must have told its report and be gone: 5 for a store that does not answer, 2
at the exit, the rest for a busy machine."""
pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    with connected_hosts(2, "f", "10.77.0", tmp_path) as both:
        yield both


def fabric_run(node: int, devices: int, *script: str) -> list[str]:
    place = ["--num-nodes=2", f"--node-rank={node}", "--main-address=10.77.0.1"]
    return [PYTHON, "-m", "fabric", "run", *place, f"--devices={devices}", "--accelerator=cpu", *script]


def torchrun(node: int, devices: int, *script: str) -> list[str]:
    # Each would ask which address its host's name has, and both take themselves for guests.
    first = ["is_host=false,join_timeout=60", "is_host=true,join_timeout=60"][node == 0]
    place = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=job"]
    place += [f"--rdzv-conf={first}", f"--local-addr=10.77.0.{node + 1}", f"--nproc-per-node={devices}"]
    return [PYTHON, "-m", "torch.distributed.run", *place, *script]


ENGINES = {"fabric run": fabric_run, "torchrun": torchrun}


def start(stack: ExitStack, hosts: list[Host], engine: str, *script: str, devices: int = 1) -> list[Job]:
    jobs = [
        host.start(ENGINES[engine](node, devices, *script), FABRIC_HANG_REPORT_AFTER="3")
        for node, host in enumerate(hosts)
    ]
    for job in jobs:
        stack.enter_context(job)
    return jobs


@pytest.fixture(scope="module")
def alone() -> dict:
    done = subprocess.run([PYTHON, TRAIN], capture_output=True, text=True, timeout=120, env=environ())
    return facts(done.stdout)[0]


@pytest.mark.parametrize(("engine", "devices"), [("fabric run", 2), ("torchrun", 1)])
def test_two_hosts_give_the_numbers_of_one_process(hosts, alone, engine, devices):
    with ExitStack() as stack:
        jobs = start(stack, hosts, engine, TRAIN, devices=devices)
        assert [job.ends() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    found = [facts(job.out) for job in jobs]
    assert [len(lines) for lines in found] == [devices, devices]
    check_facts(found[0] + found[1], alone, world_size=2 * devices)


def check_reports(jobs: list[Job], call: str) -> None:
    """Rank 0 names who is missing, before the timeout and at it; rank 1 says that it has lost the store."""
    here, there = [re.sub(r"^\[rank\d\]: ", "", job.err, flags=re.MULTILINE) for job in jobs]
    call = f"(?:replica check after )?{call}"  # steps 1, 2, 4, ... end in a check: the cable may be cut in it
    assert re.search(rf"^fabric: rank 0 has waited \d+ s in {call}", here, re.M)
    for rank, error in enumerate((here, there)):
        assert re.search(rf"^fabric\.core\.errors\.RankError: {call}.* failed on rank {rank}", error, re.M)
    tables = re.findall(r"Where the ranks are:\n *rank .*\n *(0 .*)\n *(1 .*)\n", here)
    assert len(tables) == 2, here
    for first, second in tables:
        assert f"{ENDLESS}:" in first
        assert second.split()[:3] == ["1", "no", "answer"]
    assert "lost rank zero's store at 10.77.0.1:" in there


@pytest.mark.parametrize("call", ["backward", "all_reduce"])
def test_both_hosts_end_with_a_report_when_the_cable_is_cut(hosts, call):
    with ExitStack() as stack:
        jobs = start(stack, hosts, "fabric run", ENDLESS, f"--call={call}", f"--timeout={TIMEOUT}")
        ranks = [job.says(1, "pid")[0] for job in jobs]
        hosts[1].cut()
        codes = [job.ends(TIMEOUT + MARGIN) for job in jobs]
        assert codes == [1, 1], jobs[0].err + jobs[1].err
        assert [host.pids() for host in hosts] == [[], []]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    check_reports(jobs, call)


def test_the_ranks_of_torchrun_end_with_a_report_when_the_cable_is_cut(hosts):
    """Not its agents: that of the second host waits for the first one's store for ever, deaf to SIGTERM."""
    with ExitStack() as stack:
        jobs = start(stack, hosts, "torchrun", ENDLESS, f"--timeout={TIMEOUT}")
        pids = [job.says(1, "pid")[0]["pid"] for job in jobs]
        hosts[1].cut()
        assert until(lambda: not any(alive(pid) for pid in pids), TIMEOUT + MARGIN), jobs[0].err + jobs[1].err
        assert jobs[0].ends() == 1
        check_reports(jobs, "backward")


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (0, "1 of 2 ranks arrived within 5 s; missing: rank 1."),
        (1, "found no rank zero within 5 s at 10.77.0.1:29400"),
    ],
)
def test_a_host_whose_other_is_never_started_names_it(hosts, node, words):
    command = fabric_run(node, 1, ENDLESS, "--startup-timeout=5")
    with hosts[node].start(command) as job:
        assert job.ends() == 1
        assert "LaunchError: " in job.err
        assert words in job.err
        assert hosts[node].pids() == []
