"""`python train.py`: the process that the user started is rank zero, under debuggers and profilers, too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jobs import alive, environ, until

pytestmark = pytest.mark.slow
HEAD = """
import os, sys, time
print("imported", flush=True)
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
if fabric.is_global_zero:
    print("zero", flush=True)
fabric.launch()
fabric.print("hparams")
"""
PARSED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--dropout", default=0.0)
known, sys.argv[1:] = parser.parse_known_args()
"""


def script(tmp_path, body="", name="train.py"):
    path = tmp_path / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def run(*command, code=0, **settings):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ(OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).parents[2])),
        check=False,
        **settings,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "way",
    [
        ["{script}"],
        ["-u", "-X", "faulthandler", "{script}"],
        ["-m", "train"],
        ["-m", "pdb", "-c", "continue", "{script}"],
        ["-m", "cProfile", "-o", "profile.out", "{script}"],
        ["-m", "trace", "--count", "--coverdir=cover", "--ignore-dir=/", "{script}"],
        ["-i", "{script}"],
    ],
    ids=lambda way: " ".join(way[:2]),
)
def test_code_runs_once_per_rank(tmp_path, way):
    path = script(tmp_path, 'print("rank", fabric.global_rank, os.getpid(), len(sys.argv), flush=True)')
    command = [part.format(script=path) for part in way]
    lines = run(*command, "argument", cwd=tmp_path, input="").stdout.splitlines()
    count = {name: sum([line.endswith(name) for line in lines]) for name in ("imported", "zero", "hparams")}
    assert count == {"imported": 2, "zero": 1, "hparams": 1}, lines
    ranks = sorted([line.split()[-4:] for line in lines if "rank " in line])
    assert [(rank, count) for _, rank, _, count in ranks] == [("0", "2"), ("1", "2")], lines


@pytest.mark.parametrize("way", [["{script}"], ["-m", "train"], ["-m", "pdb", "-c", "continue", "{script}"]])
def test_all_ranks_have_the_arguments_that_the_script_takes_out_of_sys_argv(tmp_path, way):
    body = "print('rank', fabric.global_rank, known.dropout, sys.argv[1:], sep='|')\nfabric.barrier()"
    path = script(tmp_path, body)  # the barrier, since pdb deletes the group of a rank that ends first
    path.write_text(path.read_text().replace("from fabric", f"{PARSED}from fabric", 1))
    command = [part.format(script=path) for part in way]
    lines = run(*command, "--dropout", "0.5", "rest", cwd=tmp_path, input="").stdout.splitlines()
    rows = sorted([line[line.index("rank|") :] for line in lines if "rank|" in line])
    assert rows == [f"rank|{rank}|0.5|['rest']" for rank in (0, 1)]


def test_a_breakpoint_is_that_of_rank_zero(tmp_path):
    path = script(tmp_path, "breakpoint()\nprint('sum', fabric.all_reduce(1.0, reduce_op='sum').item())")
    out = run(str(path), input="p 'rank', fabric.global_rank\nc\n").stdout
    assert out.count("('rank', 0)") == 1
    assert out.count("sum 2.0") == 2


def test_the_first_process_is_rank_zero(tmp_path):
    path = script(tmp_path, "print(fabric.global_rank, os.getpid(), flush=True)")
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ()) as job:
        out, _ = job.communicate(timeout=120)
    assert f"0 {job.pid}" in out.splitlines()


@pytest.mark.parametrize("arguments", [["+lr=0.1"], ["-m", "+lr=0.1,0.2"]], ids=["run", "multirun"])
def test_all_ranks_have_the_output_directory_of_hydra(tmp_path, arguments):
    place = tmp_path / "it's a place"
    place.mkdir()
    (place / "train.py").write_text(
        textwrap.dedent("""
        import os
        import hydra, torch
        from fabric import Fabric

        @hydra.main(version_base=None, config_path=None)
        def main(config):
            fabric = Fabric(accelerator="cpu", devices=2)
            fabric.launch()
            folder = hydra.core.hydra_config.HydraConfig.get().runtime.output_dir
            fabric.save(os.path.join(folder, "state.pt"), {"lr": config.lr})
            print("rank", fabric.global_rank, config.lr, folder, os.getcwd(), sep="|", flush=True)

        main()
        """)
    )
    lines = run("train.py", *arguments, cwd=place).stdout.splitlines()
    rows = [line.split("|")[1:] for line in lines if line.startswith("rank")]
    jobs = len(arguments)
    assert sorted({(rank, lr) for rank, lr, *_ in rows}) == [
        (str(rank), lr) for rank in (0, 1) for lr in ("0.1", "0.2")[:jobs]
    ]
    assert len({folder for _, _, folder, _ in rows}) == jobs
    assert len([*place.rglob("config.yaml")]) == len([*place.rglob("state.pt")]) == jobs
    assert {cwd for *_, cwd in rows} == {str(place)}


