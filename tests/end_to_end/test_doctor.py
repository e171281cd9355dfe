"""`fabric doctor` as whole jobs: healthy ones, and machines, networks and ranks that are really broken.

Debian packages: iproute2, iptables; and the right to make namespaces (root). Tests without them are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import PYTHON, Job, environ, until
from namespaces import Host, connected_hosts
from test_clusters import slurm  # noqa: F401  a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCTOR = [PYTHON, "-m", "fabric", "doctor", "--accelerator=cpu"]
pytestmark = pytest.mark.slow


def run(*command: str, seconds: int = 180, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=environ(**env)
    )


def rows(table: str, status: str) -> dict[str, str]:
    """The rows of a table that have this status, with their fixes."""
    found = re.findall(rf"^  {status} +(\S+(?: \S+)*?)  +(.*(?:\n +-> .*)?)", table, re.MULTILINE)
    return {name: re.sub(r"\n +", " ", text) for name, text in found}


def check_health(done: subprocess.CompletedProcess, table: str | None = None) -> None:
    """Nothing is wrong but what another job on this machine may slow down."""
    failed = rows(done.stdout if table is None else table, "FAIL")
    timed = ("bandwidth", "latency", "product, time")
    assert [name for name in failed if not name.startswith(timed)] == [], done
    assert done.returncode == bool(failed), done


def script(path: Path, *lines: str) -> str:
    """A script that runs `fabric doctor` on a rank with a fault, by which `rank` decides."""
    text = ["import os, sys", 'rank = int(os.environ["RANK"])', *lines, "from fabric import cli"]
    path.write_text("\n".join([*text, 'sys.exit(cli.main(["doctor", *sys.argv[1:]]))\n']))
    return str(path)


def fabric_run(devices: int, *command: str) -> list[str]:
    return [PYTHON, "-m", "fabric", "run", "--accelerator=cpu", f"--devices={devices}", *command]


def test_ranks_of_one_machine_and_a_baseline(tmp_path):
    """The baseline is of a machine that was 1,000 times as fast, with another torch."""
    healthy = run(*DOCTOR, "--devices=3", f"--dir={tmp_path}", "--json")
    report = json.loads(healthy.stdout)
    check_health(healthy, "\n".join([f"  {row['status']:<5} {row['name']}  x" for row in report["findings"]]))
    assert (report["ranks"], report["nodes"], len(report["pairs"])) == (3, 1, 3)
    assert sorted(tuple(pair[:2]) for pair in report["pairs"]) == [(0, 1), (0, 2), (1, 2)]
    assert all(number > 0 for number in report["figures"].values())
    assert list(tmp_path.iterdir()) == []
    assert report["figures"].keys() >= {"all_reduce, MB/s", "slowest pair, us", "product, ms"}
    report["figures"] = {"product, ms": 0.001, "disk, MB/s": 1e6}
    report["versions"]["torch"] = "1.0"
    (tmp_path / "healthy.json").write_text(json.dumps(report))
    later = run(*DOCTOR, "--devices=3", f"--dir={tmp_path}", f"--baseline={tmp_path / 'healthy.json'}")
    assert later.returncode == 1, later.stdout + later.stderr
    failed = rows(later.stdout, "FAIL")
    assert failed.keys() >= {"product, ms", "disk, MB/s"}
    assert re.match(r"0\.001 on 20\S+ \S+, \S+ now -> Look for what has changed", failed["product, ms"])
    assert re.match(
        r"torch 1\.0 on 20\S+ \S+, 2\S+ now -> Exp", rows(later.stdout, "WARN")["baseline, versions"]
    )


def test_ranks_of_torchrun(tmp_path):
    place = ["--standalone", "--nproc-per-node=2", "--no-python"]
    done = run(PYTHON, "-m", "torch.distributed.run", *place, *DOCTOR, f"--dir={tmp_path}")
    check_health(done)
    assert done.stdout.startswith("fabric doctor: 2 ranks on 1 machine, ")
    assert rows(done.stdout, "OK")["product, bits"] == "exact on 2 of 2 ranks"


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_srun(slurm, tmp_path, nodes):  # noqa: F811
    done = run("srun", f"-N{nodes}", "-n2", *DOCTOR, f"--dir={tmp_path}", **slurm)
    check_health(done)
    assert done.stdout.startswith(f"fabric doctor: 2 ranks on {nodes} machine")
    assert rows(done.stdout, "OK")["ports"] == "2 of 2 connections between ranks"
    assert nodes == 1 or "on node 1 (n2)" in done.stdout


def test_ranks_with_another_torch_a_wrong_product_another_clock_and_variable(tmp_path):
    faults = script(
        tmp_path / "faults.py",
        "import time, torch, fabric",
        "def wrong(a, b):",
        "    result = matmul(a, b)",
        "    return result.index_add_(0, torch.tensor([5]), torch.ones(1, 768)) if b.dim() == 2 else result",
        "if rank == 1:",
        '    torch.__version__ = "2.13.9"',
        '    os.environ["NCCL_ALGO"] = "Tree"',
        "    matmul, clock = torch.Tensor.__matmul__, time.time",
        "    time.time = lambda: clock() + 7",
        "    torch.Tensor.__matmul__ = wrong",
    )
    done = run(*fabric_run(3, faults, "--accelerator=cpu", f"--dir={tmp_path}"))
    assert done.returncode == 1, done.stdout + done.stderr
    failed, warned = rows(done.stdout, "FAIL"), rows(done.stdout, "WARN")
    assert failed.keys() >= {"versions", "product, bits"}
    assert re.match(r"torch: \S+ on ranks 0, 2; 2\.13\.9 on rank 1 -> Install the same", failed["versions"])
    words = "1 of 768 rows of the product are wrong on rank 1 (cpu) -> Do not train on this device"
    assert failed["product, bits"].startswith(words)
    assert re.match(
        r"rank 1 is [67]\.\d+ s ahead of rank 0, at most -> Start a time service", warned["clock"]
    )
    assert "NCCL_ALGO: none on ranks 0, 2; Tree on rank 1 -> Set them alike" in warned["variables"]


@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two cores")
def test_a_rank_on_a_busy_core_is_named(tmp_path):
    busy = "import os\nos.nice(-10 if os.geteuid() == 0 else 0)\nprint(flush=True)\nwhile True: pass"
    pinned = script(
        tmp_path / "pinned.py",
        "import subprocess",
        "from fabric.tools.doctor import measure",
        "os.sched_setaffinity(0, {rank})",
        "def busy(device, product=measure.measure_product):",
        f"    command = [sys.executable, '-c', {busy!r}]",
        "    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]",
        "    for other in others:",
        "        other.stdout.readline()",
        "    try:",
        "        return product(device)",
        "    finally:",
        "        for other in others:",
        "            other.kill()",
        "if rank == 1:",
        "    measure.measure_product = busy",
    )
    done = run(*fabric_run(2, pinned, "--accelerator=cpu", f"--dir={tmp_path}"))
    slow = {**rows(done.stdout, "FAIL"), **rows(done.stdout, "WARN")}["product, time"]
    assert re.match(r"[\d.e+]+ ms on rank 1, median [\d.]+ ms -> Look for other processes", slow)


def end_rank(job: Job, rank: int, number: int) -> None:
    """Send a signal to a rank of a job that was started with OF, as soon as the rank is there."""

    def send() -> bool:
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if {b"RANK=%d" % rank, job.mark} <= {*path.read_bytes().split(b"\0")}:
                    os.kill(int(path.parent.name), number)
                    return True
        return False

    assert until(send)


def started(path: Path) -> Job:
    job = Job([*DOCTOR, "--devices=3", "--timeout=20", f"--dir={path}"], path / "job", OF=str(path))
    job.mark = f"OF={path}".encode()
    return job


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_is_named(tmp_path, number):
    with started(tmp_path) as job:
        end_rank(job, 2, number)
        assert job.ends() == 1, job.out + job.err
    words = r"no answer within 20 s in phase 'arrival' from rank 2 -> Look at its output"
    assert re.match(words, rows(job.out, "FAIL")["answers"])
    assert rows(job.out, "OK")["product, bits"] == "exact on 2 of 2 ranks"
    assert "all_reduce" in job.out


def test_all_ranks_end_when_rank_zero_is_killed(tmp_path):
    with started(tmp_path) as job:
        end_rank(job, 0, signal.SIGKILL)
        assert job.ends() == 137, job.out + job.err
    assert re.search(r"^fabric: rank 0 on \S+ failed first: killed by SIGKILL", job.err, re.MULTILINE)
    assert "Traceback" not in job.err


@pytest.mark.parametrize(
    ("node", "cause", "address", "words"),
    [
        (
            1,
            "name",
            "no-such-host.invalid",
            r"the name 'no-such-host\.invalid' does not resolve \(.*\) -> Set",
        ),
        (
            1,
            "refused",
            "127.0.0.1",
            r"127\.0\.0\.1 refuses port 29411 \(MASTER_ADDR=.*\) -> Start rank 0, give",
        ),
        (
            0,
            "address",
            "192.0.2.1",
            r"192\.0\.2\.1 is no address of this machine, which has rank 0 .* -> Set",
        ),
    ],
)
def test_a_wrong_main_address(tmp_path, node, cause, address, words):
    place = ["--num-nodes=2", f"--node-rank={node}", f"--main-address={address}", "--main-port=29411"]
    done = run(*fabric_run(1, *place, "-m", "fabric", "doctor", "--timeout=3", f"--dir={tmp_path}"))
    assert done.returncode == 1
    failed = rows(done.stderr if node else done.stdout, "FAIL")
    assert re.match(
        rf"rank {node} on \S+ did not join within 3 s: {words}", failed[f"rendezvous, {cause}"]
    ), done


def test_small_shared_memory_few_files_and_an_unwritable_directory(tmp_path):
    if run("unshare", "--mount", "true").returncode:
        pytest.skip("no mount namespaces here")
    mounts = f"mount -t tmpfs -o size=8m none /dev/shm; mount -t tmpfs -o ro none {tmp_path}; ulimit -n 200; "
    command = " ".join([*DOCTOR, "--devices=1", f"--dir={tmp_path}"])
    done = run("unshare", "--mount", "bash", "-c", mounts + command)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = rows(done.stdout, "FAIL")
    assert failed.keys() == {"/dev/shm", "open files", "--dir"}
    assert re.match(r"8 of 8 MB free -> Workers of loaders die .* --shm-size=16g", failed["/dev/shm"])
    assert failed["open files"].startswith("200 for a process -> ulimit -n 65536")
    assert failed["--dir"].startswith(
        f"{tmp_path} cannot be written (Read-only file system) -> Create or mount"
    )


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    with connected_hosts(3, "d", "10.79.0", tmp_path) as found:
        yield found


def on_hosts(hosts: list[Host], directory: Path, before: str = "", timeout: int = 60) -> list[Job]:
    """Run it with one rank on each host; `before` runs on the last one."""
    with ExitStack() as stack:
        jobs = []
        for node, host in enumerate(hosts):
            place = f"--num-nodes={len(hosts)} --node-rank={node} --main-address={hosts[0].address}"
            command = f"exec {PYTHON} -m fabric run --devices=1 --accelerator=cpu {place} -m fabric doctor"
            command += f" --timeout={timeout} --dir={directory}"
            first = before if host is hosts[-1] else ""
            jobs.append(stack.enter_context(host.start(["bash", "-c", f"{first} {command}"])))
        for job in jobs:
            job.ends()
    return jobs


def test_two_hosts_are_healthy_but_for_their_directories(hosts, tmp_path):
    (tmp_path / "run").mkdir()
    first, second = on_hosts(hosts[:2], tmp_path / "run", f"mount -t tmpfs none {tmp_path / 'run'};")
    check_health(subprocess.CompletedProcess([], first.process.returncode, first.out, first.err))
    assert second.process.returncode == 0
    assert first.out.startswith("fabric doctor: 2 ranks on 2 machines, ")
    fine, warned = rows(first.out, "OK"), rows(first.out, "WARN")
    assert fine["ports"] == "2 of 2 connections between ranks"
    assert {"all_reduce", "all_gather", "latency"} <= fine.keys() | warned.keys()
    words = r"rank 1 on node 1 \(\S+\): not the directory of rank 0 -> Sharded checkpoints need one directory"
    assert re.match(words, warned["shared --dir"])


def test_a_slow_link_is_named(hosts, tmp_path):
    if shutil.which("tc") is None:
        pytest.skip("tc is not installed (Debian: iproute2)")
    slow = hosts[1]
    shaped = f"tc qdisc add dev {slow.card} root tbf rate 20mbit burst 64kbit latency 400ms"
    done = run("ip", "netns", "exec", slow.name, *shaped.split())
    assert done.returncode == 0, done.stderr
    first = on_hosts(hosts, tmp_path)[0]
    assert first.process.returncode == 1, first.out + first.err
    words = r"\d+ MB/s between rank \d .*fastest pair [\d,]+ MB/s; 2 of 3 pairs are slow, all with rank 1 on"
    assert re.match(words, rows(first.out, "FAIL")["bandwidth between machines"])


def test_a_blocked_port_is_named(hosts, tmp_path):
    if shutil.which("iptables") is None:
        pytest.skip("iptables is not installed (Debian: iptables)")
    rule = "iptables -A INPUT -p tcp --syn ! --dport 29400 -j DROP"
    assert run("ip", "netns", "exec", hosts[1].name, *rule.split()).returncode == 0
    first = on_hosts(hosts, tmp_path)[0]
    assert first.process.returncode == 1, first.out + first.err
    found = re.findall(r"FAIL  ports +(.*)", first.out)
    words = [
        rf"rank {rank} on node {rank} \(\S+\) cannot connect to rank 1 on node 1 \(\S+\): timed out"
        for rank in (0, 2)
    ]
    assert [bool(re.fullmatch(*pair)) for pair in zip(words, found, strict=True)] == [True, True], first.out
    assert "all_reduce" not in first.out


def test_a_blocked_rendezvous_names_the_rank(hosts, tmp_path):
    if shutil.which("iptables") is None:
        pytest.skip("iptables is not installed (Debian: iptables)")
    rule = f"iptables -A INPUT -p tcp -s {hosts[1].address} -j DROP"
    assert run("ip", "netns", "exec", hosts[0].name, *rule.split()).returncode == 0
    first, second = on_hosts(hosts[:2], tmp_path, timeout=10)
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    assert "no answer within 10 s in phase 'arrival' from rank 1" in rows(first.out, "FAIL")["answers"]
    words = (
        r"rank 1 on \S+ did not join within 10 s: 10\.79\.0\.1 does not answer at port 29400: .* -> Allow TCP"
    )
    assert re.match(words, rows(second.err, "FAIL")["rendezvous, silent"]), second.err
    assert "frame #" not in second.err, "torch's own report"


def test_nothing_of_it_is_loaded_by_a_job():
    code = "import sys; from fabric import Fabric; Fabric(accelerator='cpu', devices=1).launch(); "
    code += "sys.exit(any(name.startswith('fabric.tools') for name in sys.modules))"
    assert run(sys.executable, "-c", code).returncode == 0
