"""What the watchdog says, and when. No test waits for time to pass: they wait for the table itself."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import ConfigurationError, RankError
from fabric.guard.deadlocks import RankStatus, status_table
from fabric.guard.messages import RankReport
from fabric.watchdog import stacks, watchdog
from fabric.watchdog.stacks import line_of_thread
from fabric.watchdog.watchdog import report_after

HERE = Path(__file__).name


class Listener:
    """Stands in for stderr; lets the other ranks know when it has got a table."""

    def __init__(self):
        self.text = ""
        self.store = dist.PrefixStore("seen", dist.distributed_c10d._get_default_store().clone())

    def write(self, text):
        self.text += text
        if "Where the ranks are" in text:
            self.store.set("table", "here")

    def flush(self):
        pass

    def wait(self):
        """Until any rank has got a table."""
        self.store.wait(["table"], timedelta(seconds=60))


@contextmanager
def watched(after="0.4", strategy="ddp"):
    os.environ["FABRIC_HANG_REPORT_AFTER"] = after
    stderr, sys.stderr = sys.stderr, Listener()
    again, watchdog._REPEAT_FACTOR = (
        watchdog._REPEAT_FACTOR,
        1e6,
    )  # a slow machine must not get to the second table of one hang
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    try:
        fabric.launch()
        yield fabric, sys.stderr
    finally:
        sys.stderr, watchdog._REPEAT_FACTOR = stderr, again
        if (part := fabric.strategy.find_part("hang report")) is not None and part.watchdog is not None:
            part.watchdog.stop()
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"


def busy_elsewhere(listener):
    listener.wait()  # a rank that is stuck in plain Python


def late_for_a_verb():
    importlib.import_module("fabric.watchdog.watchdog")
    dist.barrier()  # a rank that replaces another one may still import
    with watched("3") as (fabric, listener):  # a rank publishes that it waits after a second
        fabric.barrier()
        if fabric.global_rank == 1:
            busy_elsewhere(listener)
        fabric.all_reduce(torch.ones(3))
        fabric.barrier("end")
        return listener.text


def test_a_rank_that_is_late_for_a_verb_is_shown_with_its_line(ranks):
    texts = ranks.run(late_for_a_verb, world_size=3)
    (text,) = [text for text in texts if text]
    head, _, table = text.partition("\n")
    assert re.fullmatch(
        r"fabric: rank [02] has waited \d+ s in all_reduce\(mean\) #\d+ \(FABRIC_HANG_REPORT_AFTER=3\)\. "
        "Where the ranks are:",
        head,
    )
    header, *rows = table.splitlines()
    assert header.split() == ["rank", "host", "in", "for", "at"]
    for rank in (0, 2):
        assert re.search(rf"  {rank} +\S+ +all_reduce\(mean\) #\d+ +\d+ s +\S*{HERE}:\d+", rows[rank]), rows[
            rank
        ]
    assert re.search(rf"  1 +\S+ +no call of all ranks +\S*{HERE}:\d+ in wait", rows[1]), rows[1]


def late_for_a_backward():
    with watched("60") as (fabric, listener):
        model = fabric.setup(torch.nn.Linear(2, 2))  # where a busy machine may keep one back
        loss = model(torch.ones(1, 2)).sum()
        fabric.barrier()
        dog = fabric.strategy.find_part("hang report").watchdog
        dog._after = dog._next = 0.4
        if fabric.global_rank == 1:
            busy_elsewhere(listener)
        fabric.backward(loss)
        return listener.text


def test_a_rank_that_is_late_for_a_backward_is_shown(ranks):
    first, second = ranks.run(late_for_a_backward, world_size=2)
    assert second == ""
    assert re.match(r"fabric: rank 0 has waited \d+ s in backward ", first)
    assert re.search(rf"  0 +\S+ +backward +\d+ s +\S*{HERE}:\d+ in late_for_a_backward", first)
    assert re.search(rf"  1 +\S+ +no call of all ranks +\S*{HERE}:\d+ in wait", first)


def plain_backward(fabric):
    model = fabric.setup(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    return lambda: (loss.backward(), model)


def sharded_forward(fabric):
    model = fabric.setup(torch.nn.Linear(2, 2))
    for _ in range(
        4
    ):  # forwards number 1, 2, 4, ... and a new order of them are compared by a call of Fabric's
        fabric.backward(model(torch.ones(1, 2)).sum())
    return lambda: model(torch.ones(1, 2))


def raw_collective(fabric):
    return lambda: dist.all_reduce(torch.ones(1))


def late_for_what_nobody_tells(make, strategy):
    with watched(strategy=strategy) as (fabric, listener):
        wait = make(fabric)
        if fabric.global_rank == 1:
            busy_elsewhere(listener)
        wait()
        return listener.text


@pytest.mark.parametrize(
    ("make", "strategy", "name"),
    [
        (plain_backward, "ddp", "backward"),
        (sharded_forward, "fsdp", "torch.distributed: _pre_forward of Linear (weight)"),
        (raw_collective, "ddp", "torch.distributed: all_reduce"),
    ],
)
def test_a_wait_that_fabric_has_no_part_in_is_seen_by_its_stillness(ranks, make, strategy, name):
    first, second = ranks.run(late_for_what_nobody_tells, make, strategy, world_size=2)
    assert second == ""
    assert re.match(rf"fabric: rank 0 has waited \d+ s in {re.escape(name)} ", first), first
    assert re.search(rf"  0 +\S+ +{re.escape(name)} +\d+ s +\S*{HERE}:\d+", first)
    assert re.search(rf"  1 +\S+ +no call of all ranks +\S*{HERE}:\d+ in wait", first)


class Hangs(torch.utils.data.Dataset):
    def __init__(self, listener):
        self.listener = listener

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= 6:
            self.listener.wait()
        return torch.ones(1)


def all_wait_in_their_loaders():
    with watched("1.5") as (fabric, listener):
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Hangs(listener)))
        for _ in loader:
            fabric.barrier()
        return listener.text


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_all_wait_for_a_batch_are_shown_with_the_line_of_the_loop(ranks, world_size):
    texts = ranks.run(all_wait_in_their_loaders, world_size=world_size)
    (text,) = [text for text in texts if text]
    loop = all_wait_in_their_loaders.__code__.co_firstlineno + 3
    assert re.match(
        rf"fabric: rank \d has waited \d+ s in the loader at {HERE}:{loop} \(FABRIC_HANG", text
    ), text
    for rank in range(world_size):
        row = rf"  {rank} +\S+ +the loader at {HERE}:{loop} +\d+ s +\S*{HERE}:\d+ in wait"
        assert re.search(row, text), text


def many_quick_steps():
    """Return what was said, and the seconds of the longest step."""
    with watched("1") as (fabric, listener):
        model, longest = fabric.setup(torch.nn.Linear(2, 2)), 0.0
        for _ in range(600):
            begin = time.monotonic()
            fabric.backward(model(torch.ones(1, 2)).sum())
            fabric.all_reduce(1.0)
            longest = max(longest, time.monotonic() - begin)
        return listener.text, longest


def test_nothing_is_said_while_nothing_waits(ranks):
    for _ in range(5):
        texts, longest = zip(*ranks.run(many_quick_steps, world_size=2), strict=True)
        if max(longest) < 1:  # else the machine held up a rank for so long: it did wait
            break
    assert texts == ("", "")


def two_hangs():
    with watched() as (fabric, listener):
        for _ in range(2):
            if fabric.global_rank == 1:
                busy_elsewhere(listener)
            fabric.barrier()
            if fabric.global_rank == 1:
                listener.store.delete_key("table")
            fabric.barrier()
        return listener.text.count("Where the ranks are")


def test_each_hang_is_said_once(ranks):
    assert ranks.run(two_hangs, world_size=2) == [2, 0]


def all_wait_at_once():
    """All ranks notice in the same look."""
    with watched("60") as (fabric, listener):
        dog = fabric.strategy.find_part("hang report").watchdog
        detector = dog._detector
        fabric.barrier()
        report = RankReport(0, "barrier('x') #1", "", "train.py:3")
        detector.waiting = detector.status(report, time.monotonic() - 100)
        listener.wait()
        for _ in range(3):  # each needs a look of every rank's watchdog
            dog.collect_statuses()
        detector.waiting = None
        fabric.barrier()
        return listener.text.count("Where the ranks are")


def test_one_rank_speaks_for_all(ranks):
    for _ in range(3):
        assert sum(ranks.run(all_wait_at_once, world_size=4)) == 1


def gone_rank():
    """Rank 1 leaves; the table of rank 0's failed call says so."""
    with watched("60") as (fabric, listener):
        if fabric.global_rank == 1:
            fabric.strategy.find_part("hang report").watchdog.stop()
            listener.store.set("table", "left")
            return ""
        listener.wait()
        return status_table(fabric.strategy.find_part("hang report").watchdog.collect_statuses().values())


