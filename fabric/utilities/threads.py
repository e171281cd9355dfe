"""Threads per rank: ranks of one machine share its cores. Called once in each process, after launch."""

from __future__ import annotations

import os

import torch

from fabric.utilities.cores import usable_cores


def share_cores(local_world_size: int) -> None:
    """Set torch's threads to `max(1, usable cores // local ranks)`, unless the user chose a number.

    OMP_NUM_THREADS is a choice (our own launchers set it to the same share), and so is a count other than
    torch's default: all processors, all usable ones, or half of either (physical cores).
    """
    if local_world_size <= 1 or "OMP_NUM_THREADS" in os.environ:
        return
    every, usable = os.cpu_count() or 1, usable_cores()
    if torch.get_num_threads() in {every, every // 2, usable, usable // 2}:
        torch.set_num_threads(max(1, usable // local_world_size))
