"""Every Python block of `docs/` is a complete program: it runs on ranks, and prints what its page shows."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:<!-- test: (?P<settings>[^>]*) -->\n)?```python[^\n]*\n(?P<code>.*?)^```\n"
    r"(?:\n(?:(?P<said>(?!```)[^\n#|]+):\n\n)?```text\n(?P<text>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


class Program(NamedTuple):
    """A block: where it is, what it prints, and what a comment before it says to the test.

    The sentence before the output names the numbers of ranks ("on 1, 2 and 4 processes"), or the comment does
    (`ranks=2`); else they are 2 and 1.
    `script`: as a program of its own, in a slow test. `errors`: the text is the error that it raises.
    """

    page: str
    line: int
    code: str
    printed: str | None
    settings: str
    worlds: list[int]


def programs() -> list[Program]:
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.read_text()
        for match in FENCE.finditer(page):
            line = page[: match.start("code")].count("\n") + 1
            place = path.relative_to(ROOT).as_posix()
            settings = match["settings"] or ""
            named = re.findall(r"ranks=([\d ]+)", settings)
            named += re.findall(r"on (\d[\d, and]*) processes", match["said"] or "")
            worlds = [int(number) for number in re.findall(r"\d+", (named or ["2 1"])[0])]
            found.append(Program(place, line, match["code"], match["text"], settings, worlds))
    return found


def cases() -> list:
    return [*parameters()]


def parameters():
    for program in programs():
        for world in program.worlds:
            slow = [pytest.mark.slow] if "script" in program.settings or world > 2 else []
            yield pytest.param(program, world, marks=slow, id=f"{program.page}:{program.line}-{world}")


def one_line(text: str) -> str:
    return " ".join(text.split())


def run_program(code: str) -> str:
    """Run the program on this rank as `train.py`; return what it prints."""
    handled = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in handled}
    environ = dict(os.environ)  # seed_everything and imports of scikit-learn leave variables
    names = {"__name__": "__main__", "__file__": "train.py"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "train.py", "exec"), names)
    if "saving" in names:
        names["saving"].wait()
    os.environ.clear()
    os.environ.update(environ)
    for number, handler in handlers.items():  # should_stop handles signals to the end of the process
        signal.signal(number, handler)
    return printed.getvalue()


def run_script(code: str) -> str:
    """Run the program by `python train.py`; return what it prints."""
    Path("train.py").write_text(code)
    settings = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 300}
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("program", "world"), cases())
def test_a_program_runs_and_prints_what_its_page_shows(program, world, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"\bdevices=\d+", f"devices={world}", program.code)
    if "script" in program.settings:
        assert run_script(code) == program.printed
        return
    if "errors" in program.settings:
        (error, *_) = ranks.run_expecting_errors(run_program, code, world_size=world)
        assert program.printed is not None
        assert one_line(program.printed) in one_line(f"{type(error).__name__}: {error}")
        return
    printed = ranks.run(run_program, code, world_size=world)
    if program.printed is not None:
        assert printed[0] == program.printed


def test_a_broken_program_is_found(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = next(one for one in programs() if "fabric.backward(" in one.code)
    with pytest.raises(Exception, match="has no attribute 'backwards'"):
        ranks.run(run_program, program.code.replace("fabric.backward(", "fabric.backwards("), world_size=2)


def test_programs_are_complete():
    without = [f"{one.page}:{one.line}" for one in programs() if "import " not in one.code]
    assert without == []
    assert len(programs()) > 20
