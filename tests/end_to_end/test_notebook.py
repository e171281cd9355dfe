"""Real notebooks: a Jupyter kernel whose cells launch ranks by fork."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nbclient
import nbformat
import pytest
import torch
from traitlets.config import Config

pytestmark = pytest.mark.slow
CELL_S = 120
"""A cell that takes longer hangs."""

HEAD = """
import multiprocessing, os, threading, time
import torch
import torch.distributed as dist
from fabric import Fabric

def launch(function, *args, strategy="ddp_notebook", **kwargs):
    return Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(function, *args, **kwargs)
"""


class Notebook:
    """A notebook with a kernel of its own: `run(source)` appends a cell and executes it."""

    def __init__(self, sockets):
        """`sockets`: the folder of its sockets (a free port can be taken before the kernel starts)."""
        config = Config(ConnectionFileMixin={"transport": "ipc", "ip": f"{sockets}/kernel"})
        self.notebook = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(self.notebook, timeout=CELL_S, allow_errors=True, config=config)

    async def run(self, source):
        """The cell's outputs: `stdout` and `stderr` (joined), `result`, `error`, `trace`."""
        cell, index = self.append(source)
        await self.client.async_execute_cell(cell, index, execution_count=index + 1)
        return outputs(cell)

    async def interrupted(self, source, until):
        """The outputs of a cell that is interrupted once `until` is in what it printed."""
        cell, index = self.append(source)
        running = asyncio.ensure_future(self.client.async_execute_cell(cell, index))
        while until not in outputs(cell).stdout and not running.done():
            await asyncio.sleep(0.05)  # the client has no event for it
        await self.client.km.interrupt_kernel()
        await asyncio.wait_for(running, CELL_S)
        return outputs(cell)

    def append(self, source):
        self.notebook.cells.append(nbformat.v4.new_code_cell(textwrap.dedent(source).strip()))
        return self.notebook.cells[-1], len(self.notebook.cells) - 1


def outputs(cell):
    kinds = [output.output_type for output in cell.outputs]
    streams = {
        name: "".join([o.text for o in cell.outputs if o.output_type == "stream" and o.name == name])
        for name in ("stdout", "stderr")
    }
    errors = [output for output in cell.outputs if output.output_type == "error"]
    trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(errors[0].traceback)) if errors else ""
    results = [output.data["text/plain"] for output in cell.outputs if "data" in output]
    return SimpleNamespace(
        **streams,
        result=results[0] if results else None,
        error=errors[0].ename if errors else None,
        trace=trace,
        kinds=kinds,
    )


