"""The loop fuzzer: fixed seeds end well, and the fuzzer finds, classifies and shrinks what is planted."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from dataclasses import replace
from types import FunctionType

import pytest
from form_mends import FORM_MENDS
from grammar import generate
from kinds import NAMES
from layouts import LAYOUTS
from mends import MENDS as OTHER_MENDS
from program import DIFFER, ORDER, WARNED, Program
from refusals import reason
from runner import (
    ALARM,
    BUG,
    CRASH,
    DIFFERENT,
    EQUAL,
    FAILURES,
    FOREIGN,
    HANG,
    INVALID,
    REFUSED,
    SAID,
    Runner,
)
from shrink import shrunk

MENDS = {**OTHER_MENDS, **FORM_MENDS}
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
SAVE = "fabric.save(folder / 'a.pt', {'net': net, 'opt': opt, 'epoch': 3})"
GOING_ON = (
    "torch.manual_seed(2)",
    *PLAIN[1:4],
    "state = {'net': net, 'opt': opt, 'epoch': 0}",
    "fabric.load(folder / 'a.pt', state)",
    "note.same('epoch', state['epoch'])",
    *PLAIN[4:],
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
FORGETTING = """
_made = make_fabric
def make_fabric():
    fabric = _made()
    def load(path, state):
        held = {name: value for name, value in state.items() if name != "net"}
        type(fabric).load(fabric, path, held)
        state.update(held)
    fabric.load = load
    return fabric
