"""The package as a user has it: a wheel in an empty environment, and the types that a script sees."""

import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import environ
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import sides_of_readme

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = sys.executable
pytestmark = pytest.mark.slow


def run(*command: object, code: int = 0, timeout: float = 600, **settings) -> subprocess.CompletedProcess:
    """The finished command; it must end with `code`."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **settings)
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def link(name: str, packages: Path, seen: set[str]) -> None:
    """Put a package of this environment, and what it needs, into another one: torch is a large download."""
    found = distribution(name)
    seen.add(canonicalize_name(name))
    for top in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(found.locate_file(top))
    for needed in map(Requirement, found.requires or []):
        there = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if there and canonicalize_name(needed.name) not in seen:
            link(needed.name, packages, seen)


def test_a_wheel_in_an_empty_environment_runs_the_readmes_program(tmp_path):
    source = tmp_path / "source"  # building leaves files behind
    shutil.copytree(ROOT / "fabric", source / "fabric", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    run(PYTHON, "-m", "build", "--wheel", "--outdir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    there = {"cwd": tmp_path, "env": environ(PYTHONPATH="")}
    link("torch", next((tmp_path / "venv").glob("lib/python*/site-packages")), set())
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
    run(*pip, "install", f"{wheel}[examples]", **there)
    assert run(*pip, "check", **there).stdout in ("", "No broken requirements found.\n")
    where = run(python, "-c", "import fabric; print(fabric.__file__)", **there).stdout
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")

    script = tmp_path / "train.py"
    script.write_text(sides_of_readme()["+"])
    done = run(python, script, **there)
    assert done.stderr == ""
    assert float(re.fullmatch(r"last loss (\d\.\d+)\n", done.stdout)[1]) < 0.5
    by_command = run(tmp_path / "venv/bin/fabric", "run", "--devices", "2", script, **there)
    assert by_command.stdout == done.stdout


CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-error-summary"],
    "pyright": ["-m", "pyright", "--pythonpath", PYTHON],
}


@pytest.fixture(scope="module", params=CHECKERS)
def checked(request, tmp_path_factory):
    """`checked(script, code)`: what a type checker says of a user's script, this package being installed."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    copy, cache = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("cache")
    (copy / "site").mkdir()
    (copy / "site/fabric").symlink_to(ROOT / "fabric")

    def check(script: str, code: int) -> str:
        (copy / script).write_text((SCRIPTS / script).read_text())
        (copy / "pyrightconfig.json").write_text('{"extraPaths": ["site"]}')
        settings = {"cwd": copy, "env": environ(PYTHONPATH=str(copy / "site"), MYPY_CACHE_DIR=str(cache))}
        return run(PYTHON, *CHECKERS[request.param], script, code=code, **settings).stdout

    return check


def test_a_typed_script_sees_the_users_classes(checked):
    said = checked("typed.py", 0)
    assert re.fullmatch(r"|0 errors, 0 warnings, .*\n|Success.*\n", said), said


def test_a_mistyped_script_is_refused_line_by_line(checked):
    said = checked("mistyped.py", 1)
    source = (SCRIPTS / "mistyped.py").read_text().splitlines()
    wrong = [number for number, line in enumerate(source, 1) if "  # " in line]
    found = {int(number) for number in re.findall(r"mistyped\.py:(\d+):.*error", said)}
    assert found == set(wrong), said


def test_the_typed_script_runs():
    done = run(PYTHON, SCRIPTS / "typed.py", env=environ(OMP_NUM_THREADS="1"))
    assert (done.stdout, done.stderr) == ("net 3\n", "")
