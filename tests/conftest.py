"""What every test gets: `ranks` (a warm pool of 4 processes), and a check that it left nothing behind."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from machine import ACCELERATOR
from warm import WarmPython

from fabric.testing import RankPool
from fabric.testing.worker import changes, child_processes, user_environ

if TYPE_CHECKING:
    from collections.abc import Iterator

# Once in the fork server: a rank that has failed is replaced, and its successor would import them again.
PRELOAD = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental._attention",  # of the first FSDP model
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    # What the first model of each strategy imports.
    "fabric.accelerators.cpu",
    "fabric.checkpoint.formats.sharded.save",
    "fabric.checkpoint.latest.latest",
    "fabric.collectives.gather",
    "fabric.guard.call_checker",
    "fabric.guard.control_connections",
    "fabric.guard.mismatch",
    "fabric.loss_check.check",
    "fabric.metrics.sync",
    "fabric.plugins.environments.process_group",
    "fabric.replicas.check",
    "fabric.strategies.context_parallel.part",
    "fabric.strategies.ddp.strategy",
    "fabric.strategies.free",
    "fabric.strategies.fsdp.strategy",
    "fabric.strategies.local_sgd.strategy",
    "fabric.strategies.pipeline.strategy",
    "fabric.strategies.sharding.dtensors",
    "fabric.strategies.tensor_parallel.strategy",
    "fabric.strategies.zero1.strategy",
    "fabric.watchdog.watchdog",
]
IGNORED = (
    # Many tests train on few equal numbers; test_unequal_parts.py tests these two warnings.
    "All ranks called .* with the same batches",
    "The loss of the first backward is a sum over its items",
    ".*batch norm in training sees only",
    "fabric.backward ran although no model was set up",
    "No loader was set up",  # loops here hold what is compared with ranks, too
    r"num_workers=\d+ on each of the \d+ ranks",  # on the cores of wherever the tests run
    "TypedStorage is deprecated",  # torch 2.9, of torch.distributed.checkpoint's own calls
    "Sparse invariant checks are implicitly disabled",  # torch 2.11, of torch.load of a sparse tensor
    "Validating sparse tensor invariants",  # torch >= 2.14: of all that this process has unpickled before
)
ROOT = Path(__file__).parent.parent
# Tests with real packages: each folder is collected only in the environment that has its package, which
# tests/integrations/__main__.py makes. There is no conftest.py beside them: it would put that folder on the
# path, where `import bitsandbytes` would find a folder of tests.
ENGINES = [path for path in Path(__file__).parent.glob("integrations/*") if path.is_dir()]
collect_ignore = [str(path) for path in ENGINES if path.name != os.environ.get("FABRIC_ENGINE")]
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__"}


def pytest_configure() -> None:
    # With it, which .ci/run sets, print() writes words apart: those of ranks that share a pipe would mix.
    os.environ.pop("PYTHONUNBUFFERED", None)
    os.environ["FABRIC_PREFIX_RANKS"] = ""  # tests read the lines that ranks print under `fabric run`
    torch.set_num_threads(1)  # as on the ranks: results and timings do not depend on the machine's cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
    if torch.cuda.is_available() or hasattr(torch, "sim"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            reason = "needs a CUDA device; make test-device runs it on a pretend one"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four warm processes; `ranks.run(function, *args, world_size=2)`. Costs nothing until the first run."""
    yield from _pool()


@pytest.fixture(scope="module")
def forking_ranks() -> Iterator[RankPool]:
    """The same, for tests that fork: in these processes nothing has run before.

    In a CUDA build of torch without a GPU, DTensors and torch.compile register eight devices. The
    next backward starts a thread for each, and in processes that are forked later no backward can run.
    """
    yield from _pool()


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    """Scripts without the start of an interpreter: `warm.run(script)`, `warm.torchrun(script, ranks=2)`."""
    python = WarmPython()
    yield python
    python.close()


def _pool() -> Iterator[RankPool]:
    settings = {"warnings_as_errors": True, "ignored_warnings": IGNORED}
    with RankPool(4, timeout=60.0, preload=PRELOAD, accelerator=ACCELERATOR, **settings) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = _traces()
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    after = _traces()
    left = [f"{kind}{change}" for kind in before for change in changes(before[kind], after[kind])]
    if left:
        _clean_up(before)
        pytest.fail("The test left traces:\n" + "\n".join(f"  {trace}" for trace in left), pytrace=False)


def _traces() -> dict[str, dict]:
    return {
        "environment variable": user_environ(),
        "child process": child_processes(),
        "default process group initialised": {"": dist.is_initialized()},
        "default dtype": {"": torch.get_default_dtype()},
        "number of torch threads": {"": torch.get_num_threads()},
        "signal handler": {
            number.name: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
        },
        "file in the repository root": dict.fromkeys(
            {entry.name for entry in ROOT.iterdir()} - CACHES, "there"
        ),
    }


def _clean_up(before: dict[str, dict]) -> None:
    """One test's traces must not fail the next."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(before["default dtype"][""])
    torch.set_num_threads(before["number of torch threads"][""])
    environ = before["environment variable"]
    for key in user_environ().keys() - environ.keys():
        del os.environ[key]
    os.environ.update(environ)
    for pid in child_processes().keys() - before["child process"].keys():
        os.kill(pid, signal.SIGKILL)
