"""The checks of `fabric doctor` one by one. Whole jobs, networks and launchers are in end_to_end."""

from __future__ import annotations

import ast
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ports import free_port

from fabric import cli
from fabric.tools.doctor import machine, measure, report
from fabric.tools.doctor.job import DoctorJob, LostError, explain
from fabric.tools.doctor.report import FAIL, OK, WARN, Reading

NODES = {0: "node 0 (a)", 1: "node 0 (a)", 2: "node 1 (b)", 3: "node 2 (c)"}
NONE: dict[int, str] = {}


def statuses(rows: list[Reading]) -> dict[str, str]:
    return {row.name: report.grade(row).status for row in rows}


# report


def test_each_check_has_limits_and_a_fix():
    limits = report.limits()
    assert {limits[name]["group"] for name in limits.sections()} == set(report.GROUPS)
    assert all(limits[name]["fix"].endswith((".", ")")) for name in limits.sections())
    trees = [ast.parse(path.read_text()) for path in Path(report.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    constants = {
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    built = {f"rendezvous, {cause}" for cause in ("name", "address", "refused", "silent", "other")}
    built |= {f"bandwidth {kind}" for kind in ("on one machine", "between machines")}
    assert built <= set(limits.sections()) <= constants | built
    rows = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Reading"]
    names = {node.args[0].value for node in rows if isinstance(node.args[0], ast.Constant)}
    assert len(names) > 20
    assert names <= set(limits.sections())


@pytest.mark.parametrize(
    ("ranks", "nodes", "text"),
    [
        ([3], NONE, "rank 3"),
        ([2, 0, 1, 5], NONE, "ranks 0-2, 5"),
        ([0, 1], NODES, "ranks 0-1 on node 0 (a)"),
        ([1, 3], NODES, "ranks 1, 3 on node 0 (a), node 2 (c)"),
        (
            range(20),
            {rank: f"n{rank}" for rank in range(20)},
            "ranks 0-19 on n0, n1, n2, n3, n4, n5, n6, n7, ...",
        ),
    ],
)
def test_names_of_ranks(ranks, nodes, text):
    assert report.format_ranks(ranks, nodes) == text


def test_the_worst_rank_is_shown_and_all_bad_ones_are_named():
    sizes = {0: 20.0, 1: 0.5, 2: 0.01, 3: 0.01}
    rows = {
        rank: [Reading("/dev/shm", size, f"{size} GB"), Reading("memory", 1, "much")]
        for rank, size in sizes.items()
    }
    shm, memory = report.merge(rows, NODES)
    assert (shm.status, memory.status, memory.text, memory.fix) == (FAIL, OK, "much", "")
    assert shm.text == "0.01 GB: ranks 1-3 on node 0 (a), node 1 (b), node 2 (c)"
    assert "docker run --shm-size=16g" in shm.fix
    (fine,) = report.merge({0: [Reading("disk", 90, "90 MB/s")], 1: [Reading("disk", 80, "80 MB/s")]}, NONE)
    assert (fine.status, fine.text) == (OK, "80 MB/s (rank 1 has the least)")


def test_versions_that_differ_are_named():
    same = {"python": "3.12", "torch": "2.13"}
    row = report.compare_ranks("versions", {0: same, 1: same, 2: {**same, "torch": "2.12"}}, NODES)
    assert report.grade(row).status == FAIL
    assert row.text == "torch: 2.13 on ranks 0-1 on node 0 (a); 2.12 on rank 2 on node 1 (b)"
    row = report.compare_ranks("variables", {0: {}, 1: {"NCCL_ALGO": "Tree"}}, NONE)
    assert (report.grade(row).status, row.text) == (WARN, "NCCL_ALGO: none on rank 0; Tree on rank 1")
    assert report.compare_ranks("versions", {0: same, 1: same}, NODES).text == "python 3.12, torch 2.13"


def test_the_table():
    found = [
        report.grade(Reading("open files", 100, "100 for a process")),
        report.grade(Reading("versions", 1, "torch 2")),
    ]
    assert report.format_table("title", found).splitlines() == [
        "title",
        "software",
        "  OK    versions    torch 2",
        "machine",
        "  FAIL  open files  100 for a process",
        "                    -> ulimit -n 65536 before the ranks start; in a service LimitNOFILE=65536.",
        "1 FAIL, 0 WARN: see the lines with ->",
    ]


DAY = {
    "format": report.FORMAT,
    "date": "2026-01-01 10:00",
    "ranks": 2,
    "nodes": 1,
    "versions": {"torch": "2.13"},
}


def test_a_worse_day():
    then = {**DAY, "figures": {"disk, MB/s": 900.0, "product, ms": 10.0, "slowest pair, us": 20.0, "gone": 1}}
    now = {**DAY, "versions": {"torch": "2.14"}, "figures": {"disk, MB/s": 500.0, "product, ms": 31.0}}
    now["figures"] |= {"slowest pair, us": 10.0}
    found = {each.name: (each.status, each.text) for each in report.compare_days(now, then)}
    assert found == {
        "baseline, versions": (WARN, "torch 2.13 on 2026-01-01 10:00, 2.14 now"),
        "disk, MB/s": (WARN, "900 on 2026-01-01 10:00, 500 now"),
        "product, ms": (FAIL, "10 on 2026-01-01 10:00, 31 now"),
        "slowest pair, us": (OK, "20 on 2026-01-01 10:00, 10 now"),
    }
    *_, size = report.compare_days({**now, "ranks": 4}, then)
    assert (size.status, size.text) == (
        WARN,
        "2 ranks on 1 machine on 2026-01-01 10:00, 4 ranks on 1 machine now",
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            None,
            "cannot be read (No such file or directory). Write one on a healthy day: fabric doctor --json",
        ),
        ('{"format": "fab', "is no JSON, or was cut short. Write one"),
        (
            '{"format": "fabric doctor 0"}',
            "has the format 'fabric doctor 0', and not 'fabric doctor 1'. Write one",
        ),
        ("{}", "has the format None, and not"),
        ("[]", "has the format 'list', and not"),
    ],
)
def test_a_baseline_that_is_none(tmp_path, capsys, content, text):
    path = tmp_path / "healthy.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["doctor", "--baseline", str(path)]) == 2
    assert f"fabric doctor: --baseline {path} {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dir", __file__], f"--dir {__file__} is a file. Write the directory for checkpoints: --dir DIR."),
        (["--timeout", "soon"], "--timeout soon must be a whole number of seconds, at least 1."),
        (["--timeout", "0"], "--timeout 0 must be"),
        (["--devices", "many"], "devices='many' cannot be read"),
    ],
)
def test_wrong_usage(capsys, arguments, text):
    assert cli.main(["doctor", *arguments]) == 2
    assert text in capsys.readouterr().err


