"""Ranks that wait for each other, one of them in torch's own collectives: found, and ended at once.

And the other half: nothing is said as long as one rank computes, sleeps, or is on its way.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, LaunchError
from fabric.guard.call_checker import job_detector
from fabric.guard.deadlocks import find_deadlocked
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, ZeRO1Strategy
from fabric.testing import RankTimeout, rank_info
from fabric.watchdog import watchdog

HERE = Path(__file__).name


def parallelize(model, mesh):
    return parallelize_module(
        model, mesh["tensor_parallel"], {"": RowwiseParallel(input_layouts=Replicate())}
    )


def parallelize_columns(model, mesh):
    """Ranks meet in its backward, too."""
    return parallelize_module(
        model, mesh["tensor_parallel"], {"": ColwiseParallel(output_layouts=Replicate())}
    )


STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "fsdp": FSDPStrategy,
    "tensor": partial(ModelParallelStrategy, parallelize, 1, 2),
    "columns": partial(ModelParallelStrategy, parallelize_columns, 1, 2),
    "hsdp": partial(FSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
}


def launch(jobs, path):
    """On each rank of the pool a job of its own, whose ranks are forked: what becomes of it in the end."""
    strategy, *parts = jobs[rank_info().rank]
    os.environ["FABRIC_HANG_REPORT_AFTER"] = "40"
    count = 4 if strategy == "hsdp" else 2
    fabric = Fabric(accelerator="cpu", devices=count, strategy=STRATEGIES[strategy](start_method="fork"))
    try:
        fabric.launch(train, f"{path}-{rank_info().rank}", *parts)
    except LaunchError as error:
        said = [Path(f"{path}-{rank_info().rank}.{rank}") for rank in range(2)]
        return str(error), [one.read_text() if one.exists() else "" for one in said]
    finally:
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"
    return "went on", []


def train(fabric, path, elsewhere, lives_on=False):
    """Rank zero goes elsewhere, the other trains on."""
    stacks = Path(f"{path}.{fabric.global_rank}.stacks").open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(60, file=stacks)
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in range(4):  # forwards 1, 2, 4, ... and a new order of them are calls of Fabric's
        step(fabric, model, optimizer, path)
    rank = fabric.global_rank
    if lives_on:
        watchdog._END_S = 0.5
        sys.excepthook = no_hook  # the process ends all the same
    try:
        (elsewhere if rank == 0 else step)(fabric, model, optimizer, path)
    except CollectiveMismatch as error:
        Path(f"{path}.{rank}").write_text(str(error))
        with suppress(CollectiveMismatch):
            fabric.barrier("after it")
            Path(f"{path}.{rank}").write_text("a call after it went on")
        if not lives_on:
            raise
        time.sleep(600)  # as somebody who catches it and goes on


def step(fabric, model, optimizer, path):
    fabric.backward(model(torch.ones(1, 4, requires_grad=True)).sum())
    optimizer.step()


def no_hook(*_):
    raise RecursionError("each process group puts one more hook around it")


def save(fabric, model, optimizer, path):
    fabric.save(path, {"model": model, "optimizer": optimizer})


def all_gather(fabric, model, optimizer, path):
    fabric.all_gather(torch.ones(2))


def barrier(fabric, model, optimizer, path):
    fabric.barrier()


def evaluate(fabric, model, optimizer, path):
    with torch.no_grad():
        model(torch.ones(1, 4))


def evaluate_late(fabric, model, optimizer, path):
    model(torch.ones(1, 4, requires_grad=True))
    evaluate(fabric, model, optimizer, path)


def raw_gather(fabric, model, optimizer, path):
    dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))


JOBS = [("ddp", save), ("zero1", all_gather, True), ("fsdp", barrier), ("ddp", raw_gather)]
ALONE = [("tensor", evaluate), ("hsdp", evaluate), ("columns", evaluate_late)]


def ends(ranks, jobs, path):
    try:
        return ranks.run(launch, jobs, str(path / "at"), world_size=len(jobs), group=False, timeout=100)
    except RankTimeout as error:
        stacks = [f"{one.name}\n{one.read_text()}" for one in sorted(path.glob("*.stacks"))]
        raise AssertionError("\n".join([str(error), *stacks])) from None


def test_a_verb_on_one_rank_and_training_on_the_other(forking_ranks, tmp_path):
    found = ends(forking_ranks, JOBS, tmp_path)
    for (_, elsewhere, *_), (end, said) in zip(JOBS[:3], found[:3], strict=True):
        table = said[0].splitlines()
        assert table[0] == "Ranks made different calls where all must make the same."
        assert re.match(rf"  0 +{elsewhere.__name__}\S* #\d+ of ranks 0-1 .+{HERE}:\d+", table[2])
        assert re.match(rf"  1 +(backward|torch.distributed: \w+) .+{HERE}:\d+ in step", table[3])
        assert " each waits for a call that another has not made." in table[5]
        assert "CollectiveMismatch: Ranks made different calls" in end or elsewhere is all_gather
    # Rank zero goes on after its error; the other one ends itself.
    assert re.match(r"rank 1 on \S+ failed first: exit code 1", found[1][0])
    # No rank is in a verb, in which it could raise.
    assert re.match(r"rank \d on \S+ failed first: exit code 1", found[3][0])


def test_evaluation_on_rank_zero_alone(forking_ranks, tmp_path):
    """Other ranks wait in functional collectives, or in groups in which rank zero has begun nothing."""
    for end, said in ends(forking_ranks, ALONE, tmp_path):
        table = said[0].splitlines()
        assert re.match(rf"  0 +forward without gradients of model 0 \(Linear\) .+{HERE}:\d+", table[2])
        for row in table[3:-2]:
            assert re.match(rf"  \d((, |-)\d)* +(backward|torch.distributed: \w+) .+{HERE}:\d+ in step", row)
        assert "`with fabric.whole(model) as plain:`" in table[-2]
        assert "CollectiveMismatch: Ranks made different calls" in end


def standing(detector):
    return {rank: one for rank, one in detector.read_statuses().items() if one.number or one.pending}


def on_the_way():
    """Rank 0 in torch's collective with rank 1, rank 2 in a verb: all wait for rank 1."""
    os.environ["FABRIC_HANG_REPORT_AFTER"] = "600"
    fabric = Fabric(accelerator="cpu", devices=3, strategy="ddp")
    fabric.launch()
    dog, rank, pair = (
        fabric.strategy.find_part("hang report").watchdog,
        fabric.global_rank,
        dist.new_group([0, 1]),
    )
    try:
        fabric.barrier()
        if rank == 1:
            detector = dog._detector
            while (found := standing(detector)).keys() != {0, 2}:
                time.sleep(0.05)  # waits for what the other ranks write
            assert len(find_deadlocked(found, {found[2].group: range(3)})) < 3
            for _ in range(2):  # each needs a look of every rank's watchdog
                dog.collect_statuses()
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
        return fabric.all_reduce(torch.ones(1), reduce_op="sum").item()
    finally:
        dog.stop()
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"


