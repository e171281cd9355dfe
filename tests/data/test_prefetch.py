"""The order in which batches are fetched, copied ahead and handed over. The recorder stands for a stream."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from itertools import islice

import pytest
import torch

from fabric.data import prefetch as prefetch_module
from fabric.data.prefetch import Prefetch
from fabric.utilities.apply_func import move_data_to_device

CPU = torch.device("cpu")
META = torch.device("meta")
X = torch.ones(2)


class Recorder:
    """A side stream's interface on a host: work runs at once, and what happens is written down."""

    def __init__(self):
        self.log = []
        self.inside = False

    @contextmanager
    def on_side_stream(self):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def wait_stream(self):
        self.log.append("hand over")

    def source(self, batches):
        for index, batch in enumerate(batches):
            self.log.append(("fetch", index))
            yield batch, f"note {index}"
        self.log.append(("fetch", "end"))

    def move(self, batch, device):
        moved = move_data_to_device(batch, device)
        moved = moved.clone() if isinstance(moved, torch.Tensor) else moved
        self.log.append(("ahead" if self.inside else "now", int(getattr(batch, "x", batch))))
        return moved

    def prefetch(self, batches):
        return Prefetch(self.source(batches), CPU, self.move, side=self)


class Holder:
    """Moves itself, in place, as batches of the field do."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Hider:
    """Its tensors are where nobody finds them."""

    def __init__(self, x):
        self.get = lambda: x

    def to(self, device):
        return Hider(self.get().to(device))


def tensors(n):
    return [torch.tensor(i) for i in range(n)]


# order


def test_the_next_copy_is_issued_when_a_batch_is_given_and_nothing_beyond_it_is_fetched():
    recorder = Recorder()
    prefetch = recorder.prefetch(tensors(4))
    assert recorder.log == []
    expected = [
        [("fetch", 0), ("now", 0), ("fetch", 1), ("ahead", 1)],
        ["hand over", ("fetch", 2), ("ahead", 2)],
        ["hand over", ("fetch", 3), ("ahead", 3)],
        ["hand over", ("fetch", "end")],
    ]
    for index, want in enumerate(expected):
        batch, note = next(prefetch)
        assert (int(batch), note) == (index, f"note {index}")
        assert recorder.log == want
        recorder.log.clear()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(prefetch)
    assert recorder.log == []


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_every_batch_comes_once_and_in_order_with_its_note(n):
    got = [(int(batch), note) for batch, note in Recorder().prefetch(tensors(n))]
    assert got == [(i, f"note {i}") for i in range(n)]


def test_notes_are_passed_on_as_they_are():
    notes = [object(), None, [torch.ones(1)]]
    pairs = zip(tensors(3), notes, strict=True)
    recorder = Recorder()
    got = [note for _, note in Prefetch(pairs, CPU, recorder.move, side=recorder)]
    assert all(a is b for a, b in zip(got, notes, strict=True))


def test_the_batch_is_what_move_gave():
    moved = [batch for batch, _ in Prefetch(iter([(torch.ones(3), 0)] * 3), META, move_data_to_device)]
    assert [batch.device for batch in moved] == [META] * 3
    recorder = Recorder()
    ahead = Prefetch(iter([({"x": torch.ones(3)}, 0)] * 3), META, move_data_to_device, side=recorder)
    assert [batch["x"].device for batch, _ in ahead] == [META] * 3
    assert recorder.log == ["hand over", "hand over"]


# the end, errors


def failing(n, error):
    yield from [(i, None) for i in tensors(n)]
    raise error


def test_a_source_that_is_over_is_not_asked_again():
    class Broken:
        """Gives more after its end."""

        asked = 0

        def __next__(self):
            self.asked += 1
            if self.asked == 3:
                raise StopIteration
            return torch.tensor(self.asked), None

    recorder, source = Recorder(), Broken()
    prefetch = Prefetch(source, CPU, recorder.move, side=recorder)
    assert [int(batch) for batch, _ in prefetch] == [1, 2]
    assert list(prefetch) == []
    assert source.asked == 3


@pytest.mark.parametrize("good", [0, 1, 3])
def test_an_error_of_the_source_surfaces_where_its_batch_was_due(good):
    recorder = Recorder()
    prefetch = Prefetch(failing(good, OSError("no such file")), CPU, recorder.move, side=recorder)
    assert [int(next(prefetch)[0]) for _ in range(good)] == list(range(good))
    with pytest.raises(OSError, match="no such file") as caught:
        next(prefetch)
    assert caught.traceback[-1].name == "failing"
    with pytest.raises(StopIteration):  # the generator is over, as it would be without us
        next(prefetch)


def test_an_error_of_a_copy_surfaces_where_its_batch_was_due():
    def move(batch, device):
        if int(batch) == 1:
            raise RuntimeError("out of memory")
        return batch.to(device)

    prefetch = Prefetch(iter([(x, None) for x in tensors(4)]), CPU, move, side=Recorder())
    assert int(next(prefetch)[0]) == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        next(prefetch)
    assert [int(batch) for batch, _ in prefetch] == [2, 3]


def test_a_source_that_goes_on_after_an_error_goes_on():
    class Flaky:
        """An iterator as that of a loader with workers, of whom one fails."""

        def __init__(self):
            self.index = -1

        def __iter__(self):
            return self

        def __next__(self):
            self.index += 1
            if self.index == 1:
                raise ValueError("a broken sample")
            return torch.tensor(self.index), self.index

    recorder = Recorder()
    prefetch = Prefetch(Flaky(), CPU, recorder.move, side=recorder)
    assert next(prefetch)[1] == 0
    with pytest.raises(ValueError, match="a broken sample"):
        next(prefetch)
    assert [note for _, note in islice(prefetch, 3)] == [2, 3, 4]
    assert recorder.log == [
        *[("now", 0), ("now", 2), ("ahead", 3)],
        *["hand over", ("ahead", 4), "hand over", ("ahead", 5)],
    ]


def test_an_interrupt_is_not_kept_for_later():
    recorder = Recorder()
    prefetch = Prefetch(failing(1, KeyboardInterrupt()), CPU, recorder.move, side=recorder)
    with pytest.raises(KeyboardInterrupt):
        next(prefetch)


# the consumer stops


def closing(log, n=9):
    try:
        yield from [(x, None) for x in tensors(n)]
    finally:
        log.append("closed")


def consumer(prefetch):
    yield from prefetch


def test_close_reaches_the_source_and_ends():
    recorder, log = Recorder(), []
    prefetch = Prefetch(closing(log), CPU, recorder.move, side=recorder)
    next(prefetch)
    prefetch.close()
    assert log == ["closed"]
    assert list(prefetch) == []
    prefetch.close()
    assert log == ["closed"]


def test_a_source_without_close_is_left_alone():
    prefetch = Prefetch(iter([(x, None) for x in tensors(3)]), CPU, move_data_to_device)
    next(prefetch)
    prefetch.close()
    assert list(prefetch) == []


@pytest.mark.parametrize("side", [True, False])
def test_generator_exit_reaches_the_source(side):
    recorder, log = Recorder(), []
    source = closing(log)
    around = consumer(Prefetch(source, CPU, recorder.move, side=recorder if side else None))
    next(around)
    assert log == []
    around.close()
    assert log == ["closed"]


@pytest.mark.parametrize("good", [1, 3])
def test_the_source_is_let_go_at_once(good):
    class Source:
        """Without `close`, as the iterator of a loader with workers."""

        given = 0

        def __next__(self):
            if self.given == good:
                raise OSError("no such file")
            self.given += 1
            return torch.ones(1), None

    source = Source()
    gone = weakref.ref(source)
    recorder = Recorder()
    prefetch = Prefetch(source, CPU, recorder.move, side=recorder)
    del source
    gc.disable()
    try:
        next(prefetch)
        if good == 1:  # an error is waiting, which refers to frames, and these to all of this
            prefetch.close()
        del prefetch
        assert gone() is None
    finally:
        gc.enable()


# nothing to do


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_without_a_side_stream_nothing_is_fetched_ahead(device, monkeypatch):
    monkeypatch.setattr(prefetch_module, "SideStream", pytest.fail)
    recorder = Recorder()
    asked = []
    prefetch = Prefetch(
        recorder.source(tensors(3)), torch.device(device), lambda batch, device: asked.append(device) or batch
    )
    for index in range(3):
        batch, note = next(prefetch)
        assert (int(batch), note) == (index, f"note {index}")
        assert recorder.log == [("fetch", i) for i in range(index + 1)]
    assert asked == [torch.device(device)] * 3


def test_making_one_touches_neither_source_nor_device(monkeypatch):
    monkeypatch.setattr(prefetch_module, "SideStream", pytest.fail)
    recorder = Recorder()
    Prefetch(recorder.source(tensors(3)), torch.device("cuda"), recorder.move)
    assert recorder.log == []


def test_batches_of_any_kind_are_copied_ahead():
    recorder = Recorder()
    device = torch.empty(1, device=META)
    batches = [torch.tensor(0), "text", Hider(X), {"there": device, "here": torch.tensor(3)}, []]
    seen = []

    def move(batch, device):
        seen.append(recorder.inside)
        return batch

    got = Prefetch(recorder.source(batches), CPU, move, side=recorder)
    assert all(batch is given for (batch, _), given in zip(got, batches, strict=True))
    assert seen == [False, True, True, True, True]


class Streams:
    """A device module whose streams write down who waits for whom; `current` is the current one."""

    current: Streams

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, CPU

    def current_device(self):
        return 0

    def current_stream(self, device):
        return self.current

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def stream(self, stream):
        return nullcontext()

    def record_event(self):
        return f"copy on {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_a_copy_waits_for_the_stream_that_reads_the_last_batch_and_for_the_current_one(monkeypatch):
    log = []
    module, side, other = (Streams(name, log) for name in ("main", "side", "other"))
    module.current = module
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(prefetch_module, "_stream_of", lambda device: side)
    prefetch = Prefetch(((x, None) for x in tensors(4)), torch.device("cuda"), lambda batch, device: batch)
    for stream, waits in (
        (module, ["side waits for main"] * 2),
        (other, ["other waits for copy on side", "side waits for main", "side waits for other"]),
        (other, ["other waits for copy on side", *["side waits for other"] * 2]),
    ):
        module.current = stream
        next(prefetch)
        assert log == waits
        log.clear()


def test_the_memory_of_a_batch_is_kept_until_its_reads_are_waited_for():
    kept = []

    class Kept(Recorder):
        def on_side_stream(self):
            kept.append([ref() is not None for ref in given])
            return super().on_side_stream()

    given, recorder = [], Kept()
    for batch, _ in Prefetch(recorder.source(tensors(4)), CPU, recorder.move, side=recorder):
        given.append(weakref.ref(batch))
        del batch
    assert kept == [[], [True], [False, True]]


def test_a_batch_that_moves_itself_is_copied_ahead():
    recorder = Recorder()
    got = [batch for batch, _ in recorder.prefetch([Holder(x) for x in tensors(3)])]
    assert [int(batch.x) for batch in got] == [0, 1, 2]
    assert recorder.log.count("hand over") == 2


def test_a_batch_asked_for_in_inference_mode_leaves_the_next_one_trainable():
    recorder = Recorder()
    prefetch = recorder.prefetch(tensors(3))
    with torch.inference_mode():
        assert next(prefetch)[0].is_inference()
        assert torch.is_inference_mode_enabled()
    batch, _ = next(prefetch)
    assert not batch.is_inference()