"""
DYING = UNEQUAL.replace("type(fabric)", "fabric.global_rank and os._exit(3) or type(fabric)")


@pytest.fixture(scope="module")
def pool():
    with Runner() as runner:
        yield runner


def program(lines=PLAIN, layout="ddp", world=2) -> Program:
    return Program(0, layout, world, None, lines)


def test_fixed_seeds_end_well(pool):
    """The first programs, of all layouts in turn."""
    ended = all_end_well(pool, [(seed, LAYOUTS[seed % len(LAYOUTS)].name) for seed in range(FIXED)])
    assert ended.count(EQUAL) > len(ended) / 3, "the grammar makes too few programs that say something"


def all_end_well(pool, asked):
    """How the programs of these seeds and layouts end."""
    ended = []
    for seed, layout in asked:
        made = generate(seed, layout)
        if made.avoided:
            continue
        outcome = pool.run(made)
        if outcome.failed:
            outcome = pool.confirmed(made)
        if outcome.word in FAILURES:
            pytest.fail(
                f"python tests/fuzz --one {seed}:{made.name} is {outcome.word}:\n"
                + "\n".join([*outcome.lines[:5], *(part.body() for part in made.parts)]),
                pytrace=False,
            )
        ended.append(outcome.word)
    return ended


@pytest.mark.slow
def test_fixed_pairs_end_well(pool):
    """Programs of two parts: every second layout saves, or loads."""
    names = [layout.name for layout in LAYOUTS[::2]]
    asked = [f"{name}:" if place % 2 else f":{name}" for place, name in enumerate(names)]
    ended = all_end_well(pool, enumerate(asked))
    assert ended.count(EQUAL) > len(ended) / 3, "the grammar makes too few pairs that say something"


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "single"), ("pipeline", "zero1")])
def test_a_plain_pair_is_equal(pool, first, then):
    assert pool.run(plain_pair(first, then, 1 if then == "single" else 3)).word == EQUAL


@pytest.mark.slow
def test_what_is_not_loaded_is_found_and_shrunk():
    with Runner(plant=FORGETTING) as planted:
        made = plain_pair("ddp", "zero1", 3)
        assert planted.run(made).word == DIFFERENT
        small = shrunk(made, lambda smaller: planted.run(smaller).word == DIFFERENT)
    assert "fabric.backward" not in small.body()
    assert "fabric.load" in small.then.body()
    assert "agree" not in small.then.body()
    assert "'opt'" not in small.body() + small.then.body()


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
    fault = "isinstance(fabric, Plain) or type(fabric.strategy).all_reduce(None, x)"
    assert pool.run(program((*PLAIN, fault))).word == BUG


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


def test_replicas_that_differ_without_a_line_for_it_are_a_false_alarm(pool):
    write = ("with torch.no_grad():", (("for p in net.parameters():", ("p.add_(fabric.global_rank)",)),))
    silent = (*PLAIN[:4], write, "fabric.check_replicas()")
    assert pool.run(program(silent)).word == ALARM
    assert pool.run(program((*PLAIN[:4], (DIFFER, (write,)), "fabric.check_replicas()"))).word == REFUSED


def test_another_order_of_two_models_must_be_named(pool):
    made = (
        "other = fabric.setup(mlp())",
        "calls = [lambda: score(net(floats(1))), lambda: score(other(floats(2)))]",
    )
    call = (f"for call in calls[{ORDER}]:", ("fabric.backward(call())",))
    lines = (*PLAIN[:4], *made, (DIFFER, (call,)))
    assert pool.run(program(lines)).word == REFUSED
    look = (f"for call in calls[{ORDER}]:", (("with torch.no_grad():", ("call()",)),))
    assert pool.run(program((*lines[:-1], (DIFFER, (look,))))).word == DIFFERENT  # no rank waits for another


def test_a_warning_is_owed_where_numbers_differ_and_nowhere_else(pool):
    lines = (
        "opt.zero_grad()",
        "y = share(fabric, labels(fabric, step, 'uneven'))",
        "fabric.backward(nn.functional.cross_entropy(net(share(fabric, floats(step))), y))",
        "opt.step()",
    )
    differs = (*PLAIN[:4], ("for step in range(3):", ((WARNED, lines),)), PLAIN[-1])
    assert pool.run(program(differs)).word == SAID
    assert pool.run(program((*PLAIN[:4], ("for step in range(3):", lines), PLAIN[-1]))).word == DIFFERENT
    needless = (
        "isinstance(fabric, Plain) or warnings.warn('The last batch of this epoch', RanksDifferWarning)"
    )
    imports = ("import warnings", "from fabric.utilities.warnings import RanksDifferWarning")
    assert pool.run(program((*imports, *PLAIN, needless))).word == ALARM


@pytest.mark.parametrize("kind", NAMES)
def test_each_kind_of_step_makes_programs_of_its_layouts(kind):
    made = [generate(seed, None, kind) for seed in range(20)]
    assert made == [generate(seed, None, kind) for seed in range(20)]
    heads = (f"# {kind}", WARNED, DIFFER)
    assert all(any(head in program.body() for head in heads) for program in made)
    assert not any("$" in program.body() for program in made)
    assert len({program.layout for program in made}) > 5


def test_ranks_outside_of_a_group_do_nothing(pool):
    assert pool.run(program(layout="ddp-group", world=3)).word == EQUAL


def test_scripts_stand_alone(tmp_path):
    made = plain_pair("ddp", "single", 1)
    environ = os.environ | {"FUZZ_FOLDER": str(tmp_path)}
    for name, text in made.scripts().items():
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            [sys.executable, name], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ
        )
        assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr


def plain_pair(first, then, world) -> Program:
    return replace(program((*PLAIN, SAVE), first), then=program(GOING_ON, then, world))


@pytest.mark.parametrize("layout", [":", *(layout.name for layout in LAYOUTS)])
def test_a_seed_always_makes_the_same_program(layout):
    assert generate(7, layout) == generate(7, layout)
    assert generate(7, layout).body() == generate(7, layout).body()


def names_that_are_missing(text: str) -> list[str]:
    """Attributes that a text sets although they do not exist."""
    names: dict[str, object] = {}
    missing = []
    for statement in ast.parse(text).body:
        for target in statement.targets if isinstance(statement, ast.Assign) else []:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    owner = eval(ast.unparse(part.value), names)
                    exists = hasattr(owner, part.attr) or hasattr(builtins, part.attr)
                    missing += [] if exists or isinstance(owner, FunctionType) else [ast.unparse(part)]
        exec(compile(ast.Module([statement], []), "undone", "exec"), names)
    return missing


@pytest.mark.parametrize("name", MENDS)
def test_a_mend_is_taken_back_by_names_that_exist(name):
    """Else nothing is taken back, and `--without` looks for what is not there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = repr(names_that_are_missing(MENDS[name].undone))
        except BaseException as error:
            found = repr(error)
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    assert found == "[]"
