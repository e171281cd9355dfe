"""`fabric.progress`: one bar on rank zero, the plain loader elsewhere, whatever ends the loop."""

from __future__ import annotations

import gc
import io
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.core.errors import MissingExtraError


class Screen(io.StringIO):
    """A stderr of which is known whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def last(self) -> str:
        """What the line of the only bar shows at the end."""
        return re.sub(r"\s+", " ", self.getvalue().strip().rpartition("\r")[2])


def stderr(monkeypatch, terminal=True):
    """Set in the test itself: pytest has put its own in place after the fixtures."""
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def ready(batches=5, **settings):
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = DataLoader(torch.arange(float(2 * batches)), batch_size=2, **settings)
    return fabric, fabric.setup_dataloaders(loader)


def test_a_bar_with_what_set_postfix_gets(monkeypatch):
    terminal = stderr(monkeypatch)
    fabric, loader = ready()
    bar, seen = fabric.progress(loader, desc="epoch 0"), []
    assert len(bar) == 5
    for batch in bar:
        seen.append(batch)
        loss = (batch.sum() * torch.ones(1, requires_grad=True)).sum()
        bar.set_postfix(loss=loss, lr=0.000125, kind="warm", step=123456, pair=torch.ones(2))
    torch.testing.assert_close(torch.cat(seen), torch.arange(10.0))
    last = terminal.last()
    assert last.startswith("epoch 0: 100%|")
    assert "5/5" in last
    assert ", loss=17, lr=0.000125, kind=warm, step=123456, pair=tensor([1., 1.])]" in last
    assert not bar._values.current["loss"].requires_grad, "the graph of a step must not live on"


def test_tensors_are_read_only_when_the_bar_is_drawn(monkeypatch):
    terminal = stderr(monkeypatch)

    class Costly:
        read = 0

        def __format__(self, spec):
            self.read += 1
            return "read"

    fabric, costly = Fabric(accelerator="cpu", devices=1), Costly()
    bar = fabric.progress(range(1000), mininterval=1000)
    for _ in bar:
        bar.set_postfix(value=costly)
    assert costly.read == 1, "at the end"
    assert "value=read" in terminal.last()


@pytest.mark.parametrize("show", [None, True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_shows_on_a_terminal_unless_asked(monkeypatch, is_terminal, show):
    screen = stderr(monkeypatch, is_terminal)
    fabric, loader = ready()
    bar = fabric.progress(loader, show=show)
    for _ in bar:
        bar.set_postfix(loss=1.0)
    shown = is_terminal if show is None else show
    assert ("5/5" in screen.getvalue()) == shown
    assert bool(screen.getvalue()) == shown


def test_where_nothing_is_shown_it_is_the_loaders_own_iterator(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    batches = [1, 2]
    bar = Fabric(accelerator="cpu", devices=1).progress(batches)
    assert type(iter(bar)) is type(iter(batches))
    assert bar.set_postfix(loss=1.0) is None
    assert "tqdm" not in str(type(iter(bar)))


def test_break_ends_the_bar_and_the_next_epoch_has_its_own(monkeypatch):
    terminal = stderr(monkeypatch)
    fabric, loader = ready()
    bar = fabric.progress(loader, leave=True)
    for number, _ in enumerate(bar):
        bar.set_postfix(number=number)
        if number == 2:
            break
    assert terminal.getvalue().endswith("\n"), "closed"
    assert "2/5" in terminal.last()
    assert "number=2" in terminal.last()
    assert loader.batches_done == 3
    assert len(list(bar)) == 5
    assert "5/5" in terminal.last()


@pytest.mark.parametrize("where", ["loop", "loader"])
def test_an_error_passes_and_leaves_a_closed_bar(monkeypatch, where):
    terminal = stderr(monkeypatch)

    def batches():
        yield 1
        if where == "loader":
            raise KeyError("in the loader")
        yield 2

    fabric = Fabric(accelerator="cpu", devices=1)

    def loop():
        for _ in fabric.progress(batches(), total=3):
            if where == "loop":
                raise KeyError("in the loop")

    with pytest.raises(KeyError, match=f"in the {where}"):
        loop()
    gc.collect()  # the traceback holds the loop
    assert terminal.getvalue().endswith("\n")
    assert "1/3" in terminal.last() if where == "loader" else "0/3" in terminal.last()
    from tqdm import tqdm

    assert len(tqdm._instances) == 0


def test_nested_bars(monkeypatch):
    terminal = stderr(monkeypatch)
    fabric, loader = ready()
    for _ in fabric.progress(range(2), desc="epochs"):
        assert len(list(fabric.progress(loader, desc="batches", leave=False))) == 5
    shown = terminal.getvalue()
    assert "epochs: 100%" in shown
    assert "\n\rbatches:" in shown, "on a line of its own"
    assert shown.count("\n") - shown.count("\x1b[A") == 1, "one line stays"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_epoch_starts_where_it_was_left(monkeypatch, shuffle):
    terminal = stderr(monkeypatch)
    fabric, loader = ready(shuffle=shuffle)
    whole, seen = [], []
    for number, batch in enumerate(fabric.progress(loader)):
        whole.append(batch)
        if number == 1:
            state = loader.state_dict()
    _, again = ready(shuffle=shuffle)
    again.load_state_dict(state)
    terminal.truncate(0)
    seen += fabric.progress(again)
    torch.testing.assert_close(seen, whole[2:])
    assert "40%|" in terminal.getvalue().partition("\r0")[0]
    assert "5/5" in terminal.last()


def test_what_has_no_length_counts(monkeypatch):
    terminal = stderr(monkeypatch)
    bar = Fabric(accelerator="cpu", devices=1).progress(n for n in range(3))
    assert list(bar) == [0, 1, 2]
    assert "3it [" in terminal.last()
    with pytest.raises(TypeError):
        len(bar)


def test_an_unset_up_loader_with_workers(monkeypatch):
    terminal = stderr(monkeypatch)
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = DataLoader(torch.arange(4.0), num_workers=1)
    assert [batch.item() for batch in fabric.progress(loader)] == [0, 1, 2, 3]
    assert "4/4" in terminal.last()


@pytest.mark.parametrize("show", [None, True])
def test_without_tqdm_every_rank_hears_it(monkeypatch, show):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(
        MissingExtraError, match=r"^fabric\.progress needs tqdm, .*torch-fabric\[progress\]\"`\.$"
    ):
        Fabric(accelerator="cpu", devices=1).progress([1], show=show)


def on_ranks():
    screen = Screen(terminal=True)
    sys.stderr, stderr = screen, sys.stderr
    try:
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2))
        bar = fabric.progress(loader)
        for batch in bar:
            bar.set_postfix(sum=batch.sum())
        return screen.last(), bool(fabric.barrier())
    finally:
        sys.stderr = stderr


def test_rank_zero_only(ranks):
    (first, _), (second, _) = ranks.run(on_ranks, world_size=2)
    assert "2/2" in first
    assert "sum=10]" in first
    assert second == ""


def kind_of_bar():
    from fabric.progress.progress import _tqdm_class

    return _tqdm_class().__module__


def test_a_child_of_a_notebook_cannot_reach_its_widgets(ranks):
    """Ranks that a kernel forks draw text; the kernel itself what tqdm finds best."""
    assert ranks.run(kind_of_bar, world_size=2) == ["tqdm.std"] * 2
    assert kind_of_bar() == "tqdm.asyncio"  # what tqdm.auto gives outside of notebooks
