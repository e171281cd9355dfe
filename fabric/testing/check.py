"""`fabric check train.py`: whether a script computes on several ranks what it computes on one, step by step.

Runs the first steps of the script twice, on the CPU: on one rank, whose batches join what the ranks get, and
on several; then compares the gradients of each step. Dropout is off in both, half precision is single.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fabric.core.messages import say
from fabric.testing.recording import BATCHES, FOLDER, RANKS, STEPS

PAGE = "docs/how-to/accumulate.md"
SHOWN_EVERY, SECONDS_TO_END = 20.0, 10.0
"""Seconds between two lines of progress; that a run has to end by itself."""
TOLERANCE, NOISE = 1e-3, 1e-2
"""What other orders of adding up stay below: a part of a parameter's largest gradient; where that is small,
of so much of its model's.
"""


class Step(NamedTuple):
    """One step of a run, by rank."""

    records: list[dict[str, Any]]

    @property
    def grads(self) -> dict[str, Any]:
        """Gradients by name; of one that several ranks hold, the first's."""
        return {name: grad for record in reversed(self.records) for name, grad in record["grads"].items()}

    @property
    def shares(self) -> list[dict[str, Any]]:
        """One record of each part of the data: several ranks may hold one (of a pipeline, say)."""
        return list({record["rank"]: record for record in reversed(self.records)}.values())

    @property
    def rows(self) -> list[int]:
        """The hashes of the samples of all ranks, sorted."""
        return sorted(row for record in self.shares for row in record["rows"])

    @property
    def losses(self) -> list[float]:
        """The mean of the ranks for each backward."""
        each = zip(*[record["losses"] for record in self.shares], strict=False)
        return [sum(values) / len(values) for values in each]


def check(command: list[str], ranks: int, steps: int) -> int:
    """Run a script on one rank and on several, and say whether they compute the same.

    Args:
        command: The script (or "-m" and a module) and its arguments.
        ranks: How many are compared with one.
        steps: How many steps of optimizers.

    Returns:
        The exit code: 0 where gradients are the same, 1 where not, or where Fabric raises an error or warns
        that ranks compute something else than one process; else that of the run that failed.
    """
    runs: list[list[Step]] = []
    for count in (ranks, 1):
        with tempfile.TemporaryDirectory() as folder:
            code = _run(command, Path(folder), count, steps, _sizes(runs[0]) if runs else (1, []))
            if code:
                return code
            runs.append(_read(Path(folder), count))
    several, alone = runs
    warned = list(
        dict.fromkeys([text for step in several for rank in step.records for text in rank["warned"]])
    )
    if not alone or not several:
        print("fabric check: no optimizer that fabric.setup gave back has made a step.", file=sys.stderr)
        return 1
    for number, (one, many) in enumerate(zip(alone, several, strict=False), 1):
        name, difference = compare(one, many)
        if name is not None:
            cause = "\n".join(warned) or reason(name, one, many)
            print(f"step {number}: {difference}\nLikely: {cause}")
            return 1
        losses = f"{_shown(one.losses)}, mean of ranks {_shown(many.losses)}"
        print(f"step {number}: {len(one.grads)} gradients are the same ({difference}); losses {losses}")
    for text in warned:
        print(f"On {ranks} ranks: {text}")
    if warned:
        return 1
    print(f"The same on 1 and on {ranks} ranks, for {min(len(alone), len(several))} steps (dropout was off).")
    return 0


def compare(one: Step, many: Step) -> tuple[str | None, str]:
    """The first parameter whose gradients differ, and how; None: none does."""
    expected, found = one.grads, many.grads
    missing = expected.keys() ^ found.keys()
    if missing:
        name = min(missing)
        where = "one rank" if name in expected else f"{len(many.records)} ranks"
        return name, f"{name} has a gradient on {where} only"
    scales, worst = scales_of(expected), 0.0
    for name, grad in expected.items():
        scale = scales[name]
        for rank, record in enumerate(many.records):
            other = record["grads"].get(name)
            if other is None or not grad.numel():
                continue
            off = float((grad - other).abs().max()) if grad.shape == other.shape else float("inf")
            if not off <= TOLERANCE * scale:
                return name, (
                    f"the gradient of {name} differs: norm {float(grad.norm()):.6g} on one rank, "
                    f"{float(other.norm()):.6g} on rank {rank} of {len(many.records)}"
                )
            worst = max(worst, off / scale if scale else 0.0)
    return None, f"within {worst:.1g} of the largest"


def scales_of(grads: dict[str, Any]) -> dict[str, float]:
    """Return the largest magnitude of each gradient, at least a fraction of its model's largest."""
    largest = {name: float(grad.abs().max()) if grad.numel() else 0.0 for name, grad in grads.items()}
    models: dict[str, float] = {}
    for name, value in largest.items():
        model = name.rpartition(": ")[0]
        models[model] = max(value, models.get(model, 0.0))
    return {name: max(value, NOISE * models[name.rpartition(": ")[0]]) for name, value in largest.items()}


