"""Lines with the rank in front: `fabric run --prefix-ranks`, FABRIC_PREFIX_RANKS."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys

import pytest

from fabric.launch.rank_prefix import LinePrefix, prefix_output

CASES = {
    "a line": (["one\n"], "[rank 3] one\n"),
    "print writes its end apart": (["one", "\n", "two", "\n"], "[rank 3] one\n[rank 3] two\n"),
    "several lines": (["one\ntwo\n", "three"], "[rank 3] one\n[rank 3] two\n[rank 3] three"),
    "a line in parts": (["a", "", "b", "c\nd"], "[rank 3] abc\n[rank 3] d"),
    "empty lines": (["\n", "one\n\ntwo\n"], "\n[rank 3] one\n\n[rank 3] two\n"),
    "a progress bar": (["\r 10%", "\r 20%", "\n", "end\n"], "\r 10%\r 20%\n[rank 3] end\n"),
    "a bar that is cleared for a line": (["\r 10%", "\r    \r", "one\n"], "\r 10%\r    \r[rank 3] one\n"),
    "line ends of other systems": (["one\r\ntwo\r\n"], "[rank 3] one\r\n[rank 3] two\r\n"),
    "a backslash": (["\\1\n\\g<0>\n"], "[rank 3] \\1\n[rank 3] \\g<0>\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_prefix_is_at_the_beginning_of_each_line(case):
    written, expected = CASES[case]
    stream = io.StringIO()
    write = LinePrefix(stream.write, "[rank 3] ")
    assert [write(text) for text in written] == [len(text) for text in written]
    assert stream.getvalue() == expected


def replace_streams(monkeypatch):
    made = {name: io.TextIOWrapper(io.BytesIO(), "utf-8") for name in ("stdout", "stderr")}
    for name, stream in made.items():
        monkeypatch.setattr(sys, name, stream)
    return made


@pytest.mark.parametrize("value", ["", "0", "off", None])
def test_it_is_off_by_default(monkeypatch, value):
    streams = replace_streams(monkeypatch)
    monkeypatch.delenv("FABRIC_PREFIX_RANKS", raising=False)
    if value is not None:
        monkeypatch.setenv("FABRIC_PREFIX_RANKS", value)
    prefix_output(0)
    assert "write" not in vars(streams["stdout"])


@pytest.mark.parametrize(("rank", "printed"), [(0, b"one\n"), (1, b"[rank 1] one\n")])
def test_lines_of_rank_zero_may_have_none(monkeypatch, rank, printed):
    streams = replace_streams(monkeypatch)
    monkeypatch.setenv("FABRIC_PREFIX_RANKS", "others")
    prefix_output(rank)
    print("one", flush=True)
    assert streams["stdout"].buffer.getvalue() == printed


def test_streams_stay_the_same_objects(monkeypatch):
    streams = replace_streams(monkeypatch)
    monkeypatch.setenv("FABRIC_PREFIX_RANKS", "1")
    handler = logging.StreamHandler()  # made before the rank is known
    for _ in range(2):
        prefix_output(12)
    print("out")
    print("part", end="")
    handler.handle(logging.makeLogRecord({"msg": "logged"}))
    sys.stdout.writelines(["\n", "x\n"])
    assert sys.stdout is streams["stdout"]
    assert streams["stdout"].buffer.getvalue() == b"[rank 12] out\n[rank 12] part\n[rank 12] x\n"
    assert streams["stderr"].buffer.getvalue() == b"[rank 12] logged\n"


class Writes(io.RawIOBase):
    def __init__(self):
        self.parts = []

    def writable(self):
        return True

    def write(self, data):
        self.parts.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_under_python_u(monkeypatch):
    """torchrun starts `python -u`: the parts of a line were single writes, which mixed with other ranks'."""
    monkeypatch.setenv("FABRIC_PREFIX_RANKS", "1")
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(writes := Writes(), "utf-8", write_through=True))
    prefix_output(1)
    print("loss", 0.5)
    assert writes.parts == [b"[rank 1] loss 0.5\n"]


class Slotted:
    __slots__ = ("text",)

    def write(self, text):
        self.text = text


