"""Saves that are killed, each in ranks of its own, which are forked from this warm process.

killed_saves.py DIRECTORY FORMAT FIRST COUNT: trials FIRST to FIRST + COUNT - 1 of saves in this format.
Prints a JSON line for each: what was done, and the problem, if there was one. A trial is drawn from its
number.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fabric import Fabric
from fabric.checkpoint.formats.sharded import dcp as sharded
from fabric.checkpoint.formats.sharded import save as sharded_save

KEEP = 2
SECONDS = 60
FULL = {
    "first": ["open", "torn write", "write", "sync", "synced", "rename", "renamed", "directory synced"],
    "overwriting": [
        *["open", "torn write", "write", "sync", "synced", "chmod", "rename", "renamed"],
        "directory synced",
    ],
    "latest": [
        *["open", "torn write", "write", "sync", "synced", "rename", "renamed", "directory synced"],
        *["remove", "removed"],
    ],
}
"""Where rank zero strikes, by the kind of save: before or after (in the past tense) what is named."""
PART = ["open", "torn write", "write", "sync", "synced"]
"""Of a sharded save, where any rank strikes, as it writes its part. Beside the loop it leaves notes, too."""
NOTES = ["mark", "marked", "tell", "told", "remove", "removed"]
NEW = ["mkdir", "made", "rename", "renamed", "manifest", "directory synced"]
WHOLE = {
    "first": NEW,
    "overwriting": [*NEW, "set aside", "delete", "torn delete", "deleted"],
    "latest": [*NEW, "delete", "torn delete", "deleted"],
}
"""Where rank zero alone does something."""
WRITES = {"write": 8, "torn write": 8}
"""So many places of that name, at least, are in each save; in a part; and there, where rank zero strikes."""
PART_WRITES = {"write": 3, "torn write": 3}
REPEATED = {**PART_WRITES, "sync": 3, "synced": 3, "directory synced": 2}


@dataclass
class Trial:
    number: int
    format: str
    kind: str
    wait: bool
    ranks: int
    victims: list[int]
    striker: int
    point: str | None
    """None: at a random time."""
    at: int
    """The save in which it happens."""
    nth: int
    """Of the places of that name in that save."""

    @classmethod
    def drawn(cls, number, format):
        draw = random.Random(number)
        kind = ("first", "overwriting", "latest")[number % 3]
        ranks = 2 if number % 7 == 6 or format == "sharded" else 1
        wait = number // 3 % 2 == 0
        striker, points, repeated = 0, FULL[kind], WRITES
        if format == "sharded":
            striker = draw.randrange(ranks)
            repeated = PART_WRITES if striker else REPEATED
            lists = [PART] + [NOTES] * (not wait) + [WHOLE[kind]] * (2 * (striker == 0))
            points = draw.choice(lists)
        point = draw.choice(points) if draw.random() < 0.75 else None
        at = {"first": 1, "overwriting": draw.randint(2, 4), "latest": draw.randint(KEEP + 1, 5)}[kind]
        victims = draw.choice([[0], [1], [0, 1]]) if ranks == 2 else [0]
        nth = draw.randint(1, repeated.get(point, 1))
        return cls(number, format, kind, wait, ranks, victims, striker, point, at, nth)


# what is saved


def made(fabric):
    net = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    return {"model": model, "optimizer": optimizer, "number": 0, "ema": torch.zeros(100)}


def tensors(state):
    moments = state["optimizer"].optimizer.state
    for parameter in state["model"].parameters():
        if not moments[parameter]:
            moments[parameter] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")},
            }
        yield from (parameter.data, *moments[parameter].values())
    yield state["ema"]


def put(state, number):
    state["number"] = number
    for place, tensor in enumerate(tensors(state)):
        values = torch.arange(float(tensor.numel())).view(tensor.shape) + (1000 * number + place)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            parts = values.chunk(mesh.size())
            tensor, values = tensor.to_local(), ([*parts, values[:0]])[mesh.get_local_rank()]
        tensor.copy_(values)


def holds(state, number):
    return state["number"] == number and all(
        torch.equal(tensor.view(-1), torch.arange(float(tensor.numel())) + (1000 * number + place))
        for place, tensor in enumerate(tensors(state))
    )


# the ranks that are killed


def save(fabric, trial, directory, state):
    if trial.kind == "latest":
        fabric.save_latest(directory, state, step=state["number"], keep=KEEP, wait=trial.wait)
    elif trial.wait:
        fabric.save(directory / "a.pt", state, format=trial.format)
    else:
        fabric.save(directory / "a.pt", state, format=trial.format, wait=False)


class Struck:
    """A file, whose `nth` write is a last one."""

    def __init__(self, file, come_to):
        self.file, self.come_to = file, come_to

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        data, done = memoryview(data).cast("B"), 0
        if self.come_to("torn write"):
            done = self.file.write(data[: len(data) // 2])
            self.file.flush()
            self.come_to("torn write", again=True)
        self.come_to("write")
        return done + self.file.write(data[done:])


def arm(trial, say, pids):
    """Strike at the trial's point from now on."""
    left = trial.nth

    def come_to(point, again=False):
        nonlocal left
        if point is None or point != trial.point:
            return False
        left -= not again
        if left > 0:
            return False
        if point.startswith("torn") and not again:
            return True
        say("strike")
        for rank in sorted(trial.victims, key=lambda rank: rank == trial.striker):  # the others first
            os.kill(pids[rank], signal.SIGKILL)
        left = 1_000_000  # a survivor goes on
        return False

    def around(owner, name, before, after, where=lambda *args: True):
        plain = getattr(owner, name)

        def patched(*args, **kwargs):
            struck = where(*args)
            come_to(before if struck else None)
            result = plain(*args, **kwargs)
            come_to(after if struck else None)
            return result

        setattr(owner, name, patched)

    around(Path, "replace", "rename", "renamed")
    around(Path, "chmod", "chmod", None)
    around(Path, "unlink", "remove", "removed")
    around(Path, "mkdir", "mkdir", "made", lambda path, *_: path.suffix == ".part")
    around(Path, "rename", "rename", "renamed", lambda path, to: Path(to).suffix != ".old")
    around(Path, "rename", None, "set aside", lambda path, to: Path(to).suffix == ".old")
    around(sharded_save, "keep_locked", "mark", "marked")
    around(Path, "write_bytes", "tell", "told")
    around(sharded, "write_manifest", "manifest", None)
    plain_sync, plain_open, plain_delete = os.fsync, Path.open, shutil.rmtree

    def sync(descriptor):
        directory = Path(f"/proc/self/fd/{descriptor}").is_dir()
        come_to(None if directory else "sync")
        plain_sync(descriptor)
        come_to("directory synced" if directory else "synced")

    def opened(path, mode="r", *args, **kwargs):
        file = plain_open(path, mode, *args, **kwargs)
        if mode != ("r+b" if trial.format == "full" else "wb") or path.suffix == ".told":
            return file
        come_to("open")
        return Struck(file, come_to)

    def delete(folder, **kwargs):
        come_to("delete")
        if come_to("torn delete"):
            os.remove(next(Path(folder).iterdir()))  # noqa: PTH107 - Path.unlink is a place of its own
            come_to("torn delete", again=True)
        plain_delete(folder, **kwargs)
        come_to("deleted")

    os.fsync, Path.open, shutil.rmtree = sync, opened, delete


