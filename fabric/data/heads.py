"""What the ranks' streams begin with: whether they are one stream, or shares that a dataset has made."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError
from fabric.core.tree import flatten
from fabric.data.streams import digest
from fabric.data.together import table

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPARED = 32
"""Samples at a stream's beginning by which it is known."""
_COLUMNS = 8
"""Values of each of them that are looked at by themselves."""
ONE_STREAM = (
    "Where all ranks shall read one stream, seed its order alike on all of them, and sort what comes from a "
    "set or a directory."
)
"""What to do about ranks that begin differently, and should not."""


class Head(NamedTuple):
    """The first samples of one rank's stream."""

    samples: list[str]
    """A digest of each."""
    columns: list[list[str]]
    """Where samples are tuples, dictionaries, ...: the digests of the first, second, ... value in each."""
    shown: str
    """The first one, for messages."""

    @classmethod
    def of(cls, samples: list[Any]) -> Head:
        """The head of a stream that begins with these."""
        compared = samples[:_COMPARED]
        rows = [[digest(leaf) for leaf in flatten(sample)[0][:_COLUMNS]] for sample in compared]
        columns = [list(column) for column in zip(*rows, strict=False)]
        shown = " ".join(reprlib.repr(samples[0]).split()) if samples else "nothing"
        return cls([digest(sample) for sample in compared], columns, f"{shown:.70}")


def shares_itself(name: str, held: list[tuple[int, Head]]) -> bool:
    """Whether a dataset has shared itself out; else all ranks read one stream.

    Args:
        name: The dataset's, for messages.
        held: Of each rank the number of its share, and its head. Ranks of one share must read the same.

    Raises:
        ConfigurationError: Neither: the same samples in another order, or it cannot be told.
    """
    heads = [head for _, head in held]
    if all([head.samples == heads[0].samples for head in heads]):
        return False
    parts = dict(reversed(held))
    shares = list(parts.values())
    if (
        all([head.samples == parts[share].samples for share, head in held])
        and not any(_overlap(shares))
        and not any([_alike(columns) for columns in zip(*[head.columns for head in shares], strict=False)])
    ):
        return True
    raise ConfigurationError(
        f"The ranks' streams of {name} are neither one stream nor shares of their own: some of their "
        "samples, or parts of them, are the same, or ranks that must see the same data (of one pipeline, "
        "sequence or model) do not. They begin with\n"
        f"{table([head.shown for head in heads])}\n{ONE_STREAM} Else say what it is: "
        "setup_dataloaders(loader, shard_iterable=False) where each rank's samples are its own share, "
        "shard_iterable=True where all read the same samples in the same order, with noise of their own."
    )


def _overlap(heads: list[Head]) -> Iterator[bool]:
    """Whether samples, each the only one of its kind in its stream, are found in several streams."""
    owner: dict[str, int] = {}
    for number, head in enumerate(heads):
        for sample in head.samples:
            if head.samples.count(sample) == 1:
                yield owner.setdefault(sample, number) != number


def _alike(columns: tuple[list[str], ...]) -> bool:
    """Whether all streams have the same values at one place, and not one value only."""
    return len(set(columns[0])) > 1 and all([column == columns[0] for column in columns])
