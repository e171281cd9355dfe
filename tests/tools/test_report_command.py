"""`fabric report`: aggregation against plain sums, findings in words, text, JSON, --follow, and bad input."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from report_cases import start_of, steps_of, write_rank, write_run
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric, cli
from fabric.core import extras
from fabric.core.errors import FabricError, MissingExtraError, UsageError
from fabric.loggers import CSVLogger
from fabric.report.format import KINDS, STEP, pack_event, pack_header, pack_step, read
from fabric.tools.report import text
from fabric.tools.report.aggregate import BINS, RunAggregate
from fabric.tools.report.summary import straggler_texts, summarize
from fabric.tools.report.text import as_text, follow_run, sparkline


def aggregate(directory):
    run = RunAggregate(directory)
    run.update()
    return run


def report(directory):
    return summarize(aggregate(directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


# aggregation


@pytest.mark.parametrize("count", [1, 319, 320, 321, 3000])
def test_bins_have_the_sums_and_the_maximum_of_their_steps(tmp_path, count):
    outlier = 2 * count // 3 + 1
    write_rank(tmp_path, 0, 1, steps_of(count, noise=0.5, forward=(outlier, outlier, 5.0)))
    run = aggregate(tmp_path)
    assert run.width == {1: 1, 319: 1, 320: 2, 321: 2, 3000: 16}[count]
    steps = b"".join([record for record in read(tmp_path / "rank-00000.bin") if isinstance(record, bytes)])
    bins: dict[int, list] = {}
    for _, number, _, *seconds, whole, memory in STEP.iter_unpack(steps):
        bins.setdefault(number // run.width, []).append([1.0, whole, *seconds, memory])
    entry = run.ranks[0]
    for place in range(BINS):
        rows = torch.tensor(bins.get(place, [[0.0] * (3 + len(KINDS))]), dtype=torch.double)
        torch.testing.assert_close(entry.sums[place], rows[:, :-1].sum(0))
        assert entry.peaks[place].tolist() == rows[:, [1, -1]].amax(0).tolist()
    assert entry.peaks[outlier // run.width, 0] > 5.0


def test_logged_values_and_events_keep_their_count_and_extremes_in_wider_bins(tmp_path):
    events = [
        (at, "log", {"values": {"loss": float(at), "text": "a", "flag": True}}) for at in range(1, 2001)
    ]
    events += [(at, "save", {"path": f"{at}.pt", "seconds": at / 1000}) for at in range(1, 2001, 100)]
    write_rank(tmp_path, 0, 1, steps_of(2000), events=events)
    run = aggregate(tmp_path)
    assert run.width == 8
    bins = run.values["loss"]
    assert sum(count for count, *_ in bins.values()) == 2000
    assert sum(total for _, total, *_ in bins.values()) == 2000 * 2001 / 2
    assert bins[3] == (8, sum(range(24, 32)), 24.0, 31.0)
    assert set(run.values) == {"loss", "flag"}
    saves = [row for row in summarize(run)["events"] if row["kind"] == "save"]
    assert [row["step"] for row in saves] == [*range(1, 2001, 100)]
    assert sum(row["count"] for row in saves) == 20


def test_events_of_one_bin_have_the_text_of_the_first_and_the_longest_seconds(tmp_path):
    begin = time.time() - 10_000
    for rank, (later, seconds) in enumerate([(2.0, 0.1), (0.0, 0.9), (1.0, 0.4)]):
        events = [(5, "save", {"path": f"of {rank}", "seconds": seconds})]
        write_rank(tmp_path, rank, 3, steps_of(8), begin=begin + later, events=events)
    (save,) = [row for row in report(tmp_path)["events"] if row["kind"] == "save"]
    assert {name: save[name] for name in ("rank", "step", "count", "seconds", "text")} == {
        "rank": 1,
        "step": 5,
        "count": 3,
        "seconds": 0.9,
        "text": "of 1",
    }


def test_a_torn_last_record_is_ignored(tmp_path):
    events = [(40, "save", {"path": "a.pt", "seconds": 1.0})]
    path = write_rank(tmp_path, 0, 1, steps_of(40), events=events, last=None)
    data, known = path.read_bytes(), report(tmp_path)
    assert (known["steps"], len(known["events"])) == (40, 2)
    event = len(data) - data.rindex(b"E\0\0\0")
    for torn in (1, event - 9, event - 1, event + 1, event + STEP.size - 1):
        path.write_bytes(data[:-torn])
        found = report(tmp_path)
        assert found["steps"] == 40 - (torn > event)
        assert [row["kind"] for row in found["events"]] == ["start"]


def test_what_is_appended_is_read_once(directory, tmp_path):
    whole = report(directory)
    (tmp_path / "run").mkdir()
    run, first = RunAggregate(directory), True
    run.directory = tmp_path / "run"
    for share in (0.1, 0.37, 0.371, 1.0, 1.0):  # ends of files anywhere
        for path in directory.glob("rank-*.bin"):
            data = path.read_bytes()
            (run.directory / path.name).write_bytes(data[: int(share * len(data))])
        run.update()
        assert first or summarize(run)["steps"] > 0
        first = False
    found = summarize(run)
    found["directory"] = whole["directory"]
    assert found["events"] == whole["events"]
    assert found["by_rank"] == whole["by_rank"]
    assert found["curves"].keys() == whole["curves"].keys()
    torch.testing.assert_close(found["curves"]["loss"]["mean"], whole["curves"]["loss"]["mean"])


# findings


def test_stragglers_in_words(directory):
    lines = straggler_texts(report(directory)["stragglers"])
    assert re.fullmatch(r"rank 3 on node0: \+23 %, in data, steps 400-1,199", lines[0])
    assert re.fullmatch(r"rank 1 on node0: \+\d+ %, in forward, steps 1,296-1,303", lines[1])
    assert len(lines) == 2


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", ["data", "forward", "optimizer", "communication", "checkpoint"])
def test_time_in_communication_and_saves_makes_no_straggler(tmp_path, ranks, kind):
    for rank in range(ranks):
        longer = {kind: (1, 150, 0.03)} if rank == 1 else {}
        write_rank(tmp_path, rank, ranks, steps_of(150, seed=rank, **longer))
    found = report(tmp_path)["stragglers"]
    expected = [] if kind in ("communication", "checkpoint") else [(1, kind, 1, 150)]
    assert [(row["rank"], row["where"], row["first_step"], row["last_step"]) for row in found] == expected


def test_only_the_costliest_stragglers_are_named(tmp_path):
    rows = [
        {"rank": rank, "host": "a", "percent": 20.0, "where": "other", "first_step": 1, "last_step": 1000}
        for rank in range(25)
    ]
    lines = straggler_texts(rows)
    assert lines[0] == "rank 0 on a: +20 %, outside of the calls of Fabric, steps 1-1,000"
    assert lines[20:] == ["and 5 more: --json has all"]


def test_the_first_failure_and_killed_ranks_are_named(tmp_path):
    failure = {"error": "ValueError", "text": "loss is nan", "place": "train.py:31", "secondary": False}
    other = {"error": "RankError", "text": "rank 1 failed", "place": "train.py:31", "secondary": True}
    begin = time.time() - 10_000
    write_rank(tmp_path, 0, 4, steps_of(50), begin=begin, events=[(50, "failure", other)], last=None)
    write_rank(tmp_path, 1, 4, steps_of(49), begin=begin, events=[(49, "failure", failure)], last=None)
    write_rank(tmp_path, 2, 4, steps_of(40), begin=begin, last=None)
    write_rank(tmp_path, 3, 4, steps_of(40), begin=begin, last=None)
    found = report(tmp_path)
    assert found["state"] == "failed"
    words = "no later record, and no end: killed, out of memory, a hang, or the machine failed"
    texts = [re.sub(r", \d{4}-\S+ \S+:(?= )", ":", line) for line in found["failures"]]
    assert texts == [
        f"ranks 2-3 on node0, step 40: {words}",
        "rank 1 on node0, step 49: ValueError, loss is nan, train.py:31",
    ]
    kinds = [row["kind"] for row in found["events"]]
    assert kinds.count("failure") == kinds.count("failure, secondary") == 1


def test_a_run_that_was_resumed_has_ended_well(tmp_path):
    begin, failure = time.time() - 10_000, {"error": "OSError", "text": "disk"}
    for rank in range(2):
        write_rank(tmp_path, rank, 2, steps_of(50), begin=begin, events=[(50, "failure", failure)], last=None)
        write_rank(tmp_path, rank, 2, steps_of(50, first=51), begin=begin + 500, append=True)
    found = report(tmp_path)
    assert (found["state"], found["failures"], found["attempts"], found["steps"]) == ("ended", [], 2, 100)
    assert [row["kind"] for row in found["events"]] == ["start", "failure", "start", "end"]


def test_a_run_that_fails_again_in_the_same_way_has_failed(tmp_path):
    events = [(50, "failure", {"error": "OutOfMemoryError", "text": "CUDA out of memory"})]
    for again, begin in enumerate((time.time() - 10_000, time.time() - 5_000)):
        kwargs = {"begin": begin, "events": events, "last": None, "append": bool(again)}
        for rank in range(2):
            write_rank(tmp_path, rank, 2, steps_of(50), **kwargs)
    found = report(tmp_path)
    assert (found["state"], found["attempts"], len(found["failures"])) == ("failed", 2, 1)
    assert "CUDA out of memory (and the same on 3 more)" in found["failures"][0]


def test_ranks_of_a_larger_attempt_before_are_no_failure(tmp_path):
    for rank in range(4):
        write_rank(tmp_path, rank, 4, steps_of(50), begin=time.time() - 3_000, last=None)
    for rank in range(2):
        write_rank(tmp_path, rank, 2, steps_of(50, first=51), begin=time.time() - 2_500, append=True)
    run = aggregate(tmp_path)
    assert (summarize(run)["state"], summarize(run)["failures"], run.is_alive(10_000)) == ("ended", [], False)


def test_missing_ranks_and_values_that_are_not_finite_are_noted(tmp_path):
    events = [(7, "log", {"values": {"loss": float("nan")}}), (5, "log", {"values": {"loss": float("inf")}})]
    write_rank(tmp_path, 0, 12, steps_of(10), events=events)
    assert report(tmp_path)["notes"] == [
        "Of 12 ranks, ranks 1-11 left no record here.",
        "loss was not finite, first in step 5.",
    ]


def test_a_rank_that_is_alive_is_running(tmp_path):
    write_rank(tmp_path, 0, 1, steps_of(10), begin=time.time() - 5, last=None)
    assert report(tmp_path)["state"] == "running"


# real ranks


def train(directory):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=world, report=directory, loggers=CSVLogger(directory))
    fabric.launch()
    model, data = torch.nn.Linear(4, 2), TensorDataset(torch.ones(24 * world, 4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in fabric.setup_dataloaders(DataLoader(data, batch_size=2)):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", loss)
    path = fabric.broadcast(f"{directory}/last.pt")
    fabric.save(path, {"model": model})
    fabric.strategy.teardown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_record_is_reported(ranks, tmp_path, world_size):
    ranks.run(train, str(tmp_path), world_size=world_size)
    found = report(tmp_path)
    assert (found["ranks"], found["steps"], found["state"]) == (world_size, 12, "ended")
    assert found["parameters"] == 10
    assert [row["state"] for row in found["by_rank"]] == ["end"] * world_size
    assert "loss" in found["curves"]
    for row in found["by_rank"]:
        assert sum(row[name] for name in (*KINDS, "other")) == pytest.approx(row["step"])
    assert {"start", "epoch", "save", "end"} <= {row["kind"] for row in found["events"]}
    assert as_text(found).startswith(f"fabric report {tmp_path}: ended, {world_size} rank")


# output


def test_text(directory, capsys):
    assert cli.main(["report", str(directory), "--text"]) == 0
    printed = capsys.readouterr().out
    assert f"fabric report {directory}: ended, 4 ranks on 1 machine, 1,500 steps\n" in printed
    assert (
        "  script train.py, strategy DDPStrategy, precision 32-true, accelerator cpu, 1,234 param" in printed
    )
    assert "\nstragglers\n  rank 3 on node0: +23 %, in data, steps 400-1,199\n" in printed
    header, _, *rows = re.findall(r"^  (?:rank  host|mean|\d ) .*", printed, re.MULTILINE)
    assert header.split() == ["rank", "host", "step", *KINDS, "other", "peak", "MB"]
    assert [float(cell) for cell in rows[3].split()[3:5]] == pytest.approx([12.67, 30.0], rel=0.02)
    assert re.search(r"^  loss +█[█▇▆▅▄▃▂▁]+▁  [\d.]+ \(from 0\.5\d+ to 1\.9\d+\)$", printed, re.MULTILINE)
    assert re.search(r"step 700  save, not ok, rank 0, 0\.1 s: runs/last\.pt$", printed, re.MULTILINE)
    assert "step 500  epoch, rank" in printed
    assert len(rows) == 4


def test_text_of_many_ranks_has_the_slowest_ones(tmp_path):
    for rank in range(20):
        write_rank(tmp_path, rank, 20, steps_of(30, seed=rank, data=(1, 30, 0.001 * (19 - rank))))
    printed = as_text(report(tmp_path))
    assert "  and 8 faster ranks: --json has all" in printed
    shown = [int(rank) for rank in re.findall(r"^  (\d+) +node", printed, re.MULTILINE)]
    assert shown == [*range(12)]


def test_json(directory, tmp_path, capsys):
    assert cli.main(["report", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["ranks"], found["steps"], found["steps_per_bin"]) == (4, 1500, 8)
    assert [row["rank"] for row in found["by_rank"]] == [0, 1, 2, 3]
    step = found["curves"]["step, ms"]
    at = step["most"].index(max(step["most"]))
    assert (step["first_step"][at], step["rank"][at]) == (1296, 1)
    assert max(step["mean"]) < 200 < 2000 < step["most"][at]
    write_rank(tmp_path, 0, 1, [])  # no step: no mean
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["steps"], found["by_rank"][0]["data"]) == (0, None)
    assert cli.main(["report", str(tmp_path), "--text"]) == 0


def test_a_sparkline_averages_groups():
    assert sparkline([1.0] * 3) == "▁▁▁  1 (from 1 to 1)"
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█  2 (from 0 to 2)"
    assert sparkline([*map(float, range(1000))]).startswith("▁▁▁▁▁")
    assert len(sparkline([*map(float, range(1000))]).split()[0]) <= 60


def test_follow_prints_a_line_for_each_interval_while_ranks_append(tmp_path, monkeypatch):
    now = time.time()
    paths = [write_rank(tmp_path, rank, 2, steps_of(10), begin=now - 60, last=None) for rank in range(2)]
    run, slept = aggregate(tmp_path), []

    def append(seconds):
        slept.append(seconds)
        for rank, path in enumerate(paths):
            with path.open("ab") as file:
                if len(slept) == 1:
                    for number, kinds in steps_of(20, first=11, data=(11, 30, 0.05 * rank)):
                        file.write(pack_step(number, now, kinds, sum(kinds), 1))
                    values = {"loss": 0.25}
                    file.write(pack_event("log", now, 30, values=values) + b"S\0\0")  # torn, for now
                elif len(slept) == 3:
                    file.seek(0, 2)
                    file.truncate(file.tell() - 3)
                    file.write(pack_event("end", now, 30))

    monkeypatch.setattr(text.time, "sleep", append)
    lines = [re.sub(r"^[\d:]+  ", "", line) for line in follow_run(run, 60.0)]
    assert slept == [60.0] * 3
    assert re.fullmatch(r"step 10 \(\+10\)  9\d\.\d+ ms per step", lines[0])
    assert re.fullmatch(r"step 30 \(\+20\)  1\d\d\.?\d* ms per step  rank 1: \+5\d %  loss 0\.25", lines[1])
    assert re.fullmatch(r"step 30 \(\+0\)  no record for \d+ s  loss 0\.25", lines[2])
    assert lines[4].startswith("ended, 2 ranks on 1 machine, 30 steps")
    assert len(lines) == 5


def test_follow_by_the_command_ends_with_1_after_a_failure(tmp_path, capsys):
    write_rank(tmp_path, 0, 1, steps_of(10), last="failure")
    assert cli.main(["report", str(tmp_path), "--follow", "--interval", "0.01"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "failed, 1 rank on 1 machine, 10 steps"
    assert printed[2].startswith("rank 0 on node0, step 10, ")


# bad input


def run_without_files(path):
    (path / "notes.txt").write_text("a")


def run_without_records(path):
    (path / "rank-00000.bin").write_bytes(pack_header()[:5])


def of_another_version(version):
    return lambda path: (path / "rank-00000.bin").write_bytes(b"FABREP" + version.to_bytes(2, "little"))


def of_another_kind(path):
    (path / "rank-00000.bin").write_bytes(b"PK\3\4" * 20)


def damaged(path):
    file = write_rank(path, 0, 1, steps_of(3))
    data = file.read_bytes()
    file.write_bytes(data[:-60].replace(b"S\0\0\0\2", b"x\0\0\0\2"))


def of_another_size(path):
    for rank in range(2):
        write_rank(path, rank, 2, steps_of(3))
    write_rank(path, 5, 8, steps_of(3))


def of_another_rank(path):
    write_rank(path, 0, 2, steps_of(3))
    write_rank(path, 1, 2, steps_of(3)).rename(path / "rank-00003.bin")


def of_another_day(path):
    write_rank(path, 0, 2, steps_of(3))
    write_rank(path, 1, 2, steps_of(3), begin=time.time() - 90_000)


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (
            run_without_files,
            2,
            "has no rank-00000.bin, but notes.txt. No run has written its report there. Start",
        ),
        (
            run_without_records,
            1,
            "has rank-00000.bin, but no record in any file. The run has not made its first",
        ),
        (
            of_another_version(99),
            1,
            "rank-00000.bin has version 99 of the run report's format. This Fabric reads",
        ),
        (
            of_another_version(0),
            1,
            "rank-00000.bin has version 0 of the run report's format. This Fabric reads",
        ),
        (of_another_kind, 1, "rank-00000.bin is no file of a run report: it begins with b'PK"),
        (damaged, 1, "rank-00000.bin is damaged: byte"),
        (
            of_another_size,
            1,
            "rank-00005.bin is of a run of 8 ranks, and rank-00000.bin of one of 2. A report is",
        ),
        (
            of_another_rank,
            1,
            "rank-00003.bin was written by rank 1. A report is of one run. Move the files of",
        ),
        (
            of_another_day,
            1,
            r"rank-00001.bin has records of [-\d]+ [:\d]+, and rank-00000.bin of [-\d]+ [:\d]+. A",
        ),
    ],
)
def test_a_directory_that_has_no_run_is_an_error_with_what_to_write(tmp_path, capsys, prepare, code, words):
    prepare(tmp_path)
    for kind in ("--text", "--json", "--follow"):
        assert cli.main(["report", str(tmp_path), kind]) == code
        error = capsys.readouterr().err
        assert re.search(words, error), error
        assert "Traceback" not in error


def test_a_directory_that_is_missing_or_a_file_is_an_error(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "none"), "--text"]) == 2
    assert re.search(
        r"The directory '.*none' does not exist \(looked in .*\)\. A report is made of the files that ranks "
        r"write into one directory\. Write that of Fabric\(report=DIR\): fabric report DIR\.$",
        capsys.readouterr().err.strip(),
    )
    path = write_rank(tmp_path, 0, 1, steps_of(3))
    assert cli.main(["report", str(path), "--text"]) == 2
    assert "rank-00000.bin' is a file. A report is made of the" in capsys.readouterr().err


def test_files_of_a_run_with_other_numbers_of_ranks_are_one_run(tmp_path):
    begin = time.time() - 10_000
    for rank in range(4):
        write_rank(tmp_path, rank, 4, steps_of(5), begin=begin)
    for rank in range(2):
        write_rank(tmp_path, rank, 2, steps_of(5, first=6), begin=begin + 100, append=True)
    assert report(tmp_path)["ranks"] == 4


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "nan", "inf", "1e3"])
def test_an_interval_that_is_no_time_is_an_error(directory, capsys, interval):
    assert cli.main(["report", str(directory), "--follow", f"--interval={interval}"]) == 2
    assert capsys.readouterr().err == (
        f"fabric report: --interval {interval} is no time. It is the seconds between two lines of --follow. "
        "Write --interval 60.\n"
    )


def test_options_that_exclude_each_other_are_an_error(directory, capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", str(directory), "--text", "--out", "a.html"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_without_plotly_the_page_is_an_error_with_the_line_that_installs_it(directory, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", missing)
    from fabric.tools.report.page import as_page

    with pytest.raises(MissingExtraError) as caught:
        as_page(aggregate(directory))
    assert str(caught.value) == (
        "fabric report needs the package plotly, which is not installed. "
        'Run `pip install "torch-fabric[report]"`, or write --text or --json.'
    )


def test_an_unreadable_file_is_an_error(directory, tmp_path, monkeypatch):
    def refuse(path, start):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fabric.tools.report.aggregate.read_from", refuse)
    with pytest.raises(
        FabricError, match=r"rank-00000.bin cannot be read: Permission denied. .* chmod a\+r "
    ):
        aggregate(directory)


def test_start_without_steps_is_a_run(tmp_path):
    (tmp_path / "rank-00000.bin").write_bytes(pack_header() + start_of(0, 1, time.time() - 5000))
    assert report(tmp_path)["steps"] == 0
    with pytest.raises(UsageError):
        aggregate(write_nothing(tmp_path / "other"))


def write_nothing(path):
    path.mkdir()
    (path / "rank-00000.bin").write_bytes(b"")
    return path
