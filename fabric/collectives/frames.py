"""Wire formats: the frame that every rank sends before a collective, and tensors packed into flat memory.

Ranks that make different calls send different frames, so that all raise an error. No function here sends.
`Channel.check_call` sends frames; the verbs send the rest.
"""

from __future__ import annotations

import ctypes
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core._torch import flatten_tensors
from fabric.core.errors import ArgumentTypeError
from fabric.core.tree import CONSTANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from fabric.core.tree import Spec

FRAME_BYTES = 8192
"""Largest size of a frame."""
PAYLOAD_BYTES = FRAME_BYTES - 48
"""Largest size of the data in a frame, after its header (guard/messages.py)."""
COMBINED_BYTES = 64
"""Largest size of data that a large group reduces while it forwards the frames of the call."""
ALONE = "forward without gradients"
"""Prefix of the verb of the call that a split model makes in evaluation."""
NO_GRADIENT = "no gradient for"
"""Begin of the list of a split model's parameters without gradients, in the description of a step."""
REFUSED = "refused: "
"""Prefix of the description of a call with invalid arguments on this rank."""

PACK_LIMIT = 1 << 20
"""Largest leaf, in bytes, that is copied into a flat tensor; above, the copy costs more than a collective."""
_ALIGN = 16
"""Bytes of the largest element. Parts begin at multiples of it, so that they are aligned for every dtype."""
_KEPT_CALLS = 1024
IN_THREAD = " in thread "
"""Part of the verb of a call by another thread than the one that joined the job."""
CONSTANT = "the constant "
"""Prefix of a str or bytes in the description of data."""
CONTENTS = ", contents "
"""Prefix of a checksum in the description of data whose values must be equal on all ranks."""


class CallSignature(NamedTuple):
    """The call that a rank is about to make; it must be equal on all ranks."""

    verb: str
    """The verb with its arguments other than data: `all_reduce(sum)`."""
    what: str
    """Structure, shapes and dtypes of the data, as text for error messages."""
    digest: bytes
    """Hash of `verb` and `what`, of 16 bytes."""
    patient: bool = False
    """Whether ranks wait in this call without a time limit, while all other ranks are alive."""


def to_bytes(raw: Tensor) -> bytes:
    """Return the content of a contiguous tensor on the host."""
    return ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b""


_Op = dist.ReduceOp
FOLDS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    _Op.SUM: torch.Tensor.add_,
    _Op.AVG: torch.Tensor.add_,
    _Op.PRODUCT: torch.Tensor.mul_,
    _Op.MIN: lambda total, row: torch.minimum(total, row, out=total),
    _Op.MAX: lambda total, row: torch.maximum(total, row, out=total),
    _Op.BAND: torch.Tensor.bitwise_and_,
    _Op.BOR: torch.Tensor.bitwise_or_,
    _Op.BXOR: torch.Tensor.bitwise_xor_,
}
"""Function of each reduction that combines the result so far with the next rank's data."""

_known: dict[Any, CallSignature] = {}


def call_of(verb: str, what: str = "") -> CallSignature:
    """Return the call of a verb whose data is described by `what`."""
    known = _known.get((verb, what))
    return known or _keep((verb, what), verb, what)


def tree_call(verb: str, spec: Spec, tensors: list[Tensor]) -> CallSignature:
    """Return the call of a verb on a tree: structure, shapes, dtypes, and whether tensors are on the host."""
    # A loop repeats the same call, so the text is cached under a key that is cheap to compute.
    shapes, kinds = tuple([t.shape for t in tensors]), tuple([(t.dtype, t.get_device()) for t in tensors])
    key = (verb, spec, shapes, kinds)
    return _known.get(key) or _keep(key, verb, format_tree(spec, map(describe_tensor, tensors)))


def _keep(key: Any, verb: str, what: str) -> CallSignature:
    if len(_known) >= _KEPT_CALLS:
        _known.clear()
    digest = blake2b(f"{verb}\0{what}".encode(), digest_size=16).digest()
    call = _known[key] = CallSignature(verb, what, digest)
    return call


def describe_tensor(tensor: Tensor) -> str:
    """Return `float32[3, 4]`, with the device if it is not the host."""
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"


def format_tree(spec: Spec, leaves: Iterable[str]) -> str:
    """Return a tree as a Python expression, with these texts for its leaves: `{'loss': float32[]}`."""
    leaves = iter(leaves)
    if spec.kind is None:
        return next(leaves)
    if spec.kind in CONSTANTS:
        return _constant(spec.keys[0])
    inner = [format_tree(child, leaves) for child in spec.children]
    if issubclass(spec.kind, dict):
        pairs = ", ".join([f"{key!r}: {child}" for key, child in zip(spec.keys, inner, strict=True)])
        return f"{{{pairs}}}" if spec.kind is dict else f"{spec.kind.__name__}({{{pairs}}})"
    if spec.kind is list:
        return f"[{', '.join(inner)}]"
    if spec.kind is tuple:
        return f"({', '.join(inner)})"
    names = spec.keys or getattr(spec.kind, "_fields", ())
    named = [f"{n}={c}" for n, c in zip(names, inner, strict=True)] if names else inner
    return f"{spec.kind.__name__}({', '.join(named)})"


