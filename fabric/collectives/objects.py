"""Any object across ranks: it is pickled once, and the tensors in it travel beside the pickle as bytes.

Small objects are sent in the frame, tensors and all.
"""

from __future__ import annotations

import copyreg
import hmac
import io
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

from fabric.collectives.frames import (
    PAYLOAD_BYTES,
    all_on_host,
    buckets,
    call_of,
    pack,
    packed_size,
    to_bytes,
    unpack,
)
from fabric.core.errors import ArgumentTypeError, RankError
from fabric.core.job_secret import VARIABLE, secret_of_world
from fabric.core.pickles import pickling_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.collectives.frames import CallSignature

_TAIL = struct.Struct("<qqq32s")
"""Of a message: where the labels of its tensors begin, where their bytes do, whether these are there, and the
signature of what is unpickled.
"""
_FORGED = (
    "A message with an object is not signed with the secret of this job, and was not read. A process that is "
    f"no rank sent it, or {VARIABLE} differs between machines. Export one value of it on all of them, "
    "or none."
)


class Label(NamedTuple):
    """The metadata of a tensor that a receiver needs before its bytes arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    is_parameter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def get_device(self) -> int:
        """Return -1 for a tensor on the host, else 0, like `Tensor.get_device`."""
        return -self.on_host

    def dress(self, values: Tensor, device: torch.device) -> Tensor:
        """The tensor as the sender has it, of the same elements: on the host, or on `device`."""
        values = values.view(self.shape)
        values = values if self.on_host else values.to(device)
        if self.is_parameter:
            return Parameter(values, self.requires_grad)
        return values.requires_grad_() if self.requires_grad else values


def label_of(tensor: Tensor) -> Label:
    """Return the metadata of a tensor that receivers need."""
    grad = tensor.requires_grad and tensor.is_leaf
    return Label(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, grad, type(tensor) is Parameter)


class Dumped:
    """An object on its way: its pickle, and its tensors, which are set aside wherever they are.

    Args:
        obj: Any object that pickles.
        verb: The call, for the error.
        whose: What the error calls the object.

    Raises:
        ArgumentTypeError: It does not pickle.
    """

    def __init__(self, obj: Any, verb: str, whose: str = "") -> None:
        self.tensors: list[Tensor] = []
        self._file = io.BytesIO()
        pickler = pickle.Pickler(self._file, pickle.HIGHEST_PROTOCOL)
        aside: Any = self._aside  # pickle asks it for these types only: the rest is pickled in C
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: aside, Parameter: aside}
        try:
            pickler.dump(obj)
        except Exception as error:
            whose = whose or f"a {type(obj).__name__}"
            raise ArgumentTypeError(
                f"{verb}: {whose} cannot be pickled ({pickling_error(error, obj, 'obj')}). Pass "
                "plain data, tensors, or objects of classes defined at the top level of a module."
            ) from error
        self.labels = [label_of(tensor) for tensor in self.tensors]

    def _aside(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        self.tensors.append(tensor)
        return _arrived, (len(self.tensors) - 1,)

    def message(self) -> Tensor:
        """Return flat bytes: the pickle, the labels, and all tensors, packed, if they are small."""
        file, tensors = self._file, self.tensors
        middle = file.tell()
        pickle.dump([tuple(label) for label in self.labels], file)
        file.write(b"\0" * (-file.tell() % 16))
        end = file.tell()
        self.inline = all_on_host(tensors) and end + packed_size(tensors) + _TAIL.size <= PAYLOAD_BYTES
        if self.inline and tensors:
            file.write(to_bytes(pack(tensors)))
        signature = secret_of_world().signature(file.getbuffer()[:end])
        file.write(_TAIL.pack(middle, end, self.inline, signature))
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _arrived(place: int) -> Any:
    raise pickle.UnpicklingError(f"tensor {place} of a message is in no pickle")  # `Arrived` replaces it


class Arrived(pickle.Unpickler):
    """An object that came as a message.

    Args:
        message: Flat bytes on the host.

    Raises:
        RankError: No rank of this job made the message; nothing of it was unpickled.
    """

    def __init__(self, message: Tensor) -> None:
        file = io.BytesIO(to_bytes(message))
        file.seek(-_TAIL.size, io.SEEK_END)
        middle, end, self.inline, signature = _TAIL.unpack(file.read())
        if not hmac.compare_digest(signature, secret_of_world().signature(file.getbuffer()[:end])):
            raise RankError(_FORGED)
        file.seek(middle)
        self.labels = [Label(*fields) for fields in pickle.load(file)]  # plain tuples pickle 3x faster
        self.data = message[end : -_TAIL.size]
        """The tensors, if they are there."""
        self._tensors: list[Tensor] = []
        file.seek(0)
        super().__init__(file)

    def around(self, tensors: list[Tensor]) -> Any:
        """The object, around its tensors."""
        self._tensors = tensors
        return self.load()

    def whole(self, device: torch.device, copies: bool = True) -> Any:
        """The object, whose tensors came along; without `copies` they share the message's memory."""
        columns = zip(self.labels, unpack(self.data[None], self.labels), strict=True)
        return self.around([label.dress(c.clone() if copies else c, device) for label, c in columns])

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a name in the pickle refers to."""
        if (module, name) == (__name__, _arrived.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def gather_objects(obj: Any, channel: Channel, verb: str = "all_gather_object") -> list[Any]:
    """Every rank's object, in rank order. All ranks of the group.

    Raises:
        ArgumentTypeError: The object does not pickle.
    """
    with channel.validating(verb):
        dumped = Dumped(obj, verb)
    return gather_dumped(call_of(verb), dumped, channel)


def gather_dumped(call: CallSignature, dumped: Dumped, channel: Channel, copies: bool = True) -> list[Any]:
    """Every rank's object: in one message if all are small; else tensors follow, in one for each device.

    Without `copies` tensors share memory: for a caller that uses them at once.
    """
    here = channel.transport.device
    came = [Arrived(message) for message in gather_bytes(call, dumped.message(), channel)]
    if all([one.inline for one in came]):
        return [one.whole(here, copies) for one in came]
    tensors: list[list[Any]] = [[None] * len(one.labels) for one in came]
    for on_host in (True, False):
        places = [[i for i, o in enumerate(one.labels) if o.on_host == on_host] for one in came]
        labels = [[one.labels[i] for i in some] for one, some in zip(came, places, strict=True)]
        sizes = [packed_size(some) for some in labels]
        device = torch.device("cpu") if on_host else here
        mine = [t.to(device) for t in dumped.tensors if t.is_cpu == on_host]
        raw = pack(mine).view(-1) if mine else torch.empty(0, dtype=torch.uint8, device=device)
        rows = _gather_padded(raw, max(sizes), channel)
        for rank, size in enumerate(sizes):
            columns = unpack(rows[rank : rank + 1, :size].to(device), labels[rank])
            for i, label, column in zip(places[rank], labels[rank], columns, strict=True):
                tensors[rank][i] = label.dress(column.clone() if copies else column, here)
    return [one.around(some) for one, some in zip(came, tensors, strict=True)]


def gather_bytes(call: CallSignature, raw: Tensor, channel: Channel) -> list[Tensor]:
    """Every rank's flat bytes (on the host), of any length: one message if all are small, else two."""
    if channel.world_size == 1:
        return [raw]
    sizes, meeting = _sizes(call, raw, channel)
    if meeting is not None and max(sizes) <= PAYLOAD_BYTES:
        return [meeting.data(place, size) for place, size in enumerate(sizes)]
    rows = _gather_padded(raw, max(sizes), channel).cpu()
    return [row[:size].clone() for row, size in zip(rows, sizes, strict=True)]


