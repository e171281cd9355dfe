"""Fingerprints of the data that ranks give to `setup_dataloaders`, and the error where they differ.

Lengths, indices and lists of files, as attributes of datasets hold them. No sample is read: that costs, and
draws random numbers.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fabric.core.errors import ConfigurationError
from fabric.data.adapters import samplers_of
from fabric.data.rank_consistency import table
from fabric.data.sharding import knows_its_rank
from fabric.utilities.data import sized_len
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

_DATASETS, _ITEMS = 32, 1024
"""How many nested datasets are read, and at how many places of each list, at least."""
_HINT = "?"
"""At the end of the name of a list of numbers, which need not decide what the samples are."""


def fingerprint(loader: Any) -> dict[str, Any] | None:
    """Return by name the values that determine the sample of each index.

    None where ranks may hold other data: streams, and samplers that take one rank's part.
    """
    if isinstance(loader.dataset, IterableDataset) or any(map(knows_its_rank, samplers_of(loader))):
        return None
    found = {"batch_size": loader.batch_size}
    parts = [("dataset", loader.dataset), ("sampler", getattr(loader.sampler, "indices", []))]
    for path, part in parts:  # grows
        size = found[f"len({path})"] = sized_len(part)
        for name, value in [("", part), *getattr(part, "__dict__", {}).items()]:
            inner = value if name == "datasets" and isinstance(value, list | tuple) else [value]
            if name and (name == "dataset" or all([isinstance(each, Dataset) for each in inner])):
                parts += [(f"{path}.{name}", each) for each in inner][: _DATASETS - len(parts)]
            elif name == "indices" or (size and sized_len(value) == size):  # an entry for each sample
                text, has_names = _summary(value)
                hint = _HINT * (name not in ("", "indices") and not has_names)
                found |= {f"{path}.{name}{hint}".rstrip("."): text} if text else {}
    return found


def check_alike(held: list[list[Any]]) -> None:
    """Raise on all ranks if they gave other data; warn if only numbers that datasets hold differ.

    Args:
        held: The fingerprints of each rank's loaders, by rank.

    Raises:
        ConfigurationError: Ranks hold other samples under one index.
    """
    for each in [each for each in zip(*held, strict=True) if None not in each]:
        keys = list(dict.fromkeys([key for found in each for key in found]))
        differ = [key for key in keys if any([found.get(key) != each[0].get(key) for found in each])]
        if not differ:
            continue
        rows = [", ".join([f"{key} {found.get(key)}" for key in differ[:4]]) for found in each]
        text = (
            f"The ranks gave fabric.setup_dataloaders different data:\n{table(rows)}\n"
            "Each rank takes its part of one order, so samples would be repeated and lost. Seed a split: "
            "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). Sort lists of files: "
            "sorted(folder.glob('*')). Where each rank has its own part already, write "
            "fabric.setup_dataloaders(loader, use_distributed_sampler=False)."
        )
        if not all([key.endswith(_HINT) for key in differ]):
            raise ConfigurationError(text)
        rank_zero_warn(text, category=RanksDifferWarning)


def _summary(values: Any) -> tuple[str, bool]:
    """A short text of a list of numbers and names, or ""; and whether there are names in it.

    Of paths only the names of the files count: ranks may have copies in folders of their own.
    """
    vector = getattr(values, "ndim", 0) == 1 and getattr(values, "is_cpu", True)
    if not vector and not isinstance(values, list | tuple | range):
        return "", False
    picked = values[:: max(1, len(values) // _ITEMS)]
    rows = picked.tolist() if hasattr(picked, "tolist") else picked
    items = [item for row in rows for item in (row if type(row) is tuple else (row,))]
    if not all([isinstance(item, int | str | os.PathLike) for item in items]):
        return "", False
    names = [i if isinstance(i, int) else os.fspath(i)[-200:].rpartition("/")[2] for i in items]
    digest = sha256(repr(names).encode()).hexdigest()[:8]
    shown = ", ".join([str(name) for name in names[:4]])
    return f"{shown:.80}, ... ({len(values)}, {digest})", str in map(type, names)
