"""Texts of ranks in messages."""

import pytest

from fabric.core.messages import by_value, name_ranks, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "3"), ([1, 0], "0-1"), ([2, 0, 1, 1], "0-2"), ([0, 2, 4, 5], "0, 2, 4-5"), ([], "")],
)
def test_ranks_in_spans(ranks, text):
    assert ranks_text(ranks) == text


def test_many_spans_are_counted():
    assert ranks_text(range(0, 200, 2)).endswith("124, 126, ... (100)")
    assert ranks_text(range(1_000)) == "0-999"


def test_names_of_ranks():
    assert (name_ranks([3]), name_ranks({0, 1, 3})) == ("rank 3", "ranks 0-1, 3")


def test_the_ranks_of_each_value():
    assert by_value({0: 0.1, 1: 0.05, 2: 0.1, 3: 0.1}) == "0, 2-3: 0.1 | 1: 0.05"
