"""The loop fuzzer: fixed seeds end well, and the fuzzer finds, classifies and shrinks what is planted."""

from __future__ import annotations

import subprocess
import sys

import pytest
from grammar import generate
from layouts import LAYOUTS
from program import Program
from refusals import reason
from runner import CRASH, DIFFERENT, EQUAL, FAILURES, FOREIGN, HANG, INVALID, REFUSED, Runner
from shrink import shrunk

FIXED = 24  # seeds, one of each layout; `make fuzz` takes as many as there is time for
PLAIN = (
    "torch.manual_seed(1)",
    "net = mlp()",
    "opt = torch.optim.SGD(net.parameters(), lr=0.1)",
    "net, opt = fabric.setup(net, opt)",
    (
        "for step in range(3):",
        (
            "x = share(fabric, floats(step))",
            "note.same('agreed', fabric.agree(step))",
            "loss = score(net(x))",
            "opt.zero_grad()",
            "fabric.backward(loss)",
            "note.mean('loss', loss)",
            "opt.step()",
        ),
    ),
    "note.same('net', net.state_dict())",
)
UNEQUAL = """
_made = make_fabric
def make_fabric():
    fabric = _made()
    def backward(loss, *args, **kwargs):
        type(fabric).backward(fabric, loss * (1 + 1e-4 * fabric.global_rank), *args, **kwargs)
    fabric.backward = backward
    return fabric
"""
SLEEPING = UNEQUAL.replace(
    "type(fabric)", "fabric.global_rank and __import__('time').sleep(600) or type(fabric)"
)
DYING = UNEQUAL.replace("type(fabric)", "fabric.global_rank and os._exit(3) or type(fabric)")


@pytest.fixture(scope="module")
def pool():
    with Runner() as runner:
        yield runner


def program(lines=PLAIN, layout="ddp", world=2) -> Program:
    return Program(0, layout, world, None, lines)


def test_fixed_seeds_end_well(pool):
    """The first programs, of all layouts in turn."""
    ended = []
    for seed in range(FIXED):
        made = generate(seed, LAYOUTS[seed % len(LAYOUTS)].name)
        outcome = pool.run(made)
        if outcome.failed:
            outcome = pool.confirmed(made)
        if outcome.word in FAILURES:
            pytest.fail(
                f"python tests/fuzz --one {seed}:{made.layout} is {outcome.word}:\n"
                + "\n".join(outcome.lines[:5])
                + f"\n{made.body()}",
                pytrace=False,
            )
        ended.append(outcome.word)
    assert ended.count(EQUAL) > len(ended) / 3, "the grammar makes too few programs that say something"


@pytest.mark.parametrize("layout", ["single", "ddp", "zero1", "fsdp", "pipeline"])
def test_a_plain_loop_is_equal(pool, layout):
    assert pool.run(program(layout=layout, world=1 if layout == "single" else 2)).word == EQUAL


def test_a_planted_difference_is_found_and_shrunk():
    with Runner(plant=UNEQUAL) as planted:
        outcome = planted.run(program())
        assert outcome.word == DIFFERENT
        assert "net" in " ".join(outcome.lines)
        small = shrunk(program(), lambda smaller: planted.run(smaller).word == DIFFERENT)
    text = small.body()
    assert "fabric.backward(loss)" in text
    assert "agree" not in text
    assert "zero_grad" not in text
    assert "range(1)" in text


def test_a_planted_hang_is_named():
    with Runner(plant=SLEEPING, limit=3.0) as planted:
        assert planted.run(program()).word == HANG
        planted.plant = None
        assert planted.run(program()).word == EQUAL  # the next one has processes of its own


def test_a_planted_crash_is_named():
    with Runner(plant=DYING) as planted:
        assert planted.run(program()).word == CRASH


def test_an_error_of_ours_and_one_of_torchs_are_told_apart(pool):
    ours = (*PLAIN[:-1], "fabric.clip_gradients(net, opt)", PLAIN[-1])
    assert pool.run(program(ours)).word == INVALID  # plain torch has no such call without a limit
    assert pool.run(program((*PLAIN, "isinstance(fabric, Plain) or fabric.setup('net')"))).word == REFUSED
    assert pool.run(program((*PLAIN, "isinstance(fabric, Plain) or torch.ones(2, 3) @ 1"))).word == FOREIGN


def test_a_local_gradient_that_is_read_makes_a_program_invalid(pool):
    body = (
        *PLAIN[:4],
        ("with fabric.no_backward_sync(net):", ("fabric.backward(score(net(share(fabric, floats(1)))))",)),
        "note.grads('own', net)",
    )
    assert pool.run(program(body)).word == INVALID


def test_a_step_with_local_gradients_is_owed_an_error(pool):
    body = (
        *PLAIN[:4],
        ("with fabric.no_backward_sync(net):", ("fabric.backward(score(net(share(fabric, floats(1)))))",)),
        "opt.step()",
        PLAIN[-1],
    )
    outcome = pool.run(program(body))
    assert outcome.owed
    assert outcome.word == DIFFERENT or reason(outcome.lines[0])


def test_a_script_stands_alone(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(program().script())
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr


@pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])
def test_a_seed_always_makes_the_same_program(layout):
    assert generate(7, layout) == generate(7, layout)
    assert generate(7, layout).body() == generate(7, layout).body()
