"""Trees gathered from ranks, of equal shapes or not. As bytes: a gather computes nothing, so every dtype
is exact.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.channel import all_on_host, as_bytes, buckets, join, to_tensors
from fabric.plugins.collectives.frames import ROOM, call_of, draw, tree_call
from fabric.plugins.collectives.handle import Handle

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel
    from fabric.plugins.collectives.frames import Call

_PICKLED = {
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
    ),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""Dtypes whose tensors come out of a pickle; torch 2.13 loads none of the others."""


def gather_tree(data: Any, channel: Channel, *, async_op: bool = False, verb: str = "all_gather") -> Any:
    """Every leaf of every rank: leaves of shape (world_size, *shape), on the device where they were.

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        channel: The group.
        async_op: Whether to return a `Handle` while large data are on their way.
        verb: What the call is to the user.

    Raises:
        ArgumentTypeError: A leaf that is no tensor and no number.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
        UsageError: This rank does not belong to the group.
    """
    channel.world_size  # noqa: B018 - raises for ranks outside the group, before anything is sent
    leaves, spec = flatten(data)
    try:
        tensors = to_tensors(leaves, channel.wire.device, "all_gather")
    except FabricError as error:
        channel.refuse("all_gather", error)
        raise
    works, finish = start_gather(tensors, tree_call(verb, spec, tensors), channel)

    def build() -> Any:
        return unflatten(finish(), spec, data)

    if async_op:
        return Handle(verb, works, build)
    for work in works:
        work.wait()
    return build()


def gather_to(data: Any, dst: int, channel: Channel) -> Any:
    """As `gather_tree`, on rank `dst` only; None on the others.

    Raises:
        ConfigurationError: `dst` is not in the group; on all ranks.
    """
    channel.world_size  # noqa: B018
    leaves, spec = flatten(data)
    try:
        tensors = to_tensors(leaves, channel.wire.device, "gather")
        channel.collective.place_of(dst)
    except FabricError as error:
        channel.refuse(f"gather(dst={dst})", error)
        raise
    call = tree_call(f"gather(dst={dst})", spec, tensors)
    works, finish = start_gather(tensors, call, channel, dst)
    for work in works:
        work.wait()
    return unflatten(finish(), spec, data) if channel.collective.rank == dst else None


def start_gather(tensors: list[Tensor], call: Call, channel: Channel, dst: int | None = None) -> Any:
    """What to wait for, and a function that then gives a (world_size, *shape) tensor for each tensor.

    Args:
        tensors: Of equal shapes and dtypes on all ranks.
        call: What the others must do, too.
        channel: The group.
        dst: The only rank that needs the result; None: all do.
    """
    world, groups = channel.world_size, buckets(tensors)
    with torch.no_grad():
        flats = [channel.wire.ready(join([tensors[i] for i in group])) for group in groups]
        raws = [as_bytes(flat) for flat in flats]
    rides = all_on_host(tensors) and sum([raw.numel() for raw in raws]) <= ROOM
    works, tables, start = [], [], 0
    takes = dst is None or channel.collective.rank == dst
    if not rides:  # before the frame: a rank without the memory must not leave others in the message after it
        tables = [raw.new_empty(world * raw.numel() * takes) for raw in raws]
    meeting = channel.meet(call, raws if rides else None) if world > 1 else None
    for place, (raw, flat) in enumerate(zip(raws, flats, strict=True)):
        if rides and meeting is not None:
            tables.append(meeting.column(start, flat.numel(), flat.dtype).view(torch.uint8))
            start += raw.numel()
            continue
        if rides:
            tables.append(raw.new_empty(world * raw.numel() * takes))
        if world == 1:
            tables[place].copy_(raw)
        elif dst is None:
            works.append(channel.collective.start_all_gather_flat(tables[place], raw))
        else:
            channel.collective.gather(raw, list(tables[place].view(world, -1)) if takes else [], dst)

    def finish() -> list[Tensor]:
        gathered = [
            tensor.new_empty(world, *tensor.shape) if not tensor.numel() else tensor for tensor in tensors
        ]
        for group, table, flat in zip(groups, tables, flats, strict=True):
            parts = [tensors[i] for i in group]
            rows = table.view(-1).view(flat.dtype).view(world, -1).to(parts[0].device)
            columns = rows.split([part.numel() for part in parts], dim=1)
            for i, column, part in zip(group, columns, parts, strict=True):
                gathered[i] = column.reshape(world, *part.shape)
        return gathered

    return [work for work in works if work is not None], finish


