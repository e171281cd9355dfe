"""`fabric run`: what its options mean and what it says about wrong ones. Whole runs are in end_to_end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fabric import cli
from fabric.core.errors import ConfigurationError


def test_it_loads_no_torch():
    code = "import sys, fabric.cli; fabric.cli._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("devices", "count"), [("2", 2), ("0,", 1), ("0,1", 2), ("1, 3", 2), (" 4 ", 4), ("auto", 1), ("-1", 1)]
)
def test_devices_on_a_cpu(devices, count):
    assert cli.count_processes(devices, "cpu") == count


@pytest.mark.parametrize("devices", ["0", "", "x", "1.5", "-2", ",", "0,x", "1,1"])
def test_devices_that_are_none(devices):
    with pytest.raises(ConfigurationError, match=r"devices='.*Write a number \(--devices 2\)"):
        cli.count_processes(devices)


@pytest.mark.parametrize(("says", "count"), [("return 8", 8), ("return 0", 1), ("raise OSError", 1)])
def test_devices_that_only_torch_knows(tmp_path, monkeypatch, says, count):
    (tmp_path / "torch.py").write_text(f"class accelerator:\n    def device_count():\n        {says}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.count_processes("auto") == count


def test_where_a_value_comes_from():
    settings = cli.effective_settings({"devices": "2", "strategy": None}, {"FABRIC_STRATEGY": "ddp"})
    assert settings["devices"] == ("2", "command line")
    assert settings["strategy"] == ("ddp", "FABRIC_STRATEGY")
    assert settings["num_nodes"] == ("1", "default")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope.py"], "The script 'nope.py' does not exist"),
        ([], "There is nothing to run"),
        (["-m"], "-m needs the name of a module"),
        (["--devices", "many", __file__], "devices='many' cannot be read"),
        (
            ["--num-nodes", "0", __file__],
            "--num-nodes 0 (from command line) must be a whole number, at least 1",
        ),
        (["--num-nodes", "2", __file__], "--num-nodes 2 needs --main-address"),
        (["--num-nodes", "2", "--node-rank", "2", __file__], "--node-rank 2 is not below --num-nodes 2"),
        (["--main-port", "70000", __file__], "port 70000 is not in 0..65535"),
    ],
)
def test_wrong_usage(capsys, monkeypatch, arguments, text):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--bogus", __file__], ["walk"]])
def test_unknown_options_and_commands(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: fabric" in capsys.readouterr().err


def test_a_taken_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["run", "--main-port", str(port), __file__]) == 1
    assert f"127.0.0.1:{port}: another process" in capsys.readouterr().err


def test_options_after_the_script_are_the_scripts():
    options = cli._parser().parse_args(["run", "--devices", "2", "s.py", "--devices", "3", "-m", "x"])
    assert (options.devices, options.arguments) == ("2", ["--devices", "3", "-m", "x"])
    options = cli._parser().parse_args(["run", "-m", "pkg.mod", "--lr", "1"])
    assert options.module == ["pkg.mod", "--lr", "1"]


# signals: the ranks of these jobs import no torch

SAVES = """
import os, signal, sys, time
again = []
def handler(number, _):
    if again:
        os._exit(9)  # a second one ends it at once
    again.append(number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handler)
os.write(1, b"ready\\n")
while not again:
    time.sleep(0.02)
time.sleep(1.5)  # saves
os.write(1, b"saved %d\\n" % again[0])
"""


def supervised(tmp_path, script, count=2):
    (tmp_path / "x.py").write_text(script)
    # The grace for ranks that go on after a failed one is no limit for those that save.
    code = (
        "import sys; from fabric import cli; from fabric.launch import commands; "
        "commands.FORWARD_GRACE_S = 0.1; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "run", f"--devices={count}", str(tmp_path / "x.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("times", [1, 2])
def test_ranks_have_the_time_they_need_after_a_signal(tmp_path, number, times):
    """Twice is how `timeout` sends it: to its child, and to the group."""
    with supervised(tmp_path, SAVES) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        for _ in range(times if number == signal.SIGTERM else 1):
            job.send_signal(number)
            time.sleep(0.1)  # else the kernel makes one of two
        assert job.communicate(timeout=60)[0].splitlines() == [f"saved {int(number)}"] * 2
        assert job.returncode == 0


def test_where_one_rank_ends_badly_after_a_signal_the_others_are_ended(tmp_path):
    script = """
