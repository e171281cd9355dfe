"""2 and 4 ranks to their first barrier and end, by every launcher: CPU seconds of all. Linux only."""

from __future__ import annotations

import sys

from harness import HERE, Samples, Table, installed, ratios, show, spread, summarise, table, tree_cost, turns

SCRIPTS = HERE / "launched"
OURS = ("script", "fabric run", "fork", "forkserver", "forkserver, second launch", "spawn")


def main(rounds: int = 5) -> None:
    show([compared(ranks, rounds) for ranks in (2, 4)])


def compared(ranks: int, rounds: int) -> Table:
    """The table of one number of ranks."""
    commands = {name: command for name, command in all_commands(ranks).items() if works(name, command, ranks)}
    cpu: Samples = {name: [] for name in commands}
    wall: Samples = {name: [] for name in commands}
    for _ in turns(rounds, f"launch of {ranks}"):
        for name, command in commands.items():
            used, took = tree_cost(command, BENCH_RANKS=str(ranks))
            cpu[name].append(used)
            wall[name].append(took)
    derive_second_launches(cpu)
    derive_second_launches(wall)
    columns = [ratios(times, to) for to in ("torchrun", "plain script, torch first") for times in (cpu, wall)]
    rows = [
        [name, *spread(times, 1.0), *[f"{column[name]:.2f}" for column in columns]]
        for name, times in cpu.items()
    ]
    head = ["case", "min CPU s", "median", "max", "CPU / torchrun", "wall", "CPU / plain", "wall"]
    note = (
        "Plain: with torch first. A second launch is a script with two launches minus one with one: noisier."
    )
    done = table(f"Launch of {ranks} ranks to the first barrier", head, rows, note)
    ratio = columns[0]
    best = {
        "ours": ", ".join(f"{how} {ratio[f'ours, {how}']:.2f}" for how in OURS if f"ours, {how}" in ratio),
        "Lightning Fabric": f"{ratio.get('Lightning Fabric, script', float('nan')):.2f}",
        "Accelerate": f"{ratio.get('Accelerate, torchrun', float('nan')):.2f} (torchrun)",
    }
    target = "<= 1.0, second forkserver launch <= 0.15"
    summarise(done, f"launch of {ranks} ranks to the first barrier, CPU s vs torchrun", best, "", target)
    return done


def all_commands(ranks: int) -> dict[str, list[str]]:
    """Each launcher's command line; the first is what the others are compared with."""
    python = sys.executable
    ours, torchrun = (
        [python, script("ours.py")],
        [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
    )
    commands = {
        "plain script": [python, script("plain.py")],
        "plain script, torch first": [python, script("plain.py"), "first"],
        "torchrun": [*torchrun, script("under_torchrun.py")],
        "ours, script": ours,
        "ours, fabric run": [python, "-m", "fabric", "run", f"--devices={ranks}", script("ours.py")],
        "ours, torchrun": [*torchrun, script("ours.py")],
    }
    for method in ("spawn", "fork", "forkserver"):
        commands[f"ours, {method}"] = [*ours, method, "1"]
        commands[f"ours, {method}, twice"] = [*ours, method, "2"]
    if installed("lightning"):
        commands["Lightning Fabric, script"] = [python, script("lightning_fabric.py")]
        commands["Lightning Fabric, fork"] = [python, script("lightning_fabric.py"), "ddp_fork"]
    if installed("accelerate"):
        # Not `accelerate launch --cpu --num_processes=2`: that starts one process.
        commands["Accelerate, torchrun"] = [*torchrun, script("hugging.py")]
    return commands


def script(name: str) -> str:
    """The path of a script that is launched."""
    return str(SCRIPTS / name)


def works(name: str, command: list[str], ranks: int) -> bool:
    """Whether the command runs here (it also warms caches); says why not."""
    try:
        tree_cost(command, BENCH_RANKS=str(ranks))
    except RuntimeError as error:
        print(f"{name} is left out: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return False
    return True


def derive_second_launches(costs: dict[str, list[float]]) -> None:
    """Replace "..., twice" by the difference to once."""
    for name in [name for name in costs if name.endswith(", twice")]:
        once, twice = costs[name.removesuffix(", twice")], costs.pop(name)
        costs[name.replace("twice", "second launch")] = [b - a for a, b in zip(once, twice, strict=True)]


if __name__ == "__main__":
    main()
