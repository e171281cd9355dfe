"""Every example with 1 and with 2 processes: exit code, clean stderr, equal results.

Most run on ranks that are warm, as under a launcher that was there before them; what is about starting, cold.
"""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from pages import sides_of_readme
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from fabric.strategies import STRATEGY_REGISTRY, exchange

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = sys.executable
LAUNCHER_VARIABLES = ("FABRIC_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "MASTER_", "TORCHELASTIC_")
pytestmark = pytest.mark.slow

SHORT = {
    "collectives": [],
    "contrastive": ["--epochs", "2", "--report-every", "1"],
    "custom_engine": ["--epochs", "2"],
    "custom_strategy": ["--epochs", "2"],
    "digits": ["--epochs", "2"],
    "gan": ["--epochs", "2", "--report-every", "1"],
    "language_model": ["--steps", "20", "--report-every", "10"],
    "long_context": ["--steps", "12", "--report-every", "4"],
    "pipeline": ["--steps", "12", "--report-every", "4"],
    "sharded": ["--steps", "10"],
    "tensor_parallel": ["--epochs", "1"],
    "token_loss": ["--sequences", "203"],
}
"""Each example, and how to make it short."""

AGREE = {
    "collectives": 1e-5,
    "contrastive": 1e-4,
    "custom_engine": 1e-4,
    "custom_strategy": 3e-2,
    "digits": 1e-4,
    "gan": 1e-6,
    "language_model": 1e-4,
    "long_context": 1e-5,
    "pipeline": 1e-4,
    "sharded": 1e-4,
    "tensor_parallel": 1e-4,
    "token_loss": 1e-4,
}
"""Relative difference allowed between 1 and 2 processes; custom_strategy rounds gradients to bfloat16."""


ELSEWHERE = {"huggingface": "tests/integrations/huggingface/test_example.py"}
"""Examples with packages of their own, and the tests that run them (make test-ecosystem)."""


def run(*command: str, timeout: float = 180, code: int = 0) -> subprocess.CompletedProcess:
    """The finished command, on one thread per process, outside any launcher; it must end with `code`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    environ["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


class Done(NamedTuple):
    """What an example printed."""

    stdout: str
    stderr: str


def as_main(script: str, arguments: list[str], folder: str) -> None:
    """The script on this rank, with its output in the folder; it leaves nothing behind."""
    before = set(STRATEGY_REGISTRY.names())
    exchange._log_shape_once.cache_clear()  # another script may have run in this process
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.dict(os.environ),
        Path(folder, "out").open("a") as out,
        Path(folder, "err").open("a") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        runpy.run_path(script, run_name="__main__")
    for name in set(STRATEGY_REGISTRY.names()) - before:
        STRATEGY_REGISTRY.remove(name)


@pytest.fixture(scope="module")
def example(ranks):
    """`example(name, *arguments, devices=)`: what the example prints on the CPU when it is short."""
    cache = {}

    def run_once(name: str, *arguments: str, devices: int) -> Done:
        key = (name, devices, *arguments)
        if key not in cache:
            with tempfile.TemporaryDirectory() as folder:
                argv = ["--accelerator", "cpu", "--devices", str(devices), *SHORT[name], *arguments]
                script = str(EXAMPLES / f"{name}.py")
                ranks.run(as_main, script, argv, folder, world_size=devices, timeout=180)
                cache[key] = Done(*(Path(folder, name).read_text() for name in ("out", "err")))
        return cache[key]

    return run_once


def results(text: str, name: str) -> list[float]:
    """The numbers of the results line, the last one printed, without world size and speed."""
    last = text.strip().splitlines()[-1]
    assert last.startswith(f"{name}: ")
    assert sum(line.startswith(f"{name}: ") for line in text.splitlines()) == 1
    return [float(number) for number in re.findall(r" (\d+\.\d+)", last)]


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, *ELSEWHERE, "demo", "resume"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_example_with_packages_of_its_own(name):
    assert f"examples/{name}.py" in (ROOT / ELSEWHERE[name]).read_text()
    pytest.skip(f"{ELSEWHERE[name]} runs it, by make test-ecosystem")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_example_ends_well(example, name, devices):
    done = example(name, devices=devices)
    said = {
        ("pipeline", 2): r"fabric: pipeline: balance=\[.*\n",
        ("collectives", 1): r"fabric: all_gather .*\n",
        ("contrastive", 1): r"fabric: all_gather .*\n",
    }
    said = said.get((name, devices), "")
    assert re.fullmatch(said, done.stderr), done.stderr
    assert f"{name}: {devices} process(es), " in done.stdout
    assert results(done.stdout, name)


@pytest.mark.parametrize("name", SHORT)
def test_one_and_two_processes_agree(example, name):
    single, several = (results(example(name, devices=n).stdout, name) for n in (1, 2))
    assert several == pytest.approx(single, rel=AGREE[name])


def test_what_is_printed_once_is_printed_once(example):
    lines = example("digits", devices=2).stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1", "digits"]


@pytest.mark.parametrize("further", [(), ("--strategy", "zero2")])
def test_the_sharded_example_agrees_with_plain_torch(example, further):
    done = example("sharded", *further, devices=2)
    first, last = done.stdout.strip().splitlines()
    held, total = map(int, re.fullmatch(r"rank 0 holds (\d+) of (\d+) parameters", first).groups())
    assert total / 2 <= held < 0.51 * total
    split, plain = results(done.stdout, "sharded")
    assert split == pytest.approx(plain, abs=2e-6)
    assert last.endswith(": the same")


@pytest.mark.parametrize("further", [(2,), (3,), (2, "--strategy", "fsdp"), (4, "--share", "2")])
def test_the_long_context_example_prints_the_losses_of_one_process(example, further):
    alone = example("long_context", devices=1).stdout.strip().splitlines()
    shared = example("long_context", *further[1:], devices=further[0]).stdout.strip().splitlines()
    losses = [[float(line.split()[-1]) for line in lines[:-1]] for lines in (alone, shared)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize(
    "further", [(2,), (2, "--one-call"), (3,), (4, "--stages", "2"), (2, "--microbatches", "16")]
)
def test_the_pipeline_example_prints_the_losses_of_one_process(example, further):
    alone = example("pipeline", devices=1).stdout.strip().splitlines()
    staged = example("pipeline", *further[1:], devices=further[0]).stdout.strip().splitlines()
    held, total = map(int, re.fullmatch(r"rank 0 holds (\d+) of (\d+) parameters", staged[0]).groups())
    assert held < 0.7 * total
    losses = [[float(line.split()[-1]) for line in lines[1:-1]] for lines in (alone, staged)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    got, expected = (results("\n".join(lines), "pipeline") for lines in (staged, alone))
    assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("devices", "held"), [(1, "256, 64"), (2, "128, 64"), (4, "64, 64")])
def test_the_tensor_parallel_example_splits_over_both_axes(example, devices, held):
    done = example("tensor_parallel", devices=devices)
    assert f"rank 0 holds ({held}) of (256, 64) of blocks.0.up.weight\n" in done.stdout
    expected = results(example("tensor_parallel", devices=1).stdout, "tensor_parallel")
    assert results(done.stdout, "tensor_parallel") == pytest.approx(expected, rel=1e-4)


def test_an_example_with_a_strategy_of_its_own_is_started_cold(example):
    """Every other way to start a script: test_launch, and the README's program below."""
    script = str(EXAMPLES / "custom_strategy.py")
    start = ("-m", "fabric", "run", "--devices", "2", script, "--accelerator", "cpu")
    done = run(PYTHON, *start, *SHORT["custom_strategy"])
    assert done.stderr == ""
    expected = results(example("custom_strategy", devices=2).stdout, "custom_strategy")
    assert results(done.stdout, "custom_strategy") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-4), ("bf16-mixed", 0.2)])
