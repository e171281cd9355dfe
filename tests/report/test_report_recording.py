"""What the ranks of a loop record: seconds by kind on a clock that only the test moves, events, failures."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric.batch_size.undo import StepUndo
from fabric.collectives.channel import Channel
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.report import file, recorder, stragglers
from fabric.report.format import STEP, pack_event, pack_header, pack_step, read
from fabric.report.recorder import StepRecorder
from fabric.report.stragglers import Straggler, find_stragglers
from fabric.strategies import LocalSGDStrategy

RANK = "rank-{:05d}.bin"
STRATEGIES = ["ddp", "zero1", "fsdp"]


class Clock:
    """Stands still, but for `pass_`."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


@contextmanager
def recorded(directory, strategy="ddp", **arguments):
    """(fabric, clock) of a job of this process's ranks."""
    clock, before = Clock(), recorder._clock
    recorder._clock = clock
    world = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, report=directory, **arguments)
    try:
        fabric.launch()
        yield fabric, clock
    finally:
        recorder._clock = before
        fabric.strategy.find_part("report").end()


def contents(directory, rank=0):
    """(events by kind, steps) of a rank's file."""
    events, steps = {}, []
    for part in read(Path(directory) / RANK.format(rank)):
        if isinstance(part, dict):
            events.setdefault(part["kind"], []).append(part)
        else:
            steps += STEP.iter_unpack(part)
    return events, steps


class Samples(Dataset):
    def __init__(self, clock, count):
        self.clock, self.count = clock, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.clock.pass_(1)
        return torch.ones(4)


class SlowModel(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.layer, self.clock = nn.Linear(4, 2), clock

    def forward(self, x):
        self.clock.pass_(10)
        return self.layer(x)


class SlowSGD(torch.optim.SGD):
    clock = None

    def step(self, closure=None):
        SlowSGD.clock.pass_(1000)
        return super().step(closure)


class SlowState:
    def __init__(self, clock):
        self.clock = clock

    def state_dict(self):
        self.clock.pass_(100_000)
        return {}

    def load_state_dict(self, state):
        pass


def slow_backward(clock):
    """A gradient hook: 100 in the backward, and 10,000 after its last operation, where DDP waits."""

    def hook(grad):
        clock.pass_(100)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: clock.pass_(10_000))

    return hook


def trained(fabric, clock, epochs=1, samples_per_rank=6):
    model = SlowModel(clock)
    SlowSGD.clock = clock
    # torch adds hooks to SGD.step when a first SGD is made, which ranks of the pool may differ in.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    model, optimizer = fabric.setup(model, SlowSGD(model.parameters(), lr=0.1))
    clock.pass_(7)  # before the loop: of no step
    loader = DataLoader(Samples(clock, samples_per_rank * fabric.world_size), batch_size=2)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(epochs):
        for batch in loader:
            out = model(batch)
            out.register_hook(slow_backward(clock))
            fabric.backward(out.sum())
            optimizer.step()
            optimizer.zero_grad()
            clock.pass_(0.5)  # of the loop itself
    return model, optimizer


def kinds(directory, strategy):
    real, slow = Channel.check_call, []

    def check_call(self, *args):
        for clock in slow:
            clock.pass_(1_000_000)
        return real(self, *args)

    Channel.check_call = check_call
    try:
        with recorded(directory, strategy, replica_check=False) as (fabric, clock):
            model, optimizer = trained(fabric, clock)
            slow.append(clock)
            fabric.all_reduce(1.0)
            slow.clear()
            fabric.save(Path(directory, "x.pt"), {"slow": SlowState(clock)})
            fabric.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            state = {}
            fabric.load(Path(directory, "x.pt"), state)
        assert Channel.check_call is check_call
    finally:
        Channel.check_call = real
    return contents(directory, fabric.global_rank)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seconds_are_counted_to_the_innermost_kind(ranks, tmp_path, strategy, world_size):
    for rank, (events, steps) in enumerate(ranks.run(kinds, tmp_path, strategy, world_size=world_size)):
        several = world_size > 1
        tail = 10_000 if several else 0
        loop = (2, 10, 100 + 10_000 - tail, tail, 1000, 0, 0)
        assert [step[3:10] for step in steps[:3]] == [loop] * 3, rank
        assert [step[10] for step in steps[:3]] == [11_112, 11_112.5, 11_112.5]
        _, number, _, *seconds, whole, kibibytes = steps[3]
        assert (number, seconds[1], seconds[4], seconds[6]) == (4, 10, 1000, 100_000)
        assert seconds[3] == (1_000_000 if several else 0)
        assert sum(seconds) + 0.5 == whole
        assert kibibytes > 10_000
        assert len(steps) == 4
        (start,) = events["start"]
        assert (start["rank"], start["world_size"], start["parameters"], start["batch_size"]) == (
            rank, world_size, 10, 2,
        )  # fmt: skip
        assert [event["epoch"] for event in events["epoch"]] == [0]
        (saved,), (loaded,) = events["save"], events["load"]
        assert (saved["path"], saved["ok"], saved["seconds"] > 0) == (str(tmp_path / "x.pt"), True, True)
        assert loaded["step"] == 4
        assert list(events)[-1] == "end"


