"""`fabric plan`: what it counts, what it recommends, what it refuses. Against a device: tests/pretend."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fabric
from fabric import cli
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.strategies import PipelineStrategy
from fabric.tools.plan import fake, units
from fabric.tools.plan.plan import PlanRequest, largest_batch, make_plan
from fabric.tools.plan.simulate import Case, simulate, simulate_all

WIDTH = 32
SCRIPT = """
import torch
from fabric import Fabric

fabric = Fabric(devices=1)
fabric.launch()
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(16, 32), batch_size=4))
for epoch in range(100):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        print("printed by the script", loss.item())
raise RuntimeError("it went on after two steps")
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(torch.relu(self.linear(x)) * 2)


def net():
    return nn.Sequential(*[Block() for _ in range(4)])


def adam_of(model):
    return torch.optim.Adam(model.parameters())


def training(model, rows=8, after=lambda loss: None):
    """A loop on `model` and batches of ones."""

    def loop():
        job = fabric.Fabric()
        job.launch()
        wrapped, optimizer = job.setup(model, adam_of(model))
        data = torch.utils.data.DataLoader(torch.ones(32, WIDTH), batch_size=rows)
        for batch in job.setup_dataloaders(data):
            optimizer.zero_grad()
            loss = wrapped(batch).mean()
            job.backward(loss)
            optimizer.step()
            after(loss)

    return loop


def size_of(model):
    return sum([p.nbytes for p in model.parameters()])


def test_each_storage_counts_once_and_by_its_kind():
    class Half(nn.Module):  # whose optimizer has half of its parameters
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.two.weight = self.one.weight
            self.register_buffer("table", torch.ones(1000))

        def forward(self, x):
            return self.two(self.one(x))

    model = Half()
    found = simulate(Case(1, strategy="ddp"), training(model))
    assert not found.error
    assert found.steps == 2
    size = size_of(model)  # the tied weight once
    assert found.peak.kinds["parameters"] == size + 4000
    assert found.peak.kinds["gradients"] == size
    assert found.peak.kinds["optimizer"] == 2 * size + 4 * 3
    assert sum(found.peak.kinds.values()) == found.peak.bytes


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1.0), ("zero1", 0.5), ("zero2", 0.5)])
def test_a_rank_holds_its_share_of_states_and_sends_what_the_layout_says(strategy, share):
    model = net()
    found = simulate(Case(2, strategy=strategy), training(model))
    assert not found.error
    size = size_of(model)
    assert found.peak.kinds["optimizer"] == pytest.approx(2 * size * share, rel=0.01)
    kinds = {
        "ddp": ["all_reduce"],
        "zero1": ["all_reduce", "broadcast"],
        "zero2": ["all_gather", "reduce_scatter"],
    }
    # A ring of two ranks sends half of the whole, an all-reduce twice that; the replica check some bytes.
    for kind in kinds[strategy]:
        assert found.traffic[kind] == pytest.approx(size / (1 if kind == "all_reduce" else 2), rel=0.1)


def test_without_values_the_same_is_counted():
    for strategy in ("ddp", "zero3"):
        case = Case(1, strategy=strategy)  # on several ranks the replica check would count
        real, without = [simulate(case._replace(fake=on), training(net())) for on in (False, True)]
        assert not without.error
        assert without.peak == real.peak


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_several_ranks_without_values(strategy):
    case = Case(2, strategy=strategy)
    real, without = [simulate(case._replace(fake=on), training(net())) for on in (False, True)]
    assert not without.error
    for kind, sent in without.traffic.items():
        assert sent == pytest.approx(real.traffic[kind], abs=600)  # messages of checks
    for kind in ("parameters", "gradients", "optimizer"):
        assert without.peak.kinds[kind] == real.peak.kinds[kind]


def test_a_number_without_value_is_printed_but_decides_nothing():
    number = fake.UnknownNumber(1.0)
    assert f"{(number + 1) / 2:.1f} {number:.2f}" == "1.0 1.00"
    for decide in (bool, lambda x: x < 1, lambda x: x == 1, int):
        with pytest.raises(ValueError, match="Leave --fake out"):
            decide(number)


def test_with_fake_an_error_names_the_line_that_decides():
    def decide(loss):
        if loss.item() > 1:
            raise AssertionError

    found = simulate(Case(1, strategy="ddp", fake=True), training(net(), after=decide))
    assert "the script decides by one. Leave --fake out" in found.error
    assert f"{__file__}:" in found.error


def test_the_largest_batch_fits_and_one_more_does_not():
    memory = 200_000
    case = Case(1, strategy="ddp")
    one, other = [simulate(case._replace(scale=scale), training(net())) for scale in (1.0, 0.5)]
    assert (one.batch_size, other.batch_size) == (8, 4)
    largest = largest_batch(one, other, memory)
    assert largest > 8
    peaks = [
        simulate(case._replace(batch_size=size), training(net())).peak.bytes
        for size in (largest, largest + 1)
    ]
    assert peaks[0] <= memory < peaks[1]
    assert largest_batch(one, other, 10_000) == 0


