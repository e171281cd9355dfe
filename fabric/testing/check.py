"""`fabric check train.py`: compare the gradients of a script on several ranks with those on one rank.

Runs the first steps of the script twice on the CPU: on several ranks, and on one with the joined batches.
Then compares the gradients of each step. Both runs have no dropout, and float32 in place of half precision.
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

from fabric.core.messages import print_line
from fabric.testing.recording import BATCHES, FOLDER, RANKS, STEPS

PAGE = "docs/how-to/accumulate.md"
PROGRESS_INTERVAL, TERMINATE_TIMEOUT = 20.0, 10.0
"""Seconds between two lines of progress; seconds from SIGTERM to SIGKILL of a run."""
TOLERANCE, NOISE = 1e-3, 1e-2
"""Largest accepted difference, relative to a parameter's largest gradient: more than another summation order
causes. That gradient counts as at least `NOISE` times the largest of its model.
"""


class Step(NamedTuple):
    """Records of one step of a run, by rank."""

    records: list[dict[str, Any]]

    @property
    def grads(self) -> dict[str, Any]:
        """Gradients by name, from the first rank that has each."""
        return {name: grad for record in reversed(self.records) for name, grad in record["grads"].items()}

    @property
    def shares(self) -> list[dict[str, Any]]:
        """One record per data shard: several ranks may have one shard (the stages of a pipeline)."""
        return list({record["rank"]: record for record in reversed(self.records)}.values())

    @property
    def rows(self) -> list[int]:
        """The hashes of the samples of all ranks, sorted."""
        return sorted(row for record in self.shares for row in record["rows"])

    @property
    def losses(self) -> list[float]:
        """The mean over ranks of the loss of each backward."""
        each = zip(*[record["losses"] for record in self.shares], strict=False)
        return [sum(values) / len(values) for values in each]


def check(command: list[str], ranks: int, steps: int) -> int:
    """Run a script on one rank and on several, and print whether gradients are the same.

    Args:
        command: The script (or "-m" and a module) and its arguments.
        ranks: Number of ranks that are compared with one.
        steps: Number of optimizer steps.

    Returns:
        The exit code: 0 if gradients are the same; 1 if not, or if Fabric raises an error or warns that
        several ranks compute other results than one; otherwise the code of the run that failed.
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
        print(
            "fabric check: no optimizer that fabric.setup returned has made a step. If the script loads a "
            "checkpoint of a run that is over, check it in a directory without that checkpoint.",
            file=sys.stderr,
        )
        return 1
    for number, (one, many) in enumerate(zip(alone, several, strict=False), 1):
        name, difference = compare(one, many)
        if name is not None:
            cause = "\n".join(warned) or likely_cause(name, one, many)
            print(f"step {number}: {difference}\nLikely: {cause}")
            return 1
        losses = f"{_formatted(one.losses)}, mean of ranks {_formatted(many.losses)}"
        print(f"step {number}: {len(one.grads)} gradients are the same ({difference}); losses {losses}")
    for text in warned:
        print(f"On {ranks} ranks: {text}")
    if warned:
        return 1
    for text in batch_sizes(alone[-1], several[-1]):
        print(f"Note: {text}")
    print(
        f"The same on 1 and on {ranks} ranks, for {min(len(alone), len(several))} steps (dropout was off). "
        "Evaluation, schedulers and stopping were not compared."
    )
    return 0


def batch_sizes(one: Step, many: Step) -> list[str]:
    """Return a text for each loader whose global batch grows with the ranks."""
    alone, each, world = one.records[0]["sizes"], many.records[0]["sizes"], many.records[0]["num_replicas"]
    return [
        f"batch_size={size} of loader {number} is per rank: {world} ranks train on {size * world} samples "
        f"per step, and a run on one rank on {whole}. For the same numbers write batch_size={whole} // "
        "fabric.world_size."
        for number, (whole, size) in enumerate(zip(alone, each, strict=False))
        if whole and size and whole != size * world
    ]


def compare(one: Step, many: Step) -> tuple[str | None, str]:
    """Return the first parameter whose gradients differ (None: all are equal), and the difference as text."""
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


