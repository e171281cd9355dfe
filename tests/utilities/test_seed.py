import io
import itertools
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fabric.core.errors import ConfigurationError
from fabric.utilities.rank_zero import rank_zero_only
from fabric.utilities.seed import (
    collect_rng_states,
    derive_seed,
    isolate_rng,
    pl_worker_init_function,
    reset_seed,
    seed_everything,
    seed_rank,
    set_rng_states,
)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    for name in ("FABRIC_GLOBAL_SEED", "FABRIC_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that it is taken away again after the test
        monkeypatch.delenv(name)
    with isolate_rng():
        yield


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_seeds_every_library_as_each_does_itself():
    assert seed_everything(42) == 42
    ours = draw()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    assert ours == draw()


def test_children_and_reset_find_the_seed_in_the_environment():
    seed_everything(7, workers=True)
    assert (os.environ["FABRIC_GLOBAL_SEED"], os.environ["FABRIC_SEED_WORKERS"]) == ("7", "1")
    first = draw()
    reset_seed()
    assert draw() == first
    assert os.environ["FABRIC_SEED_WORKERS"] == "1"
    assert seed_everything() == 7


def test_reset_without_a_seed_does_nothing():
    before = collect_rng_states()
    reset_seed()
    assert torch.equal(collect_rng_states()["torch"], before["torch"])
    assert "FABRIC_GLOBAL_SEED" not in os.environ


def test_no_seed_anywhere_is_zero_and_says_so_only_in_the_log(caplog):
    caplog.set_level("INFO")
    assert seed_everything() == 0
    assert caplog.messages == ["Seed set to 0"]
    seed_everything(1, verbose=False)
    assert caplog.messages == ["Seed set to 0"]


@pytest.mark.parametrize("seed", [0, 2**32 - 1, "12", np.int64(3), 4.0, torch.tensor(5)])
def test_valid_seeds(seed):
    assert seed_everything(seed) == int(seed)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "abc", "", [1], float("nan"), float("inf")])
def test_invalid_seeds_are_refused_before_anything_is_seeded(seed):
    before = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=r"seed=.*integer from 0 to 4294967295"):
        seed_everything(seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert "FABRIC_GLOBAL_SEED" not in os.environ


def test_invalid_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("FABRIC_GLOBAL_SEED", "lots")
    with pytest.raises(ConfigurationError, match="FABRIC_GLOBAL_SEED='lots'"):
        seed_everything()


def test_derived_seeds_are_fixed_and_distinct():
    # Values written down once: checkpoints and logs of other machines and versions depend on them.
    assert derive_seed(0) == 8493733112532773764
    assert derive_seed(42, 1, 2) == 2381500208161886863
    seeds = {derive_seed(*numbers) for numbers in itertools.product(range(-5, 15), range(10), range(10))}
    assert len(seeds) == 20 * 10 * 10
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(1, 11) != derive_seed(11, 1) != derive_seed(111)
    assert derive_seed(np.int64(3), True) == derive_seed(3, 1)


def test_seed_rank_gives_each_rank_its_own_repeatable_streams():
    os.environ["FABRIC_GLOBAL_SEED"] = "3"
    draws = []
    for rank in (0, 1, 0):
        seed_rank(3, rank)
        draws.append(draw())
    assert draws[0] == draws[2]
    assert len({value for pair in draws[:2] for value in pair}) == 6
    assert os.environ["FABRIC_GLOBAL_SEED"] == "3"


class Draws(Dataset):
    """Each item is what the three libraries draw in the worker."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(
            [random.getrandbits(48), np.random.randint(2**48), torch.randint(2**48, (1,)).item()],
            dtype=torch.int64,
        )


def test_worker_draws_are_unique_over_rank_worker_epoch_and_library():
    seed_everything(1)
    values = []
    for rank in (0, 1):
        torch.manual_seed(1)  # ranks share their global seed
        loader = DataLoader(
            Draws(), num_workers=2, worker_init_fn=partial(pl_worker_init_function, rank=rank), timeout=60
        )
        for _epoch in range(2):
            values += [int(value) for batch in loader for value in batch.flatten()]
    assert len(values) == 2 * 2 * 4 * 3
    assert len(set(values)) == len(values)


def test_worker_init_takes_the_rank_of_the_process(monkeypatch):
    def streams(rank):
        torch.manual_seed(5)
        pl_worker_init_function(0, rank)
        return draw()

    expected = streams(3)
    monkeypatch.setattr(rank_zero_only, "_rank", 3)
    assert streams(None) == expected
    assert streams(0) != expected  # rank 0 is a rank, not "unknown"


def test_states_survive_a_safe_save_and_continue_the_draws():
    seed_everything(3)
    np.random.randn()  # leaves a cached second normal in numpy's state
    file = io.BytesIO()
    torch.save(collect_rng_states(), file)
    expected = np.random.randn(), *draw()
    seed_everything(99)
    file.seek(0)
    set_rng_states(torch.load(file, weights_only=True))
    assert (np.random.randn(), *draw()) == expected


def test_isolated_block_leaves_no_trace_even_if_it_raises():
    seed_everything(11)
    expected = draw(), draw()
    seed_everything(11)
    first = draw()

    def disturb():
        with isolate_rng():
            seed_everything(12)
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        disturb()
    assert (first, draw()) == expected


@pytest.mark.gpu
def test_cuda_generators_are_seeded_saved_and_isolated():
    seed_everything(5)
    first = torch.rand(3, device="cuda")
    states = collect_rng_states()
    second = torch.rand(3, device="cuda")
    with isolate_rng():
        torch.rand(3, device="cuda")
    third = torch.rand(3, device="cuda")
    set_rng_states(states)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    assert torch.equal(torch.rand(3, device="cuda"), third)
    seed_everything(5)
    assert torch.equal(torch.rand(3, device="cuda"), first)
