"""Streams of indices, and of batches of them, that take a sampler's place in a loader.

They know samplers, not loaders: which part of the order is this rank's, where it begins, how far it went.
"""

from __future__ import annotations

import zlib
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.data.order import SeededOrder, UserOrder
    from fabric.data.rules import Rule


_CHECKED = 32
"""Items at an epoch's beginning by which an order is known again."""
_OF_BATCHES = {"batch_size": "batch", "drop_last": "drop_last", "sampler": ""}
"""What torch's BatchSampler has, and where a rule has it."""


def checksum(items: list[Any]) -> list[int] | None:
    """(count, checksum) of indices, or of batches of them; None for values that have no text of their own."""
    try:
        plain = [_plain(item) for item in items]
    except TypeError:
        return None
    return [len(plain), zlib.crc32(repr(plain).encode())]


class Forwarding:
    """Stands in for an object of the user's: what it does not have itself is that object's."""

    _OWN: frozenset[str] = frozenset()
    """Its own attributes, by name."""

    def users(self) -> Any:
        """The user's object."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Dunder names belong to protocols (pickle, copy) that must not reach the user's object through this.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.users(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.users(), name, value)


class Sampler(Forwarding):
    """A user's sampler as a loader shows it: what it lacks, `set_epoch`, chooses the loader's next epoch."""

    _OWN = frozenset({"_sampler"})

    def __init__(self, sampler: Any, set_epoch: Callable[[int], None]) -> None:
        self._sampler = sampler
        self.__dict__["set_epoch"] = set_epoch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() is for the user's
        return type(self._sampler)

    def users(self) -> Any:
        """The user's sampler."""
        return self._sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __reduce__(self) -> Any:
        return Sampler, (self._sampler, self.set_epoch)


def _plain(item: Any) -> Any:
    if hasattr(item, "tolist"):  # tensors, and what numpy has
        item = item.tolist()
    if isinstance(item, list | tuple):
        return [_plain(each) for each in item]
    if not isinstance(item, int | float | str):
        raise TypeError(type(item))
    return item


class IndexStream(Forwarding):
    """This rank's batches of indices, or its items where they are whole batches (`rule.batch` None).

    Stands in for the user's (batch) sampler.

    Args:
        order: The items of one epoch.
        rule: How they are dealt out.
    """

    _OWN = frozenset({"order", "rule", "item", "start", "ends", "expected", "check", "asked"})

    def __init__(self, order: SeededOrder | UserOrder, rule: Rule) -> None:
        self.order = order
        self.rule = rule
        self.item: Callable[[Any, int], Any] | None = None
        """Makes of a batch, and the position after it, what the loader's workers get."""
        self.asked: int | None = None
        """The epoch that the user has asked for since the last iteration."""
        self.start = 0
        """The position at which the next iteration begins."""
        self.expected: list[int] | None = None
        """The check that the next iteration must have, since it goes on in one that had it."""
        self.check: list[int] | None = None
        """(count, checksum) of the epoch's first items; None where they are no plain values, or not drawn."""
        self.ends: deque[int] = deque()
        """Positions after each batch that the last iteration has given out; whoever receives them takes them.
        """

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; told to the user's sampler too."""
        self.asked = epoch
        self.order.set_epoch(epoch)

    def check_even(self) -> None:
        """Under uneven="error", raise before the first item, where the length is known.

        Raises:
            ConfigurationError: The items cannot be dealt out evenly.
        """
        if self.rule.uneven != "error":
            return
        try:
            rest = self.rule.left_over(len(self.order))
        except TypeError:  # no length
            return
        if rest:
            raise ConfigurationError(self.rule.message(rest))

    def __iter__(self) -> Iterator[Any]:
        # No generator function: epoch and start are those of this moment, and errors come now.
        self.check_even()
        self.ends, self.check = deque(), None
        keep = max(self.rule.share.world, self.expected[0] if self.expected else 0)
        stream = self.order.stream(self.start, keep)
        return self._noted(stream, self.start, min(self.start, keep), self.ends)

    def _noted(self, stream: Iterator[Any], start: int, kept: int, ends: deque[int]) -> Iterator[Any]:
        # Drawn from only when asked: torch draws from a generator of the user's own before its sampler does.
        whole, item = self.rule.batch is None, self.item
        first = list(islice(stream, kept))
        if self.expected is not None:
            self._compare(first[: self.expected[0]], self.expected)
            self.check = self.expected
        elif not start:
            head = list(islice(stream, self.rule.size))
            self.check = checksum(head[:_CHECKED])
            stream = chain(head, stream)
        draw = lambda n: list(islice(stream, n))  # noqa: E731
        for items, end, *_ in self.rule.deal(draw, start, first[: self.rule.share.world]):
            mine = items[0] if whole else items
            ends.append(end)
            yield mine if item is None else item(mine, end)

    def _compare(self, first: list[Any], expected: list[int]) -> None:
        if checksum(first) != expected:
            raise UsageError(
                f"{type(self.order.sampler).__name__} gives another order than when the position was saved: "
                f"the epoch begins with {first[:4]} now. Let it draw from a generator (torch's, python's or "
                "numpy's) that is an attribute of it, or from the global ones; or begin an epoch with "
                "loader.set_epoch()."
            )

    def __len__(self) -> int:
        return self.rule.count(len(self.order))

    def users(self) -> Any:
        """The user's (batch) sampler."""
        return self.order.sampler

    def __getattr__(self, name: str) -> Any:
        if name in _OF_BATCHES and self.rule.batch is not None:  # in place of torch's BatchSampler
            field = _OF_BATCHES[name]
            return getattr(self.rule, field) if field else Sampler(self.order.sampler, self.set_epoch)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _OF_BATCHES.get(name) and self.rule.batch is not None:
            name, value = "rule", self.rule._replace(**{_OF_BATCHES[name]: value})
        super().__setattr__(name, value)
