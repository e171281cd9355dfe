"""What `from fabric import Fabric` costs beyond `import torch`: seconds and modules, in fresh processes."""

from __future__ import annotations

from harness import added, child, installed, ratios, show, spread, summarise, table, turns

# perf_counter from the interpreter's first line: start-up, which is alike for all, is not in it.
PROGRAM = """
import json, sys, time
begin = time.perf_counter()
{imports}
seconds = time.perf_counter() - begin
print("BENCH-RESULT " + json.dumps([seconds, sorted(sys.modules)]))
"""


def main(rounds: int = 15) -> None:
    imports = {"import torch": "import torch", "ours": "import torch\nfrom fabric import Fabric"}
    if installed("accelerate"):
        imports["Accelerate"] = "import torch\nfrom accelerate import Accelerator"
    if installed("lightning"):
        imports["Lightning Fabric"] = "import torch\nfrom lightning.fabric import Fabric"
    programs = {name: PROGRAM.format(imports=text) for name, text in imports.items()}
    modules = {
        name: set(child(["-c", program])[1]) for name, program in programs.items()
    }  # also warms caches
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in turns(rounds, "import"):
        for name, program in programs.items():
            samples[name].append(child(["-c", program])[0])
    more, ratio, base = (
        added(samples, "import torch"),
        ratios(samples, "import torch"),
        modules["import torch"],
    )
    rows = [
        [
            name,
            *spread(times, 1.0),
            f"{more[name]:+.3f}",
            f"{ratio[name]:.2f}",
            str(len(modules[name] - base)),
            by_package(modules[name] - base),
        ]
        for name, times in samples.items()
    ]
    head = ["case", "min s", "median", "max", "added s", "ratio", "added modules", "of which"]
    done = table("Import, target <= +0.05 s and < 60 modules", head, rows)
    values = {name: f"{more[name]:+.3f} s, {len(modules[name] - base)} modules" for name in samples}
    summarise(done, "import beyond `import torch`", values, "", "<= +0.05 s, < 60 modules")
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
