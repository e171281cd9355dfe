"""Steps and memory of engines of others to the same by hand, and beside ours: Horovod, DeepSpeed, local SGD.

2 ranks. `make test-engines ENGINES="deepspeed horovod"` makes the environments that this runs in.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import interleave, on_a_rank, ranks, ratios, show, summarise, table, timing_table
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Samples

ROOT = Path(__file__).resolve().parents[1]
HOROVOD = ROOT / ".venv-engines" / "horovod" / "bin"
DEEPSPEED = ROOT / ".venv-engines" / "deepspeed" / "bin"
WIDTH, DEPTH, BATCH = 384, 8, 64
BY_HAND, OURS, DDP = "Horovod by hand", "strategy='horovod'", "strategy='ddp'"


LARGE = 2048
"""Width of the model whose memory is looked at: 33.6 million parameters."""


def net(width: int = WIDTH) -> nn.Module:
    """Eight layers, 1.2 million parameters: a step of some 10 ms."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])


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


def adam(strategy: str, width: int = WIDTH) -> Callable[[], None]:
    """A step of the loop of the README with Adam, under a strategy or by DeepSpeed's documentation."""
    import torch.distributed as dist

    x, model = torch.randn(BATCH if width == WIDTH else 2, width), net(width)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if strategy.startswith("DeepSpeed by hand"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": int(strategy[-1]), "overlap_comm": strategy[-1] != "1"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 62,
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step() -> None:
            engine.backward(engine(x).pow(2).mean())
            engine.step()

        return step
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, optimizer)

    def step_of_ours() -> None:
        optimizer.zero_grad()
        fabric.backward(wrapped(x).pow(2).mean())
        optimizer.step()

    return step_of_ours


def in_three_ways(stage: int) -> dict[str, str]:
    """What is compared: name of the case to what `adam` takes."""
    hand, ours = f"DeepSpeed by hand, stage {stage}", f"strategy='deepspeed_stage_{stage}'"
    own = f"zero{stage}"
    return {hand: hand, ours: f"deepspeed_stage_{stage}", f"strategy='{own}'": own}


def prepared() -> None:
    """DeepSpeed by hand in the group that stands, without what it would compile."""
    from fabric.integrations.deepspeed.package import load_deepspeed

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    load_deepspeed("cpu").init_distributed(dist_init_required=False)


def steps_of_deepspeed(stage: int, rounds: int, busy: bool) -> Samples:
    """On a rank."""
    import torch.distributed as dist

    prepared()
    cases = {name: adam(strategy) for name, strategy in in_three_ways(stage).items()}
    hand = next(iter(cases))
    cases[f"{hand} again"] = cases[hand]
    # Without the time in which others held the core, or rank zero waited: what the wrapper costs is in this.
    clock = time.thread_time if busy else time.perf_counter
    return interleave(cases, rounds, inner=5, clock=clock, before=dist.barrier)


def memory_of(strategy: str) -> list[float]:
    """On a rank: resident bytes per parameter after a step, and the most during one."""
    from memory import peak, settled

    prepared()
    small = adam(strategy)
    for _ in range(2):
        small()
    base, count = settled(), sum([p.numel() for p in net(LARGE).parameters()])
    step = adam(strategy, LARGE)
    for _ in range(2):
        step()
    return [(settled() - base) / count, (peak(step) - base) / count]


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
    parser.add_argument(
        "--busy", action="store_true", help="processor time of DeepSpeed's steps, for a busy machine"
    )
    options = parser.parse_args()
    if options.what:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        what, *given = options.what
        if what == "horovod":
            steps_of_horovod(given[0], options.rounds)
        elif what == "deepspeed":
            on_a_rank(lambda: steps_of_deepspeed(int(given[0]), options.rounds, options.busy))
        elif what == "memory":
            on_a_rank(lambda: memory_of(given[0]))
        else:
            on_a_rank(lambda: steps_of_local_sgd(options.rounds))
        return
    tables = [deepspeed_table(stage, options.rounds, options.busy) for stage in (1, 2, 3)]
    show([*tables, memory_table(), horovod_table(options.rounds), local_table(options.rounds)])


def of_deepspeed(*arguments: str) -> Any:
    """What ranks in DeepSpeed's environment report."""
    return ranks(
        [__file__, *arguments],
        timeout=600,
        python=str(DEEPSPEED / "python"),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    )


def deepspeed_table(stage: int, rounds: int, busy: bool = False) -> dict[str, Any]:
    """Interleaved on warm ranks."""
    samples = of_deepspeed("deepspeed", str(stage), f"--rounds={rounds}", *["--busy"] * busy)
    hand, ours, own = in_three_ways(stage)
    note = f"{DEPTH} layers of {WIDTH}, batches of {BATCH}, Adam; 2 ranks of one thread; samples of 5 steps."
    item = timing_table(f"DeepSpeed, stage {stage}", samples, hand, 1e-3, "ms", note)
    ratio = ratios(samples, hand)
    limit = f"1 (again: {ratio[f'{hand} again']:.2f})"
    seen = {"ours": f"{ratio[ours]:.2f}; zero{stage} {ratio[own]:.2f}"}
    summarise(item, f"step of strategy='deepspeed_stage_{stage}' to the same by hand", seen, limit, "1.02")
    return item


def memory_table() -> dict[str, Any]:
    """A job of 2 ranks for each case."""
    rows = []
    for stage in (1, 2, 3):
        for name, strategy in in_three_ways(stage).items():
            after, most = of_deepspeed("memory", strategy)
            rows.append([name, f"{after:.2f}", f"{most:.2f}"])
    note = f"{DEPTH} layers of {LARGE}, float32, Adam; resident memory of rank zero of 2."
    return table("Bytes per parameter and rank", ["case", "after a step", "at most in a step"], rows, note)


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
