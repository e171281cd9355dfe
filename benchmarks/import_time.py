"""What `from fabric import Fabric` costs beyond `import torch`: seconds and modules, in fresh processes."""

from __future__ import annotations

from statistics import median

from harness import child, installed, show, spread, summarise, table, turns

# The clock starts after `import torch`, whose second or more would drown what comes on top of it.
PROGRAM = """
import json, sys, time
import torch
before, begin = set(sys.modules), time.perf_counter()
{imports}
seconds = time.perf_counter() - begin
print("BENCH-RESULT " + json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def main(rounds: int = 15) -> None:
    imports = {"ours": "from fabric import Fabric"}
    if installed("accelerate"):
        imports["Accelerate"] = "from accelerate import Accelerator"
    if installed("lightning"):
        imports["Lightning Fabric"] = "from lightning.fabric import Fabric"
    programs = {name: PROGRAM.format(imports=text) for name, text in imports.items()}
    modules = {
        name: set(child(["-c", program])[1]) for name, program in programs.items()
    }  # also warms caches
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in turns(rounds, "import"):
        for name, program in programs.items():
            samples[name].append(child(["-c", program])[0])
    rows = [
        [name, *spread(times, 1.0), str(len(modules[name])), by_package(modules[name])]
        for name, times in samples.items()
    ]
    head = ["case", "min s", "median", "max", "modules", "of which"]
    done = table("Import beyond `import torch`, target <= 0.05 s and < 60 modules", head, rows)
    values = {
        name: f"{median(times):+.3f} s, {len(modules[name])} modules" for name, times in samples.items()
    }
    summarise(done, "import beyond `import torch`", values, "+0.04 s", "<= +0.05 s, < 60 modules")
    show([done])


def by_package(names: set[str]) -> str:
    """How many modules of which top-level package, the largest first."""
    counts: dict[str, int] = {}
    for name in names:
        package = name.partition(".")[0]
        counts[package] = counts.get(package, 0) + 1
    first = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{package} {count}" for package, count in first[:4]) + (
        ", ..." if len(first) > 4 else ""
    )


if __name__ == "__main__":
    main()
