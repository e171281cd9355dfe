"""Write `docs/reference/`: one page per public package, with a directive of mkdocstrings for each name.

    python docs/site/reference.py

A test compares the pages with what this writes. Imports nothing of `fabric`.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "fabric": (
        "Fabric",
        "The class of the loop. Its verbs are collectives: all ranks must call them.",
        [
            "fabric",
            "fabric.wrappers:_FabricModule,_FabricOptimizer,_FabricDataLoader",
            "fabric.batch_size.search:BatchSize",
        ],
    ),
    "strategies": (
        "Strategies",
        "`Fabric(strategy=...)`: a name of the registry, or one of these. "
        "[Choose a strategy](../how-to/choose-a-strategy.md).",
        ["fabric.strategies", "fabric.integrations.horovod"],
    ),
    "precision": (
        "Precision",
        "`Fabric(precision=...)` or `Fabric(plugins=...)`. [Mixed precision](../how-to/mixed-precision.md).",
        ["fabric.plugins.precision"],
    ),
    "accelerators": ("Accelerators", "`Fabric(accelerator=...)`.", ["fabric.accelerators"]),
    "environments": (
        "Cluster environments",
        "`Fabric(plugins=...)`; the launcher is detected if none is given. "
        "[Several machines](../tutorials/several-machines.md).",
        ["fabric.plugins.environments", "fabric.integrations.ray"],
    ),
    "checkpoint-io": (
        "Checkpoint storage",
        "`Fabric(plugins=...)`. [Save, load and resume](../how-to/checkpoints.md).",
        ["fabric.plugins.io"],
    ),
    "collectives": (
        "Collectives without a Fabric",
        "The API below the verbs: one tensor per call.",
        ["fabric.plugins.collectives"],
    ),
    "loggers": ("Loggers", "`Fabric(loggers=...)`. [Log](../how-to/log.md).", ["fabric.loggers"]),
    "utilities": (
        "Utilities",
        "Helpers, and names that users of Lightning Fabric import.",
        [
            "fabric.utilities",
            "fabric.utilities.seed:RngState,pl_worker_init_function,reset_seed",
            "fabric.utilities.data:has_iterable_dataset,has_len",
            "fabric.utilities.spike:SpikeDetection,TrainingSpikeException",
            "fabric.utilities.apply_func:convert_tensors_to_scalars,convert_to_tensors",
            "fabric.utilities.cloud_io:get_filesystem",
            "fabric.utilities.warnings:PossibleUserWarning",
            "fabric.utilities.types:Optimizable",
        ],
    ),
    "testing": (
        "Testing",
        "Tests with processes that are started once: [write a test](../how-to/other-tools.md#write-a-test).",
        ["fabric.testing"],
    ),
    "parts": (
        "Parts",
        "An object with hooks that a strategy calls, passed as `Fabric(plugins=[...])`.",
        ["fabric.core.parts:Part"],
    ),
}


def exports(package):
    """(name, module that defines it) of each public name of a package, or of `module:name,name`."""
    module, _, names = package.partition(":")
    if names:
        return [(name, module) for name in names.split(",")]
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if getattr(node.func, "id", "") == "lazy_exports"]
    return list(ast.literal_eval(call.args[1]).items())


def errors():
    """The names of all errors."""
    tree = ast.parse((ROOT / "fabric/core/errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def directive(name, home, shown):
    """The directive for one name, under the path that a user imports."""
    options = f"    options:\n      heading: {shown}\n      toc_label: {name}\n"
    return f"::: {home}.{name}\n{options}"


WITHOUT_SITE = "`make docs` fills this page from the docstrings. Without the site: `python -m pydoc {0}`."


def pages():
    """Each page's file name and text."""
    made = {}
    for key, (title, about, packages) in PAGES.items():
        found = [directive(n, home, f"{p.partition(':')[0]}.{n}") for p in packages for n, home in exports(p)]
        note = WITHOUT_SITE.format("fabric.Fabric" if key == "fabric" else packages[0].replace(":", "."))
        made[f"{key}.md"] = f"# {title}\n\n{about}\n\n{note}\n\n" + "\n".join(found)
    about = (
        "Every error that the package raises on purpose is a `FabricError`. "
        "[Messages, causes and fixes](../how-to/errors.md)."
    )
    found = [directive(name, "fabric.core.errors", f"fabric.core.errors.{name}") for name in errors()]
    note = WITHOUT_SITE.format("fabric.core.errors")
    made["errors.md"] = f"# Errors\n\n{about}\n\n{note}\n\n" + "\n".join(found)
    return made


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
