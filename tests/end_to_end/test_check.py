"""`fabric check`: the user's own script on one rank and on several, and what it says of common mistakes."""

import subprocess
import sys

import pytest
import torch
from jobs import alive, until
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from fabric.testing.check import Step, compare
from fabric.testing.recording import digests, join_batches

SCRIPT = """
import subprocess, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from fabric import Fabric

strategy, how = sys.argv[1:]
fabric = Fabric(devices=4, strategy=strategy)
fabric.launch()
if how != "random split":
    fabric.seed_everything(1)
if how == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(__file__).with_name(f"child{fabric.global_rank}").write_text(str(child.pid))
norm = nn.BatchNorm1d(16) if how == "batch norm" else nn.LayerNorm(16)
model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
g = torch.Generator().manual_seed(fabric.global_rank if how == "other data" else 0)
x, y = torch.randn(48, 8, generator=g), torch.randint(3, (48,), generator=g)
data = TensorDataset(x, y)
if how == "random split":
    data, rest = random_split(data, [40, 8])
loader = DataLoader(data, batch_size=8, shuffle=how == "shuffled")
if not how.startswith("own loader"):
    loader = fabric.setup_dataloaders(loader)
if how == "parts by hand":
    whole = x[:5], y[:5]
    loader = [[t.chunk(fabric.world_size)[fabric.global_rank] for t in whole]] * 4
if how == "error":
    raise ValueError("boom")
for epoch in range(2 if how != "no step" else 0):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum" if how == "sum" else "mean")
        loss.backward() if "plain" in how else fabric.backward(loss)
        if how == "by hand":
            model.module[0].weight.grad *= 1 + fabric.global_rank
        fabric.clip_gradients(model, optimizer, max_norm=100.0)
        optimizer.step()
print("the script does not come to its end", flush=True)
"""


COMMAND = """
import sys
from fabric.cli import main
sys.exit(main(["check", *sys.argv[1:]]))
"""


@pytest.fixture
def check(tmp_path, warm):
    """`fabric check` of the script, in a forked process; the runs that it compares are started by it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "command.py").write_text(COMMAND)

    def run(strategy, how, *options):
        return warm.run(tmp_path / "command.py", *options, tmp_path / "train.py", strategy, how, timeout=300)

    run.folder = tmp_path
    return run


@pytest.mark.slow
@pytest.mark.smoke
def test_a_script_that_is_right(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fabric", "check", "--steps", "2", "train.py", "ddp_spawn", "shuffled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:32] for line in lines] == [
        "step 1: 6 gradients are the same",
        "step 2: 6 gradients are the same",
        "Note: batch_size=8 of loader 0 i",
        "The same on 1 and on 2 ranks, fo",
    ]
    assert "2 ranks train on 16 samples per step, and a run on one rank on 8." in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 3), ("pipeline", 2)])
def test_strategies_that_are_right(check, strategy, ranks):
    done = check(strategy, "shuffled", "--devices", str(ranks), "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The same on 1 and on {ranks} ranks, for 1 steps (dropout was off)." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "step", "words"),
    [
        ("sum", 1, "The loss of the first backward is a sum over its items"),
        ("batch norm", 1, "BatchNorm1d normalises by the samples of one rank"),
        ("other data", 1, "the samples differ"),
    ],
)
def test_what_is_wrong_is_named_with_its_likely_cause(check, how, step, words):
    done = check("ddp", how, "--steps", "2")
    assert done.returncode == 1, done.stderr
    found, likely = done.stdout.splitlines()[-2:]
    assert found.startswith(f"step {step}: the gradient of ")
    assert likely.startswith(f"Likely: {words}")


RESUMES = """
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from fabric import Fabric

fabric = Fabric(devices=2, report="report")
fabric.launch()
fabric.seed_everything(1)
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(32, 4))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8 // fabric.world_size))
state = {"model": model, "optimizer": optimizer, "step": 0}
if Path("last.pt").exists():
    fabric.load("last.pt", state)
fabric.load_latest("run", state)
for (x,) in loader:
    optimizer.zero_grad()
    fabric.backward(model(x).square().mean())
    optimizer.step()
    state["step"] += 1
    fabric.save("last.pt", state)
    fabric.save_latest("run", state, step=state["step"])
    before = state["step"]
    state["step"] = 0
    fabric.load("last.pt", state)
    assert state["step"] == before
