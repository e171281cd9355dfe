"""WebDataset's tar shards on disk: exact counts over ranks and workers, and the rest of an epoch."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
import webdataset
from braceexpand import braceexpand
from torch.utils.data import DataLoader

from fabric import Fabric

SHARDS = 4
PER_SHARD = 9
ALL = list(range(SHARDS * PER_SHARD))


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with webdataset.TarWriter(f"{folder}/{shard:03d}.tar") as tar:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                tar.write({"__key__": f"{number:05d}", "cls": number, "txt": f"sample {number}"})
    return f"{folder}/{{000..{SHARDS - 1:03d}}}.tar"


def whole(urls):
    """Each rank and worker reads all of it, and Fabric deals it out."""
    made = webdataset.WebDataset(urls, nodesplitter=None, shardshuffle=False)
    return made.decode().to_tuple("cls", "txt")


def split(urls):
    """Shards are split over ranks, and over workers (its default)."""
    keywords = {"nodesplitter": webdataset.split_by_node, "workersplitter": webdataset.split_by_worker}
    return webdataset.WebDataset(urls, shardshuffle=False, **keywords).decode().to_tuple("cls", "txt")


def shuffled(urls):
    """Shards in one order on all ranks; samples in an order that Fabric can find again, by `rng=random`."""
    shards = random.Random(3).sample(list(braceexpand(urls)), SHARDS)
    made = webdataset.WebDataset(shards, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    return made.shuffle(6, rng=random).decode().to_tuple("cls", "txt")


def loader_of(make, urls, workers, **keywords):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric.setup_dataloaders(DataLoader(make(urls), 2, num_workers=workers), **keywords)


def read(loader):
    numbers = []
    for labels, texts in loader:
        assert texts == tuple(f"sample {label}" for label in labels) or texts == [
            f"sample {x}" for x in labels
        ]
        numbers.append(labels.tolist())
    return numbers


def flat(batches):
    return [x for batch in batches for x in batch]


def evaluated(make, urls, workers, keywords):
    loader = loader_of(make, urls, workers, **keywords)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        epochs = [read(loader), read(loader)]
    return epochs, [str(w.message) for w in caught if "shards itself" in str(w.message)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("make", [whole, split, shuffled])
def test_each_sample_is_seen_once(ranks, urls, make, said, workers):
    keywords = {"shard_iterable": make is whole} if said else {}
    got = ranks.run(evaluated, make, urls, workers, keywords, world_size=2)
    for epoch in range(2):
        assert sorted(flat(got[0][0][epoch]) + flat(got[1][0][epoch])) == ALL
    found = make is not whole and not said
    assert [len(warned) for _, warned in got] == [found, 0]
    if make is split:
        own = [x for x in ALL if x // PER_SHARD % 2 == 0]
        assert sorted(flat(got[0][0][0])) == own


def trained(make, urls, workers):
    return read(loader_of(make, urls, workers, shard_iterable=False))


def test_ranks_of_other_numbers_of_shards_stop_together(ranks, urls):
    """Three shards on two ranks: in training all take as many steps as the one that has least."""
    urls = urls.replace("003", "002")
    with pytest.raises(Exception, match="The ranks' data are of different lengths"):
        ranks.run(trained, split, urls, 0, world_size=2)  # a warning, which is an error on these ranks


def rest(make, urls, workers, keywords, folder):
    first = loader_of(make, urls, workers, **keywords)
    with torch.no_grad():
        begun = iter(first)
        for _ in range(4):
            next(begun)
        state = first.state_dict()
        expected = [labels.tolist() for labels, _ in begun]
        second = loader_of(make, urls, workers, **keywords)
        second.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = read(second)
    assert len(got) >= 4
    return got == expected, [w for w in map(str, caught) if "is read again" in w]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [whole, split, shuffled])
def test_the_rest_of_an_epoch_is_read_again_up_to_the_position(ranks, urls, tmp_path, make, workers):
    keywords = {"shard_iterable": make is whole}
    got = ranks.run(rest, make, urls, workers, keywords, str(tmp_path), world_size=2)
    assert [same for same, _ in got] == [True, True]
    assert [len(warned) for _, warned in got] == [1, 0]


def loader_of_webdataset(urls):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    with pytest.raises(TypeError, match=r"needs torch's DataLoader, but got WebLoader"):
        fabric.setup_dataloaders(webdataset.WebLoader(split(urls), batch_size=4))


def test_its_own_loader_is_refused(ranks, urls):
    ranks.run(loader_of_webdataset, urls, world_size=2)
