"""Groups that are larger than a star: frames go over a tree of connections, here of few ranks."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_cases import counted, launched
from connected_ranks import SECONDS, connected, exchange

from fabric.core.errors import CollectiveMismatch, RankError
from fabric.guard import messages
from fabric.guard.call_checker import CallChecker, guard_of
from fabric.guard.control_connections import neighbours
from fabric.testing import RankPool


@pytest.fixture(scope="module")
def seven() -> Iterator[RankPool]:
    with RankPool(7, warnings_as_errors=True) as pool:
        yield pool


@pytest.mark.parametrize("fan_out", [1, 2, 3, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 33, 34, 100])
def test_each_rank_is_below_one_and_all_are_below_the_first(count, fan_out):
    above = {}
    for place in range(count):
        upper, blocks = neighbours(place, count, fan_out)
        above[place] = upper
        assert len(blocks) <= fan_out
        places = [other for block in blocks for other in block]
        assert places == list(range(place + 1, place + 1 + len(places)))
        for block in blocks:
            assert neighbours(block.start, count, fan_out)[0] == place
    assert [place for place, upper in above.items() if upper is None] == [0]


@pytest.mark.parametrize(
    ("count", "most", "deep"),
    [(33, 32, 1), (64, 8, 2), (1024, 32, 2), (4096, 16, 3), (16384, 26, 3)],
)
def test_large_trees_are_wide_and_flat(count, most, deep):
    def depth(place):
        _, blocks = neighbours(place, count, 32)
        widest.append(len(blocks))
        return 1 + max([depth(block.start) for block in blocks[:2]]) if blocks else 0

    widest: list[int] = []
    assert depth(0) == deep
    assert max(widest) == most


# Ranks as threads


@pytest.mark.parametrize(("size", "fan_out"), [(4, 1), (4, 2), (7, 2), (12, 3)])
def test_all_get_what_each_has_sent(size, fan_out):
    draw = random.Random(size)
    with connected(size, fan_out) as (made, threads):
        for kinds in (1, 2, 2, size):
            texts = [draw.randbytes(draw.choice([1, 40, 300_000])) for _ in range(kinds)]
            owns = [draw.choice(texts) for _ in made]
            assert list(threads.map(exchange, made, owns, timeout=SECONDS)) == [owns] * size


def test_what_differs_is_sent_up_to_a_size(monkeypatch):
    monkeypatch.setattr(messages, "GROUPED_BYTES", 1000)
    owns = [bytes([place]) * 700 for place in range(4)]
    with connected(4, 1) as (made, threads):
        for found in threads.map(exchange, made, owns, timeout=SECONDS):
            assert [own.startswith(row) and len(row) >= 100 for own, row in zip(owns, found, strict=True)]
            assert sum(map(len, found)) <= 1000


def test_rows_are_grouped_by_their_keys_and_combined_if_these_are_equal():
    combine = lambda rows: rows[0][:4] + bytes([sum([row[4] for row in rows])])  # noqa: E731
    with connected(7, 2) as (made, threads):
        owns = [b"same" + bytes([place]) for place in range(7)]
        found = list(threads.map(lambda one, own: exchange(one, own, 4, combine), made, owns))
        assert found == [[b"same" + bytes([21])] * 7] * 7
        owns[5] = b"else" + bytes([5])
        found = list(threads.map(lambda one, own: exchange(one, own, 4, combine), made, owns))
        assert found == [[b"same"] * 5 + [b"else", b"same"]] * 7


SHAPES = [(3, 32, place) for place in range(3)] + [(4, 1, place) for place in range(4)]
"""Size and fan-out of a group, a star and a chain, and one of its ranks."""
LARGER = [(7, 2, place) for place in range(7)]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize(("size", "fan_out", "gone"), SHAPES + LARGER)
def test_a_rank_that_exits_is_named_to_all_that_wait_and_that_start_later(size, fan_out, gone, sent):
    with connected(size, fan_out) as (made, threads):
        list(threads.map(exchange, made, [b"a", *[b"b"] * (size - 1)], timeout=SECONDS))
        if sent:
            made[gone].start(b"d")
        made[gone].drop("the process ends")
        others = [one for place, one in enumerate(made) if place != gone]
        closed = f"Connection closed by rank {10 + gone}"
        found = [threads.submit(exchange, one, b"d").exception for one in others]
        first = {str(exception(SECONDS)) for exception in found}  # it may still end, if all have sent
        assert first <= ({closed, "None"} if sent else {closed})
        assert len(first) == 1 or not made[0].is_star
        found = [threads.submit(exchange, one, b"d").exception for one in others]
        assert {str(exception(SECONDS)) for exception in found} == {closed}
        assert {one.lost for one in others} == {10 + gone}


@pytest.mark.parametrize(("size", "fan_out", "tired"), SHAPES)
def test_a_rank_that_gives_up_is_not_taken_for_lost(size, fan_out, tired):
    with connected(size, fan_out) as (made, threads):
        list(threads.map(exchange, made, [b"a", *[b"b"] * (size - 1)], timeout=SECONDS))
        made[tired].close("too long")
        others = [one for place, one in enumerate(made) if place != tired]
        found = [threads.submit(exchange, one, b"d").exception for one in others]
        assert {str(exception(SECONDS)) for exception in found} == {"not all ranks made the call"}
        assert {one.lost for one in others} == {None}


@pytest.mark.parametrize(("size", "fan_out", "first_to_leave"), SHAPES)
def test_rounds_that_were_left_are_done_before_the_next_one(size, fan_out, first_to_leave):
    with connected(size, fan_out) as (made, threads):
        left = made[first_to_leave].start(bytes([1 + first_to_leave]))
        assert not left.wait(0.01), "the others have not started it"
        owns = [[bytes([1 + place]), bytes([10 + place])] for place in range(size)]
        todo = [own[1:] if place == first_to_leave else own for place, own in enumerate(owns)]
        run = lambda one, messages: [exchange(one, message) for message in messages]  # noqa: E731
        got = list(threads.map(run, made, todo, timeout=SECONDS))
        assert [rounds[-1] for rounds in got] == [[own[1] for own in owns]] * size
        assert left.rows_by_rank(size) == [own[0] for own in owns]


# Ranks as processes


def small(fan_out: int):
    """All groups of more than `fan_out` + 1 ranks are trees, and their frames have no rank's own data."""
    return mock.patch.multiple(CallChecker, fan_out=fan_out, gather_up_to=1)


