"""One script under every way to start it: the same numbers, clean stderr, no port to choose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
PYTHON = sys.executable
pytestmark = pytest.mark.slow

WAYS = {
    "alone": [PYTHON, str(SCRIPT)],
    "script": [PYTHON, str(SCRIPT), "--devices=2", "--strategy=ddp"],
    "spawn": [PYTHON, str(SCRIPT), "--devices=2", "--strategy=ddp_spawn"],
    "fork": [PYTHON, str(SCRIPT), "--devices=2", "--strategy=ddp_fork"],
    "notebook": [PYTHON, str(SCRIPT), "--devices=2", "--strategy=ddp_notebook"],
    "forkserver": [PYTHON, str(SCRIPT), "--devices=2", "--start-method=forkserver"],
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", str(SCRIPT)],
    "fabric run": [PYTHON, "-m", "fabric", "run", "--devices=2", "--accelerator=cpu", str(SCRIPT)],
    "fabric run, launch() without a function": [
        *[PYTHON, "-m", "fabric", "run", "--devices=2", "--accelerator=cpu", str(SCRIPT), "--style=script"]
    ],
}


def start(command: list[str], **settings) -> subprocess.Popen:
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ.update(settings.pop("env", {}))
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, **settings
    )


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[list[dict], str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"]), err


@pytest.fixture(scope="module")
def alone() -> dict:
    lines, _ = finish(start(WAYS["alone"]))
    return lines[0]


SMOKE = ("script", "fork", "fabric run")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.smoke] * (way in SMOKE)) for way in WAYS if way != "alone"]
)
def test_the_same_script_gives_the_same_numbers(way, alone):
    lines, err = finish(start(WAYS[way]))
    check_numbers(lines, alone)
    cores = len(os.sched_getaffinity(0))
    assert all(line["threads"] <= max(1, cores // 2) for line in lines)
    if "torchrun" not in way:  # torchrun itself prints a banner about threads
        assert err == ""


def check_numbers(lines, alone):
    assert [line["rank"] for line in lines] == [0, 1]
    for line in lines:
        assert line["world_size"] == 2
        assert line["loss"] == pytest.approx(alone["loss"], abs=2e-5)
        assert line["weights"] == pytest.approx(alone["weights"], abs=2e-5)
    assert lines[0]["weights"] == lines[1]["weights"]


def test_a_module_without_a_function_that_changes_its_directory_keeps_the_users_threads(alone, tmp_path):
    (tmp_path / "job.py").write_text(f"import os; os.chdir('/')\n{SCRIPT.read_text()}")
    command = [PYTHON, "-m", "job", "--devices=2", "--style=script"]
    lines, err = finish(start(command, cwd=tmp_path, env={"OMP_NUM_THREADS": "2"}))
    check_numbers(lines, alone)
    assert [line["threads"] for line in lines] == [2, 2]
    assert err == ""


ERRORS = """
import torch
from fabric import Fabric
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Module()
        self.head.act = lambda x: x
def train(fabric, model=None):
    return model