# this machine


@pytest.mark.parametrize(
    ("cuda", "driver", "newest", "fits", "text"),
    [
        ("13.0", "580.1", "13.0", 1, "torch is built for CUDA 13.0; driver 580.1 supports CUDA 13.0"),
        ("12.9", "550.5", "12.4", 1, "torch is built for CUDA 12.9; driver 550.5 supports CUDA 12.4"),
        ("13.0", "550.5", "12.4", 0, "torch is built for CUDA 13.0; driver 550.5 supports CUDA 12.4"),
        (None, "550.5", "12.4", 0, "torch is built without CUDA; driver 550.5 supports CUDA 12.4"),
        ("13.0", "", "0", 1, "torch is built for CUDA 13.0; no NVIDIA driver"),
    ],
)
def test_cuda_and_driver(cuda, driver, newest, fits, text):
    assert machine.driver_fits(cuda, driver, newest) == (fits, text)


def test_a_driver_that_this_torch_cannot_use(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '| NVIDIA-SMI 450.1   Driver Version: 450.1   CUDA Version: 9.0  |'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    rows = machine.software_rows()
    assert statuses(rows) == {"driver": FAIL, "slow variables": WARN}
    assert rows[0].text.endswith("; driver 450.1 supports CUDA 9.0")
    assert rows[1].text == "NCCL_P2P_DISABLE=1"
    assert machine.variables()["NCCL_P2P_DISABLE"] == "1"


def test_this_machine():
    found = statuses(machine.machine_rows(torch.device("cpu"), 1))
    assert found.keys() >= {"device", "memory", "load", "open files", "locked memory"}
    assert found["open files"] in (OK, WARN)
    assert machine.versions()["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("cores", "quota", "text"),
    [
        ([[0, 1, 2, 3]] * 3, 1e9, "0.5 for each of ranks 0-1 on node 0 (a)"),
        ([[0], [0], [1]], 1e9, "0.5 for each of ranks 0-1 on node 0 (a)"),
        ([[0], [1], [1]], 1e9, "1.0 for each of ranks 0-1 on node 0 (a)"),
        ([[0, 1, 2, 3]] * 3, 1.5, "0.8 for each of ranks 0-1 on node 0 (a)"),
    ],
)
def test_cores(cores, quota, text):
    if quota > 4 and len(cores[0]) > 1:
        cores, text = [[0], [0], [0, 1, 2]], "0.5 for each of ranks 0-1 on node 0 (a)"
    row = machine.cores_row({rank: {"cores": each, "quota": quota} for rank, each in enumerate(cores)}, NODES)
    assert (row.text, statuses([row])["cores"]) == (text, OK if text.startswith("1") else WARN)


def test_a_directory(tmp_path):
    rows, speed = machine.disk_rows(tmp_path, 0)
    assert {row.name for row in rows} == {"free disk", "disk"}
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    for path, why in ((tmp_path / "none", "No such file or directory"), (Path("/proc"), "No such file")):
        (row,), speed = machine.disk_rows(path, 0)
        assert (statuses([row]), speed) == ({"--dir": FAIL}, 0)
        assert row.text.startswith(f"{path} cannot be written ({why}")


# ranks: DoctorJob with threads as ranks


class Environment(SimpleNamespace):
    """One of `size` ranks of a store in this process."""

    def make_store(self, rank, world_size, timeout):
        return self.store

    def global_rank(self):
        return self.rank

    def world_size(self):
        return self.size


def run_threads(size, function):
    """Results of `function(job)` by rank; None for a rank that is never started."""
    store, results = dist.HashStore(), {}

    def work(rank):
        about = {"host": "a"}
        try:
            results[rank] = function(DoctorJob(Environment(store=store, rank=rank, size=size), about, 5))
        except LostError as error:
            results[rank] = error.row.text

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_phases_return_to_rank_zero_or_to_all(size):
    def phases(job):
        mine = job.phase("own", lambda: job.rank * 10, 10)
        return mine, job.phase("all", lambda: job.rank, 10, share=True), job.rows, job.alive

    all_ranks = {rank: rank for rank in range(size)}
    for rank, found in run_threads(size, phases).items():
        own = {other: 10 * other for other in all_ranks} if rank == 0 else {}
        assert found == (own, all_ranks, [], list(all_ranks))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_raise_or_are_late_are_named(size):
    released = threading.Event()

    def raising(job):
        raise OSError("no route\nmore")

    def phases(job):
        job.phase("network", lambda: raising(job) if job.rank else 1, 10)
        late = job.phase("device", lambda: released.wait(60) if job.rank == size - 1 else 1, 0.5)
        return late, [row.text for row in job.rows], job.hung

    found = run_threads(size, phases)
    released.set()
    who = "rank 1" if size == 2 else "ranks 1-2"
    texts = [
        f"OSError: no route in phase 'network': {who}",
        f"no end within 0.5 s in phase 'device': rank {size - 1}",
    ]
    assert found[0] == (dict.fromkeys(range(size - 1), 1), texts, False)
    assert found[size - 1] == ({}, [], True)


@pytest.mark.parametrize("size", [2, 3])
def test_a_silent_rank_is_named_and_left_out(size, monkeypatch):
    monkeypatch.setattr("fabric.tools.doctor.job.GRACE_S", 0.3)
    dead = size - 1

    def phases(job):
        if job.rank == dead:
            return "gone"
        job.phase("first", lambda: 1, 0.2)
        return job.phase("second", lambda: 1, 5, share=True), [row.text for row in job.rows]

    found = run_threads(size, phases)
    alive = dict.fromkeys(range(dead), 1)
    text = f"no answer within 0.2 s in phase 'first' from rank {dead}"
    assert found == {**{rank: (alive, [text] if rank == 0 else []) for rank in alive}, dead: "gone"}


def test_a_rank_without_rank_zero(monkeypatch):
    monkeypatch.setattr("fabric.tools.doctor.job.GRACE_S", 0.1)
    with pytest.raises(
        LostError, match=r"rank 1 lost rank zero, or it did not answer within 0\.4 s in phase 'arrival'"
    ) as raised:
        DoctorJob(Environment(store=dist.HashStore(), rank=1, size=2), {"host": "a"}, 0.1)
    assert statuses([raised.value.row]) == {"answers": FAIL}


@pytest.mark.parametrize(
    ("rank", "address", "cause", "text"),
    [
        (1, "no-such-host.invalid", "name", "the name 'no-such-host.invalid' does not resolve ("),
        (
            1,
            "127.0.0.1",
            "refused",
            "127.0.0.1 refuses port {port} (MASTER_ADDR=127.0.0.1, MASTER_PORT={port})",
        ),
        (0, "192.0.2.1", "address", "192.0.2.1 is no address of this machine, which has rank 0 ("),
        (0, "127.0.0.1", "other", "the port is taken"),
    ],
)
def test_a_store_that_is_not_opened(rank, address, cause, text):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = explain(address, port, rank, "the port is taken\nmore")
    assert found[0] == cause
    assert found[1].startswith(text.format(port=port))
    assert f"rendezvous, {cause}" in report.limits()


# network and devices


def test_connections():
    port = measure.listen(0)
    closed = free_port()
    addresses = {
        0: ("127.0.0.1", port),
        1: ("127.0.0.1", 1),
        2: ("127.0.0.1", closed),
        3: ("127.0.0.1", port),
    }
    found = measure.connect_all(addresses, 1)
    assert found["blocked"] == {2: "[Errno 111] Connection refused", 3: "another program answers"}
    assert abs(found["behind"]) < 60
    rows = measure.connection_rows({0: {"blocked": {}, "behind": 0}, 1: json.loads(json.dumps(found))}, NODES)
    assert statuses(rows)["ports"] == FAIL
    ends = "rank 1 on node 0 (a) cannot connect to ranks 2-3 on node 1 (b), node 2 (c)"
    assert rows[0].text == f"{ends}: [Errno 111] Connection refused"


def test_clocks_and_all_connections():
    each = {0: 0.0, 1: 0.001, 2: -2.5}
    rows = measure.connection_rows(
        {rank: {"blocked": {}, "behind": behind} for rank, behind in each.items()}, NONE
    )
    assert [row.text for row in rows] == [
        "6 of 6 connections between ranks",
        "rank 2 is 2.500 s ahead of rank 0, at most",
    ]
    assert statuses(rows) == {"ports": OK, "clock": WARN}


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    rows = measure.interface_rows("127.0.0.1", "127.0.0.1", several_nodes=True)
    assert statuses(rows)["interface"] == FAIL
    assert rows[-1].text == "GLOO_SOCKET_IFNAME=ib9, and the card is lo (127.0.0.1)"


def test_a_host_name_that_is_of_this_machine_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    names, row = measure.interface_rows("10.77.0.9", "127.0.0.1", several_nodes=True)
    assert statuses([names, row]) == {"names": OK, "interface": FAIL}
    assert row.text == "None (10.77.0.9), but gloo takes that of the name localhost: 127.0.0.1"
    assert statuses(measure.interface_rows("127.0.0.1", "no-such-host.invalid", False))["names"] == FAIL


def test_the_rank_that_all_slow_pairs_have_in_common_is_named():
    pairs = [
        (0, 1, 5, 9000),
        (0, 2, 50, 800),
        (0, 3, 60, 20),
        (1, 2, 50, 790),
        (1, 3, 6000, 21),
        (2, 3, 50, 22),
    ]
    rows = {row.name: row for row in measure.pair_rows(pairs, NODES)}
    assert statuses(list(rows.values())) == {
        "bandwidth on one machine": OK,
        "bandwidth between machines": FAIL,
        "wire speed": OK,
        "latency": WARN,
    }
    assert rows["bandwidth between machines"].text == (
        "20 MB/s between rank 0 on node 0 (a) and rank 3 on node 2 (c); fastest pair 800 MB/s; "
        "3 of 5 pairs are slow, all with rank 3 on node 2 (c)"
    )
    assert rows["latency"].text == "6,000 us between rank 1 on node 0 (a) and rank 3 on node 2 (c), at most"
    slow = measure.pair_rows([(0, 2, 50, 1)], NODES)
    assert statuses(slow) == {"bandwidth between machines": OK, "wire speed": WARN, "latency": OK}
    assert measure.pair_rows([], NODES) == []


def test_collectives_against_the_fastest_pair():
    (row,) = measure.collective_rows({"all_reduce": [(1000, 2.0, 3.0), (32_000_000, 500.0, 40.0)]}, 1000.0)
    assert (row.text, statuses([row])) == (
        "0.001 MB 2 ms; 32 MB 500 ms; at best 40 MB/s, 4% of the fastest pair",
        {"all_reduce": WARN},
    )


def test_a_slow_and_a_wrong_device_are_named():
    base = {"wrong": 0, "side": 768, "device": "cuda:1"}
    ranks = {0: {**base, "ms": 10.0}, 1: {**base, "ms": 10.2}, 2: {**base, "ms": 31.0, "wrong": 2}}
    rows = measure.product_rows(ranks, NONE)
    assert [(row.name, report.grade(row).status, row.text) for row in rows] == [
        ("product, time", WARN, "31 ms on rank 2, median 10.2 ms"),
        ("product, bits", FAIL, "2 of 768 rows of the product are wrong on rank 2 (cuda:1)"),
    ]


def measure_together(sizes):
    measure.SIZES, measure.COLLECTIVE_S = sizes, 600.0  # a busy machine measures all sizes, too
    cpu = torch.device("cpu")
    return (
        measure.measure_pairs(cpu),
        measure.measure_collectives(cpu, 1e9),
        measure.measure_product(cpu)["wrong"],
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_measure_all_pairs_and_collectives(ranks, world_size):
    found = ranks.run(measure_together, (1_000, 64_000), world_size=world_size)
    pairs = sorted([tuple(pair[:2]) for own, _, _ in found for pair in own])
    assert pairs == [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    assert all(us > 0 and speed > 0 for own, _, _ in found for *_, us, speed in own)
    for _, collectives, wrong in found:
        assert {name: [each[0] for each in sizes] for name, sizes in collectives.items()} == {
            "all_reduce": [1_000, 64_000],
            "all_gather": [1_000, 64_000],
        }
        assert collectives == found[0][1]
        assert wrong == 0


def measure_with_memory_for_few():
    return measure.measure_collectives(torch.device("cpu"), 5_000.0 * (1 + dist.get_rank()))


def test_large_sizes_are_left_out_where_memory_is_short(ranks):
    cut = ranks.run(measure_with_memory_for_few, world_size=2)
    assert [[each[0] for each in found["all_reduce"]] for found in cut] == [[1_000], [1_000]]


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_bit_of_the_product_is_seen(monkeypatch, wrong):
    matmul = torch.Tensor.__matmul__

    def flipped(a, b):
        result = matmul(a, b)
        if b.dim() == 2 and wrong:
            result.view(torch.int32)[700, 3] ^= 1 << 10  # of the mantissa
        return result

    monkeypatch.setattr(measure, "PRODUCT_S", 0)
    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    assert measure.measure_product(torch.device("cpu"))["wrong"] == wrong


def test_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = cli.main(["doctor", "--accelerator", "cpu", "--dir", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["nodes"], found["pairs"]) == (1, 1, [])
    assert code == any([each["status"] == FAIL for each in found["findings"]])
    assert {each["name"] for each in found["findings"]} >= {"versions", "/dev/shm", "disk", "product, bits"}
    assert found["figures"].keys() == {"disk, MB/s", "product, ms"}
    assert list(tmp_path.iterdir()) == []
