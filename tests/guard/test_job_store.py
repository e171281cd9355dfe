"""`JobStore` on a real TCPStore in another process, which ends or stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from fabric.core.errors import RankError
from fabric.guard import job_store
from fabric.guard.job_store import JobStore, StoreTimeout

HOST = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def hosted():
    """The process that hosts a store, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def host():
    with hosted() as started:
        yield started


def connect(port, address="127.0.0.1", part="part"):
    store = dist.TCPStore(address, port, None, False, timedelta(seconds=30))
    return JobStore(part, dist.PrefixStore("outer", store))


def test_parts_and_clones_see_what_the_store_has(host):
    store = connect(host[1])
    other, elsewhere = store.clone(), connect(host[1], part="another part")
    assert not other.check(["a"])
    store.set("a", "1")
    assert store.get("a") == b"1"  # its answer: the host has taken in what came before on this connection
    assert other.check(["a"])
    assert other.get("a") == b"1"
    assert not elsewhere.check(["a"])
    assert (store.add("n", 2), other.add("n", 0)) == (2, 2)
    assert other.compare_set("b", "", "mine") == b"mine"
    assert store.compare_set("b", "", "yours") == b"mine"
    other.delete_key("a")
    assert not store.check(["a"])
    assert store.check(["b"])


def test_a_host_that_does_not_answer_is_given_up(host, monkeypatch):
    process, port = host
    store = connect(port, part="silent")
    store.set("a", "1")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # all threads stand still; before, one may still answer
    with monkeypatch.context() as patch:
        patch.setattr(job_store, "_ANSWER_S", 0.2)
        for _ in range(2):  # the second does not even ask: the first still holds the connection
            with pytest.raises(
                StoreTimeout, match=r"lost rank zero's store at 127\.0\.0\.1:\d+: no answer for 0.2 s"
            ):
                store.get("a")
    os.kill(process.pid, signal.SIGCONT)
    store._unanswered.exception(timeout=60)
    assert store.get("a") == b"1"
    assert issubclass(StoreTimeout, RankError)


def test_a_store_without_a_host_is_always_there(tmp_path):
    store = JobStore("part", dist.FileStore(str(tmp_path / "store"), 1))
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_many_keys_are_two_questions(host, monkeypatch):
    store = connect(host[1], part="many")
    for key in ("a", "b"):
        store.set(key, key * 2)
    asked = []
    call = JobStore._call
    monkeypatch.setattr(JobStore, "_call", lambda self, *args: (asked.append(args[0]), call(self, *args))[1])
    assert store.get_all(["b", "a"]) == {"b": b"bb", "a": b"aa"}
    assert asked == ["check", "multi_get"]
    assert store.get_all(["a", "c"]) == {"a": b"aa"}
    assert list(store.get_all([])) == []


def test_after_the_hosts_end_calls_raise_without_a_word(capfd):
    with hosted() as (process, port):
        store = connect(port)
        clone = store.clone()
        process.kill()
        process.wait()
        store.await_host_exit()
    for call in (lambda: store.check(["a"]), lambda: clone.add("n", 1), lambda: store.set("a", "1")):
        with pytest.raises(
            RuntimeError, match="lost rank zero's store: the process that hosted it has ended"
        ):
            call()
    assert capfd.readouterr().err == ""