"""


def failing(tmp_path: Path, body: str) -> str:
    script = tmp_path / "job.py"
    script.write_text(ERRORS + "if __name__ == '__main__':\n" + body)
    process = start([PYTHON, str(script)])
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    return err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "    Fabric(accelerator='cpu', devices=2, strategy='ddp_spawn').launch(train, Net())",
            ["cannot be pickled: Net (", "<lambda>"],
        ),
        (
            "    Fabric(accelerator='cpu', devices=2, strategy='ddp_spawn').launch()",
            ["function", "fabric.launch("],
        ),
        (
            "    Fabric(accelerator='cpu', devices=2, strategy='ddp').setup(torch.nn.Linear(1, 1))",
            ["fabric.setup() was used before fabric.launch()"],
        ),
    ],
    ids=["unpicklable", "no function", "before launch"],
)
def test_bad_input(tmp_path, body, words):
    err = failing(tmp_path, body)
    for word in words:
        assert word in err


def test_cuda_initialised_before_fork_names_the_remedy(tmp_path):
    body = (
        "    torch.cuda.is_initialized = lambda: True\n"
        "    Fabric(accelerator='cpu', devices=2, strategy='ddp_fork').launch(train)"
    )
    err = failing(tmp_path, body)
    assert "CUDA" in err
    assert "ddp_spawn" in err or "spawn" in err


def test_torchrun_with_another_world_size(tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", str(SCRIPT), "--devices=4"]
    process = start(command)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "devices=4 x num_nodes=1 asks for 4 processes, 4 on each machine, but torchrun started 2 (" in err


def test_no_thread_of_the_backend_is_left_at_exit(tmp_path):
    # One that asks for the GIL while the interpreter ends makes a good run end by SIGABRT, now and then.
    if not Path("/proc/self/task").exists():
        pytest.skip("reads thread names from /proc")
    script = tmp_path / "job.py"
    script.write_text(
        "import atexit, contextlib, os, torch\n"
        "def left():\n"
        "    names = []\n"
        "    for thread in os.listdir('/proc/self/task'):\n"
        "        with contextlib.suppress(OSError):\n"  # it ends just now
        "            names.append(open(f'/proc/self/task/{thread}/comm').read())\n"
        "    os.write(1, f'{[n for n in names if \"gloo\" in n]}\\n'.encode())\n"
        "atexit.register(left)\n"  # registered first, so it runs last
        "from fabric import Fabric\n"
        "fabric = Fabric(accelerator='cpu', devices=2)\n"
        "fabric.launch()\n"
        "net = torch.nn.Linear(2, 1)\n"
        "model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))\n"
        "fabric.backward(model(torch.ones(1, 2)).sum())\n"
        "optimizer.step()\n"
    )
    process = start([PYTHON, str(script)])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "[]\n" * 2


FEW_FILES = """
import os, resource
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2)
if "RANK" in os.environ:  # the second one: no file more than are open already
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
fabric.launch()
print(fabric.all_reduce(1.0, reduce_op="sum"), resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 272)
"""


def test_ranks_may_open_as_many_connections_as_they_need(tmp_path):
    (tmp_path / "job.py").write_text(FEW_FILES)
    process = start([PYTHON, str(tmp_path / "job.py")])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "tensor(2.) True\n" * 2


@pytest.fixture(scope="module")
def alone_with_a_sequence() -> dict:
    (line,), _ = finish(start([PYTHON, str(SCRIPT.with_name("context.py")), "alone"]))
    return line


@pytest.mark.parametrize("how", ["popen", "fork", "forkserver"])
def test_a_sequence_is_divided_in_every_kind_of_process(how, alone_with_a_sequence):
    lines, err = finish(start([PYTHON, str(SCRIPT.with_name("context.py")), how]))
    assert err == ""
    assert [line["rank"] for line in lines] == [0, 1]
    assert {line["loss"] for line in lines} == {alone_with_a_sequence["loss"]}


NO_GUARD = """
import sys
from fabric import Fabric
from fabric.strategies import DDPStrategy

def train(fabric):
    print(fabric.global_rank)

strategy = DDPStrategy(start_method=sys.argv[1])
Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_launch_without_a_guard_is_named_by_the_last_line(method, tmp_path):
    (tmp_path / "job.py").write_text(NO_GUARD)
    process = start([PYTHON, str(tmp_path / "job.py"), method])
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    cause = "launch() was called while a new rank imported this script. Put what starts the job under "
    cause += '`if __name__ == "__main__":`'
    assert cause in err.splitlines()[-1]
    assert err.count("Traceback") == 1, "that of the process that started the ranks"


def test_an_error_before_fabric_is_named_by_the_last_line(tmp_path):
    (tmp_path / "job.py").write_text("from fabric import Fabric\n\nraise ValueError('boom')\n")
    process = start([PYTHON, "-m", "fabric", "run", "--devices=2", str(tmp_path / "job.py")])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "failed first: ValueError: boom (job.py:3)" in err.splitlines()[-1]
