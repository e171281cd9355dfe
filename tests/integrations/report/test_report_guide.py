"""The page of the guide: its program runs, and its commands print or write what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "run-report.md").read_text()


def test_the_program_and_the_commands_of_the_page_run(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    settings = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    settings |= {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "train.py"], **settings)
    assert done.returncode == 0, done.stderr
    commands = re.findall(
        r"^fabric report .*", "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)), re.M
    )
    assert len(commands) == 4
    printed = []
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command.split()], **settings)
        assert (done.returncode, done.stderr) == (0, ""), command
        printed.append(done.stdout)
    assert (tmp_path / "runs" / "report" / "report.html").stat().st_size > 4e6
    assert printed[1].startswith("fabric report runs/report: ended, 2 ranks on 1 machine, 128 steps\n")
    assert '"ranks": 2' in printed[2]
    assert re.match(r"\d\d:\d\d:\d\d  step 128 \(\+128\)  [\d.,]+ ms per step", printed[3])