"""


@pytest.mark.slow
@pytest.mark.parametrize("exists", [False, True])
def test_checkpoints_of_the_user_are_read_and_never_written(tmp_path, exists):
    (tmp_path / "train.py").write_text(RESUMES)
    if exists:
        torch.manual_seed(5)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
        torch.save(state, tmp_path / "last.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    command = [sys.executable, "-m", "fabric", "check", "--steps", "2", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Note" not in done.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_replicas_that_differ_are_the_cause(check):
    done = check("ddp", "by hand", "--steps", "2")
    assert done.returncode == 1, done.stderr
    assert "With devices=2 the script stops. ReplicasDivergedError: " in done.stdout
    assert "Gradients were changed after the backward on some ranks." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own loader", "own loader, plain backward"])
def test_a_loader_that_was_not_set_up_fails(check, how):
    done = check("ddp", how, "--steps", "1")
    assert done.returncode == 1, done.stderr
    first, cause = done.stdout.splitlines()
    assert first.startswith("step 1: 6 gradients are the same")
    assert cause.startswith(
        "On 2 ranks: A DataLoader that was not set up (TensorDataset of 48, batch_size=8) is iterated in "
    )
    assert "fabric: check: running 1 steps with devices=1" in done.stderr


@pytest.mark.slow
def test_parts_of_unequal_size_are_the_cause(check):
    done = check("ddp", "parts by hand", "--steps", "2")
    assert done.returncode == 1, done.stderr
    assert "Likely: Ranks were given unequal numbers of rows: 3 on rank 0, 2 on rank 1." in done.stdout


@pytest.mark.slow
def test_an_error_of_ours_is_the_cause(check):
    done = check("ddp", "random split", "--devices", "3")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "With devices=3 the script stops. ConfigurationError: The ranks gave fabric.setup_dataloaders "
    )
    assert "generator=torch.Generator().manual_seed(0)" in done.stdout


@pytest.mark.slow
def test_what_a_script_started_ends_with_the_check(check):
    done = check("ddp", "child", "--steps", "1")
    assert done.returncode == 0, done.stderr
    for pid in {int(file.read_text()) for file in check.folder.glob("child*")}:
        assert until(lambda pid=pid: not alive(pid), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("error", "ValueError: boom"),
        ("no step", "no optimizer that fabric.setup returned has made a step"),
    ],
)
def test_a_script_that_cannot_be_compared(check, how, words):
    done = check("ddp", how)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "1", "x.py"], "--devices 1 (from --devices) must be a whole number, at least 2"),
        (["--steps", "few", "x.py"], "--steps few (from --steps) must be a whole number, at least 1"),
        ([], "There is nothing to run. Write fabric check [options] train.py"),
    ],
)
def test_wrong_usage(options, words, capsys):
    from fabric.cli import main

    assert main(["check", *options]) == 2
    assert f"fabric check: {words}" in capsys.readouterr().err


def test_batches_of_several_ranks_are_joined():
    data = TensorDataset(torch.arange(12))
    (first, *_) = join_batches(DataLoader(data, batch_size=2), 3, None)
    assert first[0].tolist() == [0, 1, 2, 3, 4, 5]
    (first, *_) = join_batches(DataLoader(data, batch_size=4), 2, 4)
    assert first[0].tolist() == [0, 1, 2, 3], "the script has divided it"
    (first, *_) = join_batches(DataLoader(data, batch_sampler=BatchSampler(range(12), 2, True)), 3, None)
    assert first[0].tolist() == [0, 1, 2, 3, 4, 5]
    own = type("Own", (BatchSampler,), {})(range(12), 2, False)
    both = join_batches(DataLoader(data, batch_sampler=own), 2, None)
    assert [batch[0].tolist() for batch in both] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(both) == 3
    assert both.batch_sampler.batch_size == 2


def test_samples_are_known_again_in_any_order():
    x, y = torch.randn(6, 3), torch.arange(6)
    order = list(RandomSampler(range(6)))
    assert sorted(digests({"x": x[order], "y": (y[order], "text")})) == sorted(
        digests({"x": x, "y": (y, "")})
    )
    assert digests((x, y)) != digests((x, y + 1))
    assert digests(["text"]) == []


def step(*grads):
    return Step([{"grads": grad, "rank": rank} for rank, grad in enumerate(grads)])


def test_a_small_model_beside_a_large_one_is_looked_at_by_itself():
    one = {"model 0: a": torch.tensor([1e6]), "model 1: a": torch.tensor([2e-3])}
    assert compare(step(one), step(one))[0] is None
    assert compare(step(one), step({**one, "model 1: a": torch.tensor([1e-3])}))[0] == "model 1: a"
    one = {"a.weight": torch.tensor([1.0]), "a.bias": torch.tensor([1e-3])}
    assert compare(step(one), step({**one, "a.bias": torch.tensor([2e-3])}))[0] == "a.bias"
    assert compare(step(one), step({**one, "a.bias": torch.tensor([1e-3 + 1e-7])}))[0] is None


def test_gradients_are_compared_on_each_rank_and_nan_is_no_agreement():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9])}
    near = {"a": torch.tensor([1.0, 2.0001]), "b": torch.tensor([0.0])}
    assert compare(step(one), step(near, one))[0] is None
    assert compare(step(one), step(one, {"a": torch.tensor([1.0, 3.0])}))[0] == "a"
    assert compare(step(one), step(one, {"a": torch.tensor([1.0, torch.nan])}))[0] == "a"
    assert compare(step(one), step({"a": one["a"]}, {"b": one["b"]}))[0] is None, "stages hold their own"
    assert compare(step(one), step({"a": one["a"]})) == ("b", "b has a gradient on one rank only")
