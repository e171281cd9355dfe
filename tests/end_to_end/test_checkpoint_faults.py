"""Saves on real processes: killed at any point, on a full disk, as the last act of a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from jobs import LIMIT, PYTHON, SCRIPTS, Job

from fabric import Fabric

FULL = {"open", "torn write", "write", "sync", "synced", "chmod", "rename", "renamed", "directory synced"}
FULL |= {"remove", "removed", None}
SHARDED = FULL - {"chmod"} | {"mark", "marked", "tell", "told", "mkdir", "made", "manifest"}
SHARDED |= {"set aside", "delete", "torn delete", "deleted"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "first", "count"),
    [
        pytest.param("full", 0, 4, marks=pytest.mark.smoke),
        pytest.param("sharded", 0, 3, marks=pytest.mark.smoke),
        *[("full", 48, 50), ("sharded", 6, 70)],  # the fewest trials that have every point, and some more
    ],
)
def test_whoever_is_killed_whenever_the_newest_valid_one_loads_and_is_what_was_saved(
    tmp_path, format, first, count
):
    command = [PYTHON, str(SCRIPTS / "killed_saves.py"), str(tmp_path), format, str(first), str(count)]
    # Whoever is left need not ask where the dead one stood, for which it would wait three seconds.
    quick = {"OMP_NUM_THREADS": "1", "FABRIC_HANG_REPORT_AFTER": "off"}
    with Job(command, tmp_path / "job", limit=900, **quick) as job:
        assert job.ends() == 0, job.err
        trials = [json.loads(line) for line in job.out.splitlines()]
    assert [trial for trial in trials if trial["problem"]] == []
    assert [trial["number"] for trial in trials] == list(range(first, first + count))
    if count >= 50:
        assert {trial["point"] for trial in trials} == (FULL if format == "full" else SHARDED)
        cells = {(trial["kind"], trial["wait"], trial["ranks"]) for trial in trials}
        assert len(cells) == 3 * 2 * (2 if format == "full" else 1)
        assert {tuple(trial["victims"]) for trial in trials} == {(0,), (1,), (0, 1)}


# a disk that takes no more


@contextmanager
def small_disk(folder):
    """64 kB. Not everybody may mount."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def launched():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric, {"n": 1, "w": torch.ones(10)}


def saved_again(how, directory):
    """Save a small checkpoint and then a large one: (path, error, text, number that is there then)."""
    fabric, state = launched()
    path = fabric.save_latest(directory, state, step=1) if how == "latest" else Path(directory, "a.pt")
    fabric.save(path, state)
    state |= {"n": 2, "w": torch.ones(1_000_000)}
    told = None
    try:
        if how == "latest":
            path = Path(directory, "step-00000002.pt")
            fabric.save_latest(directory, state, step=2)
        elif how == "beside":
            fabric.save(path, state, wait=False).wait()
        else:
            fabric.save(path, state)
    except Exception as error:
        told = type(error).__name__, str(error)
    state |= {"n": 0}
    if how == "latest":
        assert fabric.load_latest(directory, state) == 1
    else:
        fabric.load(path, state)
    assert fabric.all_reduce(torch.tensor(1.0), reduce_op="sum") == fabric.world_size
    return str(path), told, state["n"]


def check_refused(results, directory, error, reason):
    (path, first, left), (_, second, also_left) = results
    assert first == (error, f"{reason}: '{path}'")
    assert second == ("RankError", f"rank 0 failed while saving {path}: {error}: {reason}: '{path}'")
    assert left == also_left == 1, "the checkpoint before is gone"
    assert len(list(Path(directory).iterdir())) == 1, "something temporary was left"


@pytest.mark.parametrize("how", ["plain", "beside", "latest"])
def test_a_full_disk(ranks, tmp_path, how):
    with small_disk(tmp_path / "small") as directory:
        results = ranks.run(saved_again, how, str(directory), world_size=2)
        check_refused(results, directory, "OSError", "[Errno 28] No space left on device")


