"""`PendingSave`: a save that goes on while the loop does, from a copy in host memory. One at a time."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.processes.signals import flush_output
from fabric.strategies.state import together
from fabric.utilities.state_keys import like

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.core.types import PathLike


class PendingSave:
    """What `fabric.save(..., wait=False)` gives: the save that has begun.

    Its error is raised by `wait()`, or else by the next save or load; a process that ends without any of
    them waits for the file, prints the error, and ends with exit code 1.
    """

    def __init__(self, strategy: Any, path: PathLike, write: Callable[[], None] | None) -> None:
        self._strategy, self._path, self._write = strategy, path, write
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            atexit.register(self._at_exit)
            self._thread = threading.Thread(target=self._run, name="fabric-save")
            self._thread.start()

    def done(self) -> bool:
        """Whether this rank has nothing left to write. Sends nothing."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there, for all ranks. All ranks must call this.

        Raises:
            OSError: It could not be written; on the other ranks a RankError that says so.
        """
        if self._strategy.pending is not self:  # somebody has waited for it
            return
        self._strategy.pending = None
        with together(self._strategy, f"saving {self._path}"):
            self._end()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._write()  # type: ignore[misc]
        except Exception as error:
            self._error = error
        self._write = None  # with the copy

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._end()
        if self._error is not None:
            rank = self._strategy.topology.rank
            kind = type(self._error).__name__
            print(
                f"fabric: rank {rank} failed while saving {self._path}: {kind}: {self._error}",
                file=sys.stderr,
            )
            atexit._run_exitfuncs()  # the rest of them; Python has no way to end with another exit code
            flush_output()
            os._exit(1)


class Snapshot:
    """Checkpoint data copied to host memory; tensors that share memory share it in the copy.

    Args:
        before: One whose memory is taken again, unless somebody still holds a tensor of it (a CheckpointIO
            that writes later). Fresh pages cost more than the copying.
    """

    def __init__(self, before: Snapshot | None) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}  # by the address of what they are of
        self._held: list[Any] = []  # weak references to the tensors
        held = before is None or any([tensor() is not None for tensor in before._held])
        self._free = [] if before is None or held else list(before._copies.values())

    def of(self, tree: Any) -> Any:
        """A copy of what `state.gather` gives. Called once."""
        copy = self._copied(tree)
        self._free.clear()
        return copy

    def _copied(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            made = self._tensor(tree)
            self._held.append(weakref.ref(made))
            return made
        if isinstance(tree, dict):
            return like(tree, {key: self._copied(value) for key, value in tree.items()})
        if type(tree) in (list, tuple):
            return type(tree)([self._copied(value) for value in tree])
        return bytearray(tree) if type(tree) is bytearray else tree

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach().clone()
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._copies:
            self._copies[key] = self._memory(storage.nbytes()).copy_(storage)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    def _memory(self, size: int) -> torch.UntypedStorage:
        # In the order of the last time: the first one fits, unless the state has changed its shape.
        if self._free and self._free[0].nbytes() == size:
            return self._free.pop(0)
        self._free.clear()
        return torch.UntypedStorage(size)
