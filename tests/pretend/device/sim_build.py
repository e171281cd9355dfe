"""Builds the compiled part of the pretend accelerator, once for all processes, outside of what git knows."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_SOURCES = sorted((_HERE / "sim" / "csrc").iterdir())


def library() -> Path:
    """Where the compiled part is, or will be: a folder for each version of torch, Python and the sources."""
    told = [torch.__version__, sys.version, *[path.read_text() for path in _SOURCES]]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    root = os.environ.get("SIM_BUILD") or _HERE.parent / "build"
    return Path(root, f"{torch.__version__}-{key}", "_sim.so")


@cache
def missing() -> str:
    """Why the device cannot be had here; "": it can."""
    if library().exists():
        return ""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no Python.h (python3-dev)"
    needed = [name for name in ("ninja", "setuptools") if importlib.util.find_spec(name) is None]
    if "ninja" in needed and shutil.which("ninja"):
        needed.remove("ninja")
    return f"not installed: {', '.join(needed)}" if needed else ""


def load() -> Any:
    """The compiled part, built if it is not there (half a minute on two cores)."""
    made = library()
    made.parent.mkdir(parents=True, exist_ok=True)
    if not made.exists():
        with Path(made.parent, "building").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which the kernel gives back if this process is killed
            if not made.exists():
                return _build(made)
    spec: Any = importlib.util.spec_from_file_location("_sim", made)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(made: Path) -> Any:
    from torch.utils.cpp_extension import load

    print("building the pretend accelerator (once, about half a minute)", file=sys.stderr, flush=True)
    work = Path(made.parent, "work")
    work.mkdir(exist_ok=True)
    Path(work, "lock").unlink(missing_ok=True)  # torch's own, which outlives a killed process
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"  # ninja, if pip installed it
    try:
        module = load(
            "_sim",
            [str(path) for path in _SOURCES if path.suffix == ".cpp"],
            extra_cflags=["-O1", "-w", "-std=c++20"],
            build_directory=str(work),
        )
    finally:
        os.environ["PATH"] = path
    made.hardlink_to(Path(work, "_sim.so"))
    return module
