"""datasets, torchdata and tokenizers: exact counts over ranks and workers, and the rest of an epoch."""

from __future__ import annotations

import warnings

import pytest
import sklearn  # noqa: F401  # sets an environment variable; datasets imports it at its first stream
import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric import Fabric
from fabric.core.errors import UsageError

ROWS = 46
SHARDS = 4
PER_SHARD = 10


def launched():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    return fabric


def mapped(rank=0, world=1):
    return split_dataset_by_node(
        Dataset.from_dict({"x": list(range(ROWS))}).with_format("torch"), rank, world
    )


def of_shards(shards):
    for shard in shards:
        yield from ({"x": PER_SHARD * shard + i} for i in range(PER_SHARD))


def streamed():
    made = IterableDataset.from_generator(of_shards, gen_kwargs={"shards": list(range(SHARDS))})
    return made.with_format("torch")


def split(rank, world):
    return split_dataset_by_node(streamed(), rank, world)


def shuffled(buffer=8):
    return streamed().shuffle(seed=3, buffer_size=buffer)


def shuffled_shards():
    """What a state of datasets remembers: it forgets the buffer."""
    return shuffled(buffer=1)


def read(loader):
    batches = [batch["x"] for batch in loader]
    assert all(isinstance(x, torch.Tensor) for x in batches)
    return [x.tolist() for x in batches]


