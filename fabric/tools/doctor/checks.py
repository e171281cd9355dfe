"""The phases of `fabric doctor` in order, on each rank; rank zero grades the measurements of all ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.tools.doctor import machine, measure
from fabric.tools.doctor.report import Finding, Reading, compare_ranks, format_ranks, grade, merge

if TYPE_CHECKING:
    from pathlib import Path

    from fabric.tools.doctor.job import DoctorJob

GROUP_S = 15.0
"""Seconds that torch's process group waits for a message."""


def run_checks(job: DoctorJob, main_address: str, directory: Path, accelerator: str) -> dict[str, Any]:
    """Run all phases; return, on rank zero, the report for `--json`. All ranks must call this."""
    device, mark = _device(job, accelerator), directory / f".fabric-doctor-{job.ranks[0]['token']}"

    def disk() -> tuple[list[Reading], float]:
        rows, speed = machine.disk_rows(directory, job.rank)
        if speed and job.rank == 0:
            mark.touch()
        return rows, speed

    def connect() -> dict[str, Any]:
        found = measure.connect_all(_addresses(job, main_address), job.rank)
        return {**found, "sees": mark.exists()}

    local = job.phase("machine", lambda: _local(job, main_address, device), 25)
    disks = job.phase("--dir", disk, 15)
    connections = job.phase("ports", connect, 20, share=True)
    products = job.phase("product", lambda: measure.measure_product(device), 30)
    pairs, collectives = _network(job, device, connections)
    if job.rank:
        return {"findings": []}
    with suppress(OSError):
        mark.unlink()
    rows = [*_rows(local, disks, connections, products, job.nodes), *measure.pair_rows(pairs, job.nodes)]
    rows += measure.collective_rows(collectives, max([each[3] for each in pairs], default=1.0))
    own = {rank: [*each["rows"], *disks.get(rank, [[]])[0]] for rank, each in local.items()}
    by_rank = {rank: [Reading(*row) for row in each] for rank, each in own.items()}
    found: list[Finding] = [*merge(by_rank, job.nodes), *map(grade, [*rows, *job.rows])]
    numbers = {f"{name}, MB/s": [-each[2] for each in sizes] for name, sizes in collectives.items()}
    numbers["slowest pair, MB/s"], numbers["slowest pair, us"] = [p[3] for p in pairs], [-p[2] for p in pairs]
    numbers["disk, MB/s"] = [speed for _, speed in disks.values()]
    numbers["product, ms"] = [-each["ms"] for each in products.values()]
    figures = {name: abs(min(some)) for name, some in numbers.items() if some}
    about = {"pairs": pairs, "collectives": collectives, "versions": local.get(0, {}).get("versions", {})}
    return {"findings": found, "figures": figures, **about}


def _device(job: DoctorJob, accelerator: str) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or accelerator == "cpu":
        return torch.device("cpu")
    return torch.device(found.type, job.ranks[job.rank]["local_rank"] % torch.accelerator.device_count())


def _local(job: DoctorJob, main_address: str, device: torch.device) -> dict[str, Any]:
    node = job.ranks[job.rank]["node"]
    away = [each["address"][0] for each in job.ranks.values() if each["node"] != node]
    rows = [*machine.software_rows(), *machine.machine_rows(device, len(job.ranks) - len(away))]
    if job.world_size > 1:
        own = measure.route_to(away[0] if away else main_address)
        rows += measure.interface_rows(own, main_address, bool(away))
    facts = {"versions": machine.versions(), "variables": machine.variables()}
    return {"rows": rows, **facts, **machine.cores()}


def _rows(local: Any, disks: Any, connections: Any, products: Any, nodes: dict[int, str]) -> list[Reading]:
    rows = []
    for name in ("versions", "variables"):
        rows.append(compare_ranks(name, {rank: each[name] for rank, each in local.items()}, nodes))
    rows += [machine.cores_row(local, nodes)] if local else []
    if nodes and disks.get(0, (0, 0))[1]:
        blind = [rank for rank, each in connections.items() if not each["sees"]]
        text = f"{format_ranks(blind, nodes)}: not the directory of rank 0" if blind else "by all ranks"
        rows.append(Reading("shared --dir", float(not blind), text))
    rows += measure.connection_rows(connections, nodes) if len(connections) > 1 else []
    return rows + (measure.product_rows(products, nodes) if products else [])


def _addresses(job: DoctorJob, main_address: str) -> dict[int, tuple[str, int]]:
    """Return the address at which each rank listens; for rank zero MASTER_ADDR, which was reached."""
    found, here = {}, job.ranks[job.rank]["node"]
    for rank in job.alive:
        (address, port), node = job.ranks[rank]["address"], job.ranks[rank]["node"]
        near = "127.0.0.1" if node == here else main_address if node == job.ranks[0]["node"] else address
        found[rank] = (near, port)
    return found


def _network(job: DoctorJob, device: torch.device, connections: Any) -> tuple[list[Any], dict[str, Any]]:
    """Measure pairs and collectives where all ranks can connect; rank zero gets the numbers."""
    ranks, pairs, collectives = job.alive, dict[int, Any](), dict[int, Any]()
    reached = [rank for rank, each in connections.items() if not each["blocked"]]
    if len(ranks) < 2 or len(reached) < len(ranks):
        return [], {}
    at = device if device.type == "cuda" else torch.device("cpu")
    store, rank = dist.PrefixStore("doctor/group", job.store), ranks.index(job.rank)

    def join() -> None:
        backend, limit = dist.get_default_backend_for_device(at), timedelta(seconds=GROUP_S)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else NCCL ends the process without a table
        bound = at if at.type == "cuda" else None
        dist.init_process_group(backend, None, limit, len(ranks), rank, store, device_id=bound)

    if len(job.phase("group", join, 2 * GROUP_S, share=True)) == len(ranks):
        pairs = job.phase("pairs", lambda: measure.measure_pairs(at), 2 * GROUP_S, share=True)
    if pairs and len(pairs) == len(ranks):
        memory = machine.host_memory()[0] / 2 / len(ranks)
        collectives = job.phase("collectives", lambda: measure.measure_collectives(at, memory), 2 * GROUP_S)
    if not job.hung and dist.is_initialized():
        dist.destroy_process_group()
    named = [(ranks[a], ranks[b], us, speed) for found in pairs.values() for a, b, us, speed in found]
    return named, collectives.get(0, {})
