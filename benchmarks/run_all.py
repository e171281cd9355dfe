"""Runs every benchmark and writes one dated result file: `run_all.py [topic ...] [--date YYYY-MM-DD]`."""

from __future__ import annotations

import argparse
import datetime
import sys

from harness import HERE, child, header, markdown

TOPICS = (
    "import_time",
    "step",
    "ddp",
    "collectives",
    "guard",
    "metrics",
    "loader",
    "launch",
    "failure",
    "at_scale",
    "layouts",
    "memory",
    "checkpoint",
    "pipeline",
    "context_parallel",
    "thinness",
)
HEAD = ["what", "Lightning Fabric", "Accelerate", "limit", "ours", "target"]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topics", nargs="*", choices=[*TOPICS, []], help="default: all")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--name", default="", help="a word in the file's name, for a run of some topics")
    options = parser.parse_args()
    facts, tables, failures = header(), [], []
    for topic in options.topics or TOPICS:
        print(f"{topic} ...", file=sys.stderr, flush=True)
        try:
            tables += child([str(HERE / f"{topic}.py")], timeout=1800, FABRIC_BENCH_CHILD="1")
        except RuntimeError as error:
            failures.append(f"{topic} did not finish: {str(error).strip().splitlines()[-1]}")
            print(failures[-1], file=sys.stderr)
    summary = {
        "title": "Summary",
        "head": HEAD,
        "rows": [line for item in tables for line in item.get("summary", [])],
        "note": "Medians over rounds of paired ratios (or differences), all variants in turn in one run.",
    }
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    path = HERE / "results" / f"{options.date}-{kind}{options.name and '-' + options.name}.md"
    path.parent.mkdir(exist_ok=True)
    first = [f"# Benchmarks of {options.date}", "", *facts, *[f"- **{text}**" for text in failures], ""]
    path.write_text("\n".join(first) + "\n" + markdown([summary, *tables]), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