def _sizes(call: CallSignature, raw: Tensor, channel: Channel) -> tuple[list[int], Any | None]:
    """Return the number of bytes of every rank, and the frames with the bytes that fit into them."""
    meeting = channel.check_call(call, [raw])
    if meeting is not None:
        return meeting.sizes(), meeting
    sizes = _gather_padded(torch.tensor([raw.numel(), 0]).view(torch.uint8), 16, channel)
    return sizes.cpu().view(torch.int64)[:, 0].tolist(), None


def _gather_padded(raw: Tensor, length: int, channel: Channel) -> Tensor:
    """(world_size, length): every rank's flat bytes, filled up; each row is aligned for every dtype."""
    length += -length % 16
    if raw.numel() < length:
        raw = torch.cat([raw, raw.new_zeros(length - raw.numel())])
    sent = channel.transport.to_staging(raw)
    out = sent.new_empty(channel.world_size * length)
    if length:
        channel.collective.start_all_gather_flat(out, sent).wait()
    return out.view(channel.world_size, length)


def broadcast_tree(data: Any, src: int, channel: Channel) -> Any:
    """`src`'s `data` on every rank, in one message for small objects. All ranks of the group.

    Args:
        data: Any object that pickles; what ranks other than `src` pass is ignored. Tensors anywhere in it
            keep dtype, shape, `requires_grad` and identity; those of a device arrive on the receiver's own.
        src: Global rank that sends.
        channel: The group.

    Raises:
        CollectiveMismatch: Ranks made different calls, or `src`'s object does not pickle; raised on all of
            them.
    """
    return data if channel.world_size == 1 else told_by(data, f"broadcast(src={src})", src, channel)


