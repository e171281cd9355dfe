"""torchrun starts a job anew whose rank was killed: it goes on from the last save, with the same numbers."""

from __future__ import annotations

import pytest
from jobs import PYTHON, SCRIPTS, Job, check_resumed, facts

TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
RESUMED = str(SCRIPTS / "resumed.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The output of a run that nothing disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    with Job([*TORCHRUN, RESUMED, str(directory)], directory / "job") as job:
        assert job.ends() == 0, job.err
    assert {line["life"] for line in facts(job.out)} == {0}
    return job.out


@pytest.mark.parametrize("stops", [False, True], ids=["", "the script asks should_stop()"])
def test_a_killed_rank_and_the_rest_of_the_run(whole, tmp_path, stops):
    """Rank 1 is killed at step 10, in the second epoch; the last save is of step 8."""
    options = ["--kill-at=10", *(["--asks"] if stops else [])]
    with Job([*TORCHRUN, RESUMED, str(tmp_path), *options], tmp_path / "job") as job:
        assert job.ends() == 0, job.err
    check_resumed(job.out, whole, begins=8)
    assert job.err.count("failed (exitcode: -9) local_rank: 1") == 1  # one restart, and torchrun says why
    if stops:
        # torchrun's SIGTERM, which comes at once, is noted, and does not end rank 0 before it has spoken.
        assert "RankError: " in job.err
        assert "failed on rank 0" in job.err
        assert job.err.count("Traceback (most recent call last)") == 2  # rank 0's error and its cause