def rank_runs(trial, rank, directory, pipe):
    def say(what, number=0):
        if rank == 0 or what == "strike":
            os.write(pipe, f"{what} {number}\n".encode())

    if trial.ranks > 1:
        where = f"file://{directory.with_suffix('.store')}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=trial.ranks)
    several = "zero3" if trial.format == "sharded" else "ddp"
    fabric = Fabric(accelerator="cpu", devices=trial.ranks, strategy=several if trial.ranks > 1 else "auto")
    fabric.launch()
    state = made(fabric)
    pids = [os.getpid()] if trial.ranks == 1 else fabric.all_gather(torch.tensor(os.getpid())).tolist()
    pending = 0
    for number in range(1 + (trial.kind == "overwriting"), trial.at + 3):
        put(state, number)  # also: what changes while a save goes on is not in its file
        say("call", number)
        if number == trial.at:
            say("now", number)
            if rank == trial.striker:
                arm(trial, say, pids)
        save(fabric, trial, directory, state)
        say("saved", number if trial.wait else pending)  # the call waits for the one before
        pending = number
        if trial.kind == "first":
            break
    fabric.strategy.finish_save()
    say("saved", pending)
    say("end")
    while True:
        fabric.barrier()  # a rank that is left hears here that it is alone
        time.sleep(0.01)


