"""Launchers without whole scripts: errors before the start, causes, pickling explanations, command lines."""

import functools
import io
import multiprocessing
import os
import pickle
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._utils import ExceptionWrapper

from fabric import cli
from fabric.core.errors import ConfigurationError, LaunchError
from fabric.launch import system
from fabric.launch.commands import Command
from fabric.launch.functions.multiprocess import MultiprocessLauncher
from fabric.launch.functions.openmp import pause_openmp
from fabric.launch.rank_env import RankEnv
from fabric.launch.rank_exit import (
    RankExit,
    describe,
    from_returncode,
    is_secondary_failure,
    root_cause,
    summary,
)
from fabric.launch.rank_logs import RankLogs
from fabric.launch.script import ScriptLauncher, original_command
from fabric.launch.supervisor import Supervisor
from fabric.plugins.environments import LocalEnvironment
from fabric.plugins.environments.rendezvous import rendezvous

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:682"


def failed(rank, when, reason, code=1, trace=""):
    return RankExit(when, reason, trace, code, rank=rank)


def supervising(*commands, **settings):
    return Supervisor({command.rank: command.start for command in commands}, **settings)


def work(*_):
    return 1


def bad_sample(_):
    raise ValueError("bad sample")


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Identity())


# causes


def test_the_earliest_failure_is_the_cause():
    assert root_cause([failed(0, 2.0, "ValueError: b"), failed(1, 1.0, "ValueError: a")]).rank == 1


def test_a_consequence_is_not_the_cause_however_early():
    failures = [failed(0, 1.0, CLOSED), failed(1, 2.0, "killed by SIGKILL")]
    assert root_cause(failures).rank == 1
    assert root_cause(failures[:1]).rank == 0


def test_return_codes():
    oom = "killed by SIGKILL (by a user, a scheduler, or by Linux when memory ran out: see dmesg)"
    assert from_returncode(1, -9, 0.0) == failed(1, 0.0, oom, 137)
    assert "SIGABRT (native code aborted; gloo does this when" in from_returncode(1, -6, 0.0).reason
    assert from_returncode(1, -11, 0.0) == failed(1, 0.0, "killed by SIGSEGV", 139)
    assert from_returncode(1, 3, 0.0) == failed(1, 0.0, "exit code 3", 3)


def test_the_last_line():
    failure, host = failed(1, 0.0, "ValueError: boom (train.py:31)"), socket.gethostname()
    line = f"rank 1 on {host} failed first: ValueError: boom (train.py:31)"
    assert summary(failure) == summary(failure, [1]) == line
    assert summary(failure, [0]) == f"{line}; rank 0 stopped because of it"
    assert summary(failure, [2, 1, 0]) == f"{line}; ranks 0, 2 stopped because of it"
    assert summary(failure, range(20)).endswith(" ranks 0, 2-19 stopped because of it")
    assert summary(failure, multi_node=True) == line
    echo, equal = failed(2, 1.0, CLOSED), failed(3, 1.0, "ValueError: boom (train.py:31)")
    whole = f"{line}; rank 3 failed, too; ranks 0, 2 stopped because of it"
    assert summary(failure, [0], [failure, echo, equal]) == whole


def test_a_cause_on_another_machine_is_not_looked_for_here():
    line = f"rank 0 on {socket.gethostname()} lost a rank of another machine: {CLOSED}"
    assert summary(failed(0, 1.0, CLOSED), multi_node=True) == line


def test_where_all_failures_are_consequences_the_rank_that_ended_well_left_too_early():
    cause = root_cause([failed(0, 1.0, CLOSED, trace="of rank 0")], finished=[1])
    assert cause.rank == 1
    assert cause.reason == f"finished (exit 0) while rank 0 still needed it ({CLOSED})"
    assert (cause.code, cause.trace) == (1, "of rank 0")
    assert root_cause([failed(0, 1.0, "ValueError: a")], finished=[1]).rank == 0


