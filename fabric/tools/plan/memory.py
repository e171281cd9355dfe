"""`MemoryTracker`: every live storage of a process by kind, over time. Each storage counts once.

Used by simulated ranks of `fabric plan`. It allocates nothing on a device and changes no result.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fabric.core._torch import backward_pass
from fabric.tools.plan._torch import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")
FORWARD, BACKWARD, STEP = range(3)


class Record:
    """One storage: its kind if an object of the loop references it, and the block that allocated it."""

    def __init__(self, size: int, phase: int, block: str) -> None:
        self.size, self.phase, self.block = size, phase, block
        self.kind = ""
        self.is_output = False


class Peak(NamedTuple):
    """The most bytes at once: the sum, its parts by kind, and activations by block: see `MemoryTracker`."""

    bytes: int
    kinds: dict[str, int]
    blocks: dict[str, int]


class MemoryTracker(TorchDispatchMode):
    """Counts storages while `counting`: those that operations allocate, and those passed to `count_tensors`.

    `block` is the name of the repeated module whose forward runs, "" outside of all.
    """

    def __init__(self, fake: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.counting = True
        self.block = ""
        self.stepping = 0
        self.records: list[Record] = []
        self.deltas, self.owners, self.phases = array("q"), array("q"), array("b")
        self.begin = 0
        """The number of changes before the first step."""
        self._numbers: dict[int, int] = {}
        resize: Any = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (number := self._numbers.get(storage._cdata)) is not None:
                # FSDP2 frees and allocates gathered parameters by resizing their storage.
                self.records[number].kind = "parameters"
                self._change(number, size - self.records[number].size)
            return result

        vars_of: Any = torch.UntypedStorage
        vars_of.resize_ = resized
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its allocations."""
        if any([issubclass(kind, DTensor) for kind in types]):
            return NotImplemented  # DTensor's operations on its parts are dispatched here again
        result = func(*args, **(kwargs or {}))
        if self.counting:
            given: set[int] | None = None
            for leaf in tree_leaves(result):
                if self._is_counted(leaf) and leaf.untyped_storage()._cdata not in self._numbers:
                    given = given or {
                        one.untyped_storage()._cdata
                        for one in tree_leaves((args, kwargs))
                        if self._is_counted(one)
                    }
                    if leaf.untyped_storage()._cdata in given:
                        continue  # a view of a storage of the host
                    self._count(leaf)
                elif self._is_counted(leaf):
                    self._count(leaf)
        return result

    def count_tensors(self, tensors: Iterable[Any], kind: str) -> None:
        """Count tensors that are not counted yet, as of this kind; of DTensors this rank's shard."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                with torch.no_grad():
                    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if (number := self._count(part)) is not None:
                    record = self.records[number]
                    record.kind = record.kind or kind

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which allocations do not count."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    def end_block(self, output: Any) -> None:
        """End the forward of a block, whose output stays allocated with activation checkpointing."""
        self.block = ""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                number = self._numbers.get(leaf.untyped_storage()._cdata)
                if number is not None:
                    self.records[number].is_output = True

    def curve(self) -> array[int]:
        """The live bytes after each allocation, from the first step on. The time at which a thread of gloo
        frees memory differs between runs, so frees are left out.
        """
        changes = [*zip(self.deltas, accumulate(self.deltas), strict=True)][self.begin :]
        return array("q", [live for at, (delta, live) in enumerate(changes) if delta > 0 or at == 0])

    def peak(self) -> Peak:
        """The peak of live bytes since the first step."""
        curve = list(accumulate(self.deltas))
        at = max(range(self.begin, len(curve)), key=curve.__getitem__)
        live: Counter[int] = Counter()
        for number, delta in zip(self.owners[: at + 1], self.deltas[: at + 1], strict=True):
            live[number] += delta
        ends = self._freed_in_forward(at)
        kinds, blocks = dict.fromkeys(KINDS, 0), Counter[str]()
        for number, size in live.items():
            record = self.records[number]
            forward = record.phase == FORWARD and number not in ends
            kind = record.kind or ("activations" if forward else "temporaries")
            kinds[kind] += size
            if kind == "activations" and record.block and not record.is_output:
                blocks[record.block] += size
        return Peak(curve[at], kinds, dict(blocks))

    def _freed_in_forward(self, at: int) -> set[int]:
        """Return the storages that were freed after change `at` in the same forward."""
        freed, place = set(), at + 1
        while place < len(self.deltas) and self.phases[place] == FORWARD == self.phases[at]:
            if self.deltas[place] < 0:
                freed.add(self.owners[place])
            place += 1
        return freed

    def phase(self) -> int:
        """Return the part of the loop that runs: BACKWARD, STEP, or FORWARD for all else."""
        return STEP if self.stepping else FORWARD if backward_pass() == -1 else BACKWARD

    def _is_counted(self, leaf: Any) -> bool:
        """Whether a leaf is a dense tensor with memory, and no fake tensor of DTensor or torch.compile."""
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return False
        if leaf.is_meta:
            return False
        return getattr(leaf, "fake_mode", None) is self.fake and not isinstance(leaf, DTensor)

    def _count(self, tensor: Tensor) -> int | None:
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self.records)
            self.records.append(Record(0, self.phase(), self.block))
            weakref.finalize(storage, self._free, address, number).atexit = False
        if size != self.records[number].size:
            self._change(number, size - self.records[number].size)
        return number

    def _change(self, number: int, delta: int) -> None:
        self.records[number].size += delta
        self.deltas.append(delta)
        self.owners.append(number)
        self.phases.append(self.phase())

    def _free(self, address: int, number: int) -> None:
        del self._numbers[address]
        self._change(number, -self.records[number].size)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepping += 1
        self.count_tensors([p.grad for group in optimizer.param_groups for p in group["params"]], "gradients")

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepping -= 1
        self.count_tensors(
            [value for state in optimizer.state.values() for value in state.values()], "optimizer"
        )
