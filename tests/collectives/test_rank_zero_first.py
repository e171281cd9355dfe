"""`rank_zero_first`: who goes first, and what happens to the others when that goes wrong."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, RankError
from fabric.testing import rank_info

MACHINES = 2


def launched() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric


@contextmanager
def two_machines():
    """A Fabric whose four ranks pretend to stand on two machines."""
    rank = dist.get_rank()
    place = {"LOCAL_RANK": rank % 2, "NODE_RANK": rank // 2, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        fabric = Fabric(accelerator="cpu", devices=2, num_nodes=MACHINES, strategy="ddp")
        fabric.launch()
        assert (fabric.node_rank, fabric.local_rank) == (rank // 2, rank % 2)
        yield fabric


class Order:
    """Which ranks entered the block when the one at hand did; each leaves a file."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def enter(self, rank: int) -> list[str]:
        seen = sorted(path.name for path in self.folder.iterdir())
        (self.folder / str(rank)).touch()
        return seen

    @property
    def entered(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def in_order(folder):
    fabric = launched()
    order = Order(folder)
    with fabric.rank_zero_first():
        if fabric.global_rank == 0:
            time.sleep(0.1)  # time for the others to go wrong
        seen = order.enter(fabric.global_rank)
    fabric.barrier()
    return seen, order.entered


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_zero_is_alone_and_first(ranks, tmp_path, world_size):
    everyone = [str(rank) for rank in range(world_size)]
    results = ranks.run(in_order, str(tmp_path), world_size=world_size)
    assert results[0] == ([], everyone)
    for seen, entered in results[1:]:
        assert "0" in seen
        assert entered == everyone


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class WithFile(OSError):
    """Holds something that cannot travel."""

    def __init__(self, message):
        super().__init__(message)
        self.file = open(os.devnull)  # noqa: SIM115, PTH123

    def close(self):
        self.file.close()


def failing(folder, kind, local=False):
    fabric = launched()
    order = Order(folder)
    errors = {
        "oserror": lambda: FileNotFoundError(2, "no such data", "/data/set"),
        "unpicklable": lambda: Unpicklable("this", "that"),
        "file": lambda: WithFile("broken download"),
        "exit": lambda: SystemExit(3),
    }
    error = errors[kind]()
    caught = None
    try:
        with fabric.rank_zero_first(local=local):
            order.enter(fabric.global_rank)
            raise error
    except BaseException as raised:
        caught = raised
    if isinstance(error, WithFile):
        error.close()
    assert (caught is error) == (fabric.global_rank == 0), "rank zero has its own, with its traceback"
    fabric.barrier()
    value = fabric.broadcast("usable afterwards")
    notes = getattr(caught, "__notes__", [])
    return type(caught), str(caught), order.entered, notes, value


@pytest.mark.parametrize("local", [False, True])
def test_everyone_raises_what_rank_zero_raised(ranks, tmp_path, local):
    results = ranks.run(failing, str(tmp_path), "oserror", local, world_size=3)
    for kind, text, entered, _, value in results:
        assert kind is FileNotFoundError
        assert text == "[Errno 2] no such data: '/data/set'"
        assert entered == ["0"], "nobody else enters the block"
        assert value == "usable afterwards"
    assert results[1][3] == ["raised by rank 0 in fabric.rank_zero_first()"]


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [("unpicklable", Unpicklable, "this and that"), ("file", WithFile, "broken download")],
)
def test_an_error_that_cannot_travel_is_quoted(ranks, tmp_path, kind, own, text):
    zero, one = ranks.run(failing, str(tmp_path), kind, world_size=2)
    assert zero[:3] == (own, text, ["0"])
    assert one[0] is RankError
    assert one[1] == f"rank 0 failed first: {own.__name__}: {text}"
    assert one[2] == ["0"]


def test_leaving_the_program_leaves_it_everywhere(ranks, tmp_path):
    for kind, text, entered, *_ in ranks.run(failing, str(tmp_path), "exit", world_size=2):
        assert (kind, text, entered) == (SystemExit, "3", ["0"])


def other_rank_fails():
    fabric = launched()
    outcome = "fine"
    try:
        with fabric.rank_zero_first():
            if fabric.global_rank == 1:
                raise KeyError("mine alone")
    except KeyError:
        outcome = "failed"
    fabric.barrier()
    return outcome


def test_a_later_rank_fails_alone(ranks):
    assert ranks.run(other_rank_fails, world_size=2) == ["fine", "failed"]


def value_flows():
    fabric = launched()
    with fabric.rank_zero_first() as nothing:
        value = fabric.global_rank
    assert nothing is None
    return fabric.broadcast({"value": value} if fabric.global_rank == 0 else None)


def test_what_rank_zero_found_can_be_sent(ranks):
    assert ranks.run(value_flows, world_size=2) == [{"value": 0}, {"value": 0}]


