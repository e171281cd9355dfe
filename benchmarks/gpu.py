"""On one GPU, against raw torch in the same run: steps of transformers, loader, clip, saves, peak memory.

`tests/gpu/run.sh` starts it. It needs torch and this package alone, and runs on the pretend device, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import subprocess
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from harness import commit, cpu_name, interleave, markdown, table, timing_table, version
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Table

KIND = "sim" if hasattr(torch, "sim") else "cuda"
DEVICE = torch.device(KIND, 0)
MODULE: Any = getattr(torch, KIND)
MIB = 2**20


class Size(NamedTuple):
    """A transformer and its batch."""

    layers: int
    width: int
    vocabulary: int
    rows: int
    length: int


SMALL = Size(layers=2, width=128, vocabulary=512, rows=4, length=64)
SAVED = Size(layers=4, width=768, vocabulary=16_384, rows=2, length=64)
"""41 million parameters: with AdamW 470 MiB."""
LARGE = Size(layers=12, width=768, vocabulary=16_384, rows=8, length=512)
"""98 million parameters."""
TINY = Size(layers=1, width=32, vocabulary=64, rows=2, length=8)


class Block(nn.Module):
    """Attention and a feed-forward network, normalised before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, -1, min(64, width)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A language model whose embedding is its last layer, too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*[Block(size.width) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


def fabric_of(precision: str = "32-true") -> Any:
    """On the one device."""
    from fabric import Fabric

    return Fabric(accelerator=KIND, devices=1, precision=precision)


class Loop:
    """A model, its optimizer and a batch; `step()` trains once, in raw torch or by this package.

    Args:
        size: Of the model and its batch.
        precision: "32-true" or "bf16-mixed".
        ours: Whether this package runs it.
    """

    def __init__(self, size: Size, precision: str, ours: bool) -> None:
        torch.manual_seed(0)
        with DEVICE:
            self.model: Any = Transformer(size)
            self.tokens = torch.randint(size.vocabulary, (size.rows, size.length))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.fabric = fabric_of(precision) if ours else None
        if self.fabric is not None:
            self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        self.mixed = precision == "bf16-mixed"

    def step(self) -> None:
        """Forward, backward and the optimizer's step; nothing waits for the device."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self.backward(loss)
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        """The mean cross entropy of the next tokens."""
        autocast = self.mixed and self.fabric is None
        with torch.autocast(KIND, torch.bfloat16) if autocast else nullcontext():
            out = self.model(self.tokens)
        return F.cross_entropy(out.float().flatten(0, 1), self.tokens.roll(-1, 1).flatten())

    def loss_after(self, steps: int) -> float:
        """The loss after some steps: raw torch's and ours are to be equal."""
        for _ in range(steps):
            self.step()
        return self.loss().item()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, in raw torch or by this package."""
        loss.backward() if self.fabric is None else self.fabric.backward(loss)


class Bench:
    """The topics, each a list of tables.

    Args:
        quick: Smallest sizes and numbers of rounds: only whether it runs.
    """

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.small = TINY if quick else SMALL
        self.large = TINY if quick else LARGE
        self.saved = TINY if quick else SAVED

    def timed(
        self, title: str, cases: dict[str, Callable[[], Any]], rounds: int, inner: int, **how: Any
    ) -> Table:
        """Milliseconds per call of each case, with the device's work in it."""

        def until_done(call: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(inner):
                    call()
                MODULE.synchronize()

            return run

        rounds, inner, warmup = (2, 1, 1) if self.quick else (rounds, inner, 1 if rounds < 5 else 3)
        unit, before = 1e-3 * inner, how.pop("before", MODULE.synchronize)
        timed = {name: until_done(call) for name, call in cases.items()}
        samples = interleave(timed, rounds, warmup=warmup, before=before)
        return timing_table(title, samples, "raw", unit, "ms", **how)

    def steps(self) -> list[Table]:
        """A step of each model and precision, and the memory that it takes."""
        found, memory = [], []
        for name, size, rounds, inner in (("small", self.small, 30, 20), ("100M", self.large, 10, 1)):
            for precision in ("32-true", "bf16-mixed"):
                loops = {"raw": Loop(size, precision, False), "ours": Loop(size, precision, True)}
                count = sum([p.numel() for p in loops["raw"].model.parameters()])
                losses = {who: loop.loss_after(3) for who, loop in loops.items()}
                title = f"A step of the {name} transformer ({count:,} parameters), {precision}"
                cases = {"raw": loops["raw"].step, "raw again": loops["raw"].step, "ours": loops["ours"].step}
                found.append(
                    self.timed(title, cases, rounds, inner, note=f"Batch {size.rows} x {size.length}.")
                )
                peaks = {who: peak(loop.step) for who, loop in loops.items()}
                memory.append(
                    [
                        f"{name}, {precision}",
                        *[f"{peaks[who] / MIB:.1f}" for who in loops],
                        f"{peaks['ours'] / peaks['raw']:.3f}",
                        *[f"{losses[who]:.5f}" for who in loops],
                    ]
                )
                del loops, cases
                gc.collect()
                MODULE.empty_cache()
        head = [
            "model",
            "raw MiB",
            "ours MiB",
            "ratio",
            "loss of raw after 3 steps",
            "loss of ours",
        ]
        title = "Peak memory of a step beyond the model, its gradients and its optimizer; losses"
        return [*found, table(title, head, memory)]

    def loader(self) -> list[Table]:
        """An epoch of batches in pinned memory, each used by products on the device."""
        width, count = (64, 8) if self.quick else (4096, 32)
        rows = torch.randn(count * 256, width)
        weight = torch.randn(width, width, device=DEVICE)

        def fresh(pinned: bool) -> Any:
            return DataLoader(TensorDataset(rows), batch_size=256, pin_memory=pinned)

        found = []
        for pinned in (True, False):
            ours = fabric_of().setup_dataloaders(fresh(pinned))
            raw = fresh(pinned)

            def epoch_of_raw(raw: Any = raw) -> None:
                for (x,) in raw:
                    use(x.to(DEVICE, non_blocking=True), weight)

            def epoch_of_ours(ours: Any = ours) -> None:
                for (x,) in ours:
                    use(x, weight)

            cases = {"raw": epoch_of_raw, "raw again": epoch_of_raw, "ours": epoch_of_ours}
            kind = "pinned" if pinned else "pageable"
            each = rows[:256].nbytes / MIB
            title = f"An epoch of {count} batches of {each:.2g} MiB, {kind}, with work on the device"
            note = "Raw copies by `.to(device, non_blocking=True)`; ours copies the next batch ahead."
            found.append(self.timed(title, cases, 10, 1, note=note))
        return found

    def clip(self) -> list[Table]:
        """Clipping to a norm of the large model's gradients; the host does not wait for it."""
        raw, ours = Loop(self.large, "32-true", False), Loop(self.large, "32-true", True)
        for loop in (raw, ours):
            loop.backward(loop.loss())
        parameters = list(raw.model.parameters())

        def plain() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)

        cases = {
            "raw": plain,
            "raw again": plain,
            "raw, error_if_nonfinite": lambda: nn.utils.clip_grad_norm_(
                parameters, 1.0, error_if_nonfinite=True
            ),
            "ours": lambda: ours.fabric.clip_gradients(ours.model, ours.optimizer, max_norm=1.0),
        }
        return [self.timed("Clipping the gradients of the 100M transformer to a norm", cases, 20, 5)]

    def saves(self) -> list[Table]:
        """A checkpoint of a model and its AdamW, to the folder for temporary files."""
        loop = Loop(self.saved, "32-true", True)
        loop.step()
        plain = {"model": loop.model.module.state_dict(), "optimizer": loop.optimizer.state_dict()}
        size = sum([p.nbytes for p in loop.model.parameters()]) * 3 / MIB
        with tempfile.TemporaryDirectory() as folder:
            path, pending = Path(folder, "a.pt"), []
            state = {"model": loop.model, "optimizer": loop.optimizer}

            def settle() -> None:
                while pending:
                    pending.pop().wait()
                os.sync()
                MODULE.synchronize()

            def raw(flush: bool) -> None:
                with path.open("wb") as file:
                    torch.save(plain, file)
                    if flush:
                        file.flush()
                        os.fsync(file.fileno())

            def begin() -> None:
                pending.append(loop.fabric.save(path, state, wait=False))

            cases = {
                "raw": lambda: raw(True),
                "torch.save without fsync": lambda: raw(False),
                "ours": lambda: loop.fabric.save(path, state),
                "ours, wait=False, until it returns": begin,
                "one copy to the host": lambda: [p.to("cpu") for p in tensors_of(plain)],
            }
            note = "Raw is torch.save and fsync, which ours does, too."
            title = f"Saving {size:.0f} MiB"
            made = self.timed(title, cases, 3, 1, before=settle, note=note)
            settle()
            return [made]


def use(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Work on the device of about the length of a copy."""
    return (x @ weight @ weight).relu_()


def tensors_of(plain: dict[str, Any]) -> list[torch.Tensor]:
    """Those of a model and of its optimizer."""
    states = plain["optimizer"]["state"].values()
    return [*plain["model"].values(), *[v for state in states for v in state.values()]]


def peak(call: Callable[[], Any]) -> int:
    """The most bytes on the device during a call, beyond those before it."""
    MODULE.synchronize()
    MODULE.reset_peak_memory_stats()
    before = MODULE.memory_allocated()
    call()
    MODULE.synchronize()
    return int(MODULE.max_memory_allocated() - before)


def facts() -> list[str]:
    """Device, driver, versions and commit, one fact a line."""
    if KIND == "sim":
        device = "pretend device: figures say nothing about speed"
    else:
        shape = torch.cuda.get_device_properties(0)
        memory, capability = f"{shape.total_memory / 2**30:.0f} GiB", f"{shape.major}.{shape.minor}"
        device = f"{shape.name}, {memory}, compute capability {capability}"
    versions = [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    if KIND == "cuda" and torch.distributed.is_nccl_available():
        versions.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    packages = [f"{name} {version(name)}" for name in ("torch", "torchmetrics", "torchao")]
    return [
        f"- device: {device}, driver {driver()}; {', '.join(versions)}",
        f"- machine: {cpu_name()}, {len(os.sched_getaffinity(0))} usable cores, {platform.platform()}",
        f"- Python {platform.python_version()}, {', '.join(packages)}",
        f"- TF32 in matrix products: {torch.backends.cuda.matmul.allow_tf32}",
        f"- commit: {commit()}; `bash tests/gpu/run.sh`",
    ]


def driver() -> str:
    """The version of the NVIDIA driver, or "unknown"."""
    if KIND != "cuda" or shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return next(iter(done.stdout.split()), "unknown")


def main() -> int:
    """Run the topics that fit the time, write what they found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file; default: printed only")
    parser.add_argument("--seconds", type=float, default=105.0, help="no topic begins later")
    parser.add_argument("--quick", action="store_true", help="only whether it runs")
    options = parser.parse_args()
    if KIND == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was measured")
        return 0
    warnings.simplefilter("ignore")
    begin, bench = time.monotonic(), Bench(options.quick)
    tables: list[Table] = []
    failures: list[str] = []
    for topic in (bench.steps, bench.loader, bench.clip, bench.saves):
        name = topic.__name__
        if time.monotonic() - begin > options.seconds:
            failures.append(f"{name}: not begun within {options.seconds:.0f} s")
            continue
        try:
            tables += topic()
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        gc.collect()
        MODULE.empty_cache()
        if options.out is not None:  # after each topic: a run that is stopped leaves what it has
            options.out.write_text(page(tables, failures), encoding="utf-8")
    text = page(tables, failures)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return int(bool(failures))


def page(tables: list[Table], failures: list[str]) -> str:
    """The result file."""
    lines = [f"# One GPU against raw torch, {date.today().isoformat()}", "", *facts()]
    lines += [f"- **not measured: {failure}**" for failure in failures]
    return "\n".join([*lines, "", markdown(tables)])


if __name__ == "__main__":
    raise SystemExit(main())