def reason(name: str, one: Step, many: Step) -> str:
    """Return the most likely cause of a difference between one process and many."""
    world = len(many.shares)
    held = [record["grads"][name] for record in many.records if name in record["grads"]]
    sizes = [len(record["rows"]) for record in many.shares]
    ratio = _ratio(one.grads.get(name), held[0] if held else None)
    if any([not torch.allclose(held[0], other, equal_nan=True) for other in held[1:]]):
        return (
            "ranks hold different gradients: a loss.backward() or gradients by hand that nothing averaged, a "
            "no_backward_sync that covers the last backward of a step, or parameters changed on one rank."
        )
    if one.rows != many.rows:
        return (
            "the samples differ: an order or an augmentation that is random by itself on each rank (write "
            "fabric.seed_everything(0) before the loaders), a loader that was not set up, or data read twice."
        )
    if ratio is not None and abs(ratio - world) < 0.01 * world:
        return (
            f"they are {world} times as large on one rank: the loss is a sum over the batch, and ranks "
            f"average. Write its mean, or fabric.normalize_gradients ({PAGE})."
        )
    if len(set(sizes)) > 1:
        return (
            f"ranks had {', '.join(map(str, sizes))} samples: their means' mean is not that of all. "
            f"Write drop_last=True, or sum the loss and call fabric.normalize_gradients ({PAGE})."
        )
    if shared := {kind for record in one.records for kind in record["shared"]}:
        return (
            f"{', '.join(sorted(shared))} normalises by the samples of its own rank. Write, on GPUs, model = "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup, or use GroupNorm or "
            "LayerNorm."
        )
    return (
        "the loss of a sample depends on the others of its batch (negatives: fabric.all_gather(x, "
        f"sync_grads=True)), it is no mean over samples (one over tokens: {PAGE}), or each rank draws random "
        "numbers of its own (draw those of all, and take this rank's, as examples/gan.py does)."
    )


def _ratio(one: Any, many: Any) -> float | None:
    if one is None or many is None or not float(many.norm()):
        return None
    ratio = float(one.norm() / many.norm())
    return ratio if torch.allclose(one, many * ratio, rtol=1e-3, atol=1e-3 * float(one.abs().max())) else None


def _sizes(steps: list[Step]) -> tuple[int, list[int | None]]:
    """By how many ranks data are shared, and the samples in each loader's batches of all of them."""
    if not steps:
        return 1, []
    world, sizes = steps[-1].records[0]["num_replicas"], steps[-1].records[0]["sizes"]
    return world, [size and size * world for size in sizes]


def _run(command: list[str], folder: Path, ranks: int, steps: int, sizes: Any) -> int:
    """Run the script on so many ranks. The exit code; what a run says that fails is shown."""
    own = {
        "TMPDIR": str(folder),
        FOLDER: str(folder),
        STEPS: str(steps),
        RANKS: str(ranks),
        BATCHES: json.dumps(sizes),
    }
    start = ["-m", "fabric", "run", f"--devices={ranks}"] if ranks > 1 else []
    argv = [sys.executable, *start, "-m", "fabric.testing.recording", *command]
    say(f"check: running {steps} steps with devices={ranks}")
    with (folder / "said").open("w+") as said:
        code = _finished(argv, {**os.environ, **own}, said, folder, ranks)
        if code:
            said.seek(0)
            print(said.read(), end="", file=sys.stderr)
            where = ", with the strategy of one device: no mesh, stage or DTensor" if ranks == 1 else ""
            print(f"fabric check: the run with devices={ranks}{where} failed (above).", file=sys.stderr)
    failed = [path.read_text() for path in sorted(folder.glob("failed-rank*"))]
    if failed:
        print(f"With devices={ranks} the script stops. {failed[0]}")
    return 1 if failed else code


def _finished(argv: list[str], env: dict[str, str], said: Any, folder: Path, ranks: int) -> int:
    """The exit code of a run; its progress is shown meanwhile, and nothing that it started stays."""
    begin, limits = time.monotonic(), [f"step{number}-rank0.pt" for number in range(1, int(env[STEPS]) + 1)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(argv, env=env, stdout=said, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                return process.wait(SHOWN_EVERY)
            except subprocess.TimeoutExpired:
                done = len([name for name in limits if (folder / name).exists()])
                seconds = round(time.monotonic() - begin)
                say(f"check: {done} of {len(limits)} steps with devices={ranks} after {seconds} s")
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(process, folder)


def _end(process: subprocess.Popen[Any], folder: Path) -> None:
    """End a run, and on Linux whatever its script has started: they have its folder in their environment."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    mark = f"{FOLDER}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _read(folder: Path, ranks: int) -> list[Step]:
    steps: list[Step] = []
    while all([(folder / f"step{len(steps) + 1}-rank{rank}.pt").exists() for rank in range(ranks)]):
        paths = [folder / f"step{len(steps) + 1}-rank{rank}.pt" for rank in range(ranks)]
        steps.append(Step([torch.load(path, weights_only=True) for path in paths]))
    return steps


def _shown(losses: list[float]) -> str:
    return ", ".join([f"{loss:.6g}" for loss in losses]) or "none"