@pytest.mark.parametrize(
    ("doing", "name"),
    [
        ("save at /a/train.py:18", "save"),
        ("all_reduce(mean) at /a b/train.py:18", "all_reduce"),
        ("backward", "backward"),
    ],
)
def test_a_rank_that_left_too_early_is_told_with_the_call_that_another_waits_in(doing, name):
    reason = (
        f"RankError: {doing} failed on rank 0: ranks 1, 3-4 ended, or do not answer (closed). (train.py:18)"
    )
    assert is_secondary_failure(reason)
    reason = f"RankError: {doing} failed on rank 0: rank 1 ended, or does not answer (closed). (train.py:18)"
    cause = root_cause([failed(0, 1.0, reason)], finished=[1])
    hint = ": is the call inside `if fabric.is_global_zero`?" * (name == "save")
    assert cause.reason == f"finished (exit 0) while rank 0 waits in fabric.{name} (train.py:18){hint}"


def test_of_two_equal_failures_the_one_that_was_printed_is_named():
    failures = [failed(1, 1.0, "CollectiveMismatch: x", trace="held back"), failed(0, 2.0, "the same")]
    assert root_cause(failures).rank == 0


def test_an_exception_is_described_by_the_users_line():
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        text = describe(error)
    assert text.startswith("RuntimeError: ")
    assert "(test_launchers.py:" in text


def test_an_exception_of_a_loaders_worker_is_described_by_its_own_line():
    try:
        bad_sample(1)
    except ValueError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")  # as torch brings it to the rank
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker") as caught:
        wrapped.reraise()
    line = bad_sample.__code__.co_firstlineno + 1
    assert describe(caught.value) == (
        f"ValueError: bad sample (test_launchers.py:{line}, in DataLoader worker process 0)"
    )


def test_a_first_line_that_ends_in_a_colon_is_told_with_the_next():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 2)}, strict=False)
    told = describe(caught.value)
    assert told.startswith(
        "RuntimeError: Error(s) in loading state_dict for Linear: size mismatch for weight"
    )
    assert describe(ValueError("nothing more:")) == "ValueError: nothing more:"


def test_an_error_that_came_from_another_rank_is_an_echo():
    error = ValueError("download failed")
    error.fabric_raised_by = 0
    assert describe(error) == "ValueError: download failed, raised by rank 0"
    assert is_secondary_failure(describe(error))


@pytest.mark.parametrize("kind", [ConnectionResetError, BrokenPipeError, OSError])
def test_a_download_that_breaks_off_is_a_cause(kind):
    assert not is_secondary_failure(describe(kind(104, "Connection reset by peer")))
    assert not is_secondary_failure(f"{kind.__name__}: Broken pipe (train.py:3)")
    assert is_secondary_failure(f"RuntimeError: {CLOSED} (train.py:3)")
    assert is_secondary_failure("DistBackendError: NCCL communicator was aborted on rank 1. (train.py:3)")


# functions and their arguments


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_function_launcher_without_a_function(method):
    with pytest.raises(LaunchError, match=r"launch\(\) got none.*fabric\.launch\(main\)"):
        MultiprocessLauncher(LocalEnvironment(), 2, method).launch(None)


class Refuses:
    def __reduce__(self):
        raise ValueError("not me")


def with_lambda(thing):
    thing.act = lambda x: x
    return thing


def nested(levels):
    thing = []
    for _ in range(levels):
        thing = [thing]
    return thing


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((1, with_lambda(Head())), {}, r"Head \(\w+: .*<lambda>.*\)"),
        ((), {"net": with_lambda(Head())}, r"net \(\w+: .*<lambda>.*\)"),
        (({"a": [threading.Lock()]},), {}, r"dict \(TypeError: cannot pickle '_thread.lock' object.*\)"),
        ((nn.Linear(1, 1), [Refuses()]), {}, r"list \(ValueError: not me.*\)"),
        ((nested(100_000),), {}, r"list \(RecursionError: .*\)"),
    ],
)
def test_an_unpicklable_argument_is_named_with_pickles_reason(args, kwargs, named):
    with pytest.raises(LaunchError, match=rf"this cannot be pickled: {named}\. Define it"):
        MultiprocessLauncher(LocalEnvironment(), 2, "spawn").launch(work, *args, **kwargs)


def test_an_unpicklable_function_is_named():
    def local():
        """A closure."""

    with pytest.raises(LaunchError, match=r"this cannot be pickled: \S*<locals>\.local \("):
        MultiprocessLauncher(LocalEnvironment(), 2, "forkserver").launch(local)


