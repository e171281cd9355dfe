"""Broadcast and gather any objects: each is pickled once, and tensors in it are sent separately as bytes.

Small objects are sent in the frame of the call check, with their tensors.
"""

from __future__ import annotations

import copyreg
import hmac
import io
import math
import pickle
import struct
import sys
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
    shard_error,
    to_bytes,
    unpack,
)
from fabric.core.errors import ArgumentTypeError, FabricError, RankError
from fabric.core.job_secret import VARIABLE, secret_of_world
from fabric.core.pickles import pickling_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.collectives.frames import CallSignature

_TAIL = struct.Struct("<qqq32s")
"""End of a message: offset of the tensors' metadata, offset of their bytes, whether the message has these
bytes, and the signature of the pickled parts.
"""
_FORGED = (
    "A message with an object is not signed with the secret of this job, and was not read. It is from "
    f"another job's process, or {VARIABLE} differs between machines. Export one value of it on all of them, "
    "or none."
)


class TensorMetadata(NamedTuple):
    """Metadata of a tensor that a receiver needs before the tensor's bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    is_parameter: bool

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def get_device(self) -> int:
        """Return -1 for a tensor on the host, else 0, like `Tensor.get_device`."""
        return -self.on_host

    def restore(self, values: Tensor, device: torch.device) -> Tensor:
        """Return the sender's tensor with elements `values`: on the host, or on `device`."""
        values = values.view(self.shape).data  # no view: a loop may write into it
        values = values if self.on_host else values.to(device)
        if self.is_parameter:
            return Parameter(values, self.requires_grad)
        return values.requires_grad_() if self.requires_grad else values


def metadata_of(tensor: Tensor) -> TensorMetadata:
    """Return the metadata of a tensor."""
    grad = tensor.requires_grad and tensor.is_leaf
    return TensorMetadata(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, grad, type(tensor) is Parameter)


class PickledObject:
    """An object to send: its pickle, and the tensors in it, which stay on their devices.

    Args:
        obj: Any object that pickles.
        verb: The call, for the error.
        name: The object's name in the error.

    Raises:
        ArgumentTypeError: It does not pickle.
    """

    def __init__(self, obj: Any, verb: str, name: str = "") -> None:
        self.tensors: list[Tensor] = []
        self._file = io.BytesIO()
        pickler = pickle.Pickler(self._file, pickle.HIGHEST_PROTOCOL)
        reduce_tensor: Any = self._reduce_tensor  # called for these types only: the rest is pickled in C
        pickler.dispatch_table = {
            **copyreg.dispatch_table,
            torch.Tensor: reduce_tensor,
            Parameter: reduce_tensor,
        }
        if (dtensors := sys.modules.get("torch.distributed.tensor")) is not None:

            def refuse(tensor: Any) -> Any:
                raise shard_error(tensor, verb)

            pickler.dispatch_table[dtensors.DTensor] = refuse
        try:
            pickler.dump(obj)
        except FabricError:
            raise
        except Exception as error:
            name = name or f"a {type(obj).__name__}"
            raise ArgumentTypeError(
                f"{verb}: {name} cannot be pickled ({pickling_error(error, obj, 'obj')}). Pass "
                "plain data, tensors, or objects of classes defined at the top level of a module."
            ) from error
        self.metadata = [metadata_of(tensor) for tensor in self.tensors]

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        self.tensors.append(tensor)
        return _received_tensor, (len(self.tensors) - 1,)

    def message(self) -> Tensor:
        """Return flat bytes: the pickle, the metadata, and all tensors, packed, if they are small."""
        file, tensors = self._file, self.tensors
        middle = file.tell()
        pickle.dump([tuple(each) for each in self.metadata], file)
        file.write(b"\0" * (-file.tell() % 16))
        end = file.tell()
        self.inline = all_on_host(tensors) and end + packed_size(tensors) + _TAIL.size <= PAYLOAD_BYTES
        if self.inline and tensors:
            file.write(to_bytes(pack(tensors)))
        signature = secret_of_world().signature(file.getbuffer()[:end])
        file.write(_TAIL.pack(middle, end, self.inline, signature))
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _received_tensor(index: int) -> Any:
    # A placeholder in pickles, which `ReceivedObject.find_class` replaces.
    raise pickle.UnpicklingError(f"tensor {index} of a message is not part of its pickle")


