"""Launchers driven directly, on real processes: results, causes of failure, kills, ports, no survivors."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SUBJECT = Path(__file__).parent / "scripts" / "processes.py"
FUNCTION_METHODS = ["spawn", "fork", "forkserver"]
pytestmark = pytest.mark.slow


def start(how, *arguments, script=SUBJECT, **settings):
    """Start the subject in its own session, so that survivors can be found and ended."""
    heads = {
        "cli": [sys.executable, "-m", "fabric", "run", "--devices", "2", str(script)],
        "module": [sys.executable, "-m", script.stem],
    }
    command = [*heads.get(how, [sys.executable, str(script)]), how, *map(str, arguments)]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ.update(settings.pop("env", {}))
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
        **settings,
    )


def finish(process, timeout=120):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, [json.loads(line) for line in out.splitlines() if line[:1] == "{"], err


def started_pids(process, count):
    """The pids that `count` ranks print once they have met."""
    return [json.loads(process.stdout.readline())["pid"] for _ in range(count)]


def alive(pids):
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return [pid for pid, state in states.items() if state not in "ZX"]


def assert_gone(pids, within=10.0):
    deadline = time.monotonic() + within
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # waits for an end that nothing here can be told of
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize("how", ["script", "cli", "module", *FUNCTION_METHODS])
def test_two_ranks_meet_and_the_parents_environment_is_as_before(how):
    code, lines, err = finish(start(how, "sum", cwd=SUBJECT.parent))
    assert (code, err) == (0, "")
    found = sorted([line for line in lines if "rank" in line], key=lambda line: line["rank"])
    assert [(line["rank"], line["world_size"], line["sum"]) for line in found] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert {line["threads"] for line in found} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    if how in FUNCTION_METHODS:  # the result of rank zero, tensors by value
        assert {"result": [0, 3.0], "shared": False} in lines


@pytest.mark.parametrize("how", FUNCTION_METHODS)
def test_a_second_launch_in_the_same_process(how):
    env = {"OMP_NUM_THREADS": "1"} if how == "fork" else {}
    code, lines, err = finish(start(how, "sum", "twice", env=env))
    assert (code, err) == (0, "")
    assert [line["result"] for line in lines if "result" in line] == [[0, 3.0]] * 2
    if how == "fork":
        assert {"threads_at_forks": [1, 1, 1, 1]} in lines, "it forks before it starts threads"


def test_forked_ranks_compute_after_the_parent_has():
    code, _, err = finish(start("fork", "threads", env={"OMP_NUM_THREADS": "2"}), timeout=60)
    assert (code, err) == (0, "")


def test_several_jobs_at_once():
    jobs = [start("script", "sum") for _ in range(2)]
    for job in jobs:
        code, lines, err = finish(job, timeout=240)
        assert (code, len(lines), err) == (0, 2, "")


def test_the_users_number_of_threads_is_kept():
    _, lines, _ = finish(start("fork", "sum", env={"OMP_NUM_THREADS": "3"}))
    assert {line["threads"] for line in lines if "rank" in line} == {3}


def test_ctrl_c_on_a_function_launcher_stops_the_ranks():
    process = start("fork", "wait")
    pids = started_pids(process, 2)
    process.send_signal(signal.SIGINT)  # only to the parent, as a notebook does
    assert_gone([*pids, process.pid])
    process.communicate()


def test_an_unpicklable_result_is_explained():
    code, _, err = finish(start("fork", "lambda"))
    assert code == 1
    assert re.search(r"cannot be pickled \(\w+: .*<lambda>", err)


def test_a_chdir_before_the_launch_does_not_hurt(tmp_path):
    relative = os.path.relpath(SUBJECT, SUBJECT.parent.parent)
    process = start("script", "sum", tmp_path, script=Path(relative), cwd=SUBJECT.parent.parent)
    code, lines, err = finish(process)
    assert (code, len(lines), err) == (0, 2, "")


def states(pids):
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]


@pytest.mark.parametrize("how", ["cli", "script"])
def test_ctrl_z_stops_the_ranks_too_and_fg_lets_them_go_on(how, tmp_path):
    script = tmp_path / "ticking.py"
    script.write_text(
        textwrap.dedent("""
        import json, os, sys
        from fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        os.write(1, (json.dumps({"pid": os.getpid()}) + chr(10)).encode())
        while fabric.broadcast(not os.path.exists(sys.argv[-1])):
            pass
        """)
    )
    process = start(how, tmp_path / "end", script=script)
    pids = sorted({*started_pids(process, 2), process.pid})  # of a script rank zero is the first process
    assert len(pids) == (3 if how == "cli" else 2)
    process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 30
    while {*states(pids)} != {"T"} and time.monotonic() < deadline:
        time.sleep(0.05)  # waits for states of other processes that nothing tells of
    assert {*states(pids)} == {"T"}
    process.send_signal(signal.SIGCONT)
    (tmp_path / "end").touch()
    assert finish(process)[0] == 0
    assert_gone(pids)


def test_a_script_from_standard_input_says_what_to_do():
    source = textwrap.dedent("""
        from fabric.plugins.environments import LocalEnvironment
        from fabric.launch.script import ScriptLauncher
        ScriptLauncher(LocalEnvironment(), 2).launch(print)
    """)
    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "This is a script on standard input" in done.stderr


def test_a_lone_rank_names_the_missing_one():
    code, _, err = finish(start("lonely", "sum"), timeout=60)
    assert code == 1
    assert "1 of 2 ranks arrived within 2 s; missing: rank 1." in err


def test_the_cli_prints_where_values_come_from():
    command = [sys.executable, "-m", "fabric", "run", "--devices=1", "--verbose", "--precision=64-true"]
    code = "import os; print(os.environ['FABRIC_PRECISION'], 'FABRIC_STRATEGY' in os.environ)"
    script = ["-m", "timeit", "-n1", "-r1", code]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=60)
    assert "fabric: precision = 64-true (command line)" in done.stderr
    assert "fabric: strategy = auto (default)" in done.stderr
    assert done.stdout.startswith("64-true False")
