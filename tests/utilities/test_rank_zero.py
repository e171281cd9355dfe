import logging
import pickle
import warnings

import pytest

from fabric.utilities.rank_zero import (
    LightningDeprecationWarning,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

VARIABLES = ["RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK"]


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_zero_only, "_rank", None)


@rank_zero_only
def double(x):
    """Twice."""
    return 2 * x


def test_runs_on_rank_zero_only():
    assert double(2) == 4
    rank_zero_only.rank = 1
    assert double(2) is None
    assert rank_zero_only(len, default=-1)([1]) == -1
    rank_zero_only.rank = 0
    assert double(2) == 4


def test_keeps_name_and_docstring():
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"RANK": "0", "LOCAL_RANK": "2"}, 0),
        ({"SLURM_PROCID": "5"}, 5),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, 1),
        ({"SLURM_PROCID": "4", "LOCAL_RANK": "0"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"RANK": "not a number"}, 0),
    ],
)
def test_rank_comes_from_the_environment_until_it_is_set(monkeypatch, environment, rank):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank_zero_only.rank == rank
    rank_zero_only.rank = 7
    assert rank_zero_only.rank == 7
    rank_zero_only.rank = None
    assert rank_zero_only.rank == rank


def test_pickled_decorator_is_the_one_of_the_process():
    assert pickle.loads(pickle.dumps(rank_zero_only)) is rank_zero_only


@pytest.mark.parametrize(
    ("warn", "category"),
    [(rank_zero_warn, UserWarning), (rank_zero_deprecation, LightningDeprecationWarning)],
)
def test_warnings_point_to_the_caller_and_are_silent_elsewhere(warn, category):
    with pytest.warns(category, match="watch out") as caught:
        warn("watch out")
    assert caught[0].filename == __file__

    def helper():
        warn("watch out", stacklevel=5 if warn is rank_zero_warn else 6)

    with pytest.warns(category) as caught:
        helper()
    assert caught[0].lineno == helper.__code__.co_firstlineno + 4

    rank_zero_only.rank = 1
    with warnings.catch_warnings(record=True) as silent:
        warnings.simplefilter("always")
        warn("watch out")
    assert silent == []


def test_warn_takes_a_category():
    with pytest.warns(FutureWarning, match="soon"):
        rank_zero_warn("soon", category=FutureWarning)


@pytest.mark.parametrize(("log", "level"), [(rank_zero_info, "INFO"), (rank_zero_debug, "DEBUG")])
def test_logs_once_with_the_callers_file(caplog, log, level):
    caplog.set_level(logging.DEBUG)
    log("at %d", 3)
    rank_zero_only.rank = 1
    log("at %d", 4)
    assert [(r.levelname, r.getMessage(), r.pathname) for r in caplog.records] == [(level, "at 3", __file__)]