def on_two_machines(folder):
    with two_machines() as fabric:
        order = Order(folder)
        with fabric.rank_zero_first(local=True):
            if fabric.local_rank == 0:
                time.sleep(0.1)
            seen = order.enter(fabric.global_rank)
        fabric.barrier()
        return seen


def test_the_first_of_each_machine(ranks, tmp_path):
    seen = ranks.run(on_two_machines, str(tmp_path), world_size=4)
    assert not {"1", "3"} & {*seen[0], *seen[2]}
    assert {"0", "2"} <= {*seen[1]} & {*seen[3]}


def one_machine_fails(folder):
    with two_machines() as fabric:
        order = Order(folder)
        caught = None
        try:
            with fabric.rank_zero_first(local=True):
                order.enter(fabric.global_rank)
                if fabric.node_rank == 1:
                    raise OSError("disk of machine 1")
        except OSError as raised:
            caught = raised
        assert str(caught) == "disk of machine 1"
        fabric.barrier()
        assert fabric.all_reduce(1.0, reduce_op="sum").item() == 4.0
        return order.entered, getattr(caught, "__notes__", [])


def test_one_machine_that_fails_stops_all(ranks, tmp_path):
    results = ranks.run(one_machine_fails, str(tmp_path), world_size=4)
    note = ["raised by rank 2 in fabric.rank_zero_first()"]
    assert results == [(["0", "2"], note), (["0", "2"], note), (["0", "2"], []), (["0", "2"], note)]


def test_one_process_just_goes(tmp_path):
    fabric = Fabric(accelerator="cpu")
    with fabric.rank_zero_first():
        entered = True
    assert entered
    with pytest.raises(OSError, match="own"), fabric.rank_zero_first(local=True):
        raise OSError("own")


@contextmanager
def impatient(seconds: float):
    """A group of this call's ranks whose collectives wait for a rank no longer than `seconds`."""
    info = rank_info()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{info.store}",
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def longer_than_collectives_wait(folder, local):
    watched = mock.patch.dict(os.environ, FABRIC_HANG_REPORT_AFTER="60")  # it tells who lives
    with watched, impatient(seconds=2), two_machines() if local else nullcontext(None) as fabric:
        fabric = fabric or launched()
        order = Order(folder)
        assert fabric.strategy.collective.guard.timeout == timedelta(seconds=2)
        started = time.monotonic()
        with fabric.rank_zero_first(local=local):
            if fabric.global_rank == (2 if local else 0):
                time.sleep(4)  # a download
            seen = order.enter(fabric.global_rank)
        took = time.monotonic() - started
        fabric.barrier()
        return seen, took


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_the_first_may_take_longer_than_collectives_wait(ranks, tmp_path, local):
    world_size, firsts = (4, {"0", "2"}) if local else (2, {"0"})
    results = ranks.run(
        longer_than_collectives_wait, str(tmp_path), local, world_size=world_size, group=False
    )
    for rank, (seen, took) in enumerate(results):
        if str(rank) not in firsts:
            assert firsts <= {*seen}
        if not local or rank != 0:
            assert took >= 4


def first_falls_silent(folder, watch):
    """Rank 0 does not come out of its block, and cannot say so: its process stands still."""
    told = Path(folder, "told")
    watched = mock.patch.dict(os.environ, FABRIC_HANG_REPORT_AFTER=watch)
    with watched, impatient(seconds=2):
        fabric = launched()
        if fabric.global_rank == 0 and watch != "off":
            fabric.strategy.find_part("hang report").watchdog._stopped.set()
        if fabric.global_rank == 0:
            with fabric.rank_zero_first():
                while not told.exists():
                    time.sleep(0.05)
            with pytest.raises(RankError):
                fabric.barrier()  # the other has given this one up
            return ""
        with pytest.raises(RankError) as caught, fabric.rank_zero_first():
            pass
        told.touch()
        return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("watch", "why"),
    [("60", "rank 0 ended, or does not answer"), ("off", "rank 0 ended, or did not join within 2 s")],
)
def test_nobody_waits_for_ever_for_a_first_rank_that_is_silent(ranks, tmp_path, watch, why):
    _, one = ranks.run(first_falls_silent, str(tmp_path), watch, world_size=2, group=False)
    assert why in one
    assert "rank_zero_first(local=False) at " in one


def reduce_instead(folder):
    fabric = launched()
    order = Order(folder)
    if fabric.global_rank == 1:
        with pytest.raises(CollectiveMismatch) as caught:
            fabric.all_reduce(1.0)
    else:
        with pytest.raises(CollectiveMismatch) as caught, fabric.rank_zero_first():
            order.enter(fabric.global_rank)
    fabric.barrier()
    return str(caught.value), order.entered, fabric.all_reduce(1.0, reduce_op="sum").item()