def gather_uneven(
    tensors: list[Tensor], spec: Any, how: str, channel: Channel, sync_grads: bool = False
) -> list[list[Tensor]]:
    """For each tensor a list of what every rank has in its place, of any shapes ("cat": equal but for dim 0).

    One exchange of shapes, in which small data ride; else one gather per dtype follows.
    """
    verb = f"all_gather(uneven={how!r}{', sync_grads=True' if sync_grads else ''})"
    try:
        kinds = [_kind(tensor, how) for tensor in tensors]
    except FabricError as error:
        channel.refuse(verb, error)
        raise
    raws = [as_bytes(t) for t in tensors] if all_on_host(tensors) else []
    head = _pack_shapes(tensors, bool(raws) and sum([raw.numel() for raw in raws]) <= ROOM // 2)
    rides = bool(head[1])
    message = torch.cat([head.view(torch.uint8), *raws]) if rides else head.view(torch.uint8)
    messages = gather_bytes(call_of(verb, draw(spec, kinds)), message, channel)
    shapes = [_unpack_shapes(message) for message in messages]
    if all([rides for rides, _, _ in shapes]):
        cut = [_cut(data, tensors, sizes) for _, sizes, data in shapes]
    else:
        cut = _gather_padded(tensors, [sizes for _, sizes, _ in shapes], channel)
    return [[parts[i] for parts in cut] for i in range(len(tensors))]


def gather_bytes(call: Call, raw: Tensor, channel: Channel) -> list[Tensor]:
    """Every rank's flat bytes (on the host), of any length: one message if all are small, else two."""
    world = channel.world_size
    if world == 1:
        return [raw]
    meeting = channel.meet(call, [raw])
    sizes = meeting.sizes() if meeting is not None else _exchange_size(raw.numel(), channel)
    if meeting is not None and max(sizes) <= ROOM:
        return [meeting.data(place, size) for place, size in enumerate(sizes)]
    padded = raw.new_zeros(max(sizes))
    padded[: raw.numel()] = raw
    rows = _all_gather(padded, channel).cpu()
    return [row[:size].clone() for row, size in zip(rows, sizes, strict=True)]


def gather_objects(obj: Any, channel: Channel, verb: str = "all_gather_object") -> list[Any]:
    """Every rank's object, pickled on the way, in rank order. All ranks of the group.

    Raises:
        ArgumentTypeError: The object does not pickle.
    """
    channel.world_size  # noqa: B018
    try:
        try:
            file = io.BytesIO()
            _Pickler(file, channel.wire.device).dump(obj)
        except Exception as error:
            raise ArgumentTypeError(
                f"{verb}: a {type(obj).__name__} cannot be pickled ({type(error).__name__}: {error}). Pass "
                "plain data, tensors, or objects of classes defined at the top level of a module."
            ) from error
    except FabricError as error:
        channel.refuse(verb, error)
        raise
    raw = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    texts = gather_bytes(call_of(verb), raw, channel)
    return [_Unpickler(io.BytesIO(to_bytes(text)), channel.wire.device).load() for text in texts]


class _Pickler(pickle.Pickler):
    """Pickles tensors of every dtype; those that are younger than torch's own pickling go as bytes.

    Those of this rank's kind of device go by the host, and arrive on the receiver's own device: by themselves
    they would be on the sender's, also there.
    """

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._device = device

    def persistent_id(self, obj: Any) -> str | None:
        """What stands for the receiver's device."""
        return "device" if obj is _THERE else None

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is made again."""
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, Parameter):
            return NotImplemented
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return NotImplemented
        if obj.device.type == self._device.type != "cpu":
            return _onto, (obj.detach().cpu(), _THERE, obj.requires_grad, type(obj) is Parameter)
        if type(obj) is Parameter or obj.dtype in _PICKLED:
            return NotImplemented
        return _from_bytes, (as_bytes(obj).clone(), obj.dtype, tuple(obj.shape))


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> torch.device:
        """This rank's device."""
        return self._device


_THERE = object()


def _onto(tensor: Tensor, device: torch.device, requires_grad: bool, is_parameter: bool) -> Tensor:
    moved = tensor.to(device)
    return Parameter(moved, requires_grad) if is_parameter else moved.requires_grad_(requires_grad)


def _from_bytes(raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return raw.view(dtype).view(shape)


def to_bytes(raw: Tensor) -> bytes:
    """The content of a contiguous tensor of bytes on the host."""
    return ctypes.string_at(raw.data_ptr(), raw.numel()) if raw.numel() else b""


def _kind(tensor: Tensor, how: str) -> str:
    """What must be equal on all ranks."""
    dtype, place = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    if how == "list":
        return f"{dtype} on {place}"
    if not tensor.dim():
        raise ConfigurationError(
            "all_gather(uneven='cat') concatenates along dim 0, but a leaf is a number or a tensor of shape "
            "[]. Write data.reshape(1), or uneven='error' or 'list'."
        )
    return f"{dtype}{['*', *tensor.shape[1:]]} on {place}".replace("'", "")


def _pack_shapes(tensors: list[Tensor], rides: bool) -> Tensor:
    """Number of words, whether the data follow, then each tensor's number of dimensions and sizes."""
    words = [word for tensor in tensors for word in (tensor.dim(), *tensor.shape)]
    return torch.tensor([len(words) + 2, rides, *words])


def _unpack_shapes(message: Tensor) -> tuple[bool, list[list[int]], Tensor]:
    """Whether the data follow; every tensor's shape; the rest of the message."""
    count = int(message[:8].view(torch.int64))
    words = message[: 8 * count].view(torch.int64).tolist()
    shapes, at = [], 2
    while at < count:
        shapes.append(words[at + 1 : at + 1 + words[at]])
        at += 1 + words[at]
    return bool(words[1]), shapes, message[8 * count :]


def _cut(data: Tensor, like: list[Tensor], shapes: list[list[int]]) -> list[Tensor]:
    """The tensors of one rank out of its bytes."""
    sizes = [math.prod(shape) * tensor.itemsize for tensor, shape in zip(like, shapes, strict=True)]
    parts = data.split(sizes)
    return [
        part.clone().view(tensor.dtype).view(shape)
        for part, tensor, shape in zip(parts, like, shapes, strict=True)
    ]


def _gather_padded(
    tensors: list[Tensor], shapes: list[list[list[int]]], channel: Channel
) -> list[list[Tensor]]:
    """Every rank's tensors, by one gather per dtype and kind of device, as long as the longest needs."""
    kinds: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device.type), []).append(i)
    cut: list[list[Any]] = [[None] * len(tensors) for _ in shapes]
    for positions in kinds.values():
        mine = [tensors[i].detach() for i in positions]
        counts = [[math.prod(theirs[i]) for i in positions] for theirs in shapes]
        most = max([sum(count) for count in counts])
        flat = join(mine)
        padded = flat.new_zeros(most)
        padded[: flat.numel()] = flat
        raw = as_bytes(channel.wire.ready(padded))
        rows = list(_all_gather(raw, channel)) if most else [raw] * len(shapes)
        for theirs, row, count, parts in zip(shapes, rows, counts, cut, strict=True):
            values = row.view(flat.dtype)[: sum(count)].to(flat.device).split(count)
            for i, value in zip(positions, values, strict=True):
                parts[i] = value.clone().view(theirs[i])
    return cut


def _all_gather(raw: Tensor, channel: Channel) -> Tensor:
    """(world_size, numel): every rank's flat bytes, of one length."""
    sent = channel.wire.ready(raw)
    out = sent.new_empty(channel.world_size * raw.numel())
    channel.collective.all_gather_flat(out, sent)
    return out.view(channel.world_size, -1)


def _exchange_size(size: int, channel: Channel) -> list[int]:
    sizes = _all_gather(torch.tensor([size]).view(torch.uint8), channel)
    lengths: list[int] = sizes.cpu().flatten().view(torch.int64).tolist()
    return lengths
