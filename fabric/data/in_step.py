"""Ranks whose streams may be of different lengths take the same number of steps, or are told why not.

Only for data that Fabric does not deal out itself; what it deals out needs no message.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.data.together import table
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def in_step(
    pairs: Iterator[Any], length: int | None, exchange: Callable[[Any], list[Any]], refuses: bool
) -> Iterator[Any]:
    """What `pairs` gives while all ranks have something. Where all lengths are known, one message in all.

    Args:
        pairs: An iteration's batches, with notes.
        length: How many there are; None: unknown.
        exchange: Gives every rank's value of what each passes. All ranks must call it.
        refuses: Whether ranks raise, all of them, when the first of them has no more; else they stop.

    Raises:
        ConfigurationError: With `refuses`, on all ranks: their numbers of batches differ.
    """
    lengths = exchange(length)
    if None not in lengths:
        if len(set(lengths)) > 1:
            _tell([f"{count} batches" for count in lengths], refuses)
        yield from islice(pairs, min(lengths))
        return
    count = 0
    while True:
        found = next(pairs, None)
        more = exchange(found is not None)
        if not all(more):
            if any(more):
                _tell([f"{'more than ' * has}{count} batches" for has in more], refuses)
            return
        count += 1
        yield found


def _tell(counts: list[str], refuses: bool) -> None:
    text = f"The ranks' data are of different lengths:\n{table(counts)}\n"
    if refuses:
        raise ConfigurationError(
            f'{text}uneven="error" refuses that. Give all ranks as much, or write uneven="drop" to stop '
            "with the first that has no more."
        )
    rank_zero_warn(
        f"{text}All of them stop with the first that has no more, since they train together; the rest of "
        'the epoch is left out. Evaluate under torch.no_grad(), or write uneven="exact", to see all of '
        "it."
    )
