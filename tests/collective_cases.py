"""Random trees, references and counters for tests of verbs on several ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, namedtuple
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.tree import flatten
from fabric.guard.control_connections import ControlConnections
from fabric.precision.dtypes import as_bytes

Pair = namedtuple("Pair", ["left", "right"])

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
COMPLEX = [torch.complex64, torch.complex128]
GATHERED = [*FLOATS, *INTEGERS, *COMPLEX, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
REDUCERS = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
CALLS = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_gather_into_tensor",
    "all_gather_single",
)
FLAT = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    y: Any


def launched(world_size: int | None = None) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world_size or dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric


@contextmanager
def counted():
    """How often each function of torch.distributed is called, and how often ranks send frames."""
    calls: Counter[str] = Counter()

    def count(name, function):
        def counting(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    patched = {name: count(name, getattr(dist, name)) for name in CALLS if hasattr(dist, name)}
    frames = {"start": count("frame", ControlConnections.start)}
    with mock.patch.multiple(dist, **patched), mock.patch.multiple(ControlConnections, **frames):
        yield calls


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Small numbers that every dtype holds exactly and that reduce without rounding."""
    values = torch.randint(1, 4, shape, generator=generator)
    if dtype is torch.bool:
        return values > 1
    return (
        values.to(torch.float32).to(dtype)
        if dtype not in COMPLEX
        else torch.complex(values + 0.0, 1.0 - values).to(dtype)
    )


def random_tree(seed: int, rank: int, dtypes: list[torch.dtype], depth: int = 0) -> Any:
    """The same structure for every rank, other values."""
    shapes = torch.Generator().manual_seed(seed)
    values = torch.Generator().manual_seed(seed * 1000 + rank + 1)
    return _grow(shapes, values, dtypes, depth)


def _grow(shapes, values, dtypes, depth):
    draw = lambda n: int(torch.randint(n, (), generator=shapes))  # noqa: E731
    kind = draw(9) if depth < 3 else 7
    children = [None] * draw(4)
    if kind <= 1:
        return {f"key{i}": _grow(shapes, values, dtypes, depth + 1) for i, _ in enumerate(children)}
    if kind == 2:
        return [_grow(shapes, values, dtypes, depth + 1) for _ in children]
    if kind == 3:
        return tuple(_grow(shapes, values, dtypes, depth + 1) for _ in children)
    if kind == 4:
        return Pair(_grow(shapes, values, dtypes, depth + 1), _grow(shapes, values, dtypes, depth + 1))
    if kind == 5:
        return Batch(_grow(shapes, values, dtypes, depth + 1), _grow(shapes, values, dtypes, depth + 1))
    if kind == 6:
        return OrderedDict(
            b=_grow(shapes, values, dtypes, depth + 1), a=_grow(shapes, values, dtypes, depth + 1)
        )
    shape = [(), (0,), (3,), (2, 3), (0, 2), (2, 2, 2), (1,)][draw(7)]
    tensor = random_tensor(shape, dtypes[draw(len(dtypes))], values)
    form = draw(3)
    if form == 1 and len(shape) > 1:
        return tensor.transpose(0, 1)
    if form == 2 and shape:
        return torch.stack([tensor, tensor], -1)[..., 0]  # strided
    return tensor


def alike(one: Any, other: Any) -> None:
    """Equal structures, and leaves equal to the last bit."""
    ones, one_spec = flatten(one)
    others, other_spec = flatten(other)
    assert one_spec == other_spec
    for a, b in zip(ones, others, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bits(a) == bits(b), (a, b)


def bits(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor).numpy().tobytes()


def everywhere_alike(value: Any) -> None:
    """Every rank has the same bits. Uses torch's own collective."""
    everyone = [None] * dist.get_world_size()
    mine = [bits(leaf) for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone)


def reduced(leaves: list[torch.Tensor], op: str) -> torch.Tensor:
    """What a leaf must become, in a dtype that holds every intermediate result."""
    dtype = leaves[0].dtype
    if dtype is torch.bool:
        return reduce(torch.logical_or if op in ("sum", "max") else torch.logical_and, leaves)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = reduce(REDUCERS[op], [leaf.to(wide) for leaf in leaves])
    return (total / len(leaves) if op == "mean" else total).to(dtype)
