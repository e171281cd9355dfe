"""Processes that a rank starts: jobs of their own, which leave the rank's job alone."""

import sys

import pytest
from jobs import SCRIPTS, Job, facts

pytestmark = pytest.mark.slow

SCRIPT = str(SCRIPTS / "children.py")
COMMANDS = {
    "script": [sys.executable, SCRIPT],
    "wrapped": [sys.executable, "-m", "fabric", "run", "--devices", "2", "WRAPPER"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT],
}


@pytest.mark.parametrize("how", COMMANDS)
def test_a_child_of_a_rank_is_no_rank(tmp_path, how):
    wrapper = tmp_path / "wrapper.py"  # the rank itself is a child of what the launcher started
    call = f"subprocess.call([sys.executable, {SCRIPT!r}], close_fds=False)"
    wrapper.write_text(f"import subprocess, sys; sys.exit({call})")
    command = [str(wrapper) if word == "WRAPPER" else word for word in COMMANDS[how]]
    with Job(command, tmp_path / "job") as job:
        assert job.ends() == 0, job.err
    found = facts(job.out)
    assert len(found) == 2
    for rank, own in enumerate(found):
        assert own["rank"] == rank
        assert own["value"] == 0.5
        said = sorted(own["said"], key=lambda one: one["world_size"])
        assert said == [{"world_size": 1, "value": 100.0}, {"world_size": 2, "value": 100.5}]
        assert own["before"] == {"world_size": 1, "value": 100.0}  # started before `fabric.launch()`
        assert own["refused"].startswith(
            "LaunchError: SpawnProcess-1 cannot start ranks. Put the loop into a function"
        )
