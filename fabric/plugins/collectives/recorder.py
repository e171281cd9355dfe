"""Which collectives of torch's own groups this process has begun, by torch's flight recorder.

Read only by ranks that have waited a while. Where torch keeps no record (TORCH_FR_BUFFER_SIZE=0), nothing is
known.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Begun(NamedTuple):
    """Collectives by the name of their group, each counted from 1; without sends and receives."""

    last: dict[str, int]
    """The last one that this process has begun, of each group that it is in; 0: none."""
    pending: dict[str, list[tuple[int, str]]]
    """Number and kind ("gloo:all_reduce") of those that the thread has begun and that are not done."""


def latest() -> int:
    """The number of the last record: those of groups that come from now on have greater ones."""
    return max([entry["record_id"] for entry in _entries()], default=-1)


def collectives_of(thread: int, after: int) -> Begun:
    """What this process has begun, and what one of its threads (or autograd for it) waits for, if it waits.

    Args:
        thread: Its identifier, as `threading.get_ident()` gives it.
        after: The last record of former groups, or of the process that this one was forked from: groups of
            later ones have the same names.
    """
    others = {str(one.ident) for one in threading.enumerate()} - {str(thread)}
    begun = Begun(dict.fromkeys(dist.distributed_c10d._world.pg_names.values(), 0), {})
    for entry in _entries():
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or entry["record_id"] <= after:
            continue
        if name not in begun.last:  # of a group that was destroyed
            continue
        begun.last[name] = max(number, begun.last[name])
        if not entry["retired"] and str(entry["thread_id"]) not in others:
            begun.pending.setdefault(name, []).append((number, entry["profiling_name"]))
    return begun


def _entries() -> list[dict[str, Any]]:
    try:
        return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False)).get("entries", [])  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, RuntimeError):  # a torch without it
        return []