import os, signal, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready\\n")
time.sleep(600)
"""
    with supervised(tmp_path, script) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
        assert job.returncode == 128 + signal.SIGTERM


def test_ranks_of_one_machine_meet_where_the_store_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "some-host-of-a-cluster")
    rank_env, listener = cli._first_rank_env(cli.effective_settings({}, os.environ), count=2, nodes=1)
    listener.close()
    assert rank_env.main_address == "127.0.0.1"


def test_the_bare_command_prints_its_help(capsys):
    for arguments in ([], ["help"]):
        assert cli.main(arguments) == 0
        assert "run a script on several processes" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_versions_of_what_counts(capsys, option):
    with pytest.raises(SystemExit, match="0"):
        cli.main([option])
    assert re.fullmatch(r"torch-fabric \S+.*, torch \S+, Python \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chek"], "invalid choice: 'chek' .* Did you mean 'check'?"),
        (["launch", "x.py"], "invalid choice: 'launch' .*. Write fabric run."),
        (["help", "rnu"], "invalid choice: 'rnu' .* Did you mean 'run'?"),
        (["run", "-d", "2", "x.py"], "unrecognized arguments: -d. Write --devices."),
        (["consolidate", "-n", "2", "x"], "unrecognized arguments: -n x.$"),
        (["run", "-n", "2", "x.py"], "unrecognized arguments: -n. Write --devices."),
        (
            ["run", "--nproc-per-node=2", "x.py"],
            "unrecognized arguments: --nproc-per-node=2. Write --devices.",
        ),
        (["run", "--mixed_precision", "bf16", "x.py"], "Write --precision."),
        (["run", "--devics", "2", "x.py"], "unrecognized arguments: --devics. Did you mean '--devices'?"),
        (["check", "--stps=3", "x.py"], "unrecognized arguments: --stps=3. Did you mean '--steps'?"),
        (["run", "--nothing", "x.py"], "unrecognized arguments: --nothing.\n"),
        (["run", "-n2", "x.py"], "unrecognized arguments: -n2. Write --devices."),
        (["train.py", "--lr", "1"], "train.py is not a command. Write fabric run train.py --lr 1.\n"),
        (["--devices", "2", "x.py"], "--devices is not a command. Write fabric run --devices 2 x.py.\n"),
        (["--devices=2", "x.py"], "Write fabric run --devices=2 x.py.\n"),
    ],
)
def test_wrong_usage_says_what_to_write(capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    said = capsys.readouterr().err
    assert re.search(text.replace("?", r"\?").replace(". W", r"\. W"), said), said


def test_the_name_of_python_is_no_script(capsys):
    assert cli.main(["run", "--devices", "2", "python3.11", "train.py"]) == 2
    assert "python3.11 is not a script. Leave it out: `fabric run` starts Python." in capsys.readouterr().err
    assert cli.main(["run", "--devices", "2", sys.executable, "train.py"]) == 2
    assert "is not a script. Leave it out" in capsys.readouterr().err


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "run"])
    assert "usage: fabric run [options]" in capsys.readouterr().out


def test_options_after_the_script_are_warned_of(capfd, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    arguments = [str(script), "--precision=64-true", "--devices", "1"]
    assert cli.main(["run", *arguments]) == 0
    out, err = capfd.readouterr()
    assert out.strip() == "['--precision=64-true', '--devices', '1']"
    for given in ("--precision=64-true", "--devices"):
        assert f"{given} after the script is an argument of the script" in err
    assert cli.main(["run", "--devices", "1", *arguments]) == 0
    assert "after the script" not in capfd.readouterr().err, "the script has options of these names"
    for command, option in (("plan", "--memory=80GB"), ("check", "--steps")):
        assert cli.main([command, str(script), option, "4"]) == 1  # it trains nothing
        text = f"{option} after the script is an argument of the script. If it was meant for fabric {command}"
        assert text in capfd.readouterr().err


def test_a_shell_gets_completions_from_argcomplete(monkeypatch, capsys):
    asked = []
    module = SimpleNamespace(autocomplete=lambda parser: asked.append(parser.prog))
    monkeypatch.setitem(sys.modules, "argcomplete", module)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert cli.main([]) == 0
    assert asked == ["fabric"]


@pytest.mark.parametrize("command", ["run", "check", "consolidate", "doctor", "report", "plan"])
def test_the_help_of_each_command_ends_with_examples(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    lines = examples.splitlines()
    assert lines
    for line in lines:
        assert f"  fabric {command}" in line.replace("srun ", "")
        cli._parser().parse_args(line.partition("fabric ")[2].partition(" > ")[0].split())


def test_a_script_of_a_similar_name_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(["run", "trian.py"]) == 2
    assert "does not exist (looked in " in (text := capsys.readouterr().err)
    assert "). Did you mean 'train.py'? Write the path" in text
