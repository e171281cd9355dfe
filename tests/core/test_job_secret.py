"""The secret of a job: where ranks have it from, and what it signs."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from fabric.core import job_secret
from fabric.core.job_secret import JobSecret, new_secret, pop_inherited_secret, secret_of


@pytest.fixture(autouse=True)
def nothing_inherited(monkeypatch):
    monkeypatch.setattr(job_secret, "_inherited", None)
    monkeypatch.delenv("FABRIC_JOB_SECRET", raising=False)


def test_each_job_has_a_new_one_unless_a_scheduler_gives_it():
    assert len(bytes.fromhex(new_secret({}))) == 32
    assert new_secret({}) != new_secret({})
    assert new_secret({"FABRIC_JOB_SECRET": "of slurm"}) == "of slurm"
    assert len(new_secret({"FABRIC_JOB_SECRET": ""})) == 64


def test_a_rank_takes_it_out_of_the_environment_that_its_children_inherit(monkeypatch):
    monkeypatch.setenv("FABRIC_JOB_SECRET", "inherited")
    right = JobSecret(b"inherited").sign("k", "text")
    assert pop_inherited_secret().sign("k", "text") == right
    assert "FABRIC_JOB_SECRET" not in os.environ
    assert pop_inherited_secret().sign("k", "text") == right, "also at the next question"
    assert secret_of(dist.HashStore()).sign("k", "text") == right


def test_an_inherited_one_is_never_in_the_store(monkeypatch):
    monkeypatch.setenv("FABRIC_JOB_SECRET", "inherited")
    store = dist.HashStore()
    before = store.num_keys()
    secret_of(store)
    assert store.num_keys() == before


def test_without_one_all_ranks_agree_on_the_first():
    store = dist.HashStore()
    first, second = secret_of(store), secret_of(store)
    assert first.sign("k", "text") == second.sign("k", "text")
    assert secret_of(dist.HashStore()).sign("k", "text") != first.sign("k", "text")


@pytest.mark.parametrize(
    "change",
    [
        lambda key, data: (key, data.replace(b"text", b"test")),
        lambda key, data: ("other", data),
        lambda key, data: (key, b"0" + data[1:]),
        lambda key, data: (key, data[:20]),
        lambda key, data: (key, b""),
        lambda key, data: (key, b"\xff \xff"),
    ],
)
def test_a_text_that_was_changed_or_moved_is_not_verified(change):
    secret = JobSecret(b"s")
    data = secret.sign("key", "a text ä").encode()
    assert secret.verified("key", data) == "a text ä"
    assert JobSecret(b"other").verified("key", data) is None
    key, data = change("key", data)
    assert secret.verified(key, data) is None


def test_the_borders_of_parts_count():
    assert JobSecret(b"s").proof(b"ab", b"c") != JobSecret(b"s").proof(b"a", b"bc")
