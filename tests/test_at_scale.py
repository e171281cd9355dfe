"""benchmarks/at_scale.py on tiny models: simulated bytes against its formulas, and against real ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = {"layers": 2, "dim": 32, "heads": 4, "hidden": 64, "vocab": 64, "tokens": 8}
# Rows of the feed-forward: 21 of each tp part over dp 4 are 6, 6, 6, 3; 42 over 4 are 11, 11, 11, 9.
UNEVEN = SMALL | {"hidden": 42}
SIZES = ("parameters", "gradients", "optimizer")
TENSORS = 2 * 9 + 3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulated() -> dict[str, list[Any]]:
    """Name to [measured, formulas] of each simulated rank; a process of its own keeps the fake group."""
    cases = {
        "tp x fsdp": [SMALL | {"dp": 4, "tp": 2}, [0]],
        "tp x fsdp uneven": [UNEVEN | {"dp": 4, "tp": 2}, [0, 2, 4, 6]],
        "tp x fsdp 2 x 2": [UNEVEN | {"dp": 2, "tp": 2}, [0]],
        "zero3": [SMALL | {"layout": "zero3", "dp": 8, "tp": 1}, [0]],
        "zero3 uneven": [UNEVEN | {"layout": "zero3", "dp": 4, "tp": 1}, [0, 1, 2, 3]],
        "zero2": [SMALL | {"layout": "zero2", "dp": 8, "tp": 1}, [0]],
        "zero2 uneven": [UNEVEN | {"layout": "zero2", "dp": 4, "tp": 1}, [0]],
        "zero1": [SMALL | {"layout": "zero1", "dp": 32, "tp": 1}, [0, 31]],
        "ddp": [SMALL | {"layout": "ddp", "dp": 4, "tp": 1}, [0]],
    }
    # A fork per rank: DTensor remembers the groups of a mesh beyond destroy_process_group. One run before the
    # forks, on a mesh of its own, imports everything.
    code = """
import json, multiprocessing, sys, torch
from at_scale import Config, formulas, simulate
cases = json.loads(sys.argv[1])
jobs = [(Config(**config), rank) for config, ranks in cases.values() for rank in ranks]
if not torch.backends.cuda.is_built():  # such a build starts autograd's threads, which no fork survives
    simulate(Config(layers=1, dim=8, heads=8, hidden=8, vocab=8, tokens=1, dp=1, tp=8))
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    found = iter(pool.starmap(simulate, jobs, chunksize=1))
print(json.dumps({
    name: [[next(found), formulas(Config(**config))] for _ in ranks]
    for name, (config, ranks) in cases.items()
}))
"""
    text = json.dumps({name: [config, list(places)] for name, (config, places) in cases.items()})
    done = subprocess.run(
        [sys.executable, "-c", code, text],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rank_zero_has_exactly_what_the_formulas_say(simulated):
    for name, [(found, rows), *_] in simulated.items():
        assert found["bytes"] == {what: exact for what, (_, _, exact, _) in rows.items()}, name
        assert found["calls"] == {what: calls for what, (*_, calls) in rows.items() if calls}, name


@pytest.mark.parametrize("name", ["zero3", "zero2"])
def test_where_rows_divide_the_textbook_is_exact(simulated, name):
    found, rows = simulated[name][0]
    closed = {what: row[1] for what, row in rows.items()}
    assert found["bytes"] == closed | {"optimizer": closed["optimizer"] + 4 * TENSORS}


@pytest.mark.parametrize(("name", "tp"), [("tp x fsdp uneven", 2), ("zero3 uneven", 1)])
def test_the_ranks_together_hold_every_weight_once(simulated, name, tp):
    norms = (2 * 2 + 1) * 32
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 42) + 2 * 64 * 32
    total = {what: sum(found["bytes"][what] for found, _ in simulated[name]) for what in SIZES}
    values = matrices // tp + norms  # the ranks of one tp part; tensor parallelism leaves the norms whole
    assert total == {
        "parameters": 4 * values,
        "gradients": 4 * values,
        "optimizer": 8 * values + 4 * 4 * TENSORS,
    }


def test_zero1_leaves_ranks_beyond_the_tensors_without_moments(simulated):
    _, (last, _) = simulated["zero1"]
    assert last["bytes"]["optimizer"] == 0
    assert last["bytes"]["parameters"] == simulated["ddp"][0][0]["bytes"]["parameters"]


def test_a_ring_sends_its_share_of_the_payload(simulated):
    found = simulated["tp x fsdp uneven"][0][0]
    share = {"all-gather": 3 / 4, "reduce-scatter": 3 / 4, "all-reduce": 2 * 1 / 2}
    assert found["ring"] == {kind: part * found["bytes"][kind] for kind, part in share.items()}
    found = simulated["zero1"][0][0]
    share = {"all-reduce": 2 * 31 / 32, "broadcast": 31 / 32}
    assert found["ring"] == {kind: part * found["bytes"][kind] for kind, part in share.items()}


def measured_on_a_real_rank(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from at_scale import Config, measure

        return measure(Config(**config))
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("tp x fsdp 2 x 2", {"dp": 2, "tp": 2}),
        ("zero3 uneven", {"layout": "zero3", "dp": 4, "tp": 1}),
        ("zero2 uneven", {"layout": "zero2", "dp": 4, "tp": 1}),
    ],
)
def test_real_ranks_hold_and_send_what_is_simulated(ranks, simulated, name, config):
    found = ranks.run(measured_on_a_real_rank, UNEVEN | config, world_size=4)
    assert found[0] == simulated[name][0][0]


def test_real_ddp_holds_and_sends_what_is_simulated(ranks, simulated):
    config = SMALL | {"layout": "ddp", "dp": 4, "tp": 1}
    assert ranks.run(measured_on_a_real_rank, config, world_size=4)[0] == simulated["ddp"][0][0]


def test_the_call_check_at_thousands_of_ranks_has_a_line_for_each_number():
    code = "import control_scale as c; c.RANKS = (64, 1024); c.ROUNDS = 3; c.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [re.split(r"[ ,]+", line) for line in done.stdout.splitlines()]
    found = {(what, int(ranks)): float(number) for what, ranks, _, number, *_ in lines}
    whats = ("frame", "judge", "mismatch", "descriptors", "plan")
    assert found.keys() == {(what, ranks) for what in whats for ranks in (64, 1024)}
    assert found["mismatch", 1024] < 4, "MB of the first rank for its texts of 40 kB"
    assert found["descriptors", 1024] == 33
    few, many = (float(line[5]) for line in lines if line[0] == "plan")
    assert 15 < many / few < 18, "MB of all ranks, linear in their number"
    assert many < 10
