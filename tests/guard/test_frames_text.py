"""What people read when ranks disagree: calls in words, the table, and who waits for whom in a circle."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fabric
from fabric.collectives.frames import REFUSED, call_of, describe_tensor, format_tree, tree_call
from fabric.core.source import user_line
from fabric.core.tree import flatten
from fabric.guard.deadlocks import DeadlockDetector, RankStatus, find_deadlocked
from fabric.guard.job_store import JobStore
from fabric.guard.mismatch import (
    TEXT_BYTES,
    RankReport,
    decode_report,
    encode_report,
    mismatch_table,
    mismatch_text,
)

Pair = namedtuple("Pair", ["left", "right"])
PACKAGE = Path(fabric.__file__).parent


@dataclass
class Batch:
    x: Any
    y: Any = None


# Trees in words

F, L = torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (F, "float32[2, 3]"),
        (L, "int64[]"),
        ({"loss": L, 3: F}, "{'loss': int64[], 3: float32[2, 3]}"),
        ([F, (L,)], "[float32[2, 3], (int64[])]"),
        ((), "()"),
        ({}, "{}"),
        ([[], {"a": ()}], "[[], {'a': ()}]"),
        (Pair(F, L), "Pair(left=float32[2, 3], right=int64[])"),
        (Batch(L, [F]), "Batch(x=int64[], y=[float32[2, 3]])"),
        (OrderedDict(a=L), "OrderedDict({'a': int64[]})"),
        (defaultdict(list, b=L), "defaultdict({'b': int64[]})"),
        (torch.zeros(0, dtype=torch.bfloat16), "bfloat16[0]"),
        (torch.zeros(1, dtype=torch.bool, device="meta"), "bool[1] on meta"),
    ],
)
def test_a_tree_as_a_person_would_write_it(tree, text):
    leaves, spec = flatten(tree)
    assert format_tree(spec, map(describe_tensor, leaves)) == text


def test_other_texts_in_place_of_the_leaves():
    assert format_tree(flatten({"a": [1, 2]})[1], ["one", "two"]) == "{'a': [one, two]}"


def test_calls_are_equal_if_and_only_if_what_must_agree_is():
    def call(verb, tree):
        leaves, spec = flatten(tree)
        return tree_call(verb, spec, leaves)

    base = call("all_reduce(sum)", {"a": F, "b": L})
    assert call("all_reduce(sum)", {"a": torch.ones(2, 3), "b": L + 1}) == base
    others = [
        call("all_reduce(mean)", {"a": F, "b": L}),
        call("all_reduce(sum)", {"a": F, "c": L}),
        call("all_reduce(sum)", {"b": L, "a": F}),
        call("all_reduce(sum)", OrderedDict(a=F, b=L)),
        call("all_reduce(sum)", {"a": F.t(), "b": L}),
        call("all_reduce(sum)", {"a": F, "b": L.int()}),
        call("all_reduce(sum)", [F, L]),
        call("all_reduce(sum)", (F, L)),
        call_of("all_reduce(sum)"),
        call_of("all_reduce(sum)", base.what + " "),
    ]
    digests = {call.digest for call in (base, *others)}
    assert len(digests) == 1 + len(others)
    assert all(len(digest) == 16 for digest in digests)


# Rows on their way


@settings(deadline=None)
@given(verb=st.text(max_size=20), where=st.text(max_size=20), what=st.text())
def test_a_row_arrives_as_it_left(verb, where, what):
    verb, where, what = [text.replace("\n", " ").replace("\0", " ") for text in (verb, where, what)]
    sent = encode_report(RankReport(3, verb, what, where))
    assert decode_report(3, sent) == RankReport(3, verb, what, where)


@pytest.mark.parametrize("letter", ["x", "é", "🏖"])
def test_a_long_row_is_cut_and_keeps_verb_and_place(letter):
    sent = encode_report(RankReport(0, "save", letter * TEXT_BYTES, f"{'deep/' * 500}train.py:12"))
    row = decode_report(0, sent)
    assert len(sent) == TEXT_BYTES
    assert row.verb == "save"
    assert row.where.endswith("deep/train.py:12")
    assert row.what.rstrip("\N{REPLACEMENT CHARACTER}") in letter * TEXT_BYTES
    assert len(row.what.encode()) > TEXT_BYTES - 6000


# The table


def test_the_columns_of_the_table_stand_below_each_other():
    text = mismatch_table(
        [
            RankReport(0, "save #1", "", "a.py:1"),
            RankReport(10, "all_reduce(mean) #12", "float32[]", "b.py:22"),
        ]
    )
    assert text.splitlines() == [
        "  rank  call                  data       at",
        "  0     save #1                          a.py:1",
        "  10    all_reduce(mean) #12  float32[]  b.py:22",
    ]


def test_a_refusal_does_not_widen_the_other_rows():
    refusal = f"{REFUSED}ArgumentTypeError: {'long ' * 50}end"
    rows = [RankReport(0, "scatter #1", refusal, "a.py:1"), RankReport(1, "scatter #1", "", "a.py:2")]
    _, one, two = mismatch_table(rows).splitlines()
    assert one == f"  0     scatter #1  {refusal}  a.py:1"
    assert two == "  1     scatter #1        a.py:2"


def shown(*whats):
    """The data column of each rank, as the table shows it."""
    lines = mismatch_table(
        [RankReport(rank, "v", what, f"|{rank}") for rank, what in enumerate(whats)]
    ).splitlines()[1:]
    return [line[12:].rpartition("|")[0].strip() for line in lines]


def test_short_data_are_shown_whole():
    assert shown("a" * 100, "b") == ["a" * 100, "b"]


def test_long_data_are_shown_from_where_they_differ():
    alike, tail = "x" * 200, "z" * 200
    one, two = shown(f"{alike}1{tail}", f"{alike}2{tail}")
    assert one == f"...{'x' * 33}1{'z' * 60}..."
    assert two == f"...{'x' * 33}2{'z' * 60}..."


def test_data_that_only_go_on_longer_are_shown_at_their_end():
    assert shown("x" * 150, "x" * 160) == [f"...{'x' * 33}", f"...{'x' * 43}"]


def test_a_refusal_is_shown_whole_and_the_other_data_from_their_beginning():
    refusal = f"{REFUSED}ArgumentTypeError: {'long ' * 50}end"
    assert shown(refusal, "y" * 500) == [refusal, f"{'y' * 97}..."]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text("ab", max_size=400), min_size=2, max_size=4))
def test_a_difference_is_always_visible(texts):
    lines = shown(*texts)
    assert all(len(line) <= 100 for line in lines)
    assert all(line.strip(".") in text for line, text in zip(lines, texts, strict=True))
    assert (len(set(lines)) == 1) == (len(set(texts)) == 1)


def test_equal_rows_are_one_line_and_the_odd_ones_are_first():
    rows = [RankReport(rank, "all_reduce(mean) #2", "float32[]", "train.py:12") for rank in range(1024)]
    rows[700] = RankReport(700, "broadcast(src=0) #2", "", "train.py:30")
    text = mismatch_text(rows)
    assert text.splitlines()[2:4] == [
        "  700              broadcast(src=0) #2             train.py:30",
        "  0-699, 701-1023  all_reduce(mean) #2  float32[]  train.py:12",
    ]
    assert len(text) < 1000


def test_what_the_error_begins_and_ends_with():
    a, b = "a.py:1", "b.py:2"
    other_verbs = mismatch_text([RankReport(0, "save #1", "", a), RankReport(1, "barrier() #1", "", b)])
    assert other_verbs.startswith("Ranks made different calls where all must make the same.\n")
    assert "`if rank == 0:`" in other_verbs.splitlines()[-1]

    skipped = [RankReport(0, "backward", "", a), RankReport(1, "check at the end of epoch 1", "", b)]
    assert "`if fabric.any(skip): continue`" in mismatch_text(skipped).splitlines()[-1]
    of_a_model = [
        RankReport(0, "save #4", "x.pt: model 0 (Net); Adam of model 0 (Net)", a),
        RankReport(1, "forward of model 0 (Net) #4", "", b),
    ]
    assert "`if rank == 0:`" in mismatch_text(of_a_model).splitlines()[-1]
    in_order = [row._replace(verb=f"forward of model {row.rank} (Net) #4", what="") for row in of_a_model]
    assert "in one order" in mismatch_text(in_order).splitlines()[-1]
    branches = [
        RankReport(rank, "SGD.step #7", f"of model 0 (Net): no gradient for experts.{rank}.weight", a)
        for rank in range(2)
    ]
    assert "experts" in mismatch_text(branches)
    assert "same layers on all ranks" in mismatch_text(branches).splitlines()[-1]
    other_data = mismatch_text(
        [RankReport(0, "gather #2", "int64[1]", a), RankReport(1, "gather #2", "int64[2]", b)]
    )
    assert other_data.startswith("Ranks called gather #2 with different data.\n")
    assert "same structure, shapes and dtypes" in other_data.splitlines()[-1]

    refusal = RankReport(1, "all_reduce #2", f"{REFUSED}ArgumentTypeError: no", b)
    refused = mismatch_text([RankReport(0, "all_reduce(mean) #2", "int64[1]", a), refusal])
    assert refused.startswith("Rank 1 refused the arguments of all_reduce #2.\n")
    assert refused.splitlines()[-1] == "Call it on all ranks with arguments that every rank accepts."
    both = mismatch_text([refusal._replace(rank=0), refusal])
    assert both.startswith("Ranks 0-1 refused the arguments of all_reduce #2.\n")

    for text, places in ((other_verbs, (a, b)), (other_data, (a, b)), (refused, (a, b)), (both, (b,))):
        assert [line.split()[-1] for line in text.splitlines()[2:-1]] == list(places)


# The user's line


def in_file(filename: str, body: str, **names):
    """Run code that pretends to be in another file."""
    exec(compile(body, filename, "exec"), names)
    return names["place"]


def test_the_place_is_the_callers_own_line():
    place = user_line()
    assert place == f"{__file__}:{test_the_place_is_the_callers_own_line.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(
    "filename",
    [
        str(PACKAGE / "verbs.py"),
        str(PACKAGE / "plugins" / "collectives" / "deep.py"),
        contextlib.__file__,
        str(Path("lib", "site-packages", "torch", "nn", "module.py")),
    ],
)
def test_plumbing_is_not_a_place(filename):
    place = in_file(filename, "place = user_line()", user_line=user_line)
    assert place.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    "filename",
    ["train.py", str(PACKAGE.parent / "fabric_train.py"), "lib/site-packages/torchmetrics/metric.py"],
)
def test_other_files_are_places(filename):
    assert in_file(filename, "\n\nplace = user_line()", user_line=user_line) == f"{filename}:3"


def test_a_user_who_is_called_by_the_package_has_the_place():
    def make_call():
        return user_line()

    body = "place = call()"
    assert in_file(str(PACKAGE / "x.py"), body, call=make_call).startswith(f"{__file__}:")


# Circles of waiting ranks


class Waiting(NamedTuple):
    status: RankStatus
    members: list[int]


def wait(rank, group, turn, members, begun=None, **counts):
    """A rank that has come to call `turn` of its group, and to `counts` calls of others."""
    said = "barrier() #1", "", "train.py:1"
    counts = {**counts, group: turn}
    return Waiting(RankStatus(rank, "", *said, 0.0, counts, group, turn, begun or {}), list(members))


def in_torch(rank, begun, *pending):
    """A rank that stands still in torch's collectives, of which it has begun so many and waits for some."""
    named = {"0": [(number, kind) for number, kind in pending]}
    status = RankStatus(rank, "", "backward", "", "train.py:2", 0.0, {}, started={"0": begun}, pending=named)
    return Waiting(status, [])


