"""Batches that are copied on a side stream. Skipped, visibly, where there is no device."""

from contextlib import nullcontext

import pytest
import torch
from accelerated import ASYNCHRONOUS, DEVICE, KIND, MODULE, NEEDS_TWO, keep_busy
from torch.nn.utils.rnn import pack_sequence

from fabric.data.prefetch import Prefetch, SideStream
from fabric.utilities.apply_func import move_data_to_device

pytestmark = pytest.mark.gpu

LONG = 200_000_000  # cycles of a busy device: about a tenth of a second, a thousand copies of a batch
SHORT = LONG // 50
SIZE = 1 << 18


class Own:
    """A batch that moves itself, in place."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device, non_blocking=True)
        return self


class Hider:
    """A batch whose tensor nobody finds."""

    def __init__(self, x):
        self.get = lambda: x

    def to(self, device):
        return Hider(self.get().to(device, non_blocking=True))


def full(value, pinned):
    x = torch.full((SIZE,), float(value))
    return x.pin_memory() if pinned else x


def pinned_pairs(n):
    # Made before the device is busy: to pin memory can make the host wait for it.
    return iter([(full(i, True), i) for i in range(n)])


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Memory in the allocator's cache, for both streams, and kernels loaded: neither may wait for a step."""
    for context in (SideStream(DEVICE).on_side_stream(), nullcontext()):
        with context:
            blocks = [torch.ones(SIZE, device=DEVICE) for _ in range(16)]
            blocks[0].add_(1), blocks[0].sum(), blocks[0].mean()
            keep_busy(1)
            del blocks
    MODULE.synchronize()


def slowly(cycles):
    def move(batch, device):
        keep_busy(cycles)  # on the stream of the copy
        return move_data_to_device(batch, device)

    return move


MAKE = {
    "tensor": (lambda x: x, lambda b: b),
    "nested": (lambda x: {"a": [x, "text"], "n": 1}, lambda b: b["a"][0]),
    "own": (Own, lambda b: b.x),
    "hider": (Hider, lambda b: b.get()),
}


