"""Copies of checkpoint data in host memory, which a loop may not change any more."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fabric.core.tree import flatten
from fabric.utilities.state_keys import like


def bytes_of(value: Any) -> int:
    """What the values of a tensor take; of a sparse one, as of anything else, this is not known: 0."""
    known = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.numel() * value.dtype.itemsize if known else 0


def room_for(size: int) -> bool:
    """Whether host memory can take `size` bytes more, and keep a tenth of what is free; else a warning."""
    free = free_memory()
    if size <= 0.9 * free:
        return True
    warnings.warn(
        f"fabric.save(wait=False) holds the loop until the checkpoint is written: a copy of it takes "
        f"{size / 1e9:.1f} GB of host memory, of which {free / 1e9:.1f} GB are free.",
        stacklevel=2,
    )
    return False


def free_memory(root: Path = Path("/")) -> float:
    """Bytes of host memory that can be taken, of this machine and in its container (control groups of version
    2); infinite: unknown.
    """
    free, group = [math.inf], root / "sys/fs/cgroup"
    with suppress(OSError, KeyError):
        free.append(1024 * _counts(root / "proc/meminfo")["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):  # ValueError: there is no limit, "max"
        kept = _counts(group / "memory.stat")  # pages of files are given back
        limit, taken = [int((group / name).read_text()) for name in ("memory.max", "memory.current")]
        free.append(limit - taken + kept["active_file"] + kept["inactive_file"])
    return min(free)


def _counts(file: Path) -> dict[str, int]:
    return {name: int(count) for name, count, *_ in map(str.split, file.read_text().splitlines())}


class Snapshot:
    """Checkpoint data copied to host memory; tensors that share memory share it in the copy.

    What lies on an accelerator is copied to pinned memory, all of it before the host waits, once.

    Args:
        before: One that nobody uses any more, whose memory is taken again: fresh pages are slow.
    """

    def __init__(self, before: Snapshot | None) -> None:
        self._copies: dict[Any, torch.UntypedStorage] = {}  # by the place and size of what they are of
        self._free = [] if before is None else list(before._copies.values())
        self._devices: set[torch.device] = set()

    def fits(self, tree: Any) -> bool:
        """Whether there is memory for a copy of `tree`."""
        size = sum([bytes_of(leaf) for leaf in flatten(tree)[0]])
        return room_for(size - sum([storage.nbytes() for storage in self._free]))

    def of(self, tree: Any) -> Any:
        """A copy of what `state.gather` gives. Called once."""
        copy = self._copied(tree)
        self._free.clear()
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        return copy

    def _copied(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._tensor(tree)
        if isinstance(tree, dict):
            return like(tree, {key: self._copied(value) for key, value in tree.items()})
        if type(tree) in (list, tuple):
            return type(tree)([self._copied(value) for value in tree])
        return bytearray(tree) if type(tree) is bytearray else tree

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        lazy = tensor.is_conj() or tensor.is_neg()  # its values are not those in its memory
        if lazy or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._copies:
            pinned = storage.device.type not in ("cpu", "mps")  # mps: torch has no pinned memory of it
            if pinned:
                self._devices.add(storage.device)
            self._copies[key] = self._memory(storage.nbytes(), pinned).copy_(storage, pinned)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        copy.__dict__.update(vars(tensor))
        return copy.requires_grad_(tensor.requires_grad)

    def _memory(self, size: int, pinned: bool) -> torch.UntypedStorage:
        # In the order of the last time: the first one fits, unless the state has changed its shape.
        if self._free and self._free[0].nbytes() == size:
            return self._free.pop(0)
        self._free.clear()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned).untyped_storage()