def circle_of(*waits):
    members = {one.status.group: one.members for one in waits}
    return find_deadlocked({one.status.rank: one.status for one in waits}, members)


def test_two_groups_in_a_circle():
    assert circle_of(wait(0, "a", 1, (0, 1)), wait(1, "b", 1, (0, 1))) == {0, 1}


def test_three_pairs_in_a_circle():
    pairs = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    assert circle_of(
        wait(0, "a", 1, pairs["a"]), wait(1, "b", 1, pairs["b"]), wait(2, "c", 1, pairs["c"])
    ) == {0, 1, 2}


def test_a_chain_that_ends_at_a_free_rank_moves():
    assert circle_of(wait(0, "a", 1, (0, 1)), wait(1, "b", 1, (1, 2)), wait(2, "c", 1, (2, 3))) == set()


def test_who_waits_for_a_circle_is_stuck_with_it():
    circle = [wait(0, "a", 1, (0, 1)), wait(1, "b", 1, (0, 1))]
    assert circle_of(*circle, wait(2, "c", 1, (1, 2))) == {0, 1, 2}
    assert circle_of(*circle, wait(2, "c", 1, (2, 3))) == {0, 1}


def test_ranks_that_meet_in_one_call_are_not_stuck():
    assert circle_of(*[wait(rank, "a", 3, (0, 1, 2)) for rank in range(3)]) == set()
    assert circle_of(*[wait(rank, "a", 3, (0, 1, 2)) for rank in range(2)]) == set(), "rank 2 is on its way"


