"""`communication`: counts the collectives of a block by kind, bytes and line, under every strategy.

For tests of users that bound the traffic of a step. Counts operations of torch.distributed on tensors; frames
of the call check, with the small objects in them, are not counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import ArgumentTypeError
from fabric.core.source import user_line
from fabric.testing._torch import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce",
    "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "send": "send",
    "recv": "recv", "barrier": "barrier",
}  # fmt: skip
"""Prefixes of torch's names of operations, longer ones first, and the names of this module."""
_NO_COLLECTIVES = ("wait", "wrap_tensor")
_NAMES = sorted(_KINDS, key=len, reverse=True)


class Call(NamedTuple):
    """One collective: its kind, the bytes of its largest tensor (the whole one), the user's line."""

    kind: str
    bytes: int
    line: str


class Communication(TorchDispatchMode):
    """The collectives of a block on this rank, in order; `calls` and `bytes` are sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        name = name.lstrip("_")
        if space in ("c10d", "_c10d_functional") and not name.startswith(_NO_COLLECTIVES):
            kind = next((_KINDS[start] for start in _NAMES if name.startswith(start)), name)
            sides = [*args, result] if space == "_c10d_functional" else args  # they return what they gathered
            sizes = [sum([t.nbytes for t in tree_leaves(s) if isinstance(t, torch.Tensor)]) for s in sides]
            self.log.append(Call(kind, max(sizes, default=0), user_line()))
        return result

    @property
    def calls(self) -> int:
        """The number of collectives."""
        return len(self.log)

    @property
    def bytes(self) -> int:
        """The bytes of all collectives: of each the whole tensor (gathered, reduced, to be scattered)."""
        return sum([call.bytes for call in self.log])

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of "all_reduce", "all_gather", "reduce_scatter", ..."""
        return self._sums("kind")

    @property
    def by_line(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes by the user's line that caused them, as "file.py:31"."""
        return self._sums("line")

    def assert_at_most(self, *, bytes: int | None = None, calls: int | None = None) -> None:
        """Raise if the block made more calls, or of more bytes.

        Args:
            bytes: The most bytes; None: any.
            calls: The most collectives; None: any.

        Raises:
            AssertionError: More bytes or calls; the text lists them by kind and line.
            ArgumentTypeError: Neither limit was given.
        """
        if bytes is None and calls is None:
            raise ArgumentTypeError(
                "assert_at_most needs a limit. Write assert_at_most(bytes=4096, calls=2)."
            )
        limits = {"bytes": (self.bytes, bytes), "calls": (self.calls, calls)}
        wrong = [
            f"{count} {what}, at most {most}"
            for what, (count, most) in limits.items()
            if most is not None and count > most
        ]
        if wrong:
            raise AssertionError(f"{'; '.join(wrong)}:\n{self}")

    def __str__(self) -> str:
        counts = Counter(self.log)
        lines = [f"{n} x {call.kind} of {call.bytes} bytes ({call.line})" for call, n in counts.most_common()]
        return "\n".join(lines) or "no collectives"

    def _sums(self, name: str) -> dict[str, tuple[int, int]]:
        sums: dict[str, tuple[int, int]] = {}
        for call in self.log:
            calls, size = sums.get(getattr(call, name), (0, 0))
            sums[getattr(call, name)] = calls + 1, size + call.bytes
        return sums


@contextmanager
def communication() -> Iterator[Communication]:
    """Context that counts the collectives of its block on this rank.

    with fabric.testing.communication() as c:
        train_one_step()
    c.assert_at_most(bytes=8 * parameters, calls=4)
    """
    with Communication() as counted:
        yield counted