def told_by(obj: Any, verb: str, src: int, channel: Channel) -> Any:
    """`src`'s object on every rank."""
    here, collective = channel.transport.device, channel.collective
    if collective.rank != src:
        came = Arrived(_message(None, verb, src, channel))
        if came.inline:
            obj = came.whole(here)
        else:
            tensors = receive(came.labels, channel, lambda raw, _: collective.broadcast(raw, src))
            obj = came.around(tensors)
    else:
        with channel.validating(verb):
            dumped = Dumped(obj, verb, f"rank {src}'s object")
        _message(dumped.message(), verb, src, channel)
        # Receivers know one device of their own besides the host, so all others' leave from one device, too.
        sent = [t if dumped.inline or t.is_cpu else t.to(here) for t in dumped.tensors]
        for bucket in [] if dumped.inline else buckets(dumped.labels, mixed=True):
            collective.broadcast(channel.transport.to_staging(pack([sent[i] for i in bucket]).view(-1)), src)
    return obj


def _message(message: Tensor | None, verb: str, src: int, channel: Channel) -> Tensor:
    """`src`'s message (None on the others) on every rank: in the frame, or after it where it does not fit."""
    own = torch.empty(0, dtype=torch.uint8) if message is None else message
    place = channel.collective.group_rank_of(src)
    sizes, meeting = _sizes(call_of(verb), own, channel)
    if meeting is not None and sizes[place] <= PAYLOAD_BYTES:
        found: Tensor = meeting.data(place, sizes[place])
        return found
    raw = channel.transport.to_staging(
        own if message is not None else torch.empty(sizes[place], dtype=torch.uint8)
    )
    channel.collective.broadcast(raw, src)
    return raw.cpu()


def receive(labels: list[Label], channel: Channel, take: Callable[[Tensor, list[int]], Any]) -> list[Tensor]:
    """The tensors of these labels, in buckets as `take` brings them into flat memory."""
    here = channel.transport.device
    tensors: list[Any] = [None if o.nbytes else torch.empty(o.shape, dtype=o.dtype) for o in labels]
    for bucket in buckets(labels, mixed=True):
        some = [labels[i] for i in bucket]
        device = torch.device("cpu") if some[0].on_host else here
        raw = channel.transport.to_staging(torch.empty(packed_size(some), dtype=torch.uint8, device=device))
        take(raw, bucket)
        for i, column in zip(bucket, unpack(raw[None].to(device), some), strict=True):
            tensors[i] = column.clone() if len(bucket) > 1 else column
    return [label.dress(t, here) for label, t in zip(labels, tensors, strict=True)]