def likely_cause(name: str, one: Step, many: Step) -> str:
    """Return the most likely cause of a difference between one rank and many."""
    world = len(many.shares)
    grads = [record["grads"][name] for record in many.records if name in record["grads"]]
    sizes = [len(record["rows"]) for record in many.shares]
    ratio = _ratio(one.grads.get(name), grads[0] if grads else None)
    if any([not torch.allclose(grads[0], other, equal_nan=True) for other in grads[1:]]):
        return (
            "ranks hold different gradients: a loss.backward() or gradients by hand without an average, a "
            "no_backward_sync that covers the last backward of a step, or parameters changed on one rank."
        )
    if one.rows != many.rows:
        return (
            "the samples differ: an order or augmentation with a different seed on each rank (write "
            "fabric.seed_everything(0) before the loaders), a loader that was not set up, or data read twice."
        )
    if ratio is not None and abs(ratio - world) < 0.01 * world:
        return (
            f"they are {world} times as large on one rank: the loss is a sum over the batch, and ranks "
            f"average. Write its mean, or fabric.normalize_gradients ({PAGE})."
        )
    if len(set(sizes)) > 1:
        return (
            f"ranks had {', '.join(map(str, sizes))} samples: the mean of their means is not that of all. "
            f"Write drop_last=True, or sum the loss and call fabric.normalize_gradients ({PAGE})."
        )
    if shared := {kind for record in one.records for kind in record["shared"]}:
        return (
            f"{', '.join(sorted(shared))} normalises by the samples of one rank. Write, on GPUs, model = "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fabric.setup, or use GroupNorm or "
            "LayerNorm."
        )
    return (
        "the loss of a sample depends on other samples of the batch (negatives: fabric.all_gather(x, "
        f"sync_grads=True)), it is not a mean over samples (mean over tokens: {PAGE}), or each rank draws "
        "different random numbers (draw those of all ranks, and use this rank's, as examples/gan.py does)."
    )


def _ratio(one: Any, many: Any) -> float | None:
    if one is None or many is None or not float(many.norm()):
        return None
    ratio = float(one.norm() / many.norm())
    return ratio if torch.allclose(one, many * ratio, rtol=1e-3, atol=1e-3 * float(one.abs().max())) else None


def _sizes(steps: list[Step]) -> tuple[int, list[int | None]]:
    """Return the number of data shards, and the global batch size of each loader."""
    if not steps:
        return 1, []
    world, sizes = steps[-1].records[0]["num_replicas"], steps[-1].records[0]["sizes"]
    return world, [size and size * world for size in sizes]


def _run(command: list[str], folder: Path, ranks: int, steps: int, sizes: Any) -> int:
    """Run the script on `ranks` ranks and return the exit code; print the output of a failed run."""
    variables = {
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file:{folder}/mlflow",
        "TMPDIR": str(folder),
        FOLDER: str(folder),
        STEPS: str(steps),
        RANKS: str(ranks),
        BATCHES: json.dumps(sizes),
    }
    start = ["-m", "fabric", "run", f"--devices={ranks}"] if ranks > 1 else []
    argv = [sys.executable, *start, "-m", "fabric.testing.recording", *command]
    print_line(f"check: running {steps} steps with devices={ranks}")
    with (folder / "output").open("w+") as output:
        code = _wait_for_run(argv, {**os.environ, **variables}, output, folder, ranks)
        if code:
            output.seek(0)
            print(output.read(), end="", file=sys.stderr)
            where = ", with the strategy of one device: no mesh, stage or DTensor" if ranks == 1 else ""
            print(f"fabric check: the run with devices={ranks}{where} failed (above).", file=sys.stderr)
    failed = [path.read_text() for path in sorted(folder.glob("failed-rank*"))]
    if failed:
        print(f"With devices={ranks} the script stops. {failed[0]}")
    return 1 if failed else code


def _wait_for_run(argv: list[str], env: dict[str, str], output: Any, folder: Path, ranks: int) -> int:
    """Return the exit code of a run; print its progress meanwhile, and end all of its processes."""
    begin, records = time.monotonic(), [f"step{number}-rank0.pt" for number in range(1, int(env[STEPS]) + 1)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                return process.wait(PROGRESS_INTERVAL)
            except subprocess.TimeoutExpired:
                done = len([name for name in records if (folder / name).exists()])
                seconds = round(time.monotonic() - begin)
                print_line(f"check: {done} of {len(records)} steps with devices={ranks} after {seconds} s")
    finally:
        signal.signal(signal.SIGTERM, before)
        _terminate(process, folder)


def _terminate(process: subprocess.Popen[Any], folder: Path) -> None:
    """End a run; on Linux also its descendants, which have the run's folder in their environment."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_TIMEOUT)
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


def _formatted(losses: list[float]) -> str:
    return ", ".join([f"{loss:.6g}" for loss in losses]) or "none"
