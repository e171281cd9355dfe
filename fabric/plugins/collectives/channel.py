"""`Channel`: a group of ranks as the tree verbs see it: its collective, its guard, and what its backend can
send.

Beside it what every tree verb does first: leaves become tensors, tensors travel together in one.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors as flatten_tensors

from fabric.core.errors import ArgumentTypeError, ConfigurationError, FabricError, UsageError
from fabric.plugins.collectives.frames import REFUSED, ROOM, call_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from fabric.plugins.collectives.collective import Collective
    from fabric.plugins.collectives.control import Guard, Meeting
    from fabric.plugins.collectives.frames import Call


PACK_LIMIT = 1 << 20
"""Bytes up to which a leaf is copied into a flat tensor; beyond, the copy costs more than a collective."""
_ALIGN = 16
"""Bytes of the largest element: any dtype can be read from where a part begins."""


class Wire(NamedTuple):
    """What a group can send, and how the rest gets there."""

    device: torch.device
    """The rank's own device, where numbers become tensors."""
    sendable: tuple[str, ...]
    """Device types that the group's backend sends from as they are."""
    via: torch.device
    """Where tensors of other devices are copied to travel, and back."""

    def ready(self, tensor: Tensor) -> Tensor:
        """The tensor where it can be sent from."""
        return tensor if tensor.device.type in self.sendable else tensor.to(self.via)


@cache
def wire_of(device: torch.device, backends: str) -> Wire:
    """What a group can send from here.

    Args:
        device: The rank's own.
        backends: Of the group, as `torch.distributed.get_backend_config` tells them: "cpu:gloo,cuda:nccl".
    """
    by_type = dict([pair.split(":", 1) for pair in backends.split(",")])
    # gloo knows other devices by name, too, and not all operations on them.
    types = [kind for kind, backend in by_type.items() if kind == "cpu" or backend != "gloo"]
    home = next((kind for kind in (device.type, "cpu") if kind in types), types[0])
    via = device if home == device.type else torch.device(home)
    return Wire(device, tuple([kind for kind in ("cpu", via.type) if kind in types]), via)


class Channel:
    """A group of ranks: all of them must make each call on it, in one order."""

    def __init__(self, collective: Collective, wire: Wire) -> None:
        self.collective, self.wire = collective, wire
        self._guard: Callable[[], Guard | None] = lambda: None

    def __reduce__(self) -> Any:
        return Channel, (self.collective, self.wire)

    @property
    def guard(self) -> Guard | None:
        """Where the ranks meet before each call; None: nowhere."""
        guard = self._guard()
        if guard is None:
            guard = self.collective.guard
            self._guard = self._guard if guard is None else weakref.ref(guard)  # it ends with its group
        return guard

    @cached_property
    def world_size(self) -> int:
        """How many ranks the group has.

        Raises:
            UsageError: This rank is not one of them.
        """
        size = self.collective.world_size
        if size < 1:
            raise UsageError(
                "This rank is not in the process group that it was called with. Let only the members of the "
                "group make the call."
            )
        return size

    def meet(self, call: Call, payload: list[Tensor] | None = None) -> Meeting | None:
        """Wait until all ranks make this call, and give each their `payload` (flat bytes on the host) if it
        fits.

        None where nothing was exchanged: a world of one, or FABRIC_GUARD=off.

        Raises:
            CollectiveMismatch: Ranks make different calls; raised on all of them.
            RankError: A rank went away, or did not come in time.
        """
        guard = self.guard
        return None if guard is None else guard.meet(call, payload)

    def ride(
        self, call: Call, flats: list[Tensor], room: Callable[[], Any] = tuple, may: bool = True
    ) -> tuple[list[Tensor] | None, Any]:
        """As `meet`, with data that may ride: (world_size, bytes) of all ranks for each of `flats`.

        None if they must be sent by themselves, with what `room()` gave: memory, asked for before the call
        where that is known by then. A rank without it must not leave the others in the message after it.
        """
        fits = may and all_on_host(flats) and sum([flat.nbytes for flat in flats]) <= ROOM
        made = None if fits else room()
        meeting = self.meet(call, flats if fits else None) if self.world_size > 1 else None
        if not fits or meeting is None:
            return None, room() if fits else made
        tables, start = [], 0
        for flat in flats:
            tables.append(meeting.column(start, flat.numel(), torch.uint8))
            start += flat.numel()
        return tables, None

    @contextmanager
    def refusing(self, verb: str) -> Iterator[None]:
        """In the block the arguments of `verb` are looked at: an error is told to the ranks that wait in it.

        Raises:
            CollectiveMismatch: Not all ranks refuse alike; raised on all of them.
            UsageError: This rank does not belong to the group.
        """
        self.world_size  # noqa: B018 - raises for ranks outside the group, before anything is sent
        try:
            yield
        except FabricError as error:
            self.refuse(verb, error)
            raise

    def refuse(self, verb: str, error: FabricError) -> None:
        """Tell the ranks that wait in `verb` that this one does not accept its arguments; then raise `error`.

        Raises:
            CollectiveMismatch: Not all ranks refuse alike; raised on all of them.
        """
        # Alike is the kind of mistake; its text may name values, of which every rank has its own.
        kind = f"{REFUSED}{type(error).__name__}"
        self.world_size  # noqa: B018 - raises for ranks outside the group: nobody waits for them
        self.meet(call_of(verb, kind)._replace(what=f"{kind}: {error}"))


