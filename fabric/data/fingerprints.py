"""Fingerprints of the data that ranks pass to `setup_dataloaders`, and the error if they differ.

Lengths, indices and lists of files in attributes of datasets. Never reads a sample: that is slow, and
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
from fabric.data.sharding import shards_by_rank
from fabric.utilities.data import sized_len
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

_DATASETS, _ITEMS = 32, 1024
"""Limit of nested datasets, and the minimum number of entries read of each list."""
_HINT = "?"
"""Suffix of the name of a list of numbers, which need not determine the samples."""


def fingerprint(loader: Any) -> dict[str, Any] | None:
    """Return, by name, the values that determine the sample of each index.

    None if data may differ by rank: iterable datasets, and samplers that shard by rank.
    """
    if isinstance(loader.dataset, IterableDataset) or any(map(shards_by_rank, samplers_of(loader))):
        return None
    values = {"batch_size": loader.batch_size}
    parts = [("dataset", loader.dataset), ("sampler", getattr(loader.sampler, "indices", []))]
    for path, part in parts:  # grows during the loop
        size = values[f"len({path})"] = sized_len(part)
        for name, value in [("", part), *getattr(part, "__dict__", {}).items()]:
            inner = value if name == "datasets" and isinstance(value, list | tuple) else [value]
            if name and (name == "dataset" or all([isinstance(item, Dataset) for item in inner])):
                parts += [(f"{path}.{name}", item) for item in inner][: _DATASETS - len(parts)]
            elif name == "indices" or (size and sized_len(value) == size):  # an entry for each sample
                text, has_names = _summary(value)
                hint = _HINT * (name not in ("", "indices") and not has_names)
                values |= {f"{path}.{name}{hint}".rstrip("."): text} if text else {}
    return values


def check_same_data(by_rank: list[list[Any]]) -> None:
    """Raise on all ranks if their data differ; warn if only lists of numbers in datasets differ.

    Args:
        by_rank: The fingerprints of each rank's loaders, in rank order.

    Raises:
        ConfigurationError: Ranks have different samples at one index.
    """
    for fingerprints in [row for row in zip(*by_rank, strict=True) if None not in row]:
        keys = list(dict.fromkeys([key for values in fingerprints for key in values]))
        differ = [
            key for key in keys if any([each.get(key) != fingerprints[0].get(key) for each in fingerprints])
        ]
        if not differ:
            continue
        rows = [", ".join([f"{key} {each.get(key)}" for key in differ[:4]]) for each in fingerprints]
        text = (
            f"The ranks gave fabric.setup_dataloaders different data:\n{table(rows)}\n"
            "Each rank takes its part of one order, so samples would be repeated and lost. Seed a split: "
            "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). Sort lists of files: "
            "sorted(folder.glob('*')). If each rank has its own part already, write "
            "fabric.setup_dataloaders(loader, use_distributed_sampler=False)."
        )
        if not all([key.endswith(_HINT) for key in differ]):
            raise ConfigurationError(text)
        rank_zero_warn(text, category=RanksDifferWarning)


def _summary(values: Any) -> tuple[str, bool]:
    """Return a short text of a list of numbers and names (else ""), and whether it has names.

    Of paths only the file names are compared: ranks may have copies in different folders.
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
    preview = ", ".join([str(name) for name in names[:4]])
    return f"{preview:.80}, ... ({len(values)}, {digest})", str in map(type, names)