def test_nothing_is_said_while_one_rank_is_on_its_way(ranks):
    assert ranks.run(on_the_way, world_size=3) == [3.0] * 3


def asleep():
    os.environ["FABRIC_HANG_REPORT_AFTER"] = "600"
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    dog = fabric.strategy.find_part("hang report").watchdog
    try:
        fabric.barrier()
        if fabric.global_rank == 1:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            loss = torch.ones(1, requires_grad=True) * 2
            loss.register_hook(lambda _: time.sleep(4.0))  # what a hook of the user's does, not a wait
            loss.backward()
            fabric.barrier("late")
            work.wait()
        else:
            fabric.barrier("late")
            dist.all_reduce(torch.ones(1))
        return dog._detector.fatal_error
    finally:
        dog.stop()
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"


def test_a_hook_that_sleeps_is_no_wait_for_ranks(ranks):
    assert ranks.run(asleep, world_size=2) == [None, None]


def collectives_of_a_new_job(clock_set_back_ns):
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    detector = job_detector()
    detector._created_ns = detector._created_ns[0] + clock_set_back_ns, detector._created_ns[1]
    before = list(job_detector().torch_collectives(threading.get_ident())[0].values())
    dist.all_reduce(torch.ones(1))
    after = list(job_detector().torch_collectives(threading.get_ident())[0].values())
    return before, after


def test_collectives_of_a_former_job_are_not_counted(ranks):
    """Its groups have the same names, and torch's record has its collectives."""
    for clock_set_back_ns in (0, 0, 3600 * 10**9):
        for (before,), (after,) in ranks.run(collectives_of_a_new_job, clock_set_back_ns, world_size=2):
            assert after == before + 1