def test_precision_is_the_users_choice(example, precision, tolerance):
    usual = results(example("digits", devices=1).stdout, "digits")
    other = results(example("digits", "--precision", precision, devices=2).stdout, "digits")
    assert other[0] == pytest.approx(usual[0], rel=tolerance)
    assert other[1] == pytest.approx(usual[1], abs=max(tolerance, 2 / 360))  # an image or two by rounding


@pytest.mark.smoke
def test_the_demo_compares_and_says_so():
    done = run(PYTHON, str(EXAMPLES / "demo.py"), "--epochs", "1")
    assert done.stderr == ""
    assert "2 processes   1 process" in done.stdout
    page = (ROOT / "docs/install.md").read_text()
    rows = re.findall("     0 [|].*", page + done.stdout)
    shown, printed = ([float(number) for number in re.findall(r"\d+\.\d+", row)] for row in rows)
    assert printed[:4] == pytest.approx(shown[:4], abs=1e-4), "docs/install.md shows other numbers"
    assert done.stdout.endswith("the same numbers: yes\n")


STEPS = 2 * (1797 // 64)


def test_the_resume_example_compares_and_says_so():
    done = run(PYTHON, str(EXAMPLES / "resume.py"))
    signal = r"(SIGKILL \(by a user, [^)]*\)|a signal, or ended by os\._exit)"  # of rank one, or of the first
    last = rf"fabric: rank [01] on \S+ failed first: killed by {signal}; rank [01] .*\n"
    assert re.fullmatch(last, done.stderr)
    assert done.stdout.splitlines() == [
        f"undisturbed: step 1 to step {STEPS}, exit code 0",
        "killed: step 1 to step 42, exit code 137",
        f"started again: step 41 to step {STEPS}, exit code 0",
        f"resume: all {STEPS} losses identical",
    ]


@pytest.mark.parametrize(("sign", "devices"), [("-", 1), ("+", 1), ("+", 2), ("+", 4)])
def test_both_sides_of_the_readme_diff_print_the_number_that_it_shows(sign, devices, tmp_path):
    """To the last digit, on any number of processes."""
    (said,) = set(re.findall(r"last loss \d\.\d+", (ROOT / "README.md").read_text()))
    script = tmp_path / "train.py"
    script.write_text(sides_of_readme()[sign].replace("devices=2", f"devices={devices}"))
    done = run(PYTHON, str(script))
    assert (done.stdout, done.stderr) == (f"{said}\n", "")


class InDouble(torch.nn.Module):
    """A model in double precision for callers in single precision: `precision="64-true"`."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.double()).float()


def gan_in_plain_torch(epochs: int) -> str:
    """The loop of examples/gan.py for one process, with the models of the example; its results line."""
    gan = runpy.run_path(str(EXAMPLES / "gan.py"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        generator, critic = InDouble(gan["make_generator"]()), InDouble(gan["make_discriminator"]())
        optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(TensorDataset(images), 64, shuffle=True, drop_last=True, generator=order)
        judged = gan["judged"]
        for _ in range(epochs):
            losses = torch.zeros(2)
            for (real,) in loader:
                fake = generator(torch.randn(len(real), gan["NOISE"]))
                optimizer_c.zero_grad()
                loss_c = judged(critic(real), real=True) + judged(critic(fake.detach()), real=False)
                loss_c.backward()
                optimizer_c.step()
                optimizer_g.zero_grad()
                loss_g = judged(critic(fake), real=True)
                loss_g.backward()
                optimizer_g.step()
                losses += torch.stack([loss_c.detach(), loss_g.detach()]) / len(loader)
        fixed = torch.Generator().manual_seed(1)
        with torch.no_grad():
            made = generator(torch.randn(512, gan["NOISE"], generator=fixed))
        distance = (made.mean(0) - images.mean(0)).square().mean().sqrt().item()
    loss_c, loss_g = losses.tolist()
    said = f"discriminator loss {loss_c:.5f}, generator loss {loss_g:.5f}"
    return f"{said}, distance of the mean images {distance:.5f}"


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_gan_prints_the_numbers_of_the_same_loop_in_plain_torch(example, devices):
    """To the last digit."""
    done = example("gan", "--epochs", "10", "--report-every", "10", devices=devices)
    assert done.stdout.splitlines()[-1] == f"gan: {devices} process(es), {gan_in_plain_torch(10)}"