def verbs(fan_out):
    with small(fan_out):
        fabric = launched()
        rank, world = fabric.global_rank, fabric.world_size
        fabric.barrier()
        odd = torch.tensor([0.1, 1e8, -1e8, 0.3], dtype=torch.float32) * (rank + 1)
        nan = torch.tensor(float("nan") if rank == world - 1 else float(rank))
        with counted() as calls:
            found = {
                "any": [fabric.any(rank == world - 1), fabric.any(False)],
                "all": [fabric.all(rank != world - 1), fabric.all(True)],
                "sum": fabric.all_reduce(odd.clone(), reduce_op="sum"),
                "mean": fabric.all_reduce({"a": float(rank), "b": torch.tensor([rank, 1.0])}),
                "double": fabric.all_reduce(torch.tensor(0.1 * rank, dtype=torch.float64), reduce_op="sum"),
                "count": fabric.all_reduce(torch.tensor(rank), reduce_op="sum"),
                "max": fabric.all_reduce(nan.clone(), reduce_op="max"),
                "min": fabric.all_reduce(nan.clone(), reduce_op="min"),
                "product": fabric.all_reduce(torch.tensor(rank + 1), reduce_op="product"),
                "bools": fabric.all_reduce(torch.tensor([rank == 1, True, False]), reduce_op="min"),
                "agree": fabric.agree({"lr": 0.1, "seeds": [1, 2], "x": torch.ones(3)}),
                "inplace": fabric.all_reduce(torch.full((4, 2), float(rank)), reduce_op="sum"),
                "equal": [fabric.all_reduce(3, reduce_op=op).item() for op in ("sum", "product")],
                "equal mean": fabric.all_reduce(2.5).item(),
            }
        return found, dict(calls)


