"""What tests of checkpoints share."""

from __future__ import annotations

import torch


def failure(fabric, verb, *args, **kwargs):
    """(kind, text) of what the call raises here; the group must be usable afterwards."""
    try:
        getattr(fabric, verb)(*args, **kwargs)
    except Exception as error:
        told = type(error).__name__, str(error)
    else:
        told = None
    assert fabric.all_reduce(torch.tensor(1.0), reduce_op="sum") == fabric.world_size
    return told
