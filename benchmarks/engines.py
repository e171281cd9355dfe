"""Steps of engines of others to the same by hand, and beside ddp, 2 ranks: Horovod, local SGD.

`make test-engines ENGINES=horovod` makes the environment that this runs in.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import interleave, on_a_rank, ranks, ratios, show, summarise, timing_table
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Samples

ROOT = Path(__file__).resolve().parents[1]
HOROVOD = ROOT / ".venv-engines" / "horovod" / "bin"
WIDTH, DEPTH, BATCH = 384, 8, 64
BY_HAND, OURS, DDP = "Horovod by hand", "strategy='horovod'", "strategy='ddp'"


def net() -> nn.Module:
    """Eight layers, 1.2 million parameters: a step of some 10 ms."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def of_fabric(strategy: Any) -> Callable[[], None]:
    """A step of the loop of the README."""
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()

    return step


def by_hand() -> Callable[[], None]:
    """As Horovod's documentation writes it."""
    import horovod.torch as hvd

    hvd.init()
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


def steps_of_horovod(file: str, rounds: int) -> None:
    """On a rank that horovodrun has started."""
    import json

    import horovod.torch as hvd
    import torch.distributed as dist

    cases = {DDP: of_fabric("ddp"), OURS: of_fabric("horovod"), BY_HAND: by_hand()}
    cases[f"{BY_HAND} again"] = cases[BY_HAND]
    samples = interleave(cases, rounds, inner=5, before=dist.barrier)
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(samples))


def steps_of_local_sgd(rounds: int) -> Samples:
    """On a rank."""
    import torch.distributed as dist

    from fabric.strategies import LocalSGDStrategy

    cases = {DDP: of_fabric("ddp")}
    for every in (1, 16):
        cases[f"local_sgd, sync_every={every}"] = of_fabric(LocalSGDStrategy(every))
    return interleave(cases, rounds, inner=16, before=dist.barrier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if options.what:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        if options.what[0] == "horovod":
            steps_of_horovod(options.what[1], options.rounds)
        else:
            on_a_rank(lambda: steps_of_local_sgd(options.rounds))
        return
    show([horovod_table(options.rounds), local_table(options.rounds)])


def horovod_table(rounds: int) -> dict[str, Any]:
    """Interleaved in one job under horovodrun."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples.json")
        command: list[str] = [str(HOROVOD / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2"]
        command += [str(HOROVOD / "python"), __file__, "horovod", str(file), f"--rounds={rounds}"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=environ, timeout=600, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        samples = json.loads(file.read_text())
    note = f"{DEPTH} layers of {WIDTH}, batches of {BATCH}, SGD; 2 ranks of one thread; samples of 5 steps."
    item = timing_table("Horovod", samples, BY_HAND, 1e-3, "ms", note)
    ratio = ratios(samples, BY_HAND)
    limit = f"1 (again: {ratio[f'{BY_HAND} again']:.2f})"
    ours = f"{ratio[OURS]:.2f}; ddp {ratio[DDP]:.2f}"
    summarise(item, "step of strategy='horovod' to Horovod by hand, 2 ranks", {"ours": ours}, limit, "1.02")
    return item


def local_table(rounds: int) -> dict[str, Any]:
    """Interleaved on warm ranks."""
    samples = ranks([__file__, "local", f"--rounds={rounds}"], timeout=600, OMP_NUM_THREADS="1")
    note = "The same model; samples of 16 steps."
    return timing_table("Local SGD", samples, DDP, 1e-3, "ms", note)


if __name__ == "__main__":
    sys.exit(main())