@pytest.mark.parametrize(("world", "fan_out"), [(4, 1), (5, 2), (7, 2)])
def test_small_values_are_combined_in_the_frames(seven, world, fan_out):
    found = seven.run(verbs, fan_out, world_size=world)
    ranks = range(world)
    for values, calls in found:
        assert calls == {"frame": 17}, "one round for each call, and no collective of torch"
        assert (values["any"], values["all"]) == ([True, False], [False, True])
        mean = sum(ranks) / world
        assert values["mean"]["a"].item() == mean
        assert values["mean"]["b"].tolist() == [mean, 1.0]
        assert values["double"].item() == pytest.approx(0.1 * sum(ranks), rel=1e-15)
        assert values["count"].tolist() == sum(ranks)
        assert values["max"].isnan()
        assert values["min"].isnan()
        assert values["product"].item() == torch.tensor(ranks).add(1).prod().item()
        assert values["bools"].tolist() == [False, True, False]
        assert values["agree"]["x"].tolist() == [1.0, 1.0, 1.0]
        assert values["inplace"].tolist() == [[float(sum(ranks))] * 2] * 4
        assert values["equal"] == [3 * world, 3**world]
        assert values["equal mean"] == 2.5
        assert values["sum"].equal(found[0][0]["sum"]), "the same bits on all ranks"
    exact = torch.tensor([0.1, 1e8, -1e8, 0.3], dtype=torch.float32).double() * sum(range(world + 1))
    torch.testing.assert_close(found[0][0]["sum"].double(), exact, rtol=1e-6, atol=0)


def in_a_star():
    """Between the ranks whose frames have all data, and a tree: as before, floats are added up by torch."""
    with mock.patch.object(CallChecker, "gather_up_to", 1):
        fabric = launched()
        fabric.barrier()
        with counted() as calls:
            total = fabric.all_reduce(torch.tensor(0.1), reduce_op="sum")
            any_ = fabric.any(fabric.global_rank == 2)
            counts = [
                fabric.all_reduce(8, reduce_op="sum").item(),
                fabric.all_reduce(fabric.global_rank + 1, reduce_op="product").item(),
            ]
        return total.item(), any_, counts, dict(calls)


def test_a_star_combines_what_has_one_result_in_any_order(seven):
    for total, any_, counts, calls in seven.run(in_a_star, world_size=3):
        assert counts == [24, 6], "also of equal numbers"
        assert total == pytest.approx(0.3)
        assert any_
        assert calls == {"frame": 4, "all_reduce": 1}


def large_and_light(mode):
    with small(1), mock.patch.dict("os.environ", FABRIC_GUARD=mode):
        fabric = launched()
        fabric.barrier()
        rank = fabric.global_rank
        with counted() as calls:
            total = fabric.all_reduce(torch.full((17,), float(rank)), reduce_op="sum")
            half = fabric.all_reduce(torch.tensor(float(rank), dtype=torch.bfloat16), reduce_op="sum")
            any_ = fabric.any(rank == 3)
        gathered = fabric.all_gather_object({"rank": rank})
        return total.tolist(), half.item(), any_, gathered, calls["all_reduce"]


@pytest.mark.parametrize("mode", ["full", "light"])
def test_larger_values_and_halves_are_reduced_by_torch(seven, mode):
    gathered = [{"rank": rank} for rank in range(4)]
    expected = ([6.0] * 17, 6.0, True, gathered, 2 + (mode == "light"))
    assert seven.run(large_and_light, mode, world_size=4) == [expected] * 4


def agree_on_rank():
    with small(1):
        fabric = launched()
        equal = fabric.agree([float("nan"), {"b": 1, "a": 2}])
        reordered = fabric.agree({"b": 1, "a": 2} if fabric.global_rank else {"a": 2, "b": 1})
        with pytest.raises(CollectiveMismatch) as caught:
            fabric.agree("all" if fabric.global_rank < 3 else "three")  # agrees
        return equal[1], reordered, str(caught.value)


def test_values_that_differ_are_all_shown(seven):
    for equal, reordered, text in seven.run(agree_on_rank, world_size=4):
        assert equal == reordered == {"a": 2, "b": 1}
        assert "rank 2: 'all'" in text
        assert "rank 3: 'three'" in text


def leaf_differs():
    with small(2):
        fabric = launched()
        texts = []
        for odd in (6, 0, 4):
            call = fabric.barrier if fabric.global_rank == odd else lambda: fabric.all_reduce(1.0)
            with pytest.raises(CollectiveMismatch) as caught:
                call()
            texts.append(str(caught.value))
            texts.append(fabric.all_reduce(float(fabric.global_rank), reduce_op="sum").item())
        return texts


