"""What a rank holds in its metrics' states, as it travels: a layout of a few numbers, and flat bytes.

Pure: `sync.py` sends both. Tensors of one rule and dtype lie side by side, so that a rank's part of a
reduction is one slice.
"""

from __future__ import annotations

import math
import pickle
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import ArgumentTypeError
from fabric.core.tree import map_tree
from fabric.metrics.members import FOLDS, updates_of
from fabric.plugins.collectives.channel import as_bytes, join
from fabric.plugins.collectives.gather import to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from fabric.metrics.members import Found, State

TENSOR, LIST, OBJECTS = range(3)
_ALIGN = 16
"""Bytes of the largest element: any dtype can be read from where a chunk begins."""
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

Chunk = tuple[int, int]
"""Place in FOLDS, from 1 (0: not folded), and code of the dtype."""


class Run(NamedTuple):
    """Tensors of one dtype and shape: a state that is a tensor, or neighbours in one that is a list."""

    chunk: Chunk
    many: int
    shape: tuple[int, ...]
    numel: int
    """Elements of all of them."""


class Held(NamedTuple):
    """What a rank holds for one state."""

    kind: int
    runs: range
    """Places in the rank's runs."""


class Layout(NamedTuple):
    """All that one rank holds."""

    rides: int
    """Whether the data follow at once."""
    on_host: int
    """Whether all of them lie in host memory."""
    updates: list[int]
    """How often each metric was updated."""
    leaders: list[int]
    """For each metric of each collection, whose states it shares by torchmetrics' guess; -1: no guess."""
    held: list[Held | None]
    """For each state of each metric; None where the metric was never updated."""
    runs: list[Run]


class Packed(NamedTuple):
    """A layout with what it describes."""

    layout: Layout
    parts: list[list[Tensor]]
    """The tensors of each run."""


def pack(found: Found) -> Packed:
    """What this rank holds.

    Raises:
        ArgumentTypeError: A state holds what cannot be pickled.
    """
    updates: list[int] = []
    held: list[Held | None] = []
    runs: list[Run] = []
    parts: list[list[Tensor]] = []
    known: dict[Any, Held] = {}
    alive = []  # an id stands for one object only as long as that lives
    for member in found.members:
        count = updates_of(member.metric)
        updates.append(count)
        for state in member.states:
            if not count:
                held.append(None)
                continue
            value = state.value
            if isinstance(value, bool | int | float | complex):
                value = torch.tensor(value)
            # Metrics of a compute group hold the same objects: these travel once.
            key = (id(value), _fold_of(state) if isinstance(value, torch.Tensor) else 0)
            alive.append(value)
            if key not in known:
                kind, groups = _parts_of(state, value)
                known[key] = Held(kind, range(len(runs), len(runs) + len(groups)))
                for group in groups:
                    first = group[0]
                    chunk = (key[1] if kind == TENSOR else 0, _DTYPE_CODES[first.dtype])
                    runs.append(Run(chunk, len(group), tuple(first.shape), len(group) * first.numel()))
                    parts.append(group)
            held.append(known[key])
    on_host = all([group[0].device.type == "cpu" for group in parts])
    leaders = [leader for group in found.groups for leader in _leaders(group)]
    return Packed(Layout(0, int(on_host), updates, leaders, held, runs), parts)


def to_words(layout: Layout) -> Tensor:
    """The layout as bytes, aligned: how many numbers follow, of 4 bytes (negative: of 8); the numbers."""
    words = [layout.rides, layout.on_host, *layout.updates, *layout.leaders]
    known: dict[int, int] = {}
    for place, held in enumerate(layout.held):
        if held is None:
            continue
        if id(held) in known:
            words.append(-1 - known[id(held)])
            continue
        known[id(held)] = place
        words.append(held.kind)
        if held.kind == LIST:
            words.append(len(held.runs))
        for at in held.runs:
            (fold, dtype), many, shape, _ = layout.runs[at]
            if held.kind == LIST:
                words.append(many)
            words += (fold | dtype << 4 | len(shape) << 16, *shape)
    try:
        data, size = array("i", words).tobytes(), len(words)
    except OverflowError:
        data, size = array("q", words).tobytes(), -len(words)
    head = array("q", [size]).tobytes() + data
    return torch.frombuffer(bytearray(head.ljust(aligned(len(head)), b"\0")), dtype=torch.uint8)


def from_words(message: Tensor, found: Found) -> tuple[Layout, Tensor]:
    """The layout that a rank sent, and what follows it."""
    size = int(message[:8].view(torch.int64))
    width, dtype = (4, torch.int32) if size >= 0 else (8, torch.int64)
    end = 8 + abs(size) * width
    words = message[8:end].view(dtype).tolist()
    at = 2 + len(found.members)
    updates = words[2:at]
    guesses = sum([len(group._modules) for group in found.groups])
    leaders, at = words[at : at + guesses], at + guesses
    held: list[Held | None] = []
    runs: list[Run] = []
    for member, count in zip(found.members, updates, strict=True):
        for _ in member.states:
            if not count:
                held.append(None)
                continue
            kind = words[at]
            at += 1
            if kind < 0:
                held.append(held[-1 - kind])
                continue
            start, number = len(runs), 1
            if kind == LIST:
                number = words[at]
                at += 1
            for _ in range(number):
                many = 1
                if kind == LIST:
                    many = words[at]
                    at += 1
                code = words[at]
                shape = tuple(words[at + 1 : at + 1 + (code >> 16)])
                runs.append(Run((code & 15, code >> 4 & 4095), many, shape, many * math.prod(shape)))
                at += 1 + len(shape)
            held.append(Held(kind, range(start, len(runs))))
    return Layout(words[0], words[1], updates, leaders, held, runs), message[aligned(end) :]