def undone(directory):
    with recorded(directory) as (fabric, clock):
        model, optimizer = trained(fabric, clock)

        def step():
            fabric.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()

        clock.pass_(3)
        optimizer.zero_grad()
        with StepUndo(fabric.strategy):
            step()
            clock.pass_(50)
        clock.pass_(4)
        step()
    return contents(directory, fabric.global_rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_that_are_undone_are_not_recorded(ranks, tmp_path, world_size):
    for _, steps in ranks.run(undone, tmp_path, world_size=world_size):
        assert len(steps) == 4
        assert steps[-1][10] == 0.5 + 3 + 4 + 10 + 1000, "the loop, the forward, the step"


def loops(directory, epochs):
    with recorded(directory) as (fabric, clock):
        trained(fabric, clock, epochs)
    return contents(directory, fabric.global_rank)


def test_a_resumed_run_goes_on_with_other_ranks_after_a_torn_end(ranks, tmp_path):
    ranks.run(loops, tmp_path, 1, world_size=2)
    with (tmp_path / RANK.format(1)).open("r+b") as torn:  # its last step, and its end
        torn.truncate(torn.seek(0, os.SEEK_END) - 60)
    found = ranks.run(loops, tmp_path, 2, world_size=3)
    assert [len(events["start"]) for events, _ in found] == [2, 2, 1]
    numbers = [[step[1] for step in steps] for _, steps in found]
    assert numbers[0] == [*range(1, 10)]
    assert numbers[1] in ([*range(1, 10)], [1, 2, *range(4, 10)])
    assert numbers[2] == [*range(4, 10)]  # a new rank has the numbers of the others
    assert found[0][0]["start"][1]["step"] == 3


class Kept:
    def __init__(self):
        self.values = []

    def log_metrics(self, metrics, step=None):
        self.values.append((dict(metrics), step))


def logs(directory):
    logger = Kept()
    with recorded(directory, loggers=logger) as (fabric, clock):
        trained(fabric, clock)
        fabric.log("loss", torch.tensor(2.0), step=40)
        fabric.log_dict({"lr": 0.5, "mean": fabric.global_rank}, sync_dist=True)
        fabric.check_replicas()
    return contents(directory, fabric.global_rank)[0], logger.values


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_logged_goes_to_the_logger_and_to_the_file_of_rank_zero(ranks, tmp_path, world_size):
    for rank, (events, logged) in enumerate(ranks.run(logs, tmp_path, world_size=world_size)):
        values = [{"loss": 2.0}, {"lr": 0.5, "mean": (world_size - 1) / 2}]
        assert [value for value, _ in logged] == values
        assert [event["values"] for event in events.get("log", [])] == (values if rank == 0 else [])
        assert rank or events["log"][0]["logged_step"] == 40
        checks = [event["what"] for event in events.get("check", [])]
        assert checks[-1:] == (["check_replicas"] if world_size > 1 else [])
        assert len(checks) == (4 if world_size > 1 else 0)  # two after backwards, one after the epoch


def warns(directory):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recorded(directory, "auto") as (fabric, clock):
            for text in ("first", "first", "second"):
                warnings.warn(text, stacklevel=1)
            trained(fabric, clock)
    return contents(directory)[0], [str(one.message) for one in caught]


def test_warnings_are_events_after_the_start_and_each_once(ranks, tmp_path):
    ((events, texts),) = ranks.run(warns, tmp_path, world_size=1)
    assert list(events)[:2] == ["start", "warning"]
    assert events["start"][0]["parameters"] == 10
    assert [(event["text"], event["place"].split(":")[0]) for event in events["warning"]] == [
        ("first", Path(__file__).name),
        ("second", Path(__file__).name),
    ]
    assert texts == ["first", "first", "second"]  # shown as before


def fails(directory):
    save = Fabric.save
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", report=directory)
    with pytest.raises(ValueError, match="boom"):
        fabric.launch(_raise)
    assert Fabric.save is save
    return contents(directory, fabric.global_rank)[0]


def _raise(fabric):
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError(f"boom {fabric.global_rank}") from error


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_is_recorded_with_its_cause_and_line(ranks, tmp_path, world_size):
    line = _raise.__code__.co_firstlineno + 4
    for rank, events in enumerate(ranks.run(fails, tmp_path, world_size=world_size)):
        assert list(events) == ["start", "failure"]
        (failure,) = events["failure"]
        del failure["time"]
        assert failure == {
            "kind": "failure",
            "step": 0,
            "error": "ValueError",
            "text": f"boom {rank}",
            "secondary": False,
            "place": f"{Path(__file__).name}:{line}",
            "cause": f"KeyError: 'key' ({Path(__file__).name}:{line - 2})",
        }


def stops(directory):
    with recorded(directory) as (fabric, _):
        try:
            fabric.should_stop()
            if fabric.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert fabric.should_stop()
            assert fabric.should_stop()
        finally:
            fabric._stopper.restore()
    return [event["name"] for event in contents(directory, fabric.global_rank)[0].get("signal", [])]


def test_a_signal_is_an_event_of_the_rank_that_got_it(ranks, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    assert ranks.run(stops, tmp_path, world_size=2) == [[], ["SIGUSR1"]]
    assert signal.getsignal(signal.SIGUSR1) == before


def copies(directory):
    with recorded(directory, "auto") as (fabric, clock):
        plain = nn.Linear(4, 2)
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        x = torch.ones(1, 4)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), model(x))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
        pickle.loads(pickle.dumps(fabric))
        thread = threading.Thread(target=lambda: (model(x), clock.pass_(5), optimizer.step()))
        thread.start()
        thread.join()
        optimizer.step()
    return contents(directory)[1]


