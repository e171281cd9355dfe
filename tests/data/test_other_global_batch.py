"""A position that is loaded with another global batch than it was saved with."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric


def loader_of(batch):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    return fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(48.0)), batch_size=batch))


def saved(batch):
    loader = loader_of(batch)
    next(iter(loader))
    return loader.state_dict()


def resumed(state, batch):
    loader = loader_of(batch)
    loader.load_state_dict(state)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rest = [int(x) for (batch,) in loader for x in batch]
    return [str(warning.message) for warning in found], rest


@pytest.mark.parametrize(
    ("world", "batch", "words"), [(2, 12, ""), (3, 8, ""), (2, 8, "16 now"), (3, 4, "12 now")]
)
def test_one_warning_names_both_batches(ranks, world, batch, words):
    state = ranks.run(saved, 12, world_size=2)[0]
    results = ranks.run(resumed, state, batch, world_size=world)
    texts = results[0][0]
    assert [words in text and "saved with 24 samples in a batch of all ranks" in text for text in texts] == (
        [True] if words else []
    )
    assert all(not other for other, _ in results[1:])
    assert sorted([x for _, rest in results for x in rest]) == list(range(24, 48))


def test_a_state_without_the_batch_is_loaded(ranks):
    state = {k: v for k, v in ranks.run(saved, 12, world_size=2)[0].items() if k != "batch"}
    assert ranks.run(resumed, state, 8, world_size=2)[0][0] == []