@contextmanager
def kernel(folder, **env):
    """`tell(story)`, which runs `story(notebook)` in a kernel that has executed HEAD."""
    places = {
        name: str(folder / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    sockets = tempfile.TemporaryDirectory()  # not in `folder`: names of sockets have 107 characters
    loop, notebook = asyncio.new_event_loop(), Notebook(sockets.name)
    tell = lambda story: loop.run_until_complete(story(notebook))  # noqa: E731

    async def begin(notebook):
        head = await notebook.run(HEAD)
        assert (head.error, head.stderr) == (None, "")

    try:
        with mock.patch.dict(os.environ, places | env):
            os.environ.pop("PYTEST_CURRENT_TEST", None)  # with it a kernel leaves its file descriptors alone
            running = notebook.client.async_setup_kernel(cwd=str(folder))
            loop.run_until_complete(running.__aenter__())
            for number in (signal.SIGINT, signal.SIGTERM):  # the client's own, which would outlast a test
                loop.remove_signal_handler(number)
            tell(begin)
        yield tell
        loop.run_until_complete(running.__aexit__(None, None, None))
    finally:
        loop.close()
        sockets.cleanup()


@pytest.fixture
def in_notebook(tmp_path, request):
    """A kernel of the test's own, with the variables of its parameter."""
    with kernel(tmp_path, **getattr(request, "param", {})) as tell:
        yield tell


@pytest.fixture(scope="module")
def in_this_notebook(tmp_path_factory):
    """The kernel of all tests that leave it as it was."""
    with kernel(tmp_path_factory.mktemp("notebook")) as tell:
        yield tell


@pytest.mark.smoke
def test_two_launches_of_a_function_of_a_cell(in_this_notebook):
    async def story(notebook):
        await notebook.run("""
            def add(fabric, factor):
                total = torch.tensor([fabric.global_rank + 1.0])
                dist.all_reduce(total)
                print("rank", fabric.global_rank, "of", fabric.world_size)
                print("begun", "and ended", sep=", ", end="")
                return total.item() * factor
        """)
        for factor in (1, 10):
            cell = await notebook.run(f"launch(add, {factor})")
            assert cell.error is None, cell.trace
            assert cell.result == str(3.0 * factor)
            assert cell.stderr == ""
            # Whole lines of both ranks, in whichever order, and what they had not ended with a line's end.
            assert sorted(re.findall(r"rank \d of 2\n", cell.stdout)) == ["rank 0 of 2\n", "rank 1 of 2\n"]
            assert cell.stdout.count("begun, and ended") == 2
        default = await notebook.run("Fabric(accelerator='cpu', devices=2).launch(add, 100)")
        assert default.result == "300.0"
        assert (await notebook.run("multiprocessing.active_children()")).result == "[]"

    in_this_notebook(story)


def test_all_that_the_ranks_print_is_shown(in_this_notebook):
    async def story(notebook):
        await notebook.run("""
            import sys
            def talk(fabric):
                me = fabric.global_rank
                for number in range(200):
                    print("out", me, number)
                print("err", me, file=sys.stderr)
                os.write(1, f"raw {me}\\n".encode())
        """)
        for _ in range(5):
            cell = await notebook.run("print('before'); launch(talk); print('after')")
            assert cell.error is None, cell.trace
            lines = cell.stdout.splitlines()
            for rank in (0, 1):
                said = [line for line in lines if line.startswith(f"out {rank} ")]
                assert said == [f"out {rank} {number}" for number in range(200)]
            assert {"raw 0", "raw 1"} <= set(lines)
            assert sorted(cell.stderr.splitlines()) == ["err 0", "err 1"]
            assert (lines.count("before"), lines.count("after")) == (1, 1)

    in_this_notebook(story)


def test_an_exception_of_a_rank_is_shown_with_its_cause(in_this_notebook):
    async def story(notebook):
        cell = await notebook.run("""
            def bad(fabric):
                print("rank", fabric.global_rank, "was here")
                if fabric.global_rank == 1:
                    raise ValueError("boom in a cell")
                dist.barrier()
            launch(bad)
        """)
        assert cell.error == "LaunchError"
        assert re.search(r"rank 1 .*failed first: ValueError: boom in a cell", cell.trace)
        assert len(re.findall("^ValueError: boom in a cell$", cell.trace, re.MULTILINE)) == 1
        # The line of the cell, in the rank's traceback.
        assert re.search(r'line 4, in bad\n\s+raise ValueError\("boom in a cell"\)', cell.trace)
        assert "rank 1 was here\n" in cell.stdout
        again = await notebook.run("launch(lambda fabric: fabric.all_reduce(torch.ones(1), reduce_op='sum'))")
        assert again.result == "tensor([2.])", again.trace

    in_this_notebook(story)


@pytest.mark.parametrize("place", ["in_python", "in_collective"])
def test_an_interrupt_ends_the_ranks(in_this_notebook, place):
    async def story(notebook):
        await notebook.run(f"""
            def wait(fabric):
                dist.barrier()
                print(f"<{{os.getpid()}}>")
                dist.barrier()
                print("met")
                if {place == "in_collective"} and fabric.global_rank == 1:
                    dist.barrier()
                threading.Event().wait(600)
        """)
        cell = await notebook.interrupted("launch(wait)", until="met")
        assert cell.error == "KeyboardInterrupt", cell.trace
        pids = list(map(int, re.findall(r"<(\d+)>", cell.stdout)))
        assert len(pids) == 2
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
        after = await notebook.run("launch(lambda fabric: fabric.all_reduce(torch.ones(1), reduce_op='sum'))")
        assert after.result == "tensor([2.])", after.trace

    in_this_notebook(story)


@pytest.mark.parametrize("in_notebook", [{"OMP_NUM_THREADS": "2"}], indirect=True, ids=["two threads"])
def test_launches_after_computing_with_threads_and_a_backward(in_notebook):
    compute = """
        def compute():
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
            loss = net(torch.randn(512, 512)).square().mean()
            loss.backward()
            return round(sum([p.grad.abs().sum().item() for p in net.parameters()]), 3)
    """

    async def story(notebook):
        await notebook.run(compute)
        before = await notebook.run("torch.get_num_threads(), compute()")
        assert before.result.startswith("(2, ")
        for _ in range(2):
            cell = await notebook.run("launch(lambda fabric: (torch.get_num_threads(), compute()))")
            assert cell.error is None, cell.trace
            assert cell.result == before.result
            assert cell.stderr == ""
            # The kernel computes on, with its threads.
            assert (await notebook.run("torch.get_num_threads(), compute()")).result == before.result

    in_notebook(story)


def test_spawn_says_what_to_do_instead(in_this_notebook):
    async def story(notebook):
        await notebook.run("""
            class Net(torch.nn.Linear):
                pass
            def train(fabric, *args):
                pass
        """)
        for call, name in [
            ("train", "train"),
            ("print, Net(1, 1)", "Net"),
        ]:
            cell = await notebook.run(f"launch({call}, strategy='ddp_spawn')")
            assert cell.error == "LaunchError"
            assert f"'{name}' is defined in a notebook" in cell.trace
            assert 'strategy="ddp_notebook"' in cell.trace
        cell = await notebook.run("launch(print, [Net(1, 1)], strategy='ddp_spawn')")
        assert cell.error == "LaunchError"  # of a rank
        assert "Can't get attribute 'Net' on <module '__main__'" in cell.trace
        cell = await notebook.run("""
            model = torch.nn.Linear(1, 1)
            model.act = lambda x: x
            launch(print, model, strategy='ddp_spawn')
        """)
        assert "cannot be pickled: Linear (" in cell.trace
        assert "<lambda>" in cell.trace
        cell = await notebook.run("launch(train, strategy='ddp')")
        assert cell.error == "ConfigurationError"
        assert "ddp_notebook" in cell.trace

    in_this_notebook(story)


TRAIN = """
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, 4, generator=generator), torch.randn(6, 8, 1, generator=generator)

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def weights(net):
    return [value for p in net.parameters() for value in p.detach().flatten().tolist()]
"""


def test_training_gives_the_weights_of_plain_torch(in_this_notebook):
    async def story(notebook):
        await notebook.run(TRAIN)
        await notebook.run("""
            def train(fabric):
                net = network()
                model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
                for x, y in zip(*data()):
                    mine = slice(fabric.global_rank, None, fabric.world_size)
                    optimizer.zero_grad()
                    fabric.backward(torch.nn.functional.mse_loss(model(x[mine]), y[mine]))
                    optimizer.step()
                return weights(net)
        """)
        cell = await notebook.run("print(launch(train))")
        assert cell.error is None, cell.trace
        assert [float(text) for text in cell.stdout.strip("[]\n").split(", ")] == pytest.approx(
            plain(), abs=1e-6
        )

    in_this_notebook(story)


def plain():
    names = {"torch": torch}
    exec(TRAIN, names)
    net = names["network"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in zip(*names["data"](), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return names["weights"](net)


# examples/notebook.ipynb


def test_the_notebook_is_interrupted_and_goes_on(in_notebook):
    path = Path(__file__).parents[2] / "examples/notebook.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    *before, launch, plot = [cell.source for cell in cells if cell.cell_type == "code"]

    async def story(notebook):
        for source in before:
            cell = await notebook.run(source)
            assert (cell.error, cell.stderr) == (None, ""), cell.trace
        await notebook.run("epochs = 10_000")
        cell = await notebook.interrupted(launch, until="epoch 2:")
        assert cell.error == "KeyboardInterrupt", cell.trace
        done = re.findall(r"epoch (\d+):", cell.stdout)

        await notebook.run(f"epochs = {len(done) + 2}")
        cell = await notebook.run(launch)
        assert (cell.error, cell.stderr) == (None, ""), cell.trace
        further = [int(epoch) for epoch in re.findall(r"epoch (\d+):", cell.stdout)]
        begin = further[0]  # an epoch may have been saved and not told yet
        assert begin in (len(done), len(done) + 1)
        assert further == list(range(begin, len(done) + 2))

        undisturbed = launch.replace('"run"', '"other"').replace("losses =", "others =")
        await notebook.run(undisturbed)
        assert (await notebook.run("others == losses, len(losses)")).result == f"(True, {len(done) + 2})"
        await notebook.run("raw_losses = raw()")
        equal = "[f'{loss:.4f}' for loss in raw_losses] == [f'{loss:.4f}' for loss in losses]"
        close = await notebook.run(f"{equal}, losses[-1] < losses[0]")
        assert close.result == "(True, True)"
        for devices in (1, 4):
            again = launch.replace("devices=2", f"devices={devices}").replace('"run"', f'"run{devices}"')
            assert (await notebook.run(again)).error is None
            assert (await notebook.run(equal)).result == "True"
        drawn = await notebook.run(plot)
        assert drawn.error is None, drawn.trace
        if find_spec("matplotlib"):
            assert "image/png" in notebook.notebook.cells[-1].outputs[-1].data
        else:
            assert drawn.stdout.count("2 processes") == len(done) + 2

    in_notebook(story)


# CUDA: torch's own way to initialise it, as far as that goes without a device


DRIVER = """
def find_driver():
    if torch.cuda.is_available():
        return
    # What torch asks of a driver before it runs what waits for CUDA.
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_init = lambda: None
    torch.cuda._cudart = torch.cuda._cudart or object()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # builds for CUDA ask before all else

def touch():
    try:
        return torch.ones(1).cuda()
    except (NotImplementedError, RuntimeError):  # initialised; now this build has no kernels for it
        pass
"""


def test_a_kernel_that_has_initialised_cuda_is_told(in_notebook):
    async def story(notebook):
        await notebook.run(DRIVER)  # In[2]
        await notebook.run("fabric = Fabric(accelerator='cpu', devices=2, strategy='ddp_notebook')")
        cell = await notebook.run("find_driver()\ntouch()\ntorch.cuda.is_initialized()")
        assert cell.result == "True", cell.trace
        cell = await notebook.run("fabric.launch(print)")
        assert cell.error == "LaunchError"
        assert "CUDA is initialised in this process" in cell.trace
        assert "restart the kernel first" in cell.trace

    in_notebook(story)


# a script on standard input


def from_stdin(strategy):
    source = f"""
import torch
from fabric import Fabric

def train(fabric):
    return fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0]), reduce_op="sum").item()

if __name__ == "__main__":
    print(Fabric(accelerator="cpu", devices=2, strategy="{strategy}").launch(train))
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-"], input=source, capture_output=True, text=True, timeout=120, env=environ
    )


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_fork_takes_a_function_of_a_script_on_standard_input(strategy):
    done = from_stdin(strategy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


def test_spawn_refuses_a_function_of_a_script_on_standard_input():
    done = from_stdin("ddp_spawn")
    assert done.returncode == 1
    assert "'train' is defined in a notebook, prompt or piped script" in done.stderr
    assert 'Use strategy="ddp_notebook" (or "ddp_fork"), or define it in a file.' in done.stderr
    assert done.stdout == ""


PROGRESS = """
def train(fabric):
    bar = fabric.progress(range(3), desc=f"rank {fabric.global_rank}")
    for number in bar:
        bar.set_postfix(number=torch.tensor(number))
    return len(bar)
"""


def test_a_progress_bar_in_a_cell_and_of_ranks_of_a_cell(in_this_notebook):
    async def story(notebook):
        await notebook.run(PROGRESS)
        for call in ("train(Fabric(accelerator='cpu', devices=1))", "launch(train)"):
            cell = await notebook.run(call)
            assert (cell.error, cell.result) == (None, "3"), cell.trace
            shown = cell.stderr + cell.stdout
            assert re.search(r"rank 0: 100%\|.*\| 3/3 .*, number=2\]", shown), (call, cell)
            assert "rank 1" not in shown

    in_this_notebook(story)


RECORDED = """
from fabric.report.format import STEP, read

def train(fabric):
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()

def recorded(folder, rank):
    records = read(os.path.join(folder, f"rank-0000{rank}.bin"))
    kinds = [record["kind"] for record in records if isinstance(record, dict) and record["kind"] != "check"]
    return sum([len(record) for record in records if isinstance(record, bytes)]) // STEP.size, kinds
"""


def test_a_report_is_recorded_in_the_kernel_and_in_ranks_of_a_cell(in_this_notebook, tmp_path):
    async def story(notebook):
        await notebook.run(RECORDED)
        folder = str(tmp_path / "ranks")
        for runs in (1, 2):  # a cell that is run again adds to the report
            cell = await notebook.run(
                f"Fabric(accelerator='cpu', devices=2, report={folder!r}).launch(train)\n"
                + f"print([recorded({folder!r}, rank) for rank in (0, 1)])"
            )
            assert cell.error is None, cell.trace
            assert cell.stdout.strip() == str([(5 * runs, ["start", "end"] * runs)] * 2)
        folder = str(tmp_path / "kernel")
        start = f"fabric = Fabric(accelerator='cpu', devices=1, report={folder!r}); fabric.launch()"
        for _ in (1, 2):  # all cells are run again in the same kernel
            begun = await notebook.run(start)
            assert begun.error is None, begun.trace
            failed = await notebook.run("train(fabric); 1 / 0")
            assert failed.error == "ZeroDivisionError"
            await notebook.run("train(fabric)")
        cell = await notebook.run(f"fabric.strategy.teardown(); print(recorded({folder!r}, 0))")
        assert cell.stdout.strip() == "(20, ['start', 'end', 'start', 'end'])", cell.trace

    in_this_notebook(story)
