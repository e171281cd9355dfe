"""The package on each Python that is installed: unit tests, a job under every launcher, the demo.

    python tests/pythons.py                # all of them
    python tests/pythons.py 3.10 3.13      # these

Each has a virtual environment of its own in `.venv-pythons/`, which is removed afterwards unless KEEP is set:
the build of torch that PyPI has for Linux brings CUDA along (2 GB to load, 5 GB on disk). Another one:
TORCH="torch==2.13.0 --index-url ...". What cannot be had is skipped, and the table at the end says why.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv-pythons"
KNOWN = ("3.10", "3.11", "3.12", "3.13", "3.14")
INSTALL_SECONDS, TEST_SECONDS = 900, 1800
LAUNCHES = "tests/end_to_end/test_launch.py::test_the_same_script_gives_the_same_numbers"
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal"]
STEPS = {
    "unit tests": [*PYTEST, "-m", "not slow and not ranks and not device", "tests"],
    "launches": [*PYTEST, LAUNCHES],
    "demo": ["examples/demo.py", "--epochs", "2"],
}


def interpreter(version: str) -> str | None:
    """A Python of this version: of the path or of pyenv, and one that starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    ask = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for candidate in [shutil.which(f"python{version}"), *own]:
        if candidate and subprocess.run([candidate, "-c", ask], capture_output=True).returncode == 0:
            return candidate
    return None


def install(python: str, place: Path) -> str:
    """Make the environment; gives why that failed, or ""."""
    pip = [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "--no-input", "install"]
    torch = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
    for command in ([python, "-m", "venv", "--clear", place], [*pip, *torch], [*pip, "-e", ".[dev]"]):
        try:
            subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True
            )
        except subprocess.TimeoutExpired:
            return f"not installed within {INSTALL_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return (error.stderr.strip() or f"exit {error.returncode}").splitlines()[-1]
    return ""


def test(place: Path) -> dict[str, str]:
    """What each step came to."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(place / "bin"), os.environ["PATH"]])}
    outcomes = {}
    for name, command in STEPS.items():
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [place / "bin/python", *command], cwd=ROOT, env=environ, timeout=TEST_SECONDS
            )
            word = "passed" if done.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            word = "FAILED: not through"
        outcomes[name] = f"{word} ({time.monotonic() - begun:.0f} s)"
    return outcomes


def row(version: str) -> str:
    """The line of the table for one Python, once all its steps have run."""
    python = interpreter(version)
    if python is None:
        return "skipped: not installed on this machine"
    place = VENVS / version
    try:
        why = install(python, place)
        if why:
            return f"skipped: {why}"
        facts = "import platform, torch; print(platform.python_version(), 'torch', torch.__version__)"
        which = subprocess.run(
            [place / "bin/python", "-W", "ignore", "-c", facts], capture_output=True, text=True
        )
        steps = ", ".join(f"{name} {outcome}" for name, outcome in test(place).items())
        return f"{which.stdout.strip()}: {steps}"
    finally:
        if "KEEP" not in os.environ:
            shutil.rmtree(place, ignore_errors=True)


def main(asked: list[str]) -> int:
    """All rows; a table at the end."""
    unknown = set(asked) - set(KNOWN)
    if unknown:
        print(f"not a Python of these: {', '.join(sorted(unknown))}. There are: {', '.join(KNOWN)}.")
        return 2
    table = {version: row(version) for version in asked or KNOWN}
    print("Pythons:", *[f"{version:5} {line}" for version, line in table.items()], sep="\n  ", flush=True)
    return int(any("FAILED" in line for line in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
