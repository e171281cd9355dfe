"""Datasets and small helpers of the tests of loaders on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from fabric import Fabric


class Indices(Dataset):
    """Gives the index that it is asked for."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Numbers(IterableDataset):
    """0 to n - 1, in order; its length is not told."""

    def __init__(self, n=4):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def launched(strategy="ddp"):
    """A Fabric over the ranks of this call."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def rows(loader):
    """The batches of one epoch, as lists."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def in_workers(count):
    """Keywords for a DataLoader with so many workers."""
    return {"num_workers": count, "multiprocessing_context": "fork"} if count else {}