def test_models_are_copied_pickled_and_compiled_with_their_timed_forward(ranks, tmp_path):
    (steps,) = ranks.run(copies, tmp_path, world_size=1)
    assert [step[1:2] + step[3:11] for step in steps] == [(1, 0, 0, 0, 0, 0, 0, 0, 5)]


def test_the_step_of_another_optimizer_ends_no_step_until_the_first_is_gone(tmp_path):
    with recorded(tmp_path, "auto") as (fabric, _):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        pairs = [fabric.setup(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
        for _, optimizer in pairs:
            optimizer.step()
    assert len(contents(tmp_path)[1]) == 1


def test_the_fabric_that_is_launched_last_records(tmp_path):
    with recorded(tmp_path / "a", "auto") as (first, clock), recorded(tmp_path / "b", "auto") as (second, _):
        trained(first, clock)
        trained(second, clock)
    assert [len(contents(tmp_path / name)[1]) for name in "ab"] == [0, 3]
    assert list(contents(tmp_path / "a")[0]) == ["start", "end"]


def test_a_full_disk_ends_the_report_and_not_the_run(tmp_path, monkeypatch):
    real = os.write
    with recorded(tmp_path, "auto") as (fabric, clock):
        _, optimizer = trained(fabric, clock)
        monkeypatch.setattr(file.os, "write", lambda fd, data: real(fd, data[:20]))
        with pytest.warns(UserWarning, match=r"The report ends here, and the run goes on: .*rank-00000.bin"):
            optimizer.step()
        optimizer.step()
        monkeypatch.undo()
    assert len(contents(tmp_path)[1]) == 3


# stragglers


def test_stragglers_are_found_by_the_lower_median():
    even = [1.0, 4.0, 4.0, 9.0, 1.0, 0.0, 0.0, 0.0]
    late = [3.2, 4.0, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    rows = {0: ("a", even), 3: ("node7", late)}
    assert find_stragglers(rows) == [Straggler(3, "node7", 22, "data")]
    assert str(*find_stragglers(rows)) == "rank 3 on node7: +22 %, in data"
    assert find_stragglers({0: ("a", even), 1: ("b", [1.0, 4.0, 4.5, 0.0, 1.0, 0.5, 50.0, 0.0])}) == []
    own = [1.0, 4.0, 4.0, 0.0, 1.0, 0.0, 0.0, 10.0]
    (found,) = find_stragglers({0: ("a", even), 1: ("b", even), 2: ("c", own)})
    assert str(found) == "rank 2 on c: +100 %, outside of the calls of Fabric"
    assert find_stragglers({0: ("a", [0.0] * 8), 1: ("b", [0.0] * 8)}) == []


def slow_rank(directory, slow):
    every, stragglers.STEPS = stragglers.STEPS, 5
    real, stragglers.socket = stragglers.socket, SimpleNamespace(gethostname=lambda: "node7")
    try:
        with recorded(directory) as (fabric, clock), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = nn.Linear(4, 2)
            model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            count = 3 if fabric.global_rank == slow else 2
            for _ in range(25):
                clock.pass_(8 * count)
                fabric.backward(model(torch.ones(1, 4)).sum())
                optimizer.step()
    finally:
        stragglers.STEPS, stragglers.socket = every, real
    events = contents(directory, fabric.global_rank)[0].get("straggler", [])
    return [str(one.message) for one in caught], events


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_zero_warns_once_of_a_slow_rank(ranks, tmp_path, world_size):
    found = ranks.run(slow_rank, tmp_path, 1, world_size=world_size)
    assert [len(texts) for texts, _ in found] == [1, *[0] * (world_size - 1)]
    assert found[0][0][0].startswith("rank 1 on node7: +50 %, outside of the calls of Fabric (of")
    (event,) = found[0][1]
    wanted = {"rank": 1, "hostname": "node7", "percent": 50, "where": "other", "steps": 5}
    assert {name: event[name] for name in wanted} == wanted


def uneven_steps(directory):
    every, stragglers.STEPS = stragglers.STEPS, 2
    try:
        with recorded(directory, LocalSGDStrategy(sync_every=100)) as (fabric, _):
            model = nn.Linear(4, 2)
            model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3 + 8 * fabric.global_rank):
                fabric.backward(model(torch.ones(1, 4)).sum())
                optimizer.step()
    finally:
        stragglers.STEPS = every
    return len(contents(directory, fabric.global_rank)[1])


def test_ranks_may_step_unequally_often(ranks, tmp_path):
    assert ranks.run(uneven_steps, tmp_path, world_size=3) == [3, 11, 19]


# bad input


def make(report):
    return Fabric(accelerator="cpu", devices=1, report=report)


@pytest.mark.parametrize(
    ("report", "error", "text"),
    [
        (True, ArgumentTypeError, "report=True is no path. Each rank appends to a file in this directory."),
        ("", ArgumentTypeError, "report='' is no path."),
        ("s3://bucket/run", ConfigurationError, "report='s3://bucket/run' is a URL. Each rank"),
        ("/proc/none/x", ConfigurationError, "report='/proc/none/x' cannot be written (No such file or"),
        ("taken", ConfigurationError, "report='taken' is a file. Each rank"),
        ("other", ConfigurationError, "has the report of other.py, but this run is of"),
        ("foreign", UsageError, "is no file of a run report: it begins with b'somethin'."),
        ("newer", UsageError, "has version 9 of the run report's format. This Fabric reads version 1."),
    ],
)  # fmt: skip
def test_bad_directories_are_refused(tmp_path, monkeypatch, report, error, text):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    newer = b"FABREP\x09\x00"
    begins = {
        "other": pack_header() + pack_event("start", 0.0, 0, script="other.py"),
        "foreign": b"something",
    }
    for name, data in {**begins, "newer": newer}.items():
        Path(name).mkdir()
        Path(name, RANK.format(0)).write_bytes(data)
    with pytest.raises(error) as caught:
        make(report)
    assert text in str(caught.value)


def test_the_variable_is_named_in_errors_and_switches_the_report_on(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FABRIC_REPORT", str(tmp_path / "taken"))
    with pytest.raises(ConfigurationError, match=r"^FABRIC_REPORT=.*taken is a file\."):
        make(None)
    monkeypatch.setenv("FABRIC_REPORT", str(tmp_path / "here"))
    make(None).strategy.find_part("report").end()
    assert list(contents(tmp_path / "here")[0]) == ["start", "end"]
    monkeypatch.setenv("FABRIC_REPORT", "")
    assert make(None).strategy.find_part("report") is None


LOCK = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
)


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    path = tmp_path / RANK.format(0)
    command = [sys.executable, "-c", LOCK, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(ConfigurationError, match=r"rank-00000.bin is being written by another process"):
            make(tmp_path)
        other.communicate(b"\n")


def damaged_on_one_rank(directory):
    path = Path(directory, RANK.format(1))
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", report=directory)
    with pytest.raises(ConfigurationError) as caught:
        fabric.launch()
    return str(caught.value).replace(str(path), "FILE")


def test_a_damaged_file_of_one_rank_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / RANK.format(1)).write_bytes(pack_header() + pack_step(1, 0.0, [0.0] * 7, 1.0, 1) + b"XXXX")
    text = (
        "The report of rank 1 cannot be written. FILE is damaged: byte 60 begins neither a step nor an event."
    )
    for found in ranks.run(damaged_on_one_rank, tmp_path, world_size=2):
        assert found.startswith(text)


def test_forked_processes_write_nothing(tmp_path):
    path = tmp_path / RANK.format(0)
    one = StepRecorder(file.RankFile(path, "x.py"), 0, {})
    one._pid = 0
    one.event("log")
    one._pid = os.getpid()
    one.event("end")
    one.file.close()
    assert [event["kind"] for event in read(path)] == ["start", "end"]


def test_memory_is_that_of_the_devices_allocator_where_it_has_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1024 * (5 + device.index))
    assert recorder.peak_memory(torch.device("cuda", 2)) == 7
    assert recorder.peak_memory(torch.device("cpu")) == recorder.peak_memory(None) > 10_000