def _constant(value: Any) -> str:
    text = repr(value)
    if len(text) > 100:  # equal texts are equal values
        text = f"{text[:60]}... {blake2b(text.encode(), digest_size=8).hexdigest()}"
    return text if value is None else f"{CONSTANT}{text}"


def buckets(like: Sequence[Any], mixed: bool = False) -> list[list[int]]:
    """Return the positions of tensors for each message: of one dtype and device. Large ones are alone.

    Tensors without elements are left out.

    Args:
        like: Tensors or labels.
        mixed: Whether a message has tensors of several dtypes, as bytes.
    """
    groups: dict[Any, list[int]] = {}
    for position, one in enumerate(like):
        size = one.nbytes
        if size:
            key = position if size > PACK_LIMIT else (mixed or one.dtype, one.get_device())
            groups.setdefault(key, []).append(position)
    return list(groups.values())


def join(tensors: list[Tensor]) -> Tensor:
    """Return the concatenated elements of tensors of one dtype; a single contiguous tensor is not copied.

    The result has no gaps, since backends write into a view with gaps as if it had none.
    """
    if len(tensors) > 1:
        return flatten_tensors(tensors)  # type: ignore[no-any-return]
    flat: Tensor = tensors[0].contiguous().view(-1)
    return flat.view(()).view(1) if flat.numel() == 1 else flat  # one counts as contiguous with any stride


def pack(tensors: list[Tensor], parts: int = 1) -> Tensor:
    """Return tensors of one device as (parts, bytes), each split along dim 0; equal dtypes are adjacent."""
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    if len(plain) == 1:
        return join(plain).view(torch.uint8).view(parts, -1)
    rows = []
    for places in _by_dtype(plain).values():
        cut = [plain[i].reshape(parts, -1) for i in places]
        rows.append(torch.cat(cut, dim=1).view(torch.uint8))
    if len(rows) < 2:
        return rows[0] if rows else torch.empty(parts, 0, dtype=torch.uint8)
    return torch.cat([torch.nn.functional.pad(row, (0, -row.shape[1] % _ALIGN)) for row in rows], dim=1)


def packed_size(like: Sequence[Any]) -> int:
    """Return the number of bytes of `pack(like)`."""
    sizes = [sum([like[i].nbytes for i in places]) for places in _by_dtype(like).values()]
    return sizes[0] if len(sizes) == 1 else sum([size + -size % _ALIGN for size in sizes])


def unpack(rows: Tensor, like: Sequence[Any], parts: int = 1) -> list[Tensor]:
    """Return a view of (rows, numel / parts) elements for each tensor that `pack` packed on several ranks.

    Args:
        rows: The packed bytes, (rows, bytes).
        like: The tensors that were packed, or their labels.
        parts: As for `pack`.
    """
    found: list[Any] = [None] * len(like)
    start = 0
    for dtype, places in _by_dtype(like).items():
        widths = [like[i].numel() // parts for i in places]
        end = start + sum(widths) * dtype.itemsize
        columns = rows[:, start:end].view(dtype).split(widths, dim=1)
        for i, column in zip(places, columns, strict=True):
            found[i] = column
        start = end + -end % _ALIGN
    return found


def _by_dtype(like: Sequence[Any]) -> dict[torch.dtype, list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(like):
        groups.setdefault(one.dtype, []).append(place)
    return groups


def all_on_host(tensors: list[Tensor]) -> bool:
    """Whether every tensor is in host memory, so that it can be sent in a frame."""
    return all([t.is_cpu for t in tensors])


def fold(rows: list[Tensor] | Tensor, op: Any) -> Tensor:
    """Return the reduction of every rank's flat data, in rank order: bitwise equal on all ranks.

    Half-precision data are added up in float32.
    """
    first, *others = rows.unbind() if isinstance(rows, torch.Tensor) else rows
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first.clone()
    step = FOLDS[op if first.dtype is not torch.bool else for_bools(op)]
    for row in others:
        step(total, row)
    return total.div_(len(rows)) if op == _Op.AVG else total


def for_bools(op: Any) -> Any:
    """Return the operation on bools for a reduction: OR for a sum, AND for a product."""
    return {_Op.SUM: _Op.MAX, _Op.PRODUCT: _Op.MIN}.get(op, op)


def shard_error(tensor: Any, verb: str) -> ArgumentTypeError:
    """Return the error for a DTensor: a verb would combine different shards as if they were one tensor."""
    return ArgumentTypeError(
        f"{verb} got a DTensor of shape {list(tensor.shape)}, such as a parameter of a sharded model or its "
        "gradient. Its elements are on several ranks, and the verb would combine different ones. "
        "fabric.backward has averaged gradients already. For other tensors write "
        f"fabric.{verb.partition('(')[0]}(tensor.full_tensor()) on all ranks."
    )