def test_who_has_been_in_the_call_is_not_waited_for():
    # Rank 1 left call 2 of the group "a" long ago; rank 0 has only not noticed yet.
    assert circle_of(wait(0, "a", 2, (0, 1)), wait(1, "b", 1, (0, 1), a=2)) == set()
    assert circle_of(wait(0, "a", 3, (0, 1)), wait(1, "b", 1, (0, 1), a=2)) == {0, 1}


REDUCE, GATHER = "gloo:all_reduce", "gloo:all_gather"


def test_who_waits_in_torch_for_one_that_waits_in_a_verb():
    verb = wait(0, "a", 1, (0, 1), begun={"0": 4})
    assert circle_of(verb, in_torch(1, 5, (5, REDUCE))) == {0, 1}
    assert circle_of(verb, in_torch(1, 5, (4, REDUCE), (5, REDUCE))) == {0, 1}


def test_who_waits_in_torch_for_what_all_have_begun_moves():
    verb = wait(0, "a", 1, (0, 1), begun={"0": 5})  # a slow network: rank 0 has its result already
    assert circle_of(verb, in_torch(1, 5, (5, REDUCE))) == set()
    assert circle_of(in_torch(0, 5, (5, REDUCE)), in_torch(1, 5, (5, REDUCE))) == set()
    assert circle_of(in_torch(0, 6, (6, REDUCE)), in_torch(1, 5, (5, REDUCE))) == set(), "5 may still come"
    unknown = wait(0, "a", 1, (0, 1))
    assert circle_of(unknown, in_torch(1, 5, (5, REDUCE))) == set(), "nothing is known of rank 0"


