"""A store that outlives its ranks, as torchrun's does: those that start anew see nothing of earlier ones."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from fabric.core.errors import LaunchError
from fabric.plugins.environments.rendezvous import await_ranks
from fabric.plugins.environments.torchelastic import attempt_store

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=2)


@pytest.fixture
def connect():
    """Gives a connection to a store that no rank hosts."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, timeout=LONG)


def arrive(store, rank, world_size):
    part = attempt_store(store, rank, world_size, LONG)
    await_ranks(part, rank, world_size, LONG)
    return part


def meet(connect, ranks=(0, 1, 2)):
    """The ranks arrive, one after the other as far as they can; each one's part of the store."""
    with ThreadPoolExecutor(3) as pool:
        futures = {rank: pool.submit(arrive, connect(), rank, 3) for rank in ranks}
        return [futures[rank].result(60) for rank in sorted(ranks)]


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_attempt_has_a_part_of_its_own(connect, ranks):
    first = meet(connect)
    for rank, part in enumerate(first):
        part.set("who", "first")
        part.set(f"{rank}", "first")
    second = meet(connect, ranks)
    assert not any(part.check(["who"]) or part.check(["0"]) for part in second)
    second[0].set("who", "second")
    assert [part.get("who") for part in second] == [b"second"] * 3
    assert [part.get("who") for part in first] == [b"first"] * 3


def test_ranks_that_died_while_they_met_do_not_count(connect):
    for rank in (1, 2):  # without a rank zero they get nowhere
        with pytest.raises(LaunchError, match=rf"Rank {rank} found no rank zero within 2 s\. Look at"):
            attempt_store(connect(), rank, 3, SHORT)
    parts = meet(connect)
    parts[0].set("key", "value")
    assert [part.get("key") for part in parts] == [b"value"] * 3


def test_rank_zero_names_those_that_do_not_come(connect):
    store = connect()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(attempt_store, connect(), 2, 3, LONG)
        with pytest.raises(LaunchError, match=r"1 of 3 ranks arrived within 2 s; missing: ranks 1-2\."):
            attempt_store(store, 0, 3, SHORT)  # rank 2 has got its part, and does not go on
        there.result(60)


def test_a_new_attempt_leaves_no_words_behind(connect):
    store = connect()
    meet(connect)
    keys = store.num_keys()
    meet(connect)
    assert store.num_keys() == 2 * keys
    assert not store.check(["fabric/hello"])