def test_streams_that_are_closed_or_take_no_attribute_are_left_alone(monkeypatch):
    monkeypatch.setenv("FABRIC_PREFIX_RANKS", "1")
    monkeypatch.setattr(sys, "stdout", stream := Slotted())
    monkeypatch.setattr(sys, "stderr", None)
    prefix_output(0)
    stream.write("one\n")
    assert stream.text == "one\n"


SCRIPT = """
import logging, os, sys, warnings
logging.basicConfig(format="%(message)s")
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
sys.stdout.write("early\\n")  # one write: torchrun starts python with -u
sys.stdout.flush()
fabric.launch()
print("hello", sys.stdout.isatty())
logging.error("logged")
print("part", end=" ")
print("done")
fabric.barrier()
if fabric.global_rank == 1 and "fail" in sys.argv:
    raise ValueError("boom")
fabric.barrier()
"""
HELLO = ["[rank 0] hello False", "[rank 0] part done", "[rank 1] hello False", "[rank 1] part done"]
LAUNCHERS = {
    "fabric run": (["-m", "fabric", "run", "--devices=2", "--prefix-ranks"], None),
    "fabric run with logs": (
        ["-m", "fabric", "run", "--devices=2", "--prefix-ranks", "--log-dir=logs"],
        None,
    ),
    "fabric run by default": (["-m", "fabric", "run", "--devices=2"], None),
    "fabric run without": (["-m", "fabric", "run", "--devices=2", "--no-prefix-ranks"], "1"),
    "fabric run with the variable": (["-m", "fabric", "run", "--devices=2"], "1"),
    "python": ([], "1"),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], "on"),
}


def run(tmp_path, launcher, *arguments):
    (tmp_path / "train.py").write_text(SCRIPT)
    command, value = LAUNCHERS[launcher]
    unset = ("PYTHONUNBUFFERED", "FABRIC_PREFIX_RANKS")  # see conftest.py
    environ = {name: text for name, text in os.environ.items() if name not in unset}
    environ |= {"OMP_NUM_THREADS": "1"} | ({"FABRIC_PREFIX_RANKS": value} if value else {})
    settings = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "timeout": 180}
    return subprocess.run([sys.executable, *command, "train.py", *arguments], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fabric run", "fabric run with the variable", "python", "torchrun"])
def test_lines_of_a_job_have_their_rank(tmp_path, launcher):
    done = run(tmp_path, launcher)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    early = [line.split()[-1] for line in lines if line not in HELLO]
    assert early == ["early", "early"]  # with a rank under fabric run, where it is known from Fabric(...) on
    assert [line for line in lines if line in HELLO] == HELLO
    logged = sorted([line for line in done.stderr.splitlines() if "logged" in line])
    assert logged == ["[rank 0] logged", "[rank 1] logged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "expected"),
    [("fabric run by default", [HELLO[2], "hello False"]), ("fabric run without", 2 * ["hello False"])],
)
def test_fabric_run_prefixes_the_lines_of_other_ranks(tmp_path, launcher, expected):
    done = run(tmp_path, launcher)
    assert done.returncode == 0, done.stderr
    assert sorted([line for line in done.stdout.splitlines() if "hello" in line]) == expected


@pytest.mark.slow
def test_a_traceback_has_its_rank_and_the_last_line_has_none(tmp_path):
    done = run(tmp_path, "fabric run", "fail")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert [line for line in lines if line.endswith("ValueError: boom")] == [
        "[rank 1] [rank1]: ValueError: boom"
    ]
    assert lines[-1].startswith("fabric: rank 1 on ")


@pytest.mark.slow
def test_log_files_have_the_prefix_once(tmp_path):
    done = run(tmp_path, "fabric run with logs")
    lines = sorted([line for line in done.stdout.splitlines() if "early" not in line])
    assert lines == HELLO
    assert (tmp_path / "logs/rank1.out").read_text() == "early\nhello False\npart done\n"


@pytest.mark.slow
def test_a_terminal_stays_one(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    parent, child = pty.openpty()
    command = [sys.executable, *LAUNCHERS["fabric run"][0], "train.py"]
    done = subprocess.run(command, cwd=tmp_path, stdout=child, stderr=subprocess.DEVNULL, timeout=180)
    os.close(child)
    printed = b""
    while (part := _read(parent)) != b"":
        printed += part
    os.close(parent)
    assert done.returncode == 0
    assert printed.count(b"] hello True\r\n") == 2


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # no writer is left
        return b""