def test_a_function_of_a_notebook_cannot_be_imported_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    function = type(work)(work.__code__, {"__name__": "__main__"}, "work")
    function.__module__ = "__main__"
    cell = type("Cell", (), {"work": work, "__module__": "__main__"})
    for call, name in [((function,), "work"), ((work, cell), "Cell"), ((work, cell()), "Cell")]:
        with pytest.raises(LaunchError, match=rf"'{name}' is defined in a notebook.*ddp_notebook"):
            MultiprocessLauncher(LocalEnvironment(), 2, "spawn").launch(*call)


def test_fork_after_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(LaunchError, match=r"CUDA is initialised.*Move the first \.cuda\(\).*ddp_spawn"):
        MultiprocessLauncher(LocalEnvironment(), 2, "fork").launch(work)


def test_openmp_rests_without_losing_its_settings():
    before = torch.get_num_threads()
    torch.randn(100_000).exp()
    assert pause_openmp() in (True, False)  # False where torch has another runtime
    torch.randn(100_000).exp()
    assert torch.get_num_threads() == before


# the script launcher


def test_one_process_starts_nothing():
    assert ScriptLauncher(LocalEnvironment(), 1).launch(work) == 1


def test_a_launched_rank_starts_nothing(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ScriptLauncher(LocalEnvironment(), 4).launch(work) == 1


@pytest.mark.parametrize(
    ("main", "argv", "original", "expected"),
    [
        (  # a script: its path becomes absolute, its directory is the start's
            {"__file__": "/a/b/train.py"},
            ["b/train.py", "--lr", "1"],
            ["python", "-X", "dev", "b/train.py", "--lr", "1"],
            (["-X", "dev", "/a/b/train.py", "--lr", "1"], "/a/"),
        ),
        (
            {"__file__": "/a/b/train.py"},
            ["/a/b/train.py"],
            ["python", "/a/b/train.py"],
            (["/a/b/train.py"], None),
        ),
        ({}, ["-c"], ["python", "-c", "pass"], (["-c", "pass"], None)),
        (  # -m: found from where Python was started
            {"__file__": "/a/m.py", "__spec__": SimpleNamespace(name="a.m", origin="/a/m.py")},
            ["/a/m.py", "1"],
            ["python", "-m", "a.m", "1"],
            (["-m", "a.m", "1"], "/"),
        ),
        (  # a tool that runs a script: what it has put before its path says nothing of the start
            {"__file__": "/a/m.py", "__spec__": SimpleNamespace(name="cProfile", origin="/lib/cProfile.py")},
            ["m.py"],
            ["python", "-m", "cProfile", "m.py"],
            (["-m", "cProfile", "m.py"], None),
        ),
        (  # the script has taken the arguments that it has parsed out of sys.argv
            {"__file__": "/a/m.py", "__spec__": SimpleNamespace(name="a.m", origin="/a/m.py")},
            ["/a/m.py"],
            ["python", "-W", "ignore::m", "-m", "a.m", "--dropout", "0.5"],
            (["-W", "ignore::m", "-m", "a.m", "--dropout", "0.5"], "/"),
        ),
        (
            {"__file__": "/a/m.py", "__spec__": SimpleNamespace(name="a.m", origin="/a/m.py")},
            ["/a/m.py", "x"],
            ["python", "-Wignore::m", "-ma.m", "--lr", "1", "x"],
            (["-Wignore::m", "-m", "a.m", "--lr", "1", "x"], "/"),
        ),
        (
            {"__file__": __file__},
            [__file__],
            ["python", "-m", "pdb", "-c", "continue", __file__, "--lr", "1"],
            ([__file__, "--lr", "1"], None),
        ),
        (  # an argument that the script has taken names it
            {"__file__": __file__},
            [__file__],
            ["python", "-m", "pdb", __file__, "--config", __file__],
            ([__file__, "--config", __file__], None),
        ),
        (  # so does an option of a tool
            {"__file__": __file__},
            [__file__, "--lr", "1"],
            ["python", "/bin/profiler", "--only", __file__, "-p", __file__, "--lr", "1"],
            ([__file__, "--lr", "1"], None),
        ),
        (
            {"__file__": __file__},
            [__file__],
            ["python", "/bin/scalene", __file__, "---", "--lr", "1"],
            ([__file__, "--lr", "1"], None),
        ),
        (
            {"__file__": "/a/m.py", "__spec__": SimpleNamespace(name="a.m", origin="/a/m.py")},
            ["/a/m.py", "--lr", "1"],
            ["python", "/bin/coverage", "run", "--source", "a.m", "-m", "a.m", "--lr", "1"],
            (["-m", "a.m", "--lr", "1"], "/"),
        ),
        (
            {
                "__file__": "/p/__main__.py",
                "__spec__": SimpleNamespace(name="p.__main__", origin="/p/m.py"),
            },
            ["/p/m.py"],
            ["python", "-m", "p.__main__", "--lr", "1"],
            (["-m", "p", "--lr", "1"], None),
        ),
    ],
)
def test_the_command_is_run_again(monkeypatch, main, argv, original, expected):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**{"__spec__": None, **main}))
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.setattr(sys, "path", ["/", *sys.path])
    command, directory = original_command()
    assert command[0] == sys.executable
    assert (command[1:], directory) == expected


