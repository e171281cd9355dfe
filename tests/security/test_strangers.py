"""A stranger's program against jobs of each launcher: nothing that it sends is run, and the job goes on."""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from stranger import IS_ROOT, Harm, as_stranger, attack_connections, attack_save
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

sys.path.append(str(Path(__file__).parents[1] / "end_to_end"))
from jobs import Job, facts, until

JOB = str(Path(__file__).parent / "job.py")
RUN = [sys.executable, "-m", "fabric", "run", "--devices", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCHERS = {
    "script": ([sys.executable], "ddp"),
    "fabric run": (RUN, "ddp"),
    "spawn": ([sys.executable], "ddp_spawn"),
    "fork": ([sys.executable], "ddp_fork"),
    "torchrun": (TORCHRUN, "ddp"),
}


@pytest.fixture
def folder():
    """A directory into which strangers can look."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def plant(folder: Path) -> None:
    """Checkpoints that run code where they are unpickled, or read files of others."""
    harm = Harm(folder / "harm")
    torch.save({"model": harm}, folder / "planted-1.pt")
    for number, change in enumerate((harm, "/etc/passwd"), 2):
        directory = folder / f"planted-{number}"
        save_by_torch({"w": torch.ones(3)}, checkpoint_id=directory)
        described = pickle.loads((directory / ".metadata").read_bytes())
        if change is harm:
            described.planner_data = harm
        else:
            next(iter(described.storage_data.values())).relative_path = change
        (directory / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stranger_does_no_harm(folder, tmp_path, launcher):
    plant(folder)
    command, how = LAUNCHERS[launcher]
    given = {"FABRIC_JOB_SECRET": "of a scheduler"} if launcher == "torchrun" else {}
    with Job([*command, JOB, str(folder), how], tmp_path / "job", **given) as job:
        assert until(lambda: (folder / "port").exists() or job.process.poll() is not None, 120), job.err
        told = as_stranger(attack_connections, int((folder / "port").read_text()), folder)
        (folder / "attacked").touch()
        assert "error" not in told, (told, job.err)
        assert until(lambda: (folder / "saves").exists() or job.process.poll() is not None, 120), job.err
        assert (folder / "saves").exists(), job.err
        if IS_ROOT:  # else the stranger is who writes the files
            written = as_stranger(attack_save, Path((folder / "saves").read_text()), folder)
            assert written == [], "the directory is 0700"
        (folder / "save attacked").touch()
        assert job.ends() == 0, job.err
        found = facts(job.out)
    assert not (folder / "harm").exists()
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        assert (one["total"], one["ranks"], one["environ"]) == (3.0, [0, 1], False)
        assert one["sockets"] == [], "children of a rank inherit none"
        holds, describes, reads = one["refused"]
        assert "holds code: os.system" in holds
        assert "holds code: os.system" in describes
        assert "it names the file '/etc/passwd'" in reads
    assert told["guesses"] > 3
    assert told["address"].startswith("0100007F:") or launcher == "torchrun"
    assert not told["secret"], "it is not in the store"
    assert "of a scheduler" not in job.out + job.err