def test_the_first_strategy_that_fits_is_recommended_with_the_reason():
    memory = int(4.7 * size_of(net()))  # Adam: 4 sizes, and one for what a step computes
    plan = make_plan(training(net()), PlanRequest(4, memory=memory, precisions=("32-true",)))
    assert [row.strategy for row in plan.rows] == ["ddp", "zero1", "zero2", "zero3"]
    assert plan.best.strategy != "ddp"
    text = str(plan)
    assert f'Write Fabric(devices=4, strategy="{plan.best.strategy}", precision="32-true"): ' in text
    assert "; ddp needs " in text
    assert json.loads(json.dumps(plan.as_dict()))["best"]["strategy"] == plan.best.strategy


def test_all_ranks_of_a_pipeline_are_run():
    model = net()
    found = simulate_all(Case(2, strategy="pipeline"), training(model))
    assert not found.error, found.error
    assert [one.steps for one in found.ranks] == [2, 2]
    assert found.peak.bytes == max([one.peak.bytes for one in found.ranks])
    halves = [one.peak.kinds["parameters"] for one in found.ranks]
    assert halves == [size_of(model) / 2] * 2
    # Activations of the first stage, and gradients from the second; in micro-batches, twice half a batch.
    assert found.ranks[0].traffic["send"] == pytest.approx(8 * WIDTH * 4, abs=200)
    memory = 4 * found.peak.bytes
    plan = make_plan(training(model), PlanRequest(2, memory=memory, strategies=("pipeline",)))
    (row, _) = plan.rows
    assert row.largest > 8
    largest = simulate_all(Case(2, strategy="pipeline", batch_size=row.largest), training(model))
    # When a thread of gloo frees the memory of a collective differs from run to run, by some bytes.
    assert 0.9 * memory < largest.peak.bytes < 1.1 * memory


@pytest.mark.parametrize("step", ["forward", "pipeline_step"])
def test_the_strategy_of_the_script_may_be_a_pipeline(step):
    def loop():
        job = fabric.Fabric(strategy=PipelineStrategy(num_microbatches=2))
        job.launch()
        model, optimizer = job.setup(model := net(), adam_of(model))
        while True:
            if step == "pipeline_step" and hasattr(model, step):  # under the pipeline only
                model.pipeline_step(torch.ones(8, WIDTH), torch.ones(8, WIDTH), nn.functional.mse_loss)
            else:
                job.backward(model(torch.ones(8, WIDTH)).mean())
            optimizer.step()

    plan = make_plan(loop, PlanRequest(2, precisions=("32-true",)))
    assert [row.found.error for row in plan.rows] == [""] * 5
    assert plan.rows[-1].strategy == "PipelineStrategy"
    assert [len(row.found.ranks) for row in plan.rows] == [0, 0, 0, 0, 2]
    assert plan.rows[-1].found.peak.kinds["optimizer"] < 0.6 * plan.rows[0].found.peak.kinds["optimizer"]


def test_the_error_of_one_rank_of_a_pipeline_ends_all():
    def after(loss):
        if dist.get_rank() == 1:
            raise ValueError("no luck")

    found = simulate_all(Case(3, strategy="pipeline"), training(net(), after=after))
    assert found.error == f"ValueError: no luck ({__file__}:{after.__code__.co_firstlineno + 2})."
    without = simulate_all(Case(2, strategy="pipeline", fake=True), training(net()))
    assert "Run the plan without --fake." in without.error


def test_a_model_an_optimizer_and_a_batch_are_left_as_they_were():
    model = net()
    optimizer = adam_of(model)
    before = [p.clone() for p in model.parameters()]
    plan = fabric.plan(
        model,
        optimizer,
        torch.ones(512, WIDTH),
        memory="1kB",
        strategy="ddp",
        precision="32-true",
        flops="1G",
    )
    assert plan.best is None
    assert "Nothing fits into 1 kB, with any batch_size." in str(plan)
    assert "of 4 blocks of `Block` would save" in str(plan)
    assert plan.as_dict()["rows"][0]["seconds_at_least"] > 0
    assert "Times are lower bounds" in str(plan)
    assert not optimizer.state
    assert all([torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)])
    assert not torch.distributed.is_initialized()
    without = fabric.plan(
        model, optimizer, torch.ones(512, WIDTH), strategy="ddp", precision="32-true", fake=True
    )
    assert without.rows[0].found.peak == plan.rows[0].found.peak
    assert "fake_mode" not in vars(model[0].linear.weight)


