"""`fabric.profile`: a trace per rank, a table with the slowest rank, nothing outside of the context."""

from __future__ import annotations

import contextlib
import io
import json
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, ConfigurationError, UsageError
from fabric.data.loader import _FabricDataLoader
from fabric.profile.profile import table, times_of
from fabric.wrappers import _FabricModule, _FabricOptimizer

OWN = ["fabric.data", "fabric.forward", "fabric.backward", "fabric.step"]
MARKED = [(_FabricModule, "__call__"), (_FabricOptimizer, "step"), (_FabricDataLoader, "__iter__")]


class Slow(nn.Module):
    """Waits on one rank."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rank = rank

    def forward(self, x):
        if self.rank == 1:
            time.sleep(0.1)
        return self.linear(x)


def ready(strategy="ddp", slow=False, wrap=lambda model: model, **settings):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **settings)
    fabric.launch()
    torch.manual_seed(0)
    model = Slow(fabric.global_rank) if slow else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(64, 4), batch_size=2))
    return fabric, wrap(model), optimizer, loader


def train(fabric, model, optimizer, loader, prof, steps=8):
    for number, batch in enumerate(loader):
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        prof.step()
        if number + 1 == steps:
            break


def untouched(fabric, before):
    return before == [vars(owner).get(name) for owner, name in MARKED] and "backward" not in vars(fabric)


def a_profile(folder, parts=None, steps=8, **settings):
    parts = parts or ready()
    before = [vars(owner).get(name) for owner, name in MARKED]
    with contextlib.redirect_stdout(io.StringIO()) as told, parts[0].profile(folder, **settings) as prof:
        train(*parts, prof, steps)
    assert untouched(parts[0], before)
    return told.getvalue(), prof.profiler is not None


def names_in(file):
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    return [event["name"] for event in events]


def on_a_slow_rank(folder):
    return a_profile(folder, ready(slow=True), wait=2, warmup=1, active=3)


def test_a_trace_per_rank_and_the_slowest_rank_by_phase(ranks, tmp_path):
    (told, _), (other, _) = ranks.run(on_a_slow_rank, tmp_path / "made" / "trace", world_size=2)
    assert other == ""
    for rank in range(2):
        names = names_in(tmp_path / "made" / "trace" / f"rank_{rank}.json")
        assert {name: names.count(name) for name in OWN} == dict.fromkeys(OWN, 3)
        assert [name for name in names if name.startswith("ProfilerStep#")] == [
            f"ProfilerStep#{n}" for n in (3, 4, 5)
        ]
        assert any(name.startswith("gloo:") for name in names)
    lines = told.splitlines()
    assert lines[0] == f"{tmp_path}/made/trace/rank_*.json: 3 steps of 2 ranks, milliseconds per step"
    rows = {line[:22].strip(): line[22:].split() for line in lines[2:-1]}
    assert list(rows) == [
        *["data", "forward", "backward", "communication", "step"],
        *["whole step", "without communication"],
    ]
    assert rows["forward"][2] == rows["without communication"][2] == "1"
    assert float(rows["forward"][1]) >= 100, "milliseconds of one step"
    assert float(rows["forward"][0]) >= 50, "of which this is the mean"
    assert rows["communication"][2] == "0", "it waits for the other"
    assert lines[-1] == "The others wait for rank 1."


def chosen(folder, ranks):
    return a_profile(folder, ranks=ranks)


def test_chosen_ranks(ranks, tmp_path):
    (told, recorded), (_, other) = ranks.run(chosen, tmp_path, [1], world_size=2)
    assert (recorded, other) == (False, True)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_1.json"]
    assert "3 steps of 1 ranks" in told
    assert "wait for" not in told


def under(folder, strategy, settings, compiled):
    wrap = (lambda model: torch.compile(model, backend="eager")) if compiled else lambda m: m
    return a_profile(folder, ready(strategy, wrap=wrap, **settings))[0]


@pytest.mark.parametrize(
    ("strategy", "settings", "compiled"),
    [
        ("fsdp", {}, False),
        ("zero1", {}, False),
        ("pipeline", {}, False),
        ("ddp", {"precision": "bf16-mixed"}, False),
        ("ddp", {}, True),
    ],
)
def test_every_strategy_shows_its_phases(ranks, tmp_path, strategy, settings, compiled):
    told, _ = ranks.run(under, tmp_path, strategy, settings, compiled, world_size=2)
    for line in told.splitlines()[2:-1]:
        assert float(line.split()[-3]) > 0, line


def refused(folder):
    fabric, *_ = parts = ready()
    for settings in ({"active": 0}, {"wait": -1}, {"ranks": [2]}, {"ranks": []}):
        with pytest.raises(
            ConfigurationError, match=r"^fabric\.profile: ranks=.*, active=. Give|ranks of 0 to 1"
        ):
            a_profile(folder, parts, **settings)
    with pytest.raises(CollectiveMismatch, match="profile"):
        a_profile(folder, parts, wait=fabric.global_rank)
    active = {"ranks": [0], "wait": 0, "warmup": 9}  # it records nothing
    with (
        pytest.warns(UserWarning, match="recorded nothing")
        if fabric.is_global_zero
        else contextlib.nullcontext(),
        fabric.profile(folder / "a", **active),
        pytest.raises(UsageError, match=r"^fabric\.profile is active already"),
        fabric.profile(folder / "b"),
    ):
        pass
    (folder / "a").rmdir() if fabric.is_global_zero else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told, _ = a_profile(folder, parts, steps=1)
    return told, [str(each.message) for each in caught if "fabric.profile" in str(each.message)]


def test_what_cannot_be_profiled(ranks, tmp_path):
    text = (
        "fabric.profile has recorded nothing: there were no more than wait + warmup = 2 steps, which are not "
        "recorded. Call prof.step() at the end of each step of the loop, and run more steps."
    )
    assert ranks.run(refused, tmp_path, world_size=2) == [("", [text]), ("", [])]
    assert list(tmp_path.iterdir()) == []


def an_error_inside(folder):
    parts = ready()
    before = [vars(owner).get(name) for owner, name in MARKED]

    def fails():
        with parts[0].profile(folder) as prof:
            train(*parts, prof, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert untouched(parts[0], before)
    return a_profile(folder, parts)[0]


def test_an_error_passes_and_leaves_nothing_marked(ranks, tmp_path):
    told, _ = ranks.run(an_error_inside, tmp_path, world_size=2)
    assert "3 steps of 2 ranks" in told


def test_one_process(tmp_path, capsys):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(64, 4), batch_size=2))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # puts a step of its own on the instance
    with fabric.profile(tmp_path, record_shapes=True) as prof:
        train(fabric, model, optimizer, loader, prof)
        schedule.step()
    told = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in told.splitlines()[2:]}
    assert all(float(rows[name][0]) > 0 for name in ("data", "forward", "backward", "step"))
    assert float(rows["communication"][0]) == 0
    assert (tmp_path / "rank_0.json").exists()


def test_a_compiled_model_is_not_compiled_again(tmp_path, capsys):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    fabric = Fabric(accelerator="cpu", devices=1)
    compiled = torch.compile(fabric.setup(nn.Linear(4, 4)), backend=backend, fullgraph=True)
    x = torch.ones(2, 4)
    compiled(x)
    with fabric.profile(tmp_path, wait=0) as prof:
        for _ in range(4):
            fabric.backward(compiled(x).sum())
            prof.step()
    compiled(x)
    assert len(graphs) == 1
    assert float(capsys.readouterr().out.partition("forward")[2].split()[0]) > 0
    torch._dynamo.reset()


def test_before_launch(tmp_path):
    with pytest.raises(UsageError, match=r"fabric\.profile\(\) was used before fabric\.launch\(\)"):
        Fabric(accelerator="cpu", devices=2, strategy="ddp").profile(tmp_path)


# arithmetic


def row(name, begin, end):
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin}


def test_time_counts_once_and_waiting_is_not_being_busy():
    events = [
        {"ph": "M", "name": "process_name"},
        row("ProfilerStep#2", 0, 100),
        row("ProfilerStep#3", 100, 200),
        row("fabric.data", 0, 10),
        row("enumerate(DataLoader)#_Single.__next__", 2, 8),
        row("fabric.forward", 10, 30),
        row("gloo:all_reduce", 50, 70),
        row("gloo:all_reduce", 60, 90),
        row("nccl:all_gather", 190, 250),
        row("aten::add", 0, 1000),
    ]
    phases = {"data": 0.005, "forward": 0.01, "backward": 0.0, "communication": 0.05, "step": 0.0}
    assert times_of(events, 3) == {"steps": 2, **phases, "whole step": 0.1, "without communication": 0.075}
    assert times_of(events[3:], 3) == times_of(events, 0) == {}


def test_a_step_that_the_loop_has_not_ended_does_not_count():
    events = [
        row("ProfilerStep#3", 100, 200),
        row("ProfilerStep#2", 0, 100),
        row("fabric.forward", 10, 30),
        row("fabric.forward", 110, 180),
        row("gloo:all_reduce", 90, 120),
    ]
    found = times_of(events, 1)
    assert (found["steps"], found["forward"], found["communication"]) == (1, 0.02, 0.01)
    assert (found["whole step"], found["without communication"]) == (0.1, 0.09)


def test_a_devices_copies_of_the_hosts_events_do_not_count():
    host = [row("ProfilerStep#2", 0, 100), row("ProfilerStep#3", 100, 200), row("fabric.forward", 10, 30)]
    copies = [{**event, "ts": event["ts"] + 30, "cat": "gpu_user_annotation"} for event in host]
    assert times_of([*copies, *host], 2) == times_of(host, 2)


def short_loops(folder):
    parts = ready()
    told = [a_profile(folder / str(steps), parts, steps, wait=1, warmup=1)[0] for steps in (3, 4, 5)]
    return [text.partition(": ")[2].partition(" of")[0] for text in told]


def test_a_loop_that_ends_in_the_window(ranks, tmp_path):
    assert ranks.run(short_loops, tmp_path, world_size=2)[0] == ["1 steps", "2 steps", "3 steps"]


def waiting(folder, strategy):
    """The second rank is late for an operation of all ranks; its own backward is plain torch's."""
    fabric, model, optimizer, loader = ready(strategy)
    with contextlib.redirect_stdout(io.StringIO()) as told, fabric.profile(folder, wait=0) as prof:
        for number, batch in enumerate(loader):
            loss = model(batch).square().mean()
            loss.register_hook(lambda _: time.sleep(0.05))
            loss.backward()
            if fabric.global_rank == 1:
                time.sleep(0.2)
            fabric.all_reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
            if number == 3:
                break
    return told.getvalue()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_a_wait_for_a_late_rank_is_communication(ranks, tmp_path, strategy):
    told, _ = ranks.run(waiting, tmp_path, strategy, world_size=2)
    lines = told.splitlines()
    rows = {line[:22].strip(): line[22:].split() for line in lines[2:-1]}
    assert rows["communication"][2] == "0"
    assert float(rows["communication"][1]) >= 150, "milliseconds"
    assert float(rows["backward"][1]) >= 50, "of loss.backward()"
    assert lines[-1] == "The others wait for rank 1."


def test_the_table():
    def times(forward, communication, busy):
        phases = {
            "data": 0.5,
            "forward": forward,
            "backward": 0.0,
            "communication": communication,
            "step": 0.0,
        }
        return {"steps": 2, **phases, "whole step": 4.0, "without communication": busy}

    text = table({0: times(1.0, 2.5, 1.5), 3: times(3.0, 0.5, 3.5)}, Path("t"))
    assert text.splitlines() == [
        "t/rank_*.json: 2 steps of 2 ranks, milliseconds per step",
        "                           mean  slowest  rank",
        "data                       0.50     0.50  0",
        "forward                    2.00     3.00  3",
        "backward                   0.00     0.00  0",
        "communication              1.50     2.50  0",
        "step                       0.00     0.00  0",
        "whole step                 4.00     4.00  0",
        "without communication      2.50     3.50  3",
        "The others wait for rank 3.",
    ]