def chunks_of(runs: Sequence[Run], folded: bool = True) -> dict[Chunk, list[int]]:
    """Which runs lie side by side, in the order in which the chunks lie.

    Args:
        runs: A rank's.
        folded: Whether those to be folded are among them.
    """
    chunks: dict[Chunk, list[int]] = {}
    for at, run in enumerate(runs):
        if folded or not run.chunk[0]:
            chunks.setdefault(run.chunk, []).append(at)
    return {chunk: chunks[chunk] for chunk in sorted(chunks)}


def size_of(runs: Sequence[Run], folded: bool = True) -> int:
    """Bytes that these runs take."""
    return sum([_bytes_of(chunk, runs, places) for chunk, places in chunks_of(runs, folded).items()])


def fold_size(runs: Sequence[Run]) -> int:
    """Bytes of what is to be folded."""
    return size_of(runs) - size_of(runs, folded=False)


def fill(buffer: Tensor, packed: Packed, folded: bool = True) -> Tensor:
    """The data written into flat bytes, on whichever device these are."""
    runs, start = packed.layout.runs, 0
    for chunk, places in chunks_of(runs, folded).items():
        flat = as_bytes(_joined([part for place in places for part in packed.parts[place]], buffer.device))
        buffer[start : start + flat.numel()] = flat
        start += _bytes_of(chunk, runs, places)
    return buffer


class Reader:
    """One rank's data."""

    def __init__(self, runs: Sequence[Run], data: Tensor, folded: bool = True) -> None:
        self._runs = runs
        self._flat: dict[Chunk, tuple[Tensor, list[int]]] = {}
        self._where: dict[int, int] = {}
        start = 0
        for chunk, places in chunks_of(runs, folded).items():
            dtype = _DTYPES[chunk[1]]
            numel = sum([runs[place].numel for place in places])
            self._flat[chunk] = (data[start : start + numel * dtype.itemsize].view(dtype), places)
            start += _bytes_of(chunk, runs, places)
            element = 0
            for place in places:
                self._where[place] = element
                element += runs[place].numel

    def run(self, place: int) -> Tensor:
        """(count, *shape): the tensors of a run."""
        run, start = self._runs[place], self._where[place]
        flat, _ = self._flat[run.chunk]
        return flat[start : start + run.numel].view(run.many, *run.shape)

    def row(self, places: list[int]) -> Tensor:
        """The elements of several runs, one after the other; no copy of a whole chunk."""
        flat, whole = self._flat[self._runs[places[0]].chunk]
        return flat if whole == places else torch.cat([self.run(place).flatten() for place in places])


def dtype_of(run: Run) -> torch.dtype:
    """The dtype of a run."""
    return _DTYPES[run.chunk[1]]


def aligned(size: int) -> int:
    """`size`, rounded up to where any dtype may begin."""
    return -(-size // _ALIGN) * _ALIGN


def _bytes_of(chunk: Chunk, runs: Sequence[Run], places: Iterable[int]) -> int:
    return aligned(_DTYPES[chunk[1]].itemsize * sum([runs[place].numel for place in places]))


def _fold_of(state: State) -> int:
    return FOLDS.index(state.rule) + 1 if state.rule in FOLDS else 0


def _parts_of(state: State, value: Any) -> tuple[int, list[list[Tensor]]]:
    """A state's kind, and its tensors, neighbours of one dtype and shape together."""
    if isinstance(value, torch.Tensor):
        return TENSOR, [[value.detach()]]
    entries = list(value)
    if not all([isinstance(entry, torch.Tensor) for entry in entries]):
        return OBJECTS, [[_pickled(state, entries)]]
    groups: list[list[Tensor]] = []
    last: Any = None
    for entry in entries:
        key = (entry.shape, entry.dtype)
        if key != last:
            groups.append([])
            last = key
        groups[-1].append(entry.detach())
    return LIST, groups


def _pickled(state: State, entries: list[Any]) -> Tensor:
    plain = map_tree(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, entries)
    try:
        return torch.frombuffer(bytearray(pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
    except Exception as error:
        raise ArgumentTypeError(
            f"compute_metrics: state {state.name!r} of {type(state.metric).__name__} holds what cannot be "
            f"pickled ({type(error).__name__}: {error}). Keep tensors, numbers or texts in it."
        ) from error


def unpickled(reader: Reader, held: Held) -> list[Any]:
    """The entries of a list of objects."""
    entries: list[Any] = pickle.loads(to_bytes(reader.run(held.runs[0]).flatten().cpu()))
    return entries


def _leaders(group: Any) -> list[int]:
    """For each metric of a collection, the first of its compute group, where torchmetrics guessed these."""
    places = {name: place for place, name in enumerate(group._modules)}
    leaders = [-1] * len(places)
    if group._enable_compute_groups is True and group._groups_checked:
        for names in group._groups.values():
            for name in names:
                leaders[places[name]] = places[names[0]]
    return leaders


def _joined(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The elements of tensors of one dtype on `device`; each device's are copied at once."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.to(device) for tensor in tensors]
    return join(tensors).to(device)
