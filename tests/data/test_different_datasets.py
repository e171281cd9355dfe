"""Datasets that differ by rank are an error of `setup_dataloaders`, the same on all ranks; those that only
look different are none.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
from data_cases import Indices, Numbers, launched, rows
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from fabric.core.errors import ConfigurationError
from fabric.utilities.warnings import RanksDifferWarning

N = 40


class Files(Dataset):
    """One sample for each file; whatever else is given is an attribute."""

    def __init__(self, files, **more):
        self.files = files
        vars(self).update(more)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return index


class Sampled(Indices):
    """Draws its samples, and counts them."""

    def __init__(self, n):
        super().__init__(n)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return random.random()


def names(rank, folder="/data"):
    return [f"{folder}/{index}.png" for index in random.Random(rank).sample(range(N), N)]


def split(rank, n=N):
    return random_split(Indices(n), [n - 8, 8], generator=torch.Generator().manual_seed(rank))[0]


DIFFERENT = {
    "random_split": (split, "dataset.indices "),
    "subset": (lambda rank: Subset(Indices(N), range(rank, N, 4)), "dataset.indices "),
    "indices in a tensor": (lambda rank: Subset(Indices(N), torch.randperm(N) + rank), "dataset.indices "),
    "a subset of a subset": (lambda rank: Subset(split(rank), range(8)), "dataset.dataset.indices "),
    "a subset inside": (lambda rank: Files(list("abc"), source=split(rank)), "dataset.source.indices "),
    "a part of several": (lambda rank: ConcatDataset([Indices(3), split(rank)]), "dataset.datasets.indices "),
    "a length": (lambda rank: Indices(N + rank), "len(dataset) "),
    "files": (lambda rank: Files(names(rank)), "dataset.files "),
    "paths": (lambda rank: Files([*map(Path, names(rank))]), "dataset.files "),
    "files with classes": (lambda rank: Files([(name, 1) for name in names(rank)]), "dataset.files "),
    "files of copies": (lambda rank: Files(names(rank, f"/local/rank{rank}")), "dataset.files "),
    "a list itself": (names, "dataset "),
}


def set_up(make, **options):
    """What a rank hears of a loader over `make(rank)`: an error, and warnings."""
    fabric = launched()
    loader = make(fabric.global_rank)
    if not isinstance(loader, DataLoader):
        loader = DataLoader(loader, batch_size=2, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ready, error = fabric.setup_dataloaders(loader, **options), None
        except ConfigurationError as raised:
            ready, error = None, str(raised)
    fabric.barrier()  # the ranks can go on
    if ready is not None:
        rows(ready)
    return error, [str(w.message) for w in caught if w.category is RanksDifferWarning]


def of_case(case, **options):
    return set_up(DIFFERENT[case][0], **options)


@pytest.mark.parametrize(
    ("case", "world_size"), [*[(case, 2) for case in DIFFERENT], ("random_split", 3), ("files", 3)]
)
def test_data_that_differ_are_an_error_of_all_ranks(ranks, case, world_size):
    heard = ranks.run(of_case, case, world_size=world_size)
    assert heard == [heard[0]] * world_size
    lines = heard[0][0].splitlines()
    assert lines[0] == "The ranks gave fabric.setup_dataloaders different data:"
    for rank in range(world_size):
        assert DIFFERENT[case][1] in lines[1 + rank], lines
    assert len(lines) == 2 + world_size


def test_the_error_shows_the_samples_and_how_to_seed(ranks):
    (text, told), _ = ranks.run(of_case, "files", world_size=2)
    first, second = ([name.rpartition("/")[2] for name in names(rank)[:4]] for rank in (0, 1))
    lines = text.splitlines()
    assert lines[1].startswith(f"  rank 0: dataset.files {', '.join(first)}, ... (40, ")
    assert lines[2].startswith(f"  rank 1: dataset.files {', '.join(second)}, ... (40, ")
    assert lines[3] == (
        "Each rank takes its part of one order, so samples would be repeated and lost. Seed a split: "
        "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). Sort lists of files: "
        "sorted(folder.glob('*')). If each rank has its own part already, write "
        "fabric.setup_dataloaders(loader, use_distributed_sampler=False)."
    )
    assert told == []


def by_sampler(rank):
    return DataLoader(Indices(N), 2, sampler=SubsetRandomSampler(range(rank, N, 4)))


def by_batch_size(rank):
    return DataLoader(Indices(N), 2 + rank)


@pytest.mark.parametrize(
    ("make", "shown"), [(by_sampler, "sampler 0, 4, 8, 12, ... (10, "), (by_batch_size, "batch_size 2")]
)
def test_samplers_and_batches_that_differ_are_errors_too(ranks, make, shown):
    (first, _), (second, _) = ranks.run(set_up, make, world_size=2)
    assert first == second
    assert f"  rank 0: {shown}" in first


ALIKE = {
    "the same": lambda rank: split(0),
    "draws its samples": lambda rank: Sampled(N),
    "copies of files": lambda rank: Files(names(0, f"/local/rank{rank}")),
    "copies of files in two folders": lambda rank: Files([f"/tmp/{rank}/a", "/data/b"]),
    "another folder": lambda rank: Files(names(0), folder=f"/local/rank{rank}", rank=rank),
    "a cache": lambda rank: Files(names(0), cache=[None] * 3 + ["read"] * (N - 3) * rank, read=[1] * rank),
    "a log": lambda rank: Files(names(0), log=["read"] * rank),
    "tensors": lambda rank: TensorDataset(torch.full((N, 2), float(rank))),
    "no vars": lambda rank: range(N),
    "a stream": lambda rank: DataLoader(Numbers(N + rank), 2),
    "a sampler that knows its rank": lambda rank: DataLoader(
        Subset(Indices(N), range(rank, N)), 2, sampler=DistributedSampler(range(4), 2, rank)
    ),
}


def of_alike(case):
    return set_up(ALIKE[case])


@pytest.mark.parametrize("case", [case for case in ALIKE if case != "a stream"])
def test_data_that_only_look_different_are_no_error(ranks, case):
    assert ranks.run(of_alike, case, world_size=2) == [(None, [])] * 2


def streams():
    launched().setup_dataloaders(ALIKE["a stream"](torch.distributed.get_rank()))


def test_streams_are_compared_when_they_are_iterated(ranks):
    ranks.run(streams, world_size=2)


@pytest.mark.parametrize("case", ["subset", "files", "a list itself"])
def test_ranks_that_say_so_have_parts_of_their_own(ranks, case):
    heard = ranks.run(of_case, case, use_distributed_sampler=False, world_size=2)
    assert heard == [(None, [])] * 2


def numbers(rank):
    return Files(names(0), labels=[rank] * N)


def test_numbers_that_a_dataset_holds_are_a_warning(ranks):
    (error, told), others = ranks.run(set_up, numbers, world_size=2)
    assert error is None
    assert others == (None, [])
    (text,) = told
    assert "  rank 0: dataset.labels? 0, 0, 0, 0, ... (40, " in text


def no_sample_is_read():
    data = Sampled(N)
    state = random.getstate()
    launched().setup_dataloaders(DataLoader(data, 2))
    return data.asked, random.getstate() == state


def test_no_sample_is_read_and_nothing_is_drawn(ranks):
    assert ranks.run(no_sample_is_read, world_size=2) == [([], True)] * 2


def test_a_long_list_is_read_in_places():
    from fabric.data.fingerprints import fingerprint

    class Counted(list):
        def __getitem__(self, key):
            found = super().__getitem__(key)
            assert len(found) < 2100
            return found

        def __iter__(self):
            raise AssertionError

    files = [f"{index}.png" for index in range(100_000)]
    shown = fingerprint(DataLoader(Files(Counted(files)), 2))
    assert shown["dataset.files"].startswith("0.png, 97.png, ")
    random.Random(0).shuffle(files)
    assert fingerprint(DataLoader(Files(Counted(files)), 2)) != shown


def nested(depth):
    data = Indices(N)
    for _ in range(depth):
        data = ConcatDataset([data, Indices(2)])
    return data


def test_many_nested_datasets_are_bounded():
    from fabric.data.fingerprints import fingerprint

    assert len(fingerprint(DataLoader(nested(100)))) < 100