def test_collectives_of_two_kinds_never_meet():
    assert circle_of(in_torch(0, 5, (5, GATHER)), in_torch(1, 5, (5, REDUCE))) == {0, 1}


def test_nobody_waits():
    assert find_deadlocked({}, {}) == set()


@st.composite
def worlds(draw):
    """Some ranks of a world that wait, each in a call of a group that it belongs to."""
    size = draw(st.integers(2, 6))
    groups = draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=4))
    waits = {}
    for rank in range(size):
        mine = [place for place, members in enumerate(groups) if rank in members]
        if mine and draw(st.booleans()):
            counts = {str(place): draw(st.integers(0, 2)) for place in mine}
            place = draw(st.sampled_from(mine))
            turn = counts.pop(str(place)) + 1
            waits[rank] = wait(rank, str(place), turn, sorted(groups[place]), **counts)
    return waits


@settings(deadline=None, max_examples=200)
@given(worlds())
def test_stuck_is_the_union_of_all_sets_that_wait_within_themselves(waits):
    def waits_within(ranks):
        """Whether each of them waits for one of them that has not come to its call."""
        return all(
            any(
                other in waits[rank].members
                and waits[other].status.counts.get(waits[rank].status.group, 0) < waits[rank].status.number
                for other in ranks
            )
            for rank in ranks
        )

    sets = [ranks for size in range(1, len(waits) + 1) for ranks in combinations(waits, size)]
    expected = {rank for ranks in sets if waits_within(ranks) for rank in ranks}
    assert circle_of(*waits.values()) == expected


@settings(deadline=None, max_examples=150)
@given(worlds(), st.randoms(use_true_random=False))
def test_all_others_come_to_an_end_in_any_order(waits, random_):
    """A simulation: a call ends when all members have come; whoever does not wait may come to any call."""
    waiting = dict(waits)
    while True:
        free = [
            rank
            for rank, one in waiting.items()
            if all(
                other not in waiting
                or waiting[other].status.counts.get(one.status.group, 0) >= one.status.number
                for other in one.members
            )
        ]
        if not free:
            break
        del waiting[random_.choice(free)]
    assert circle_of(*waits.values()) == set(waiting)


# Verdicts through a store


def waiting(waits, group, members, where="train.py:7"):
    """What a rank tells that waits in the first call of a group."""
    waits.counts[group] = 1
    waits.members[group] = members
    said = RankReport(waits.rank, "barrier() #1", "", where)
    return waits.status(said, 0.0, group=group, number=1)


def judge(waits, *arguments):
    """Look twice: a rank judges once no further one has begun to wait since its last look."""
    for _ in range(2):
        waits.detect_deadlock(*arguments)


def elsewhere(waits):
    return waits.status(RankReport(waits.rank, "", "", ""), None)


