"""`Channel`: a group of ranks for the tree verbs: its collective, its call checker, its backend's devices.

Also the first steps of each tree verb: convert leaves to tensors and names to operations, and refuse others.
This is all that one rank needs. Wire formats are in frames.py.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fabric.core.errors import (
    ArgumentTypeError,
    ConfigurationError,
    FabricError,
    UsageError,
)
from fabric.core.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from fabric.collectives.collective import Collective
    from fabric.collectives.frames import CallSignature


_OPS = ("sum", "mean", "min", "max", "product", "avg", "prod", "band", "bor", "bxor")
_TORCHS = {"mean": "AVG", "prod": "PRODUCT"}
"""Names of operations for which torch has another name, and that name."""

WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that backends do not reduce, and the dtypes in which their reduction has the same result."""

_REDUCIBLE = {
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, *WIDER,
}  # fmt: skip


class Transport(NamedTuple):
    """The device types that a group can send from, and the staging device for other tensors."""

    device: torch.device
    """The rank's own device, where numbers become tensors."""
    sendable: tuple[str, ...]
    """Device types from which the group's backend sends tensors without a copy."""
    staging_device: torch.device
    """Device to which tensors of other devices are copied before a message, and from which after it."""

    def to_staging(self, tensor: Tensor) -> Tensor:
        """Return the tensor on a device from which the backend can send."""
        return tensor if tensor.device.type in self.sendable else tensor.to(self.staging_device)


@cache
def transport_of(device: torch.device, backends: str) -> Transport:
    """Return the `Transport` of a group on this rank.

    Args:
        device: The device of this rank.
        backends: From `torch.distributed.get_backend_config`: "cpu:gloo,cuda:nccl".
    """
    by_type = dict([pair.split(":", 1) for pair in backends.split(",")])
    # gloo accepts other device types, but does not support all operations on them.
    types = [kind for kind, backend in by_type.items() if kind == "cpu" or backend != "gloo"]
    home = next((kind for kind in (device.type, "cpu") if kind in types), types[0])
    staging = device if home == device.type else torch.device(home)
    return Transport(device, tuple([kind for kind in ("cpu", staging.type) if kind in types]), staging)


class Channel:
    """A group of ranks: all of them must make each call on it, in one order."""

    def __init__(self, collective: Collective, transport: Transport) -> None:
        self.collective, self.transport = collective, transport
        self.facts: Any = None
        """The facts that ranks compare in each call, in addition to the call: see `Part.facts`."""
        self.reducing: Callable[..., None] | None = None
        """Called before tensors are reduced in place: see `Part.reducing`."""
        self._guard: Callable[[], Any | None] = lambda: None

    def __reduce__(self) -> Any:
        return Channel, (self.collective, self.transport)

    @property
    def guard(self) -> Any | None:
        """The `CallChecker` that compares calls before they run; None: no check."""
        guard = self._guard()
        if guard is None:
            guard = self.collective.guard
            self._guard = self._guard if guard is None else weakref.ref(guard)  # it ends with its group
        return guard

    @cached_property
    def world_size(self) -> int:
        """The number of ranks in the group.

        Raises:
            UsageError: This rank is not one of them.
        """
        size = self.collective.world_size
        if size < 1:
            raise UsageError(
                "A call with group= was made on a rank that is not in the group. Only members of a group can "
                "use it. Make the call on the members only."
            )
        return size

    def check_call(self, call: CallSignature, payload: Sequence[Tensor] = (), op: Any = None) -> Any | None:
        """Wait until all ranks make this call, and exchange their payloads if these fit into the frames.

        Args:
            call: The call of this rank.
            payload: Its data: contiguous tensors on the host.
            op: torch's operation, by which a large group may reduce the data in the frames.

        Returns:
            The frames of all ranks (`guard.messages.GatheredFrames`), or one with the reduced data. None if
            no data were exchanged: a world of one, FABRIC_GUARD=light or off, or without the folder `guard/`.

        Raises:
            CollectiveMismatch: Ranks make different calls; raised on all of them.
            RankError: A rank exited, or did not make the call in time.
        """
        guard = self.guard
        return None if guard is None else guard.compare(call, payload, self, op)

    def exchange_small(
        self,
        call: CallSignature,
        flats: list[Tensor],
        allocate: Callable[[], Any] = tuple,
        may: bool = True,
        op: Any = None,
    ) -> tuple[list[Tensor] | None, Any]:
        """Exchange small host tensors in the message of `check_call`: (world_size, numel) for each one, or
        (1, numel) if `op` was applied to them in the message.

        None if they must be sent in a message of their own, with the buffers that `allocate()` allocates.
        These are allocated before the call if possible: a rank out of memory must not block the others in
        the message after it.
        """
        from fabric.collectives.frames import PAYLOAD_BYTES, all_on_host

        if self.world_size == 1 and may:
            return [flat.view(1, -1).clone() for flat in flats], None
        fits = may and all_on_host(flats) and sum([flat.nbytes for flat in flats]) <= PAYLOAD_BYTES
        made = None if fits else allocate()
        frames = self.check_call(call, flats if fits else (), op)
        if not fits or frames is None:
            return None, allocate() if fits else made
        tables = frames.columns(flats)
        if op == dist.ReduceOp.AVG and frames.count == 1:
            tables = [table.div_(self.world_size) for table in tables]
        return tables, None

    def check_barrier(self, verb: str, what: str = "") -> None:
        """Wait until all ranks make a call without data: this verb, with the same description `what`."""
        if self.world_size > 1:
            from fabric.collectives.frames import call_of

            self.check_call(call_of(verb, what))

    @contextmanager
    def validating(self, verb: str) -> Iterator[None]:
        """Check the arguments of `verb` in the block; an error there is sent to the ranks that wait in it.

        Raises:
            CollectiveMismatch: Not all ranks raise the same kind of error; raised on all of them.
            UsageError: This rank does not belong to the group.
        """
        self.world_size  # noqa: B018 - raises for ranks outside the group, before anything is sent
        try:
            yield
        except FabricError as error:
            self.abort_call(verb, error)

    def abort_call(self, verb: str, error: FabricError) -> NoReturn:
        """Report to the ranks that wait in `verb` that its arguments on this rank are invalid; raise `error`.

        Raises:
            CollectiveMismatch: Not all ranks raise the same kind of error; raised on all of them.
        """
        if self.world_size > 1:  # raises for ranks outside the group: no rank waits for them
            from fabric.collectives.frames import REFUSED, call_of

            # Compared is the error's class: its text may contain values that differ by rank.
            kind = f"{REFUSED}{type(error).__name__}"
            self.check_call(call_of(verb, kind)._replace(what=f"{kind}: {error}"))
        raise error


