"""torchrun starts a job anew whose ranks were killed: it goes on from the last save with the same numbers.

Ranks of jobs that are killed at drawn places, or that nothing disturbs, are forked from a warm process.
"""

from __future__ import annotations

import pytest
from jobs import PYTHON, SCRIPTS, Job, check_resumed, facts

TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
RESUMED, RECIPE = SCRIPTS / "resumed.py", SCRIPTS / "recipe.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory) -> str:
    """The output of a run that nothing disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    done = warm.torchrun(RESUMED, directory, ranks=2, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert {line["life"] for line in facts(done.stdout)} == {0}
    return done.stdout


@pytest.mark.parametrize("stops", [False, True], ids=["", "the script asks should_stop()"])
def test_a_killed_rank_and_the_rest_of_the_run(whole, tmp_path, stops):
    """Rank 1 is killed at step 10, in the second epoch; the last save is of step 8."""
    options = ["--kill-at=10", *(["--asks"] if stops else [])]
    with Job([*TORCHRUN, str(RESUMED), str(tmp_path), *options], tmp_path / "job") as job:
        assert job.ends() == 0, job.err
    check_resumed(job.out, whole, begins=8)
    assert job.err.count("failed (exitcode: -9) local_rank: 1") == 1  # one restart, and torchrun says why
    if stops:
        # torchrun's SIGTERM, which comes at once, is noted, and does not end rank 0 before it has spoken.
        assert "RankError: " in job.err
        assert "failed on rank 0" in job.err
        assert job.err.count("Traceback (most recent call last)") == 2  # rank 0's error and its cause


# killed again and again, at drawn places


def recipe(warm, directory, strategy, ranks, *options, code=0):
    """Each loss of scripts/recipe.py by step, and the steps at which its lives began."""
    restarts = 12 if "--kills" in options else 0
    arguments = [directory, "--strategy", strategy, *options]
    done = warm.torchrun(RECIPE, *arguments, ranks=ranks, restarts=restarts, timeout=900, cwd=directory)
    assert done.returncode == code, done.stderr
    begun = facts(done.stdout, "begins")
    assert len(begun) % ranks == 0
    assert {line["world_size"] for line in begun} == {ranks}
    lives = sorted({(line["life"], line["begins"]) for line in begun})
    assert len(lives) == len(begun) / ranks
    found = {}
    for line in facts(done.stdout, "loss"):
        found.setdefault(line["step"], set()).add(line["loss"])
    assert {len(losses) for losses in found.values()} == {1}, "a step that was made again has another loss"
    return {step: losses.pop() for step, losses in found.items()}, [begins for _, begins in lives]


STEPS = list(range(1, 61))
FIXED_BUCKETS = "ddp_find_unused_parameters_true"
"""DDP that sums gradients of a first step as of all others: see tests/checkpoint/test_portable_runs.py."""


@pytest.mark.parametrize(("strategy", "ranks", "kills"), [(FIXED_BUCKETS, 2, 4), ("zero3", 3, 3)])
def test_a_run_that_is_killed_at_random_has_the_losses_of_an_undisturbed_one(
    warm, tmp_path, strategy, ranks, kills
):
    """With dropout, shuffled data, and saves beside the loop: to the bit."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, _ = recipe(warm, tmp_path / "whole", strategy, ranks, "--dropout", "0.3")
    found, lives = recipe(
        warm, tmp_path / "killed", strategy, ranks, "--dropout", "0.3", "--kills", str(kills)
    )
    assert len(lives) == kills + 1
    assert lives == sorted(lives)
    assert lives[-1] > 0
    assert list(whole) == STEPS
    assert found == whole


@pytest.fixture(scope="module")
def of_one_process(warm, tmp_path_factory) -> dict:
    losses, _ = recipe(warm, tmp_path_factory.mktemp("whole"), "ddp", 1, "--double")
    assert list(losses) == STEPS
    return losses


@pytest.mark.parametrize(("strategy", "worlds"), [("ddp", (3, 2, 3)), ("zero3", (4, 2, 3))])
def test_a_run_that_goes_on_with_other_numbers_of_ranks_has_the_losses_of_one_process(
    of_one_process, warm, tmp_path, strategy, worlds
):
    """In double precision, so that an order of samples or a moment that is wrong is no rounding."""
    whole, reached = of_one_process, 0
    for ranks, ends in zip(worlds, (("--ends-at", "13"), ("--ends-at", "32"), ()), strict=True):
        found, (begins,) = recipe(warm, tmp_path, strategy, ranks, "--double", *ends, code=1 if ends else 0)
        assert reached - 4 < begins <= reached
        assert begins % 2 == 0
        assert min(found) == begins + 1
        assert found == pytest.approx({step: whole[step] for step in found}, rel=1e-9)
        reached = max(found)
    assert reached == 60