def begin(trial, rank, directory, pipe):
    pid = os.fork()
    if pid:
        return pid
    try:
        with Path(os.devnull).open("w") as nowhere:  # a rank that is left says that the other is gone
            os.dup2(nowhere.fileno(), 2)
        rank_runs(trial, rank, directory, pipe)
    except Exception:
        if rank not in trial.victims or len(trial.victims) < trial.ranks:
            os._exit(1)
        os.write(pipe, f"raised 0 {json.dumps(traceback.format_exc())}\n".encode())
    finally:
        os._exit(2)


# the process that looks at what they left


def lines(pipe, deadline):
    """What rank zero says, until no rank is there to say more."""
    rest = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            yield "silent", 0, ""
            return
        more = os.read(pipe, 65536)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        for line in whole:
            what, number, *text = line.decode().split(" ", 2)
            yield what, int(number), "".join(text)


def run(trial, directory, usual):
    """Let the ranks save and die: (last number that was saved, last that was tried, problem)."""
    reading, writing = os.pipe()
    pids = {rank: begin(trial, rank, directory, writing) for rank in range(trial.ranks)}
    os.close(writing)
    saved, called, problem, struck = 1 if trial.kind == "overwriting" else 0, 0, None, False
    for what, number, text in lines(reading, time.monotonic() + SECONDS):
        saved = max(saved, number) if what == "saved" else saved
        called = max(called, number) if what == "call" else called
        struck |= what == "strike"
        if what == "now" and trial.point is None:
            time.sleep(random.Random(trial.number).uniform(0, 1.3 * usual))
            for rank in trial.victims:
                os.kill(pids[rank], signal.SIGKILL)
            struck = True
        elif what in ("silent", "raised") or (what == "end" and not struck):
            problem = f"{what}: {text}"
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
    os.close(reading)
    codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in pids.items()}
    for rank, code in codes.items():
        if problem is None and code != (-signal.SIGKILL if rank in trial.victims else 1):
            problem = f"rank {rank} ended with {code}"
    return saved, called, problem


def look(fabric, trial, directory, state, saved, called):
    """The problem with what is there."""
    path = directory / "a.pt"
    put(state, 0)
    if trial.kind == "latest":
        found = fabric.load_latest(directory, state) or 0
    else:
        if path.exists() or list(directory.glob(".a.pt.*.old")):
            fabric.load(path, state)
        found = state["number"]
    if not saved <= found <= called:
        return f"{found} was loaded, {saved} was saved, {called} was tried"
    if not holds(state, found):
        return f"{found} is not what was saved then"
    complete = [entry.name for entry in directory.iterdir() if not entry.name.endswith((".part", ".old"))]
    if len(complete) > KEEP + 1 or (trial.kind != "latest" and complete not in ([], ["a.pt"])):
        return f"there are {complete}"
    put(state, called + 1)
    save(fabric, trial, directory, state)
    fabric.strategy.finish_save()
    left = sorted(entry.name for entry in directory.iterdir())
    most = KEEP if trial.kind == "latest" else 1
    tidy = trial.kind == "latest" or trial.format == "sharded"
    if tidy and (len(left) > most or any(name.startswith(".") for name in left)):
        return f"the next save left {left}"
    return None


def main(root, format, first, count):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.strategy.state_dict_type = format
    state = made(fabric)
    usual = 0.05
    for number in range(first, first + count):
        trial = Trial.drawn(number, format)
        directory = Path(root, str(number))
        directory.mkdir()
        begins = time.monotonic()
        if trial.kind == "overwriting":
            put(state, 1)
            fabric.save(directory / "a.pt", state, format=format)
            usual = time.monotonic() - begins
        saved, called, problem = run(trial, directory, usual)
        try:
            problem = problem or look(fabric, trial, directory, state, saved, called)
        except Exception:
            problem = traceback.format_exc()
        seconds = round(time.monotonic() - begins, 3)
        print(json.dumps({**asdict(trial), "saved": saved, "seconds": seconds, "problem": problem}))
        if problem is None:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