def test_nobody_enters_if_a_rank_does_something_else(ranks, tmp_path):
    one, other = ranks.run(reduce_instead, str(tmp_path), world_size=2)
    assert one == other
    text, entered, total = one
    assert "rank_zero_first(local=False)" in text
    assert "all_reduce(mean)" in text
    assert text.count("test_rank_zero_first.py:") == 2
    assert entered == []
    assert total == 2.0


def different_arguments(folder):
    fabric = launched()
    order = Order(folder)
    with (
        pytest.raises(CollectiveMismatch, match=r"(?s)local=False.*local=True"),
        fabric.rank_zero_first(local=fabric.global_rank == 1),
    ):
        order.enter(fabric.global_rank)
    fabric.barrier()
    return order.entered


def test_ranks_must_agree_on_who_is_first(ranks, tmp_path):
    assert ranks.run(different_arguments, str(tmp_path), world_size=2) == [[], []]


def threads_around_blocks():
    fabric = launched()
    fabric.barrier()
    before = {*threading.enumerate()}
    inside = []
    for _ in range(3):
        with fabric.rank_zero_first():
            inside.append([thread.name for thread in {*threading.enumerate()} - before])
    assert {*threading.enumerate()} == before
    with pytest.raises(KeyError), fabric.rank_zero_first():
        raise KeyError("in the block")
    assert {*threading.enumerate()} == before
    return inside


def test_no_thread_outlives_the_block(ranks):
    assert ranks.run(threads_around_blocks, world_size=2) == [[[]] * 3] * 2


def one_block_after_the_other(folder):
    fabric = launched()
    seen = []
    for turn in range(20):
        order = Order(folder)
        with fabric.rank_zero_first(local=turn % 2 == 1):
            (order.folder / f"{turn} {fabric.global_rank}").touch()
            seen.append((order.folder / f"{turn} 0").exists())
    return seen


def test_many_blocks_in_a_row(ranks, tmp_path):
    assert ranks.run(one_block_after_the_other, str(tmp_path), world_size=3) == [[True] * 20] * 3


def collective_in_the_block(folder, group_of):
    fabric = launched()
    group = dist.new_group(group_of) if group_of else None
    order, started = Order(folder), time.monotonic()
    caught = None
    try:
        with fabric.rank_zero_first():
            order.enter(fabric.global_rank)
            fabric.all_reduce(1.0, group)
    except CollectiveMismatch as raised:
        caught = raised
    waited = time.monotonic() - started
    try:
        total = fabric.all_reduce(1.0, reduce_op="sum").item()
    except CollectiveMismatch as raised:
        total = str(raised)
    return str(caught), order.entered, waited, total


@pytest.mark.parametrize("group_of", [None, [0, 1]])
def test_a_collective_in_the_block_of_rank_zero_is_named_at_once(ranks, tmp_path, group_of):
    """The others wait outside until the block is over, so it could never end."""
    results = ranks.run(collective_in_the_block, str(tmp_path), group_of, world_size=3)
    for text, entered, waited, total in results:
        assert text == results[0][0]
        assert "all_reduce(mean)" in text
        assert "waiting until rank 0 leaves the block" in text
        assert "test_rank_zero_first.py:" in text
        assert entered == ["0"]
        assert waited < 20, "not the half hour that collectives wait"
        assert total == (text if group_of else 3.0), "the ranks of a group never met: no later call is right"


def late_for_the_turn(folder):
    fabric = launched()
    order = Order(folder)
    if fabric.global_rank == 1:
        time.sleep(1.5)  # the others post where they wait, and withdraw that while rank 1 is in the turn
    with fabric.rank_zero_first():
        order.enter(fabric.global_rank)
        time.sleep(0.05)
    fabric.barrier()
    return order.entered


def test_who_waited_for_the_turn_to_begin_is_not_stuck(ranks, tmp_path):
    assert ranks.run(late_for_the_turn, str(tmp_path), world_size=3) == [["0", "1", "2"]] * 3


def collective_of_the_firsts(folder):
    with two_machines() as fabric:
        order = Order(folder)
        group = dist.new_group([0, 2])
        total = None
        with fabric.rank_zero_first(local=True):
            if fabric.local_rank == 0:
                if fabric.node_rank == 1:
                    time.sleep(1.5)  # long enough for rank 0 to post where it waits
                total = fabric.all_reduce(fabric.global_rank, group, reduce_op="sum").item()
            seen = order.enter(fabric.global_rank)
        fabric.barrier()
        return total, {"0", "2"} <= {*seen}


def test_first_ranks_may_speak_to_each_other_in_the_block(ranks, tmp_path):
    zero, one, two, three = ranks.run(collective_of_the_firsts, str(tmp_path), world_size=4)
    assert zero[0] == two[0] == 2
    assert one == three == (None, True)
