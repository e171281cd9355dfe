"""The limit on open files, in processes of their own: nobody can raise a hard limit again."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from fabric.launch.system import allow_open_files

resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
print(allow_open_files(300), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((100, 1000), "True 300 1000"),
        ((400, 1000), "True 400 1000"),
        ((100, 200), "False 200 200"),
        ((200, 200), "False 200 200"),
    ],
)
def test_files_that_may_be_open(limits, said):
    command = [sys.executable, "-c", PROGRAM.format(limits=limits)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == said
