"""The package on other versions of torch: the tests of each folder of the package, the demo.

    python tests/torch_versions.py 2.9.1 2.15.0

Each has a virtual environment of its own in `.venv-torch/`, which is removed afterwards unless KEEP is set:
the builds of torch that PyPI has for Linux bring CUDA along (5 to 7 GB each). TORCH_INDEX: another index,
such as https://download.pytorch.org/whl/cpu. A version that cannot be had is skipped; the table says why.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = Path(os.environ.get("TORCH_VENVS", ROOT / ".venv-torch"))
WORKERS = os.environ.get("WORKERS", "2")
INSTALL_SECONDS, TEST_SECONDS = 1800, 5400
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", WORKERS, "--dist", "worksteal"]


def is_of_package(folder: Path) -> bool:
    """Whether it has the tests of a folder of the package."""
    return (ROOT / "fabric" / folder.name).is_dir() and folder.name != "integrations"


STEPS = {
    "tests of the folders": [
        *PYTEST,
        "-m",
        "not slow or smoke",
        *[f"tests/{folder.name}" for folder in sorted((ROOT / "tests").iterdir()) if is_of_package(folder)],
    ],
    "demo": ["examples/demo.py"],
}


def install(version: str, place: Path) -> str:
    """Make the environment, unless it is there; gives why that failed, or ""."""
    pip = [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "--no-input", "install"]
    index = ["--index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
    commands = [
        [sys.executable, "-m", "venv", place],
        [*pip, f"torch=={version}", *index],
        [*pip, "-e", ".[dev]", f"torch=={version}"],
    ]
    for command in commands[2:] if (place / "bin/torchrun").exists() else commands:
        try:
            subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True
            )
        except subprocess.TimeoutExpired:
            return f"not installed within {INSTALL_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return (error.stderr.strip() or f"exit {error.returncode}").splitlines()[-1]
    return ""


def run(place: Path, name: str, command: list[str]) -> str:
    """What a step came to; its output is in a file beside the environment."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(place / "bin"), os.environ["PATH"]])}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log, begun = place.with_name(f"{place.name}-{name.partition(' ')[0]}.txt"), time.monotonic()
    with log.open("w") as file:
        try:
            full = [place / "bin/python", *command]
            code = subprocess.run(
                full, cwd=ROOT, env=environ, stdout=file, stderr=file, timeout=TEST_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return "FAILED: not through"
    word = "passed" if code == 0 else f"FAILED, see {log}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    counts = f"{last} " if re.search(r"\d+ passed|the same numbers", last) else ""
    return f"{counts}{word} ({time.monotonic() - begun:.0f} s)"


def row(version: str) -> str:
    """The line of the table for one version, once all its steps have run."""
    place = VENVS / version
    try:
        if why := install(version, place):
            return f"skipped: {why}"
        return "; ".join([f"{name}: {run(place, name, command)}" for name, command in STEPS.items()])
    finally:
        if "KEEP" not in os.environ:
            shutil.rmtree(place, ignore_errors=True)


def main(versions: list[str]) -> int:
    """All rows; a table at the end."""
    wrong = [version for version in versions if not re.fullmatch(r"\d+\.\d+\.\d+", version)]
    if wrong or not versions:
        print(f'not versions of torch: {wrong}. Write TORCH_VERSIONS="2.9.1 2.15.0".')
        return 2
    table = {version: row(version) for version in versions}
    print("torch:", *[f"{version:7} {line}" for version, line in table.items()], sep="\n  ", flush=True)
    return int(any("FAILED" in line for line in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
