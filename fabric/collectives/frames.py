"""Wire formats: the frame that every rank sends before a collective, and tensors packed into flat memory.

Frames turn a mismatch into an error. Pure: the bytes of a call and its data.
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
"""Most bytes of a frame."""
PAYLOAD_BYTES = FRAME_BYTES - 48
"""Bytes of data that fit into a frame, behind its header (guard/messages.py)."""
COMBINED_BYTES = 64
"""Bytes of data up to which a large group reduces them in the frames of the call, on their way."""
ALONE = "forward without gradients"
"""How the call begins that a split model makes in evaluation."""
REFUSED = "refused: "
"""How the description of a call begins whose arguments this rank did not accept."""

PACK_LIMIT = 1 << 20
"""Bytes up to which a leaf is copied into a flat tensor; beyond, the copy costs more than a collective."""
_ALIGN = 16
"""Bytes of the largest element: any dtype can be read from where a part begins."""
_KEPT_CALLS = 1024
IN_THREAD = " in thread "
"""In the verb of a call that another thread makes than the one that joined the job."""
CONSTANT = "the constant "
"""Before a str or bytes in the data of a call."""
CONTENTS = ", contents "
"""In the data of a call: a checksum of the values follows, which are to be the same."""


class CallSignature(NamedTuple):
    """The call that a rank is about to make; it must be equal on all ranks."""

    verb: str
    """The verb with what its arguments decide: `all_reduce(sum)`."""
    what: str
    """Structure, shapes and dtypes of the data, for people."""
    digest: bytes
    """16 bytes: the hash of both."""
    patient: bool = False
    """Whether ranks wait in it as long as the others live, however long collectives wait."""


def to_bytes(raw: Tensor) -> bytes:
    """The content of a contiguous tensor on the host."""
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
"""What a reduction does with the result so far and the next rank's data."""

_known: dict[Any, CallSignature] = {}


def call_of(verb: str, what: str = "") -> CallSignature:
    """The call of a verb whose data is described by `what`."""
    known = _known.get((verb, what))
    return known or _keep((verb, what), verb, what)


def tree_call(verb: str, spec: Spec, tensors: list[Tensor]) -> CallSignature:
    """The call of a verb on a tree: structure, shapes, dtypes, and whether tensors are on the host."""
    # Looked up by values that are at hand; a loop makes the same call a million times.
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
    """`float32[3, 4]`, with the device where that is not the host."""
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"


def format_tree(spec: Spec, leaves: Iterable[str]) -> str:
    """A tree as a person would write it down, with these texts for its leaves: `{'loss': float32[]}`."""
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
    """Positions of what travels together: of a dtype (or `mixed`) and device; large ones alone, none empty.

    Args:
        like: Tensors or labels.
        mixed: Whether tensors of several dtypes travel together: as bytes.
    """
    groups: dict[Any, list[int]] = {}
    for position, one in enumerate(like):
        size = one.nbytes
        if size:
            key = position if size > PACK_LIMIT else (mixed or one.dtype, one.get_device())
            groups.setdefault(key, []).append(position)
    return list(groups.values())


def join(tensors: list[Tensor]) -> Tensor:
    """The elements of tensors of one dtype, one after the other; no copy of a single contiguous one.

    Without gaps: backends write into a view with gaps as if it had none, without a word.
    """
    if len(tensors) > 1:
        return flatten_tensors(tensors)  # type: ignore[no-any-return]
    flat: Tensor = tensors[0].contiguous().view(-1)
    return flat.view(()).view(1) if flat.numel() == 1 else flat  # one counts as contiguous with any stride


def pack(tensors: list[Tensor], parts: int = 1) -> Tensor:
    """(parts, bytes): each tensor split along dim 0; those of one device, of one dtype side by side."""
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
    """Bytes of what `pack` makes of such tensors."""
    sizes = [sum([like[i].nbytes for i in places]) for places in _by_dtype(like).values()]
    return sizes[0] if len(sizes) == 1 else sum([size + -size % _ALIGN for size in sizes])


def unpack(rows: Tensor, like: Sequence[Any], parts: int = 1) -> list[Tensor]:
    """For each tensor (rows, numel / parts) elements out of what `pack` made on several ranks. No copies.

    Args:
        rows: (rows, bytes).
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
    """The reduction of every rank's flat data, in the order of ranks: the same bits wherever it is computed.

    Half-precision data are added up in float32.
    """
    first, *others = rows.unbind() if isinstance(rows, torch.Tensor) else rows
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first.clone()
    step = FOLDS[op if first.dtype is not torch.bool else for_bools(op)]
    for row in others:
        step(total, row)
    return total.div_(len(rows)) if op == _Op.AVG else total


def for_bools(op: Any) -> Any:
    """The operation on truth values that a sum or a product of them means."""
    return {_Op.SUM: _Op.MAX, _Op.PRODUCT: _Op.MIN}.get(op, op)


def shard_error(tensor: Any, verb: str) -> ArgumentTypeError:
    """Return the error for a DTensor: a verb would combine other parts of a tensor as if they were one."""
    return ArgumentTypeError(
        f"{verb} takes tensors that each rank has whole, but one of shape {list(tensor.shape)} is split over "
        "ranks, such as a parameter of a sharded model or its gradient. fabric.backward has averaged that "
        f"gradient already. Else write fabric.{verb.partition('(')[0]} of tensor.full_tensor(), on all ranks."
    )