def with_small_files(how, directory):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        return saved_again(how, directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("how", ["plain", "beside", "latest"])
def test_a_file_that_may_not_grow(ranks, tmp_path, how):
    results = ranks.run(with_small_files, how, str(tmp_path), world_size=2)
    check_refused(results, tmp_path, "OSError", "[Errno 27] File too large")


# one rank of those that write a directory


def one_cannot_write(how, bad, wait, directory):
    """(kind, text) of what a save raises here whose rank `bad` may not write, and what is there then."""
    import resource

    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3")
    fabric.launch()
    path, limit, user = Path(directory, "parts"), resource.getrlimit(resource.RLIMIT_FSIZE), os.geteuid()
    model = fabric.setup(torch.nn.Linear(300, 300))
    fabric.save(path, {"model": model, "n": 1})
    told = None
    try:
        if fabric.global_rank == bad and how == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        elif fabric.global_rank == bad:
            with suppress(PermissionError):
                os.seteuid(65534)
        saving = fabric.save(path, {"model": model, "n": 2}, wait=wait)
        if saving is not None:
            saving.wait()
    except Exception as error:
        told = type(error).__name__, str(error)
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    fabric.barrier()  # the others' error comes before rank zero has tidied up
    left = sorted(entry.name for entry in Path(directory).iterdir())
    now = fabric.load(path)["n"]
    fabric.save(path, {"model": model, "n": 3})
    return told, left, now, fabric.load(path)["n"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how", ["size", "permission"])
def test_one_rank_that_cannot_write_its_part(ranks, how, bad, wait):
    if how == "permission" and os.geteuid():
        pytest.skip("needs to be root, to be nobody on one rank")
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        results = ranks.run(one_cannot_write, how, bad, wait, directory, world_size=2)
        path = f"{directory}/parts"
    kind, reason = {
        "size": ("OSError", "[Errno 27] File too large"),
        "permission": ("PermissionError", "[Errno 13] Permission denied"),
    }[how]
    for rank, (told, left, now, then) in enumerate(results):
        assert (left, now, then) == (["parts"], 1, 3)
        text = f"rank {bad} failed while saving {path}: {kind}: {reason}: '{path}'"
        if wait:
            expected = (kind, f"{reason}: '{path}'") if rank == bad else ("RankError", text)
            assert told == expected
        else:
            assert text in told[1] or (rank == bad and told == (kind, f"{reason}: '{path}'"))


# a directory that takes nothing


def as_nobody(how, directory):
    """Root may write anywhere: for these saves the rank is somebody else."""
    fabric, state = launched()
    path = Path(directory, "a.pt")
    fabric.save(path, state)
    Path(directory).chmod(0o555)
    fabric.barrier()
    user = os.geteuid()
    with suppress(PermissionError):  # not root: what is read-only is so for this user, too
        os.seteuid(65534)
    try:
        saving = fabric.save(path, {"n": 2}, wait=how != "beside")
        if saving is not None:
            saving.wait()
    except Exception as error:
        return type(error).__name__, str(error), fabric.load(path)["n"]
    finally:
        os.seteuid(user)
        fabric.barrier()
        Path(directory).chmod(0o755)


@pytest.mark.parametrize("how", ["plain", "beside"])
def test_a_directory_that_may_only_be_read(ranks, how):
    with TemporaryDirectory() as directory:  # not pytest's, which nobody else may enter
        Path(directory).chmod(0o755)
        first, second = ranks.run(as_nobody, how, directory, world_size=2)
        path = Path(directory, "a.pt")
        assert first == ("PermissionError", f"[Errno 13] Permission denied: '{path}'", 1)
        assert second[0] == "RankError"
        assert second[1] == f"rank 0 failed while saving {path}: PermissionError: {first[1]}"
        assert list(path.parent.iterdir()) == [path]


def below_a_file(directory):
    fabric, state = launched()
    fabric.save(Path(directory, "file", "a.pt"), state)


def test_a_directory_that_is_a_file(ranks, tmp_path):
    (tmp_path / "file").write_text("mine")
    first, second = ranks.run_expecting_errors(below_a_file, str(tmp_path), world_size=2)
    text = f"{tmp_path / 'file' / 'a.pt'} cannot be written: {tmp_path / 'file'} is a file. "
    text += "Write a path in a directory."
    assert str(first) == text
    assert str(second) == f"rank 0 failed while saving {tmp_path}/file/a.pt: NotADirectoryError: {text}"
    assert (tmp_path / "file").read_text() == "mine"


# the last act of a script


def saves_last(start, how, path):
    return subprocess.run(
        [PYTHON, str(SCRIPTS / "saves_last.py"), start, how, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["other raises", "fails and raises"])
def test_another_rank_fails_while_the_last_act_goes_on(tmp_path, how):
    done = saves_last("script", how, tmp_path / "a.pt")
    assert done.returncode == 1, done.stderr
    assert re.match(r"fabric: rank [01] on \S+ failed first: ValueError: boom", done.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "how"),
    [(start, how) for start in ("one", "script", "fork", "forkserver") for how in ("late", "fails")]
    + [("one", "fails and raises")],
)
def test_a_save_beside_the_loop_is_the_last_act(tmp_path, start, how):
    path = tmp_path / "a.pt"
    done = saves_last(start, how, path)
    said = f"fabric: rank 0 failed while saving {path}: OSError: [Errno 28] No space left on device: '{path}'"
    if how == "late":
        assert (done.returncode, done.stderr) == (0, "")
        assert torch.load(path, weights_only=True)["w"].sum() == 2_000_000
    else:
        assert done.returncode == 1, done.stderr
        assert done.stderr.splitlines().count(said) == 1, done.stderr
        assert not path.exists()
    assert "after the save of rank 0" in done.stdout
