"""Import torch and other large packages without garbage collection, in all processes of an environment.

    .venv/bin/python tests/quick_imports.py     # installs this file into .venv, as `make .venv/.dev` does

A test of a whole job spends most of its time in `import torch` and `import torch._dynamo` (every optimizer
imports) of its processes. The collections during them free nothing and take a fifth of that time.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

LARGE = ("accelerate", "datasets", "deepspeed", "lightning", "torch", "torch._dynamo", "torchmetrics")


class Loader(SourceFileLoader):
    """Runs a module with the garbage collector off, if it was on."""

    def exec_module(self, module):
        on = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if on:
                gc.enable()


class Finder:
    """Finds the large packages as Python does, and gives them that loader."""

    @staticmethod
    def find_spec(name, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LARGE else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


if __name__ == "__main__":
    import shutil
    import sysconfig
    from pathlib import Path

    place = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, place)
    (place / "quick_imports.pth").write_text("import quick_imports\n")
else:
    sys.meta_path.insert(0, Finder())
