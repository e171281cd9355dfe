"""Objects and groups on ranks with different secrets: nothing is unpickled, and the error says why."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint.formats.sharded.dcp import ShardWriter
from fabric.core import job_secret
from fabric.core.errors import ConfigurationError, RankError
from fabric.core.job_secret import JobSecret
from fabric.testing import rank_info


class Harm:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def launched(secret, guard="full"):
    os.environ["FABRIC_JOB_SECRET"] = secret
    os.environ["FABRIC_GUARD"] = guard
    fabric = Fabric(accelerator="cpu", devices=rank_info().world_size)
    fabric.launch()
    return fabric


def forget():
    job_secret._inherited = None
    for name in ("FABRIC_JOB_SECRET", "FABRIC_GUARD"):
        os.environ.pop(name, None)


def with_other_secrets():
    try:
        fabric = launched("of node 1" if rank_info().rank else "of node 0")
        with pytest.raises(ConfigurationError) as caught:
            fabric.all_reduce(1.0)
        return str(caught.value)
    finally:
        forget()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_secrets_say_so_at_their_first_call(ranks, world_size):
    texts = ranks.run(with_other_secrets, world_size=world_size)
    assert texts[0] == (
        f"FABRIC_JOB_SECRET of rank 0 is not that of rank {', '.join(map(str, range(1, world_size)))}. Ranks "
        "with different secrets do not connect. Export one value of it on all machines, or none."
    )
    assert all([text.startswith(f"FABRIC_JOB_SECRET of rank {rank} is") for rank, text in enumerate(texts)])


def receive_unsigned(file, verb, size):
    """Without connections of ours objects go by gloo, which knows no secret."""
    rank = rank_info().rank
    try:
        fabric = launched("of the job", guard="off")
        assert fabric.all_gather_object([rank, "x" * size]) == [[0, "x" * size], [1, "x" * size]]
        job_secret._of_groups.clear()
        job_secret._inherited = JobSecret(b"of a stranger" if rank else b"of the job")
        data = [Harm(file), "x" * size] if rank else ["own"]
        try:
            fabric.all_gather_object(data) if verb == "gather" else fabric.broadcast(data, src=1)
        except RankError as error:
            return str(error)
        return "sent"
    finally:
        forget()


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("verb", ["gather", "broadcast"])
def test_objects_of_others_are_not_unpickled(ranks, tmp_path, verb, size):
    texts = ranks.run(receive_unsigned, tmp_path / "harm", verb, size, world_size=2)
    assert not (tmp_path / "harm").exists()
    assert texts[0].startswith("A message with an object is not signed with the secret of this job, and was")


def save_with_a_forged_note(folder):
    """Rank 1 leaves a pickle in place of what it has written."""
    rank = rank_info().rank
    fabric = Fabric(accelerator="cpu", devices=rank_info().world_size)
    fabric.launch()
    write = ShardWriter.write
    fabric.save(folder / "a", {"w": torch.ones(3)}, format="sharded")

    def forge(self, directory):
        found = write(self, directory)
        assert (directory.stat().st_mode & 0o777) == 0o700
        return found

    ShardWriter.write = forge
    undo = forge_notes(folder) if rank else None
    try:
        with pytest.raises((ValueError, RankError)) as caught:
            fabric.save(folder / "a", {"w": torch.ones(3)}, format="sharded")
        return str(caught.value), fabric.load(folder / "a")["w"].tolist()
    finally:
        ShardWriter.write = write
        if undo:
            undo()


def forge_notes(folder):
    """Make the notes of this rank pickles; returns what undoes it."""
    written = Path.write_bytes

    def forged(self, data):
        return written(self, pickle.dumps(Harm(folder / "harm")) if self.suffix == ".report" else data)

    Path.write_bytes = forged
    return lambda: setattr(Path, "write_bytes", written)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_ranks_leave_for_rank_zero_is_not_unpickled(ranks, tmp_path, world_size):
    told = ranks.run(save_with_a_forged_note, tmp_path, world_size=world_size)
    assert not (tmp_path / "harm").exists()
    assert {tuple(kept) for _, kept in told} == {(1.0, 1.0, 1.0)}, "the checkpoint before is there"
