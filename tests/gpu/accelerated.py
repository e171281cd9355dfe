"""What tests of devices share: CUDA where there is one, else the pretend one of `make test-device`."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIND = "sim" if hasattr(torch, "sim") else "cuda"
DEVICE = torch.device(KIND, 0)
MODULE: Any = getattr(torch, KIND)

NEEDS_TWO = pytest.mark.skipif(MODULE.device_count() < 2, reason="needs two devices")
ASYNCHRONOUS = pytest.mark.skipif(
    KIND == "sim", reason="work of the pretend accelerator is done when it is asked for"
)
SYNC_WARNING = "called a synchronizing CUDA operation"


def keep_busy(cycles: int) -> None:
    """Let the device's current stream wait; where its work is always done, nothing."""
    if KIND == "cuda":
        torch.cuda._sleep(cycles)


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """The places at which the host waited for the device in the block, one entry per wait.

    On CUDA torch reports them (`torch.cuda.set_sync_debug_mode`), but for those inside of NCCL.
    """
    places: list[str] = []
    if KIND == "sim":
        from sim import HostSyncs

        with HostSyncs() as waits:
            yield places
        places += [f"{place}: {kind}" for (kind, place), n in waits.places.items() for _ in range(n)]
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found = [one for one in caught if SYNC_WARNING in str(one.message)]
    places += [f"{one.filename}:{one.lineno}" for one in found]


class Peak:
    """Bytes of the device beyond those before a block: `most` at once within it, `now` when it ended."""

    most = now = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the bytes of tensors that a block allocates on this process's device."""
    found = Peak()
    gc.collect()
    MODULE.synchronize()
    MODULE.reset_peak_memory_stats()
    before = MODULE.memory_allocated()
    yield found
    gc.collect()
    found.most = MODULE.max_memory_allocated() - before
    found.now = MODULE.memory_allocated() - before


def captured(step: Callable[[], None], warmup: int = 3) -> Callable[[], None]:
    """A call that repeats `step` by a CUDA graph, after `warmup` steps; the step itself on other devices."""
    if KIND == "sim":
        for _ in range(warmup):
            step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