def test_a_rank_that_has_left_is_told_from_one_that_does_not_answer(ranks):
    text = ranks.run(gone_rank, world_size=2)[0]
    assert re.search(r"  1 +\S+ +exited +finished", text)
    assert re.search(rf"  0 +\S+ +no call of all ranks +\S*{HERE}:\d+ in gone_rank", text)


def explained():
    with watched("60") as (fabric, _):
        fabric.barrier()
        found = []
        if fabric.global_rank == 0:
            gloo = RuntimeError(
                "[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:42730. This is typically x"
            )
            for error in (gloo, RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
                try:
                    fabric.strategy.explain(error)
                    found.append("")
                except RankError as better:
                    found.append(str(better))
        fabric.barrier()
        return found


def test_errors_of_the_process_group_get_the_table_and_others_stay(ranks):
    with_table, without = ranks.run(explained, world_size=2)[0]
    assert with_table.startswith(
        "backward failed on rank 0, since another rank ended or did not join (Connection closed by peer "
        "[127.0.0.1]:42730). Where the ranks are:\n  rank  host"
    )
    assert without == ""


def threads(after):
    with watched(after) as (fabric, _):
        found = [t.name for t in threading.enumerate()].count("fabric-watchdog")
        other = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
        other.launch()
        again = [t.name for t in threading.enumerate()].count("fabric-watchdog")
        fabric.barrier()
    return found, again, [t.name for t in threading.enumerate()].count("fabric-watchdog")


def test_one_thread_for_each_process_and_none_where_it_is_switched_off(ranks):
    assert ranks.run(threads, "60", world_size=2) == [(1, 1, 0)] * 2
    assert ranks.run(threads, "off", world_size=2) == [(0, 0, 0)] * 2
    assert ranks.run(threads, "0", world_size=2) == [(0, 0, 0)] * 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60.0), ("0.5", 0.5), ("0", None), ("off", None), ("OFF", None)]
)
def test_the_variable(monkeypatch, text, seconds):
    monkeypatch.setenv("FABRIC_HANG_REPORT_AFTER", text)
    assert report_after() == seconds
    monkeypatch.delenv("FABRIC_HANG_REPORT_AFTER")
    assert report_after() == 60.0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", ""])