def test_an_application_in_a_zip_file_is_run_again(monkeypatch, tmp_path):
    (tmp_path / "app.zip").touch()
    monkeypatch.chdir(tmp_path)
    main = SimpleNamespace(
        __spec__=SimpleNamespace(origin="app.zip/__main__.py"), __file__="app.zip/__main__.py"
    )
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["app.zip", "run"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "app.zip", "run"])
    assert original_command() == ([sys.executable, str(tmp_path / "app.zip"), "run"], f"{tmp_path}/")


@pytest.mark.parametrize("parallel", [True, False])
def test_the_other_ranks_are_measured_by_coverage_too(monkeypatch, capsys, tmp_path, parallel):
    (tmp_path / "m.py").touch()
    monkeypatch.chdir(tmp_path)
    coverage = SimpleNamespace(Coverage=SimpleNamespace(current=lambda: "running"))
    options = ["--branch", *["-p"] * parallel, "--source", "m.py"]
    monkeypatch.setitem(sys.modules, "coverage", coverage)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="m.py"))
    monkeypatch.setattr(sys, "argv", ["m.py", "run"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/coverage", "run", *options, "m.py", "run"])
    command, _ = original_command()
    measured = ["-m", "coverage", "run", "-p", "--branch", "--source", "m.py"]
    assert command[1:] == [*measured, str(tmp_path / "m.py"), "run"]
    assert ("without -p" in capsys.readouterr().err) == (not parallel)
    coverage.Coverage.current = lambda: None  # imported, and measures nothing
    assert original_command()[0][1:] == [str(tmp_path / "m.py"), "run"]


@pytest.mark.parametrize(("argv", "prompt"), [(["-"], False), ([""], False), (["x.py"], True)])
def test_no_command_to_run_again(monkeypatch, argv, prompt):
    monkeypatch.setattr(sys, "argv", argv)
    if prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(LaunchError, match=r"no command that the ranks could run.*ddp_notebook"):
        original_command()


def launch_in_child(launcher):
    try:
        return launcher(LocalEnvironment(), 2).launch(work)
    except LaunchError as error:
        return str(error)


def test_a_worker_of_a_pool_starts_no_ranks():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        script, function = pool.map(launch_in_child, [ScriptLauncher, MultiprocessLauncher])
    assert script.endswith(
        'cannot start ranks. Put the loop into a function and use strategy="ddp_spawn" with '
        "fabric.launch(function)."
    )
    assert function.endswith(
        "is daemonic, as workers of multiprocessing.Pool are. Python lets it start no ranks. "
        "Use concurrent.futures.ProcessPoolExecutor."
    )


@pytest.mark.parametrize(
    "launcher", [ScriptLauncher, functools.partial(MultiprocessLauncher, start_method="fork")]
)
def test_several_machines_need_an_address(monkeypatch, launcher):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(LaunchError, match="num_nodes=2 needs MASTER_ADDR and MASTER_PORT"):
        launcher(LocalEnvironment(), 1, num_nodes=2).launch(work)


@pytest.mark.parametrize(
    "start",
    [
        lambda: ScriptLauncher(LocalEnvironment(), 2).launch(work),
        lambda: MultiprocessLauncher(LocalEnvironment(), 2).launch(work),
        lambda: rendezvous(LocalEnvironment(), 0, 2, timedelta(seconds=1)),
        lambda: cli._run(cli._parser().parse_args(["run", "train.py"])),
    ],
)
def test_a_system_without_signals_is_told(monkeypatch, start):
    monkeypatch.setattr(system, "SYSTEM", "nt")
    with pytest.raises(LaunchError, match=r"this is Windows\. Run it in WSL2, or write devices=1"):
        start()


def test_variables_of_a_rank(monkeypatch):
    monkeypatch.setattr("fabric.launch.rank_env.usable_cores", lambda: 5)
    place = RankEnv(1, 4, 2, "127.0.0.1", 99, node_rank=1)
    variables = place.variables({}, "cli")
    assert variables == {
        "OMP_NUM_THREADS": "2",
        "FABRIC_LAUNCHED": "cli",
        "FABRIC_JOINED": "",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "99",
    }
    assert "OMP_NUM_THREADS" not in place.variables({"OMP_NUM_THREADS": "7"}, "cli")


# the supervisor


def held_back(rank, reason, seconds):
    """A rank that leaves its traceback to the supervisor, as `attach_to_supervisor` does, and then ends."""
    said = pickle.dumps((time.monotonic(), reason, "[rank0]: held back\n"))
    code = (
        "import os, sys, time; from multiprocessing.connection import Connection; "
        f"Connection(int(os.environ['FABRIC_REPORT_FD']), readable=False).send_bytes({said!r}); "
        f"time.sleep({seconds}); sys.exit(1)"
    )
    return Command(rank, [sys.executable, "-c", code], dict(os.environ))


def test_what_a_rank_has_not_printed_goes_to_its_log_and_to_the_terminal_only_as_the_cause(tmp_path, capfd):
    killed = Command(1, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], dict(os.environ))
    for others, code in (([killed], 137), ([], 1)):
        directory = tmp_path / str(code)
        supervisor = supervising(held_back(0, CLOSED, 0.1), *others, logs=RankLogs(directory))
        supervisor.start()
        supervisor.wait_all(60)
        cause = supervisor.first_failure()
        assert supervisor.stop_and_report(cause) == code
        supervisor.close()
        assert (directory / "rank0.err").read_text() == "[rank0]: held back\n"
        err = capfd.readouterr().err
        assert ("held back" in err) == (not others), err
        assert f"rank {cause.rank} on" in err.splitlines()[-1]


def test_lines_of_ranks_stay_lines_with_their_rank_in_front(tmp_path, capfd):
    code = r"import sys; sys.stdout.buffer.write(b'a\r\xff\n'); print('b', end=''); sys.stderr.write('c\n')"
    supervisor = supervising(
        Command(3, [sys.executable, "-c", code], dict(os.environ)), logs=RankLogs(tmp_path)
    )
    supervisor.start()
    assert supervisor.wait_all(60) is None
    supervisor.close()
    out, err = capfd.readouterr()
    assert out.splitlines() == ["[rank 3] a", "[rank 3] \N{REPLACEMENT CHARACTER}", "[rank 3] b"]
    assert err == "[rank 3] c\n"
    assert (tmp_path / "rank3.out").read_bytes() == b"a\r\xff\nb"


def test_a_log_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"--log-dir .*file/logs cannot be written to: .*Pass a directory"
    ):
        RankLogs(tmp_path / "file" / "logs")