@pytest.mark.parametrize("copy", [0, SHORT], ids=["fast-copy", "slow-copy"])
@pytest.mark.parametrize("step", [0, SHORT], ids=["fast-step", "slow-step"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("kind", MAKE)
def test_values_are_right_while_memory_is_used_again(kind, pinned, step, copy):
    make, get = MAKE[kind]
    pairs = ((make(full(i, pinned)), i) for i in range(30))
    sums = []
    for batch, note in Prefetch(pairs, DEVICE, slowly(copy)):
        x = get(batch)
        assert x.device == DEVICE
        keep_busy(step)  # the host frees the batch long before the device has read it
        sums.append((note, x.double().sum(), x.amin(), x.amax()))
        del x, batch
    assert [(note, float(s), float(lo), float(hi)) for note, s, lo, hi in sums] == [
        (i, float(i * SIZE), float(i), float(i)) for i in range(30)
    ]


@ASYNCHRONOUS
def test_memory_that_the_step_still_reads_is_written_by_no_copy():
    prefetch = Prefetch(pinned_pairs(6), DEVICE, move_data_to_device)
    next(prefetch)
    MODULE.synchronize()
    keep_busy(10 * LONG)
    begun = MODULE.Event()
    begun.record()
    reads = []
    for batch, _ in prefetch:
        reads.append(batch.mean())
        del batch
    assert not begun.query(), "the host was too slow for this test"
    # The host has freed each, and the device has read none.
    assert torch.stack(reads).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


@ASYNCHRONOUS
def test_the_next_copy_ends_before_the_step_does():
    copied, ended = {}, {}

    def move(batch, device):
        moved = move_data_to_device(batch, device)
        copied[int(batch[0])] = MODULE.Event(enable_timing=True)
        copied[int(batch[0])].record()
        return moved

    used = []
    for batch, note in Prefetch(pinned_pairs(5), DEVICE, move):
        assert sorted(copied) == list(range(min(note + 2, 5)))  # the next one, and no other
        keep_busy(LONG)
        used.append(batch.sum())
        ended[note] = MODULE.Event(enable_timing=True)
        ended[note].record()
    MODULE.synchronize()
    for index in range(4):
        assert copied[index + 1].elapsed_time(ended[index]) > 0
    assert [float(x) for x in used] == [float(i * SIZE) for i in range(5)]


@ASYNCHRONOUS
def test_the_host_does_not_wait_for_a_step():
    MODULE.synchronize()
    for batch, _ in Prefetch(pinned_pairs(3), DEVICE, move_data_to_device):
        keep_busy(LONG)
        batch.add_(1)
    done = MODULE.Event()
    done.record()
    assert not done.query()
    MODULE.synchronize()


def test_copies_and_steps_run_on_their_own_streams():
    streams = []

    def move(batch, device):
        streams.append(MODULE.current_stream(DEVICE))
        return batch.to(device, non_blocking=True)

    mine = MODULE.current_stream(DEVICE)
    for _ in Prefetch(pinned_pairs(4), DEVICE, move):
        assert MODULE.current_stream(DEVICE) == mine
    first, *rest = streams
    assert first == mine
    assert len(set(rest)) == 1
    assert mine not in rest
    # Another epoch takes the same side stream: what is cached for it is used again.
    assert SideStream(torch.device(KIND))._stream == rest[0]


def test_a_batch_is_ready_for_the_stream_it_is_asked_for_on():
    prefetch = Prefetch(pinned_pairs(8), DEVICE, slowly(SHORT))
    streams = [MODULE.current_stream(DEVICE), *[MODULE.Stream(DEVICE) for _ in range(3)]]
    sums = []
    for index in range(8):
        with MODULE.stream(streams[index % 4]):
            batch, note = next(prefetch)
            keep_busy(SHORT)
            sums.append((note, batch.double().sum()))
            del batch
    MODULE.synchronize()
    assert [(note, float(x)) for note, x in sums] == [(i, float(i * SIZE)) for i in range(8)]


def test_a_packed_sequence_is_copied_ahead_and_keeps_its_sizes_on_the_host():
    def sequences(i):
        packed = pack_sequence(
            [torch.full((2, 3), float(i)), torch.full((5, 3), float(i))], enforce_sorted=False
        )
        return packed.pin_memory()

    streams = []

    def move(batch, device):
        streams.append(MODULE.current_stream(DEVICE))
        return move_data_to_device(batch, device)

    pairs = ((sequences(i), i) for i in range(10))
    for batch, note in Prefetch(pairs, DEVICE, move):
        assert batch.data.device == batch.sorted_indices.device == DEVICE
        assert batch.batch_sizes.device.type == "cpu"
        assert batch.batch_sizes.tolist() == [2, 2, 1, 1, 1]
        assert batch.data.unique().tolist() == [float(note)]
    assert len(set(streams)) == 2


def test_batches_that_are_on_the_device_stay_as_they_are():
    given = [torch.full((4,), float(i), device=DEVICE) for i in range(4)]
    got = [batch for batch, _ in Prefetch(iter([(x, None) for x in given]), DEVICE, move_data_to_device)]
    assert all(a is b for a, b in zip(got, given, strict=True))


@ASYNCHRONOUS
def test_a_step_on_one_loader_does_not_wait_for_the_copies_of_another():
    fast = Prefetch(pinned_pairs(3), DEVICE, move_data_to_device)
    slow = Prefetch(pinned_pairs(3), DEVICE, slowly(5 * LONG))
    next(fast)  # its second batch is on its way, before anything slow
    next(slow)
    MODULE.current_stream(DEVICE).synchronize()
    busy = MODULE.Event()
    with MODULE.stream(slow._side._stream):
        busy.record()
    batch, _ = next(fast)
    assert float(batch[0]) == 1.0
    assert not busy.query()
    MODULE.synchronize()


def test_stopping_midway_leaves_the_device_in_order():
    for _ in range(20):
        prefetch = Prefetch(pinned_pairs(9), DEVICE, slowly(SHORT))
        batches = [next(prefetch)[0] for _ in range(3)]
        prefetch.close()
        assert [float(batch.mean()) for batch in batches] == [0.0, 1.0, 2.0]


def test_a_batch_asked_for_in_inference_mode_leaves_the_next_one_trainable():
    weight = torch.ones(SIZE, device=DEVICE, requires_grad=True)
    prefetch = Prefetch(pinned_pairs(3), DEVICE, move_data_to_device)
    with torch.inference_mode():
        next(prefetch)
    (next(prefetch)[0] * weight).sum().backward()
    assert float(weight.grad.amax()) == 1.0


@NEEDS_TWO
def test_the_device_of_the_batches_need_not_be_the_current_one():
    other = torch.device(KIND, 1)
    for batch, note in Prefetch(pinned_pairs(6), other, slowly(SHORT)):
        assert MODULE.current_device() == 0
        assert batch.device == other
        with MODULE.device(other):
            keep_busy(SHORT)
        assert float(batch.mean()) == note