def test_another_fabric_in_the_same_script(tmp_path):
    body = """
    again = Fabric(accelerator="cpu", devices=2)
    again.launch()
    print("sum", again.all_reduce(1.0, reduce_op="sum").item(), flush=True)
    """
    out = run(script(tmp_path, body)).stdout.splitlines()
    assert out.count("sum 2.0") == 2
    assert out.count("imported") == 2


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("sys.exit(3 if fabric.global_rank == 0 else fabric.barrier())", 3, "rank 0 .* exit code 3; rank 1"),
        ("if fabric.global_rank: time.sleep(0.5); sys.exit(5)", 5, "rank 1 .* exit code 5$"),
        (
            "if fabric.global_rank: raise ValueError('boom')\ntime.sleep(100)",
            1,
            r"rank 1 .* boom \(train.py:",
        ),
        (
            "if not fabric.global_rank: sys.exit()\nfabric.barrier()",
            1,
            r"rank 0 .* finished \(exit 0\) while rank 1 waits in fabric.barrier \(train.py:",
        ),
        (
            "if fabric.global_rank: sys.exit('no data')\ntime.sleep(100)",
            1,
            r"rank 1 .* exit code 1 \(no data\); rank 0 stopped",
        ),
        ("if fabric.global_rank: os._exit(7)\ntime.sleep(100)", 7, "rank 1 .* exit code 7; rank 0 stopped"),
        (
            "if fabric.global_rank: sys.exit(256)\ntime.sleep(100)",
            1,
            "rank 1 .* exit code 256; rank 0 stopped",
        ),
        ("if not fabric.global_rank: sys.exit(512)\ntime.sleep(100)", 1, "rank 0 .* exit code 512; rank 1"),
        (
            "class NoText(Exception):\n    def __str__(self): return 1 / 0\n"
            "if fabric.global_rank: raise NoText()\ntime.sleep(100)",
            1,
            r"rank 1 .* NoText: <exception str\(\) failed> \(train.py:",
        ),
    ],
    ids=[
        "exit of rank zero",
        "after rank zero has ended",
        "exception",
        "rank zero leaves",
        "text",
        "os._exit",
        "a code whose last 8 bits are zero",
        "such a code of rank zero",
        "an exception without a text",
    ],
)
def test_the_exit_code_and_the_last_line_are_those_of_the_cause(tmp_path, body, code, last):
    path = tmp_path / "train.py"
    path.write_text(
        "import atexit\natexit.register(print, 'hook')\n"
        + HEAD
        + "try:\n    fabric.barrier()\n"  # in which rank zero may still be when the other one fails
        + textwrap.indent(body, "    ")
        + "\nfinally:\n    fabric.global_rank or print('finally', flush=True)\n"
    )
    done = run(path, code=code)
    assert re.search(f"^fabric: {last}", done.stderr.splitlines()[-1]), done.stderr
    assert done.stdout.count("finally") == 1  # of rank zero, whoever fails


@pytest.mark.parametrize("way", [[], ["-m", "fabric", "run", "--devices", "2"]], ids=["script", "cli"])
def test_a_rank_that_ends_well_before_launch_ends_the_others(tmp_path, way):
    path = tmp_path / "train.py"
    path.write_text("import os, sys\nif os.environ.get('RANK') == '1': sys.exit(0)\n" + HEAD)
    last = run(*way, path, code=1).stderr.splitlines()[-1]
    line = r"rank 1 on \S+ failed first: finished \(exit 0\) before fabric.launch\(\), in which rank 0 waits"
    assert re.fullmatch(f"fabric: {line}; rank 0 stopped because of it", last)


