"""What pages of `docs/` claim beyond what their blocks print: other strategies, interrupted runs."""

import pytest
from test_page_blocks import programs, run_program


def program(page: str, words: str) -> str:
    """The one block of a page that has these words."""
    (code,) = [one.code for one in programs() if one.page == f"docs/{page}.md" and words in one.code]
    return code


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("pipeline", 2)],
)
def test_the_average_of_weights_is_that_of_one_process(strategy, world, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = program("how-to/ema", "lerp_")
    (alone,) = ranks.run(run_program, code.replace("devices=2", "devices=1"), world_size=1)
    code = code.replace("devices=2", f"devices={world}").replace('"fsdp"', f'"{strategy}"')
    if strategy == "pipeline":  # batch_size is that of the whole pipeline
        code = code.replace(" // fabric.world_size", "")
    printed = ranks.run(run_program, code, world_size=world)
    assert printed[0] == alone
    assert alone.startswith("loss of the average 0.")


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_started_again_prints_what_an_undisturbed_one_prints(
    world, ranks, tmp_path, monkeypatch
):
    code = program("how-to/checkpoints", "last.pt").replace("devices=2", f"devices={world}")
    monkeypatch.chdir(tmp_path)
    (undisturbed, *_) = ranks.run(run_program, code, world_size=world)
    (tmp_path / "last.pt").unlink()
    step = '        state["step"] += 1\n'
    killed = '        if state["step"] == 13:\n            raise SystemError("killed")\n'
    stopped = code.replace(step, step + killed)
    assert stopped != code
    errors = ranks.run_expecting_errors(run_program, stopped, world_size=world)
    assert [str(error) for error in errors] == ["killed"] * world
    assert (tmp_path / "last.pt").exists()
    assert ranks.run(run_program, code, world_size=world)[0] == undisturbed
