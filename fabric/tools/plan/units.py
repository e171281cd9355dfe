"""Sizes and rates with units: "80GB", "400Gb/s", "400T". Called by `plan.py`."""

from __future__ import annotations

import re
from typing import Any

from fabric.core.errors import ConfigurationError

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_bytes(text: Any, option: str = "--memory") -> int:
    """Return the bytes of "80GB" or "80GiB".

    Raises:
        ConfigurationError: It is no number with a unit of bytes, above 0.
    """
    found = re.fullmatch(r"([\d.]+)\s*([kKMGT]?i?)B", str(text).strip())
    scale = {**_PREFIXES, **_BINARY, "K": 10**3}
    if found is None or not (size := _number(found[1]) * scale.get(found[2], 0)):
        value = str(text).strip()
        example = value if value.replace(".", "", 1).isdigit() and _number(value) else "80"
        raise ConfigurationError(
            f"{option} {text} is no size of memory: it needs a number above 0 and a unit. Write {option} "
            f"{example}GB, or {option} {example}GiB."
        )
    return int(size)


def read_bandwidth(text: Any) -> float:
    """Return the bytes per second of "400Gb/s" (bits) or "50GB/s" (bytes).

    Raises:
        ConfigurationError: It is no rate above 0.
    """
    found = re.fullmatch(r"([\d.]+)\s*([kMGT]?)(b|B)(/s|ps)", str(text).strip())
    if found is None or not (rate := _number(found[1]) * _PREFIXES[found[2]]):
        raise ConfigurationError(
            f"--bandwidth {text} is no rate above 0. Write --bandwidth 400Gb/s (bits), or --bandwidth 50GB/s "
            "(bytes)."
        )
    return rate if found[3] == "B" else rate / 8


def read_flops(text: Any) -> float:
    """Return the operations per second of "400T".

    Raises:
        ConfigurationError: It is no rate above 0.
    """
    found = re.fullmatch(r"([\d.]+)\s*([kMGTP]?)(FLOPS?(/s)?)?", str(text).strip(), re.IGNORECASE)
    prefix = "" if found is None else found[2].upper().replace("K", "k")
    if found is None or not (rate := _number(found[1]) * _PREFIXES[prefix]):
        raise ConfigurationError(
            f"--flops {text} is no rate above 0. Write --flops 400T for 400e12 operations per second."
        )
    return rate


def show_bytes(size: float) -> str:
    """Return a size with three digits: "61.2 GB"."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "1.2.3"
        return 0.0