def test_a_forked_child_of_a_rank_does_not_report_as_the_rank():
    code = (
        "import os; from fabric.launch.parent_death import attach_to_supervisor; attach_to_supervisor()\n"
        "if os.fork() == 0: raise ValueError('of the child')\n"
        "os.wait()"
    )
    supervisor = supervising(
        Command(0, [sys.executable, "-c", code], dict(os.environ)),
    )
    supervisor.start()
    assert supervisor.wait_all(60) is None
    supervisor.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_rank_prints_on_though_its_log_is_full_and_the_terminal_cannot_show_it(tmp_path, monkeypatch):
    (tmp_path / "rank0.out").symlink_to("/dev/full")
    code = "print('ä', flush=True); print('x' * 300_000); print('end')"
    terminal, error = io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", error)
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    supervisor = supervising(Command(0, [sys.executable, "-c", code], environ), logs=RankLogs(tmp_path))
    supervisor.start()
    assert supervisor.wait_all(60) is None
    supervisor.close()
    shown = terminal.buffer.getvalue().decode().splitlines()
    assert shown[0] == r"[rank 0] \xe4"
    assert shown[-1] == "[rank 0] end"
    assert "".join(line.removeprefix("[rank 0] ") for line in shown[1:-1]) == "x" * 300_000
    assert len(shown) > 3, "a line without an end is shown in pieces"
    assert re.fullmatch(r"fabric: \S+rank0.out is no longer written: .*No space left.*\n", error.getvalue())