class ReceivedObject(pickle.Unpickler):
    """An object received as a message.

    Args:
        message: Flat bytes on the host.

    Raises:
        RankError: The message is not from a rank of this job; nothing of it was unpickled.
    """

    def __init__(self, message: Tensor) -> None:
        file = io.BytesIO(to_bytes(message))
        file.seek(-_TAIL.size, io.SEEK_END)
        middle, end, self.inline, signature = _TAIL.unpack(file.read())
        if not hmac.compare_digest(signature, secret_of_world().signature(file.getbuffer()[:end])):
            raise RankError(_FORGED)
        file.seek(middle)
        self.metadata = [TensorMetadata(*fields) for fields in pickle.load(file)]  # tuples pickle 3x faster
        self.data = message[end : -_TAIL.size]
        """The tensors' bytes, if `inline`."""
        self._tensors: list[Tensor] = []
        file.seek(0)
        super().__init__(file)

    def load_with(self, tensors: list[Tensor]) -> Any:
        """Return the object with these tensors in it."""
        self._tensors = tensors
        return self.load()

    def load_inline(self, device: torch.device, copies: bool = True) -> Any:
        """Return the object with the tensors of the message; without `copies` they share its memory."""
        columns = zip(self.metadata, unpack(self.data[None], self.metadata), strict=True)
        return self.load_with([each.restore(c.clone() if copies else c, device) for each, c in columns])

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a name in the pickle refers to."""
        if (module, name) == (__name__, _received_tensor.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def gather_objects(obj: Any, channel: Channel, verb: str = "all_gather_object") -> list[Any]:
    """Return every rank's object, in rank order. All ranks of the group must call this.

    Raises:
        ArgumentTypeError: The object does not pickle.
    """
    with channel.validating(verb):
        pickled = PickledObject(obj, verb)
    return gather_pickled(call_of(verb), pickled, channel)


def gather_pickled(
    call: CallSignature, pickled: PickledObject, channel: Channel, copies: bool = True
) -> list[Any]:
    """Return every rank's object, sent in one message if all are small, else with one more per device.

    Without `copies` tensors are views of the received messages, for a caller that uses them at once.
    """
    home = channel.transport.device
    received = [ReceivedObject(message) for message in gather_bytes(call, pickled.message(), channel)]
    if all([obj.inline for obj in received]):
        return [obj.load_inline(home, copies) for obj in received]
    tensors: list[list[Any]] = [[None] * len(obj.metadata) for obj in received]
    for on_host in (True, False):
        indices = [[i for i, m in enumerate(obj.metadata) if m.on_host == on_host] for obj in received]
        metadata = [[obj.metadata[i] for i in each] for obj, each in zip(received, indices, strict=True)]
        sizes = [packed_size(of_rank) for of_rank in metadata]
        device = torch.device("cpu") if on_host else home
        local = [t.to(device) for t in pickled.tensors if t.is_cpu == on_host]
        raw = pack(local).view(-1) if local else torch.empty(0, dtype=torch.uint8, device=device)
        rows = _gather_padded(raw, max(sizes), channel)
        for rank, size in enumerate(sizes):
            columns = unpack(rows[rank : rank + 1, :size].to(device), metadata[rank])
            for i, each, column in zip(indices[rank], metadata[rank], columns, strict=True):
                tensors[rank][i] = each.restore(column.clone() if copies else column, home)
    return [obj.load_with(of_rank) for obj, of_rank in zip(received, tensors, strict=True)]


def gather_bytes(call: CallSignature, raw: Tensor, channel: Channel) -> list[Tensor]:
    """Return every rank's flat bytes (on the host), of any length: one message if all are small, else two."""
    if channel.world_size == 1:
        return [raw]
    sizes, frames = _sizes(call, raw, channel)
    if frames is not None and max(sizes) <= PAYLOAD_BYTES:
        return [frames.data(rank, size) for rank, size in enumerate(sizes)]
    rows = _gather_padded(raw, max(sizes), channel).cpu()
    return [row[:size].clone() for row, size in zip(rows, sizes, strict=True)]


def _sizes(call: CallSignature, raw: Tensor, channel: Channel) -> tuple[list[int], Any | None]:
    """Return the number of bytes of every rank, and the frames with the bytes that fit into them."""
    frames = channel.check_call(call, [raw])
    if frames is not None:
        return frames.sizes(), frames
    sizes = _gather_padded(torch.tensor([raw.numel(), 0]).view(torch.uint8), 16, channel)
    return sizes.cpu().view(torch.int64)[:, 0].tolist(), None