def test_a_variable_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("FABRIC_HANG_REPORT_AFTER", text)
    with pytest.raises(ConfigurationError) as caught:
        report_after()
    assert str(caught.value) == (
        f"FABRIC_HANG_REPORT_AFTER={text!r} is not a number of seconds. Write for example "
        "FABRIC_HANG_REPORT_AFTER=60, or =off."
    )


def test_lines_of_threads():
    assert re.fullmatch(rf"\S*{HERE}:\d+ in test_lines_of_threads", line_of_thread(threading.get_ident()))
    assert line_of_thread(-1) == ""


def test_the_table():
    rows = [
        RankStatus(0, "one", "barrier() #3", "", "train.py:4", 3.0, {}, published=64.2),
        RankStatus(12, "two", "", "", "train.py:9 in load", None, {}, published=8.0),
    ]
    assert status_table(rows) == (
        "  rank  host  in                    for   at\n"
        "  0     one   barrier() #3          61 s  train.py:4\n"
        "  12    two   no call of all ranks        train.py:9 in load"
    )


class Returning:
    """A frame of another thread that returns while it is looked at: `f_back` can be read once."""

    def __init__(self, file, name, back=None):
        self.f_code = SimpleNamespace(co_filename=file, co_name=name)
        self._back = back

    @property
    def f_back(self):
        back, self._back = self._back, None
        return back


@pytest.mark.parametrize("file", ["/x/fabric/verbs.py", "/x/torch/utils/_device.py"])
def test_a_frame_may_return_while_it_is_looked_at(monkeypatch, file):
    monkeypatch.setattr(stacks, "_PACKAGE", "/x/fabric/")
    monkeypatch.setattr(stacks, "DISPATCH_FILES", ("/x/torch/utils/",))
    outer = Returning("/x/fabric/verbs.py", "barrier")
    assert stacks._blocking_call(Returning(file, "inner", outer)) == "barrier"
