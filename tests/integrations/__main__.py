"""The tests of each engine with its real package, in a virtual environment of its own.

    python tests/integrations                  # all of them
    python tests/integrations horovod ray      # these

A folder here is an engine, or a package that people bring along (huggingface, peft, webdataset):
`requirements.txt` is what pip installs, or `install.sh VENV` installs it. An environment sees the packages of
the interpreter that runs this (torch, pytest), stands in `.venv-engines/NAME` and is used again while what it
was made from is the same. An engine that cannot be installed is skipped, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENVS = ROOT / ".venv-engines"
INSTALL_SECONDS = 900
TEST_SECONDS = 1500
AT_ONCE = 2  # three on 2 cores, and Ray takes a machine that is late for dead
LONGEST = ("deepspeed", "huggingface")  # first, or they would run alone at the end
INSTALLING = Lock()


def engines() -> list[str]:
    """The folders that say how their engine is installed."""
    return sorted(path.parent.name for path in [*HERE.glob("*/requirements.txt"), *HERE.glob("*/install.sh")])


def install(name: str) -> str:
    """Make the environment of an engine; gives why that failed, or ""."""
    place, recipe = VENVS / name, HERE / name / "requirements.txt"
    script = HERE / name / "install.sh"
    recipe = script if script.exists() else recipe
    made_from = hashlib.sha256(recipe.read_bytes() + sys.executable.encode()).hexdigest()
    stamp = place / ".installed"
    if stamp.exists() and stamp.read_text() == made_from:
        return ""
    venv.create(place, with_pip=True, clear=True)
    packages = Path(next(place.glob("lib/python*/site-packages")))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in ours]
    (packages / "ours.pth").write_text("".join(lines))
    pip = [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "install", "-r", recipe]
    command = ["bash", script, place] if script.exists() else pip
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"not installed within {INSTALL_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()[-1]
    stamp.write_text(made_from)
    return ""


def test(name: str) -> bool:
    """Run the tests of an engine in its environment, and print what pytest wrote."""
    command = [VENVS / name / "bin/python", "-m", "pytest", HERE / name]
    paths = [str(VENVS / name / "bin"), os.environ["PATH"]]
    environ = {**os.environ, "FABRIC_ENGINE": name, "PATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        passed = False
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, timeout=TEST_SECONDS, stdout=output, stderr=subprocess.STDOUT
            )
            passed = done.returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{name}: not through after {TEST_SECONDS} s", file=output)
        output.seek(0)
        print(f"{name}:\n{output.read()}", flush=True)
    return passed


def outcome(name: str) -> tuple[str, bool]:
    """Install and test an engine; gives its row in the table, and whether it failed."""
    with INSTALLING:
        try:
            why = install(name)
        except Exception as error:  # the other engines are tested all the same
            return f"{name:20} FAILED: {error!r}", True
    begun = time.monotonic()
    word = f"skipped: {why}" if why else "passed" if test(name) else "FAILED"
    return f"{name:20} {word} ({time.monotonic() - begun:.0f} s)", word == "FAILED"


def main(asked: list[str]) -> int:
    """Install and test; a table at the end."""
    unknown = set(asked) - set(engines())
    if unknown:
        print(f"no such engine: {', '.join(sorted(unknown))}. There are: {', '.join(engines())}.")
        return 2
    names = sorted(asked or engines(), key=lambda name: (name not in LONGEST, name))
    with ThreadPoolExecutor(AT_ONCE) as lanes:
        table = list(lanes.map(outcome, names))
    print("engines:", *sorted(row for row, _ in table), sep="\n  ", flush=True)
    return int(any(failed for _, failed in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