def to_tensors(leaves: list[Any], device: torch.device, verb: str) -> list[Tensor]:
    """The leaves as tensors; numbers and numpy arrays become new ones on `device`, in torch's usual dtypes.

    Raises:
        ArgumentTypeError: A leaf is neither a dense tensor nor a number.
    """
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
                raise ArgumentTypeError(f"{verb} takes dense tensors, but a leaf {_why_not_dense(leaf)}")
            tensors.append(leaf)
        elif isinstance(leaf, bool | int | float | complex) or type(leaf).__module__ == "numpy":
            try:
                plain = device.type != "cpu" and isinstance(leaf, bool | int | float | complex)
                # A copy to a device would let the host wait for it; a kernel that fills does not.
                made = torch.full((), leaf, device=device) if plain else torch.tensor(leaf, device=device)
                tensors.append(made)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ArgumentTypeError(
                    f"{verb}: torch makes no tensor of the {type(leaf).__name__} {leaf!r:.80} ({error}). "
                    "Convert it to a tensor of a dtype that holds it."
                ) from error
        else:
            raise ArgumentTypeError(
                f"{verb} takes tensors, numbers, and nestings of them, but a leaf is "
                f"{type(leaf).__name__}: {leaf!r:.80}. Convert it to a tensor, or use fabric.broadcast or "
                "fabric.all_gather_object for objects."
            )
    return tensors


def _why_not_dense(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "is nested. Pass a list of its parts (tensor.unbind())."
    if tensor.is_quantized:
        return "is quantised. Write tensor.dequantize(), or tensor.int_repr()."
    if tensor.is_meta:
        return "is on the meta device and holds no values. Give it memory first."
    return f"is {tensor.layout}. Write tensor.to_dense()."


def check_parts(shapes: list[list[int]], world: int, verb: str) -> None:
    """Raise unless every leaf splits into `world` equal parts along dim 0."""
    for shape in shapes:
        if not shape or shape[0] % world:
            why = (
                "has no dim 0"
                if not shape
                else f"has {shape[0]} rows, which {world} ranks cannot share evenly"
            )
            raise ConfigurationError(
                f"{verb} splits every leaf along dim 0 into one part per rank, but a leaf of shape {shape} "
                f"{why}. Give it a first dimension that divides by {world}, such as [{world}, ...]."
            )


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
    """The elements of tensors of one dtype, one after the other; no copy of a single contiguous one."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else flatten_tensors(tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of `tensor` as flat bytes, row-major; shares its memory where that is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous with any stride
    return plain.view(torch.uint8)


def pack(tensors: list[Tensor], parts: int = 1) -> Tensor:
    """(parts, bytes): each tensor split along dim 0; those of one device, of one dtype side by side."""
    rows = []
    for places in _by_dtype(tensors).values():
        group = [tensors[i].detach() for i in places]
        if parts == 1:
            flat = join(group)
        else:
            cut = [t.resolve_conj().resolve_neg().reshape(parts, t.numel() // parts) for t in group]
            flat = torch.cat(cut, dim=1) if len(cut) > 1 else cut[0]
        rows.append(as_bytes(flat).view(parts, -1))
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
    """Whether every tensor is in host memory, so that it may ride in a frame."""
    return all([t.is_cpu for t in tensors])
