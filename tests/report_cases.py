"""Files of runs as ranks write them, for tests of `fabric report`: `write_run`."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from fabric.report.format import FILE_NAME, KINDS, pack_event, pack_header, pack_step

SECONDS = dict(zip(KINDS, (0.002, 0.03, 0.05, 0.01, 0.004, 0.001, 0.0), strict=True))
"""Of a step, by kind; 1 ms more belongs to no kind."""


def start_of(rank, ranks, moment, step=0, **facts):
    """The event that begins a rank's file."""
    facts = {"script": "train.py", "strategy": "DDPStrategy", "precision": "32-true"} | facts
    facts |= {"rank": rank, "world_size": ranks, "hostname": f"node{rank // 8}", "accelerator": "cpu"}
    return pack_event("start", moment, step, parameters=1234, versions={"torch": "2.13.0"}, **facts)


def steps_of(count, *, seed=0, noise=0.02, first=1, **longer):
    """(number, seconds by kind) of each step. `longer`: kind=(first, last, seconds)."""
    generator = torch.Generator().manual_seed(seed)
    factors = 1 + noise * (2 * torch.rand(count, len(KINDS), generator=generator) - 1)
    seconds = factors * torch.tensor([*SECONDS.values()])
    for kind, (begin, end, more) in longer.items():
        seconds[begin - first : end - first + 1, KINDS.index(kind)] += more
    return list(zip(range(first, first + count), seconds.tolist(), strict=True))


def write_rank(directory, rank, ranks, steps, *, begin=None, events=(), last="end", append=False):
    """Write the file of a rank. `events`: (after step, kind, values). `last`: the kind of the last event."""
    path = Path(directory) / FILE_NAME.format(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    moment = time.time() - 10_000 if begin is None else begin
    records = [
        b"" if append else pack_header(),
        start_of(rank, ranks, moment, steps[0][0] - 1 if steps else 0),
    ]
    for number, seconds in steps:
        whole = sum(seconds) + 0.001
        records.append(pack_step(number, moment, seconds, whole, 1_000_000 + number))
        moment += whole
        records += [pack_event(kind, moment, number, **values) for at, kind, values in events if at == number]
    if last is not None:
        records.append(pack_event(last, moment, steps[-1][0] if steps else 0))
    with path.open("ab" if append else "wb") as file:
        file.write(b"".join(records))
    return path


def write_run(directory, ranks=4, count=1500):
    """Write a run in which rank 3 is slow in data from step 400 to 1,200 and rank 1 has one long forward."""
    for rank in range(ranks):
        longer = {"data": (400, 1200, 0.02)} if rank == 3 else {"communication": (400, 1200, 0.02)}
        longer |= {"forward": (1300, 1300, 2.0)} if rank == 1 else {}
        events = [(number, "epoch", {"epoch": number // 500}) for number in (500, 1000, 1500)]
        if rank == 0:
            events += [
                (at, "log", {"values": {"loss": 1000 / (at + 500), "lr": 0.1}}) for at in range(1, count, 5)
            ]
            events += [(600, "save", {"path": "runs/last.pt", "seconds": 0.5, "ok": True})]
            events += [(700, "save", {"path": "runs/last.pt", "seconds": 0.1, "ok": False})]
            events += [(9, "warning", {"text": "<b>slow</b> </script>", "place": "train.py:31"})]
        write_rank(directory, rank, ranks, steps_of(count, seed=rank, **longer), events=events)
    return Path(directory)