def evaluated(kind, workers):
    fabric = launched()
    loader = fabric.setup_dataloaders(kind(mapped(), 4, num_workers=workers))
    with torch.no_grad():
        return read(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_each_row_is_seen_once(ranks, kind, workers):
    got = ranks.run(evaluated, kind, workers, world_size=2)
    assert sorted(x for rank in got for batch in rank for x in batch) == list(range(ROWS))
    assert [len(batch) for batch in got[0]] == [len(batch) for batch in got[1]]


def global_batches(kind):
    fabric = launched()
    dataset, size = mapped(), 8 // fabric.world_size
    loader = fabric.setup_dataloaders(kind(dataset, size, shuffle=True, drop_last=True))
    return [read(loader), read(loader)]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_global_batches_are_those_of_one_process(ranks, kind):
    (one,) = ranks.run(global_batches, kind, world_size=1)
    several = ranks.run(global_batches, kind, world_size=2)
    for epoch in range(2):
        joined = [sorted(a + b) for a, b in zip(several[0][epoch], several[1][epoch], strict=True)]
        assert joined == [sorted(batch) for batch in one[epoch]]
    assert one[0] != one[1]


def dealt(kind, make, workers):
    fabric = launched()
    with torch.no_grad():
        return read(fabric.setup_dataloaders(kind(make(), 4, num_workers=workers)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("make", [streamed, shuffled])
def test_a_stream_is_dealt_out(ranks, kind, make, workers):
    got = ranks.run(dealt, kind, make, workers, world_size=2)
    assert sorted(x for rank in got for batch in rank for x in batch) == list(range(SHARDS * PER_SHARD))


def own_share(workers, kind, said):
    fabric = launched()
    data = split(fabric.global_rank, fabric.world_size)
    keywords = {} if said is None else {"shard_iterable": False}
    loader = fabric.setup_dataloaders(kind(data, 4, num_workers=workers), **keywords)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        return read(loader), [str(w.message) for w in caught if "shards itself" in str(w.message)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "said"), [(DataLoader, None), (DataLoader, False), (StatefulDataLoader, False)]
)
def test_split_dataset_by_node_is_found_and_not_split_again(ranks, kind, said, workers):
    got = ranks.run(own_share, workers, kind, said, world_size=2)
    for rank, (batches, _) in enumerate(got):
        assert sorted(x for batch in batches for x in batch) == sorted(x["x"].item() for x in split(rank, 2))
    assert [len(warned) for _, warned in got] == [said is None, 0]


def split_again(right):
    fabric = launched()
    data = mapped(fabric.global_rank, fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(data, 4), use_distributed_sampler=not right)
    if right:
        return [x for batch in read(loader) for x in batch]
    with pytest.raises(UsageError, match=r"data \{'x': 0\} .*\n  rank 1: data \{'x': 23\}") as caught:
        read(loader)
    assert "setup_dataloaders(loader, use_distributed_sampler=False)" in str(caught.value)
    return None


def test_rows_that_were_split_before_are_not_split_again(ranks):
    """In training: rank zero would train on half of its half."""
    ranks.run(split_again, False, world_size=2)
    got = ranks.run(split_again, True, world_size=2)
    assert got == [list(range(23)), list(range(23, 46))]


RESUMED = {
    "rows": (DataLoader, lambda *_: mapped(), {}, True),
    "rows, torchdata": (StatefulDataLoader, lambda *_: mapped(), {}, True),
    "stream": (DataLoader, lambda *_: streamed(), {}, False),
    "stream, torchdata": (StatefulDataLoader, lambda *_: streamed(), {}, False),
    "stream of shuffled shards": (DataLoader, lambda *_: shuffled_shards(), {}, False),
    "own share": (DataLoader, split, {"shard_iterable": False}, False),
    "own share, torchdata": (StatefulDataLoader, split, {"shard_iterable": False}, False),
}


def rest(case, workers, folder):
    fabric = launched()
    kind, make, keywords, shuffle = RESUMED[case]
    order = {"shuffle": True} if shuffle else {}

    def loader():
        data = make(fabric.global_rank, fabric.world_size)
        return fabric.setup_dataloaders(kind(data, 2, num_workers=workers, **order), **keywords)

    with torch.no_grad():
        first = loader()
        begun = iter(first)
        for _ in range(5):
            next(begun)
        fabric.save(f"{folder}/a.pt", {"loader": first})
        expected = [batch["x"].tolist() for batch in begun]
        second = loader()
        fabric.load(f"{folder}/a.pt", {"loader": second})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = read(second)
    assert len(got) >= 5
    return got == expected, [str(w.message) for w in caught if "read again" in str(w.message)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", RESUMED)
def test_the_rest_of_an_epoch(ranks, tmp_path, case, workers):
    """Streams go on by their own `state_dict`, without reading what was before."""
    assert ranks.run(rest, case, workers, str(tmp_path), world_size=2) == [(True, [])] * 2


def without_length():
    fabric = launched()
    loader = fabric.setup_dataloaders(DataLoader(streamed(), 4))
    with pytest.raises(TypeError) as caught:
        len(loader)
    return str(caught.value)


def test_a_stream_without_a_length_says_what_to_write(ranks):
    for said in ranks.run(without_length, world_size=2):
        assert said == (
            "IterableDataset has no length, so its loader has none. Write `for step, batch in "
            "enumerate(loader):`, with a fixed number of steps for schedules and progress bars "
            "(loader.batches_done counts this epoch's), or add __len__ to the dataset."
        )


class Encoded(torch.utils.data.Dataset):
    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines = tokenizer, lines

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return [len(each.ids) for each in self.tokenizer.encode_batch(self.lines[i : i + 3])]


def tokenized(workers):
    fabric = launched()
    lines = [f"line {i} of {i * i} lines" for i in range(16)]
    tokenizer = Tokenizer(BPE(unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(lines, BpeTrainer(special_tokens=["?"], vocab_size=40, show_progress=False))
    tokenizer.encode_batch(lines)  # its threads are there now
    loader = fabric.setup_dataloaders(
        DataLoader(Encoded(tokenizer, lines), 4, num_workers=workers, collate_fn=list)
    )
    return list(loader)


def test_a_tokenizer_that_was_used_before_workers_are_forked_goes_on(ranks):
    """tokenizers itself leaves its threads in forked workers, and says so on stderr: nothing hangs."""
    assert ranks.run(tokenized, 2, world_size=2) == ranks.run(tokenized, 0, world_size=2)