@pytest.mark.smoke
def test_the_command_prints_the_table_of_a_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "fabric",
        "plan",
        "--devices",
        "2",
        "--memory",
        "1MB",
        "--strategy",
        "ddp,zero1",
    ]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("One of 2 ranks, batch_size 4 on each")
    assert [line.split()[:2] for line in lines[2:6]] == [
        [strategy, precision] for precision in ("32-true", "bf16-mixed") for strategy in ("ddp", "zero1")
    ]
    assert lines[6].startswith('Write Fabric(devices=2, strategy="ddp", precision="32-true"): ')
    assert "printed by the script" not in done.stdout


RESUMES = """
import torch
from pathlib import Path
from fabric import Fabric

fabric = Fabric(accelerator="cpu", report="report")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
state = {"model": model, "optimizer": optimizer, "step": 0}
if Path("last.pt").exists():
    fabric.load("last.pt", state)
    fabric.load_latest("run", state)
first = state["step"]
while state["step"] < first + 2:
    fabric.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    state["step"] += 1
    fabric.save("last.pt", state, wait=False).wait()
    fabric.save_latest("run", state, step=state["step"])
    fabric.load("last.pt", state)
"""


@pytest.mark.parametrize("trained", [None, "ddp", "fsdp"])
def test_checkpoints_of_the_user_are_read_and_never_written(tmp_path, trained):
    (tmp_path / "train.py").write_text(RESUMES)
    run, settings = [sys.executable, "-m", "fabric"], {"text": True, "timeout": 250, "cwd": tmp_path}
    if trained:
        command = [*run, "run", "--devices", "2", "--strategy", trained, "train.py"]
        subprocess.run(command, check=True, **settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command = [*run, "plan", "--devices", "2", "--strategy", "ddp,zero1,fsdp", "--precision", "32-true"]
    done = subprocess.run([*command, "train.py"], capture_output=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:5]] == ["ddp", "zero1", "fsdp"], (
        done.stdout
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["nope.py"], "The script 'nope.py' does not exist"),
        (["--memory", "80", __file__], "--memory 80 is no size of memory"),
        (["--memory", "80", __file__], "it needs a number above 0 and a unit. Write --memory 80GB"),
        (["--strategy", "zero9", __file__], "strategy='zero9' is not known. Did you mean 'zero3'"),
        (["--precision", "bf17", __file__], "precision='bf17' is not known"),
        (["--devices", "0", __file__], "--devices 0 must be a whole number, at least 1. Write --devices 8."),
        (["--batch-size", "x", __file__], "--batch-size x must be a whole number"),
        (["--bandwidth", "400", __file__], "--bandwidth 400 is no rate above 0. Write --bandwidth 400Gb/s"),
        (["--flops", "fast", __file__], "--flops fast is no rate above 0. Write --flops 400T"),
        ([], "There is nothing to run. Write fabric plan [options] train.py"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_with_what_to_write(options, text, capsys):
    assert cli.main(["plan", *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (lambda: None, "The script ended without a step of an optimizer. Call optimizer.step() in the loop"),
        (training(net(), rows=32), "The script ended after one step of an optimizer. Call optimizer.step()"),
        (lambda: torch.ones(2).cuda(), "Write fabric.device and fabric.to_device"),
        (lambda: __import__("os")._exit(3), "The script ended its process with exit code 3"),
        (lambda: {}["lr"], f"KeyError: 'lr' ({__file__}:"),
    ],
)
def test_a_loop_that_cannot_be_run_ends_with_its_line_and_what_to_write(loop, text):
    with pytest.raises(UsageError) as failed:
        make_plan(loop, PlanRequest())
    assert "No step could be run: " in str(failed.value)
    assert text in str(failed.value)


def test_a_call_that_cannot_be_is_refused():
    model = net()
    with pytest.raises(ArgumentTypeError, match="takes a torch module on the CPU, but got a int"):
        fabric.plan(3, None, torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"memory= 80GiBs is no size of memory"):
        fabric.plan(model, adam_of(model), torch.ones(1), memory="80GiBs")
    with pytest.raises(ConfigurationError, match="devices=0 must be a whole number, at least 1"):
        fabric.plan(model, adam_of(model), torch.ones(1), devices=0)


def called_on_ranks():
    model = net()
    with pytest.raises(UsageError, match=r"Call it before fabric.launch\(\)"):
        fabric.plan(model, adam_of(model), torch.ones(1))


def test_ranks_that_have_joined_make_no_plan(ranks):
    ranks.run(called_on_ranks, world_size=2)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("512MB", 512e6), ("3B", 3), ("2XB", None)]
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(ConfigurationError, match="Write --memory 80GB"):
            units.read_bytes(text)
    else:
        assert units.read_bytes(text) == size


def test_rates():
    assert units.read_bandwidth("400Gb/s") == units.read_bandwidth("50GB/s") == 50e9
    assert units.read_flops("400T") == units.read_flops("400TFLOPS") == 4e14
    assert units.show_bytes(61.24e9) == "61.2 GB"