def test_a_verdict_is_the_same_for_all():
    store = dist.HashStore()
    zero, one, two = ranks = [DeadlockDetector(store, rank, 3) for rank in range(3)]
    zero.publish_status(waiting(zero, "a", [0, 1]))
    judge(zero)
    assert zero.fatal_error is None, "rank 1 may be on its way"
    one.publish_status(waiting(one, "b", [0, 1], "train.py:9"))
    two.detect_deadlock()
    assert not two.poll_verdict(), "further ranks may begin to wait"
    two.detect_deadlock()
    assert all([waits.poll_verdict() for waits in ranks])
    assert zero.fatal_error == one.fatal_error == two.fatal_error
    assert zero.fatal_error.endswith("Later calls of this job raise this error too.")
    for line in ("  0     barrier() #1 of ranks 0-1        train.py:7", "train.py:9"):
        assert line in zero.fatal_error
    assert set(zero.read_statuses()) == {0, 1}
    assert set(zero.read_statuses(ranks=[1, 2])) == {1}


def test_who_has_gone_on_is_not_judged():
    store = dist.HashStore()
    zero, one = [DeadlockDetector(store, rank, 2) for rank in range(2)]
    zero.publish_status(waiting(zero, "a", [0, 1]))
    zero.publish_status(elsewhere(zero))
    one.publish_status(waiting(one, "b", [0, 1]))
    judge(one)
    assert not one.poll_verdict()


def test_who_stands_still_in_torch_is_judged_only_if_nobody_is_on_the_way():
    store = dist.HashStore()
    zero, one, two = ranks = [DeadlockDetector(store, rank, 3) for rank in range(3)]
    board = one.store.clone()

    def backward(waits):
        said = RankReport(waits.rank, "backward", "", "train.py:7")
        return waits.status(said, 0.0, started={"0": 5}, pending={"0": [(5, REDUCE)]})

    one.publish_status(backward(one), board)
    zero.counts["a"] = one.counts["a"] = 1
    zero.publish_status(waiting(zero, "b", [0, 1, 2])._replace(started={"0": 4}))
    for waits in ranks:
        judge(waits)
    assert not zero.poll_verdict(), "rank 2 may compute"
    two.publish_status(backward(two))
    judge(one, board)
    assert all([waits.poll_verdict() for waits in ranks])
    assert zero.can_raise
    assert zero.fatal_error.endswith("Later calls of this job raise this error too.")


@pytest.mark.parametrize("world", [4, 64])
def test_a_look_at_others_asks_the_store_three_times_however_many_ranks_there_are(monkeypatch, world):
    store = dist.HashStore()
    ranks = [DeadlockDetector(store, rank, world) for rank in range(world)]
    for waits in ranks[1:]:
        waits.publish_status(waiting(waits, "a", list(range(world))))
    waits.detect_deadlock()
    asked = []
    call = JobStore._call
    monkeypatch.setattr(JobStore, "_call", lambda self, *args: (asked.append(args[0]), call(self, *args))[1])
    ranks[1].publish_status(elsewhere(ranks[1]))
    assert asked == ["set"]
    asked.clear()
    waits.detect_deadlock()
    assert "multi_get" in asked or "get" in asked, "it judges: no further rank has begun to wait"
    for waits in ranks:
        asked.clear()
        judge(waits)
        assert asked == ["check", "add", "compare_set"] * 2


# Strangers that write into the store


def test_a_forged_verdict_is_ignored_and_a_true_one_takes_its_place():
    store = dist.HashStore()
    zero, one = [DeadlockDetector(store, rank, 2) for rank in range(2)]
    for forged in ('"ended by a stranger"', f"{'0' * 64} []", "", "no space", "\x00"):
        zero.store.set("verdict", forged)
        assert not zero.poll_verdict()
        assert zero.fatal_error is None
    zero.publish_status(waiting(zero, "a", [0, 1]))
    one.publish_status(waiting(one, "b", [0, 1], "train.py:9"))
    judge(one)
    assert one.fatal_error is not None
    assert zero.poll_verdict()
    assert zero.fatal_error == one.fatal_error


def test_forged_and_moved_reports_are_ignored():
    store = dist.HashStore()
    zero, one, two = [DeadlockDetector(store, rank, 3) for rank in range(3)]
    one.publish_status(elsewhere(one))
    row = json.dumps(waiting(two, "a", [0, 2]))
    for forged in (row, f"{'0' * 64} {row}", zero.store.get("at/1")):
        zero.store.set("at/2", forged)
        assert set(zero.read_statuses()) == {1}