def test_the_last_line_names_an_error_of_the_arguments_in_a_rank(tmp_path):
    """Ranks raise it before they have joined the job."""
    path = tmp_path / "train.py"
    path.write_text("from fabric import Fabric\nFabric(accelerator='cpu', devices=2)\n")
    last = run("-m", "fabric", "run", "--devices", "3", path, code=1).stderr.splitlines()[-1]
    cause = (
        r"ConfigurationError: Fabric\(devices=2\) contradicts devices='3' from `fabric run` .* \(train.py:2\)"
    )
    assert re.match(rf"fabric: rank \d on \S+ failed first: {cause}", last)


@pytest.mark.parametrize("way", ["", "-m fabric run --devices 2"], ids=["script", "cli"])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_standard_descriptor_that_is_closed(tmp_path, way, closed):
    body = """
    for number in (1, 2):
        os.write(number, b"by number")
    sys.stdout.write("by name")
    sys.stderr.write("by name")
    value = fabric.all_reduce(fabric.global_rank + 0.0).item()
    open(f"rank{fabric.global_rank}", "w").write(str(value))
    """
    command = f"exec {sys.executable} {way} {script(tmp_path, body)} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], env=environ(), cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["0.5", "0.5"]


@pytest.mark.parametrize("way", [[], ["-m", "fabric", "run", "--devices", "2"]], ids=["script", "cli"])
def test_the_end_of_a_terminal_is_a_request_to_stop(tmp_path, way):
    body = """
    fabric.should_stop()
    print("ready", flush=True)
    try:
        while not fabric.should_stop():
            time.sleep(0.01)
    finally:
        print("saved", flush=True)
    """
    # These tests may run under nohup, which ignores the signal.
    reset = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", reset, sys.executable, *way, str(script(tmp_path, body))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ(), **streams) as job:
        ready = 0
        while ready < 2:
            ready += "ready" in job.stdout.readline()
        job.send_signal(signal.SIGHUP)
        out, err = job.communicate(timeout=120)
    assert (job.returncode, out.count("saved"), err) == (0, 2, "")


def test_a_status_that_the_script_catches_is_none(tmp_path):
    body = """
    try:
        sys.exit(3)
    except SystemExit as stop:
        assert stop.code == 3
    fabric.barrier()
    """
    assert run(script(tmp_path, body)).stderr == ""


def test_the_supervisor_is_killed(tmp_path):
    body = """
    print("supervisor", os.getppid() if fabric.global_rank else "", flush=True)
    fabric.barrier()
    time.sleep(100)
    """
    command = [sys.executable, str(script(tmp_path, body))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ(), **streams) as job:
        supervisor = 0
        while not supervisor:
            words = job.stdout.readline().split()
            supervisor = int(words[1]) if words[0] == "supervisor" and len(words) == 2 else 0
        os.kill(supervisor, signal.SIGKILL)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"the supervisor of this job (process {supervisor}) was killed" in err


def test_rank_zero_is_killed_beside_workers(tmp_path):
    body = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    fabric.barrier()
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(0.01)
    """
    command = [sys.executable, str(script(tmp_path, body))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ(), **streams) as job:
        pids: list[int] = []
        while len(pids) < 2:
            words = job.stdout.readline().split()
            pids += [int(words[1])] if words[0] == "pid" else []
        job.send_signal(signal.SIGKILL)
        assert until(lambda: not any(map(alive, pids)), 10)
        _, err = job.communicate(timeout=60)
    assert "killed by a signal, or ended by os._exit; rank 1 stopped because of it" in err


def test_a_test_of_pytest_gets_an_error(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import pytest
        from fabric import Fabric
        from fabric.core.errors import LaunchError

        def work(fabric):
            return float(fabric.all_reduce(1.0, reduce_op="sum"))

        @pytest.mark.parametrize("number", [0, 1])
        def test_script(number):
            with pytest.raises(LaunchError, match="This is a test of pytest, .* strategy=\\"ddp_spawn\\""):
                Fabric(accelerator="cpu", devices=2).launch()

        @pytest.mark.parametrize("number", [0, 1])
        def test_function(number):
            assert Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(work) == 2.0
        """)
    )
    assert (
        "4 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path).stdout
    )
