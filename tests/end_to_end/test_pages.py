"""Every code block of every page runs: python blocks on ranks that are warm, both sides of diffs as scripts.

Blocks of other languages are `text` (what is printed) and `console` (what is typed). A python block of a page
is often not a whole program: what it is about to use (`model`, `loader`, `state`) is made here.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environ
from pages import PAGES, blocks, lives_of, sides

PYTHON = sys.executable
pytestmark = pytest.mark.slow

GIVEN = """
import torch, torch.nn.functional as F
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fabric import Fabric
from fabric.plugins.environments import SLURMEnvironment
from fabric.strategies import ContextParallel, DDPStrategy, FSDPStrategy, PipelineStrategy

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

def Transformer():
    return nn.Sequential(*[Block() for _ in range(6)])

torch.manual_seed(0)
model, loss_fn, step, epochs, accumulate = Transformer(), F.mse_loss, 3, 1, 2
loader = DataLoader(TensorDataset(torch.randn(16, 8, 16), torch.randn(16, 8, 16)), batch_size=8)
"""
READY = """
fabric = Fabric(devices=2)
fabric.launch()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": fabric.rng_state(), "step": 0}
"""


def preamble(block) -> str:
    """What stands before a python block: data and a model, set up unless the block does so itself."""
    given = GIVEN
    return given + (
        "optimizer = torch.optim.AdamW(model.parameters())\n" if "Fabric(" in block.code else READY
    )


def run_block(before: str, code: str, page: str, line: int) -> None:
    """Run the block on this rank, as if it stood in its page; twice, as a job that is started again."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for _ in range(2):
        names = {"__name__": "__main__"}
        exec(before, names)
        exec(compile("\n" * (line - 1) + code.replace("% 1000", "% 2"), page, "exec"), names)
        if "saving" in names:
            names["saving"].wait()
    for number, handler in handlers.items():  # should_stop listens to the end of the process
        signal.signal(number, handler)


def label(block) -> str:
    return f"{block.page}:{block.line}"


def of(*languages: str) -> list:
    return [block for block in blocks() if block.language in languages]


def fragments() -> list:
    """Python blocks that are not whole programs; those of `docs/` are, and tests/guide runs them."""
    return [block for block in of("python") if not block.page.startswith("docs/")]


def test_every_block_says_what_it_is():
    bare = [label(block) for block in of("")]
    assert bare == [], "tag it python or diff, which are run, or text or console"
    assert {block.language for block in blocks()} <= {"", "python", "diff", "text", "console"}
    fences = {page: (Path(__file__).parents[2] / page).read_text().count("```") for page in PAGES}
    assert sum(fences.values()) == 2 * len(blocks()), "a fence that is not at its line's beginning"


@pytest.mark.parametrize(
    "block", [block for block in fragments() if "\ndef test_" not in block.code], ids=label
)
def test_a_python_block_runs(block, ranks, tmp_path, monkeypatch):
    if "huggingface_hub" in block.code:
        pytest.skip("tests/integrations/huggingface runs it, with models of transformers")
    monkeypatch.chdir(tmp_path)
    world_size = int((re.findall(r"\bdevices=(\d)", block.code) or ["2"])[0])
    ranks.run(run_block, preamble(block), block.code, block.page, block.line, world_size=world_size)


@pytest.mark.parametrize("block", [block for block in fragments() if "\ndef test_" in block.code], ids=label)
def test_the_tests_of_a_page_pass(block, tmp_path):
    (tmp_path / "test_it.py").write_text("import torch\nfrom fabric import Fabric\n" + block.code)
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environ())
    assert done.returncode == 0, done.stdout


def test_a_broken_block_is_found(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in fragments() if "fabric.save(" in block.code]
    block = next(block for block in blocks if "huggingface_hub" not in block.code)
    with pytest.raises(Exception, match="has no attribute 'safe'"):
        ranks.run(
            run_block,
            preamble(block),
            block.code.replace("fabric.save(", "fabric.safe("),
            "",
            1,
            world_size=2,
        )


OTHERS = re.compile(r"^.from (accelerate|fairscale|lightning)\b|^.import (deepspeed)\b", re.MULTILINE)
"""Packages of left sides: tests/integrations has these diffs, with the packages."""
DIFFS = [
    (block, count)
    for block in of("diff")
    if not OTHERS.search(block.code) and block.page != "README.md"
    for count in (1, 2, 4)
]
"""Both programs of the README: test_examples, which compares with the number that is shown."""


def shown_after(block) -> list[float]:
    """The numbers of the output that a page shows directly below a diff."""
    lines = (Path(__file__).parents[2] / block.page).read_text().splitlines()
    begin = block.line - 1 + len(block.code.splitlines())
    below = "\n".join(lines[begin + 1 :])
    output = re.match(r"\n[^`\n]+:\n\n```text\n(.*?)^```$", below, re.DOTALL | re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", output[1])] if output else []


@pytest.mark.parametrize(("block", "processes"), DIFFS, ids=[f"{label(one)}-{count}" for one, count in DIFFS])
def test_both_sides_of_a_diff_print_the_same_numbers(block, processes, tmp_path, warm):
    """Each side is a program, as it is shown; to the last digit. So does the output below the diff.

    Programs of two lives are started as a user does on 2 processes; their ranks of other numbers are forked.
    """
    lives = "epochs = 4" in block.code
    python = warm if lives and processes != 2 else None
    left, right = [
        lives_of(program, tmp_path / side, processes, python)
        for side, program in zip(("left", "right"), sides(block.code).values(), strict=True)
    ]
    assert len(left) == 4 if lives else left
    assert left == right
    assert right == (shown_after(block) or right)


def test_the_output_below_a_diff_is_found():
    assert [block.page for block in of("diff") if shown_after(block)] == [
        "docs/how-to/several-models.md",
        "docs/migrate/fairscale.md",
    ]


def test_diffs_with_other_packages_are_tested_with_them():
    packages = {
        next(filter(None, OTHERS.search(block.code).groups()))
        for block in of("diff")
        if OTHERS.search(block.code)
    }
    assert packages == {"accelerate", "deepspeed", "fairscale", "lightning"}
    for package in packages:
        assert (Path(__file__).parents[1] / "integrations" / package / "test_page.py").exists()
