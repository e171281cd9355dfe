"""Private names of torch's DataLoader, each once; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ITERATOR = "_iterator"
"""Attribute of a DataLoader for the iterator with persistent workers."""


def loader_iterator() -> type:
    """Return the base class of all iterations of a DataLoader."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return _BaseDataLoaderIter


def drop_workers(loader: Any) -> None:
    """Discard a DataLoader's persistent workers, so that the next iteration starts new ones."""
    loader.__dict__[ITERATOR] = None


def pin_memory(batch: Any) -> Any:
    """Return the batch in pinned memory, like a DataLoader with `pin_memory=True`."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Context in which `get_worker_info()` is None, even in a DataLoader's worker."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