def to_tensors(leaves: list[Any], device: torch.device, verb: str) -> list[Tensor]:
    """Return the leaves as tensors; numbers and numpy arrays as new ones on `device`, in torch's dtypes.

    Raises:
        ArgumentTypeError: A leaf is neither a dense tensor nor a number, or is split over ranks.
    """
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) is not torch.Tensor and hasattr(leaf, "device_mesh"):
                from fabric.collectives.frames import shard_error

                raise shard_error(leaf, verb)
            if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
                kind = "nested" if leaf.is_nested else "quantised" if leaf.is_quantized else str(leaf.layout)
                kind = "on the meta device" if leaf.is_meta else kind
                raise ArgumentTypeError(
                    f"{verb} takes dense tensors with values, but a leaf is {kind}. Write .to_dense() of "
                    "a sparse one, .dequantize() of a quantised one, .unbind() of a nested one."
                )
            tensors.append(leaf)
        elif isinstance(leaf, bool | int | float | complex) or type(leaf).__module__ == "numpy":
            try:
                # The host waits for a copy to a device, but not for a kernel that fills a tensor.
                make = torch.tensor if type(leaf).__module__ == "numpy" else partial(torch.full, ())
                tensors.append(make(leaf, device=device))
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


def check_parts(tensors: list[Tensor], world: int, verb: str) -> None:
    """Raise unless every leaf splits into `world` equal parts along dim 0."""
    for tensor in tensors:
        if not tensor.dim() or len(tensor) % world:
            raise ConfigurationError(
                f"{verb} splits every leaf along dim 0 into one part per rank, but a leaf of shape "
                f"{list(tensor.shape)} does not divide by {world} ranks. Give it a first dimension that "
                f"does, such as [{world}, ...]."
            )


def torch_op(op: Any) -> Any:
    """Return torch's ReduceOp for a name ("mean", "SUM", ...) or a ReduceOp.

    Raises:
        ConfigurationError: The name means no reduction.
        ArgumentTypeError: Neither a name nor a ReduceOp.
    """
    if not isinstance(op, str):
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return op
        raise ArgumentTypeError(
            f"reduce_op={op!r} is a {type(op).__name__}. Write a name such as 'mean', or "
            "torch.distributed.ReduceOp.SUM."
        )
    name = op.lower()
    if name not in _OPS:
        raise ConfigurationError(
            f"reduce_op={op!r} is not a reduction.{did_you_mean(op, _OPS)} Write one of 'mean', 'sum', "
            "'min', 'max', 'product'."
        )
    return getattr(dist.ReduceOp, _TORCHS.get(name, name.upper()))


def reducible(leaves: list[Any], op: Any, device: torch.device, verb: str) -> list[Tensor]:
    """Return the leaves as tensors for which `op` is defined.

    Raises:
        ArgumentTypeError: `op` is not defined for one of them.
    """
    tensors = to_tensors(leaves, device, verb)
    for dtype in {t.dtype for t in tensors}:
        refusal = ""
        if dtype not in _REDUCIBLE:
            refusal = "is not defined. Convert first: data.float()"
        elif op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
            refusal = "would round. Write reduce_op='sum', or convert first: data.float()"
        elif dtype.is_complex and op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            refusal = "is not defined. Reduce torch.view_as_real(data), or its absolute values"
        if refusal:
            raise ArgumentTypeError(f"{verb}({op_name(op)}) of a tensor of {dtype} {refusal}.")
    return tensors


def op_name(op: Any) -> str:
    """Return the user's name of an operation."""
    name = str(getattr(op, "op", op)).rpartition(".")[2].lower()
    return "mean" if name == "avg" else name


def check_writable(tensors: list[Tensor], op: Any) -> None:
    """Raise if elements of a tensor share memory, so that no result can be written into it."""
    for tensor in tensors:
        if tensor.is_contiguous():  # most are, and a verb may get hundreds
            continue
        if any([step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)]):
            raise ArgumentTypeError(
                f"all_reduce({op_name(op)}) of a tensor of {tensor.dtype} cannot be written in place, since "
                "its elements share memory. Pass inplace=False, or data.clone()."
            )