def _gather_padded(raw: Tensor, length: int, channel: Channel) -> Tensor:
    """Return (world_size, length): every rank's flat bytes, padded; rows are aligned for every dtype."""
    length += -length % 16
    if raw.numel() < length:
        raw = torch.cat([raw, raw.new_zeros(length - raw.numel())])
    sent = channel.transport.to_staging(raw)
    out = sent.new_empty(channel.world_size * length)
    if length:
        channel.collective.start_all_gather_flat(out, sent).wait()
    return out.view(channel.world_size, length)


def broadcast_tree(data: Any, src: int, channel: Channel) -> Any:
    """Return `src`'s `data` on every rank, sent in one message if small. All ranks of the group must call
    this.

    Args:
        data: Any object that pickles; that of ranks other than `src` is ignored. Tensors anywhere in it keep
            dtype, shape, `requires_grad` and identity; those on a device are put on the receiver's device.
        src: Global rank that sends.
        channel: The group.

    Raises:
        CollectiveMismatch: Ranks made different calls, or `src`'s object does not pickle; raised on all of
            them.
    """
    return data if channel.world_size == 1 else broadcast_object(data, f"broadcast(src={src})", src, channel)


def broadcast_object(obj: Any, verb: str, src: int, channel: Channel) -> Any:
    """Return `src`'s object on every rank. All ranks of the group must call this."""
    device, collective = channel.transport.device, channel.collective
    if collective.rank != src:
        received = ReceivedObject(_broadcast_message(None, verb, src, channel))
        if received.inline:
            obj = received.load_inline(device)
        else:
            tensors = receive(received.metadata, channel, lambda raw, _: collective.broadcast(raw, src))
            obj = received.load_with(tensors)
    else:
        with channel.validating(verb):
            pickled = PickledObject(obj, verb, f"rank {src}'s object")
        _broadcast_message(pickled.message(), verb, src, channel)
        # Receivers use one device in addition to the host. So tensors of all other devices are sent from it.
        sent = [t if pickled.inline or t.is_cpu else t.to(device) for t in pickled.tensors]
        for bucket in [] if pickled.inline else buckets(pickled.metadata, mixed=True):
            collective.broadcast(channel.transport.to_staging(pack([sent[i] for i in bucket]).view(-1)), src)
    return obj


def _broadcast_message(message: Tensor | None, verb: str, src: int, channel: Channel) -> Tensor:
    """Return the message of rank `src` on every rank, sent in the frame if it fits, else after it.

    `message` is None on other ranks.
    """
    local = torch.empty(0, dtype=torch.uint8) if message is None else message
    src_in_group = channel.collective.group_rank_of(src)
    sizes, frames = _sizes(call_of(verb), local, channel)
    if frames is not None and sizes[src_in_group] <= PAYLOAD_BYTES:
        found: Tensor = frames.data(src_in_group, sizes[src_in_group])
        return found
    raw = channel.transport.to_staging(
        local if message is not None else torch.empty(sizes[src_in_group], dtype=torch.uint8)
    )
    channel.collective.broadcast(raw, src)
    return raw.cpu()


def receive(
    metadata: list[TensorMetadata], channel: Channel, recv_bucket: Callable[[Tensor, list[int]], Any]
) -> list[Tensor]:
    """Return tensors with this metadata; `recv_bucket(buffer, indices)` receives several in flat memory."""
    home = channel.transport.device
    tensors: list[Any] = [None if m.nbytes else torch.empty(m.shape, dtype=m.dtype) for m in metadata]
    for bucket in buckets(metadata, mixed=True):
        of_bucket = [metadata[i] for i in bucket]
        device = torch.device("cpu") if of_bucket[0].on_host else home
        buffer = torch.empty(packed_size(of_bucket), dtype=torch.uint8, device=device)
        raw = channel.transport.to_staging(buffer)
        recv_bucket(raw, bucket)
        for i, column in zip(bucket, unpack(raw[None].to(device), of_bucket), strict=True):
            tensors[i] = column.clone() if len(bucket) > 1 else column
    return [each.restore(t, home) for each, t in zip(metadata, tensors, strict=True)]
