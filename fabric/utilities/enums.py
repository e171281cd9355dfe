"""`LightningEnum`: a string enum that ignores case, for users' code. The package itself uses Literals."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from typing_extensions import Self

from fabric.core.errors import ConfigurationError

Source = Literal["key", "value", "any"]


class LightningEnum(str, Enum):
    """A string enum whose members equal their value in any case: `Color.RED == "Red"`."""

    @classmethod
    def from_str(cls, value: str, source: Source = "key") -> Self:
        """Return the member with key or value `value`; case is ignored, and "-" equals "_" in keys.

        Args:
            value: The text to find.
            source: Compare with "key" (names of members), "value", or "any" of both.

        Raises:
            ConfigurationError: Nothing matches.
        """
        found = cls.try_from_str(value, source)
        if found is None:
            raise ConfigurationError(
                f"{value!r} is not a {source if source != 'any' else 'key or value'} of {cls.__name__}. "
                f"Write one of {', '.join(repr(m.value if source == 'value' else m.name) for m in cls)}."
            )
        return found

    @classmethod
    def try_from_str(cls, value: str, source: Source = "key") -> Self | None:
        """Return the member, or None if nothing matches. Arguments as for `from_str`."""
        lowered = value.lower()
        for member in cls:
            by_key = source in ("key", "any") and member.name.lower() == lowered.replace("-", "_")
            if by_key or (source in ("value", "any") and member.value.lower() == lowered):
                return member
        return None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and self.value.lower() == other.lower()

    def __ne__(self, other: object) -> bool:
        return not self == other  # str.__ne__ is case-sensitive

    def __hash__(self) -> int:
        return hash(self.value.lower())