def test_a_mismatch_in_a_leaf_names_it_first_on_all_ranks(seven):
    found = seven.run(leaf_differs, world_size=7)
    assert found == [found[0]] * 7
    for odd, others, text in zip("604", ("0-5", "1-6", "0-3, 5-6"), found[0][::2], strict=True):
        first, second = text.splitlines()[2:4]
        assert re.match(rf"  {odd} +barrier\(\) #\d+ ", first), text
        assert re.match(rf"  {others} +all_reduce\(mean\) #\d+ +float32\[\] ", second), text
    assert found[0][1::2] == [21.0] * 3, "the group stays usable"


def some_ranks():
    with small(1):
        fabric = launched()
        rank = fabric.global_rank
        groups = [dist.new_group(members) for members in ([1, 3, 5, 6], [0, 2, 4])]
        mine = groups[0] if rank in (1, 3, 5, 6) else groups[1]
        total = fabric.all_reduce(float(rank), group=mine, reduce_op="sum").item()
        with pytest.raises(CollectiveMismatch) as caught:
            fabric.all_reduce(torch.ones(1 + (rank in (0, 6))), group=mine)
        return total, str(caught.value), fabric.all_reduce(rank, reduce_op="sum").item()


def test_groups_of_some_ranks(seven):
    for rank, (total, text, world) in enumerate(seven.run(some_ranks, world_size=7)):
        first, second = text.splitlines()[2:4]
        big = rank in (1, 3, 5, 6)
        assert total == (15.0 if big else 6.0)
        assert re.match(r"  6 +.*float32\[2\]" if big else r"  0 +.*float32\[2\]", first), text
        assert re.match(r"  1, 3, 5 +.*float32\[1\]" if big else r"  2, 4 +.*float32\[1\]", second), text
        assert world == 21


def one_is_gone(gone):
    with small(2), mock.patch.dict("os.environ", FABRIC_HANG_REPORT_AFTER="off"):
        fabric, group = launched(), dist.new_group(range(7))
        fabric.all_reduce(1.0, group=group)
        if fabric.global_rank == gone:
            guard_of(group).connections.drop("as the end of the process does")
            return ""
        with pytest.raises(RankError) as caught:
            fabric.all_reduce(1.0, group=group)
        return str(caught.value)


@pytest.mark.parametrize("gone", [0, 1, 6])
def test_a_rank_that_ended_is_named_on_all_ranks(seven, gone):
    found = seven.run(one_is_gone, gone, world_size=7)
    for text in found[:gone] + found[gone + 1 :]:
        assert f"rank {gone} ended, or does not answer (Connection closed by rank {gone})" in text


def one_is_stopped():
    """The last rank stops itself before its call; rank zero lets it go on once it has waited long."""
    with small(1):
        fabric = launched()
        pids = fabric.all_gather_object(os.getpid())
        detector, over, long = guard_of(dist.group.WORLD).detector, threading.Event(), threading.Event()

        def wake():
            while not over.wait(0.02):
                if detector.waiting is not None:
                    long.set()
                    os.kill(pids[3], signal.SIGCONT)

        thread = threading.Thread(target=wake)
        if fabric.global_rank == 0:
            thread.start()
        elif fabric.global_rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        total = fabric.all_reduce(float(fabric.global_rank), reduce_op="sum").item()
        over.set()
        if fabric.global_rank == 0:
            thread.join()
        return total, detector.fatal_error, long.is_set()


def test_a_rank_that_was_stopped_is_waited_for(seven):
    assert seven.run(one_is_stopped, world_size=4) == [(6.0, None, True)] + [(6.0, None, False)] * 3


def in_two_groups():
    with small(1):
        fabric = launched()
        fabric.barrier()
        group = dist.new_group([0, 1, 2, 3])
        rank = fabric.global_rank
        with pytest.raises(CollectiveMismatch) as caught:
            fabric.all_reduce(1.0, group=group if rank in (1, 2) else None)
        return str(caught.value)


def test_ranks_that_wait_in_two_groups(seven):
    texts = seven.run(in_two_groups, world_size=5)
    assert texts == [texts[0]] * 5
    assert "These ranks wait for each other in different groups" in texts[0]
    assert re.search(r"  1-2 +all_reduce\(mean\) #1 of ranks 0-3 ", texts[0])
    assert re.search(r"  (\d[,-] ?)+\d +all_reduce\(mean\) #2 of ranks 0-4 ", texts[0])
