"""Ranks as threads: what a star brings to each, and what it says once one of them has gone."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
from connected_ranks import KEY, SECONDS, connected

from fabric.guard import control_connections as module
from fabric.guard import handshake
from fabric.guard.control_connections import ControlConnections, Listener, connect


def take_turn(one: ControlConnections, own: bytes) -> list[bytes]:
    turn = one.start(own)
    assert turn.wait(SECONDS)
    return [bytes(turn.rows[at : at + turn.row_bytes]) for at in range(0, len(turn.rows), turn.row_bytes)]


def all_take(
    made: list[ControlConnections], threads: ThreadPoolExecutor, owns: list[bytes]
) -> list[list[bytes]]:
    return list(threads.map(take_turn, made, owns, timeout=SECONDS))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_get_what_each_has_sent(size):
    draw = random.Random(size)
    with connected(size) as (made, threads):
        for _ in range(30):
            owns = [draw.randbytes(draw.choice([1, 24, 8192, 300_000])) for _ in made]
            longest = max(map(len, owns))
            expected = [own.ljust(longest, b"\0") for own in owns]
            assert all_take(made, threads, owns) == [expected] * size


def test_equal_messages_come_back_as_one():
    with connected(3) as (made, threads):
        assert all_take(made, threads, [b"same"] * 3) == [[b"same"]] * 3
        assert all_take(made, threads, [b"same", b"same", b"samf"])[1] == [b"same", b"same", b"samf"]


def test_more_than_connections_hold_at_a_time():
    owns = [bytes([at]) * 8_000_000 for at in range(3)]
    with connected(3) as (made, threads):
        assert all_take(made, threads, owns) == [owns] * 3


def test_that_a_rank_has_gone_is_seen_behind_the_answer_to_the_turn_before():
    with connected(3) as (made, _):
        turns = [one.start(b"x") for one in made]
        assert turns[0].wait(SECONDS)
        made[2].drop("the process ends")
        with pytest.raises(ConnectionError):
            made[0].start(b"y").wait(SECONDS)
        assert turns[1].wait(SECONDS)
        with pytest.raises(ConnectionError, match="Connection closed by rank 12"):
            made[1].start(b"y").wait(SECONDS)


def test_an_interrupt_in_the_middle_of_a_message_is_not_taken_for_one_between_them():
    with connected(2) as (made, _):
        turn = made[1].start(b"x")
        made[0].start(b"x")
        with (
            mock.patch.object(module._Connection, "receive", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            made[0].start(b"y").wait(SECONDS)
        with pytest.raises(ConnectionError, match="a message was cut off by a KeyboardInterrupt"):
            made[0].start(b"z").wait(SECONDS)
        assert not turn.wait(0.01)


@contextmanager
def strangers(port: int, count: int):
    made = [socket.create_connection(("localhost", port)) for _ in range(count)]
    yield made
    for one in made:
        one.close()


def test_strangers_are_not_let_in():
    with (
        ThreadPoolExecutor(1) as threads,
        Listener([1]) as listener,
        strangers(listener.port, 4) as (silent, chatty, short, gone),
    ):
        chatty.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(10_000))
        short.sendall(b"x")
        gone.close()
        rank = threads.submit(connect, 1, 0, "localhost", listener.port, KEY)
        (found,) = listener.accept(KEY)
        line = rank.result(SECONDS)
        assert found.group_rank == 1
        assert found.send(5, b"hello")
        while (message := line.receive()) is None:
            pass
        assert message == (5, b"hello")
        for one in (silent, short):
            assert len(one.recv(1000)) == 32, "a nonce, and no more"
            assert one.recv(1) == b"", "closed"
        with suppress(ConnectionResetError):  # since what it sent was not read to its end
            assert len(chatty.recv(1000)) <= 32
        for one in (found, line):
            one.socket.close()


@pytest.mark.parametrize("most", [4, handshake.MAX_PENDING])
def test_silent_connections_do_not_keep_ranks_out(monkeypatch, most):
    """A thousand of them came before the ranks, and stay open while the ranks connect."""
    monkeypatch.setattr(handshake, "MAX_PENDING", most)
    with (
        ThreadPoolExecutor(2) as threads,
        Listener([1, 2]) as listener,
        strangers(listener.port, 400),
    ):
        ranks = [threads.submit(connect, place, 0, "localhost", listener.port, KEY) for place in (2, 1)]
        with strangers(listener.port, 50):
            found = listener.accept(KEY)
        assert [one.group_rank for one in found] == [1, 2]
        for one in (*found, *[rank.result(SECONDS) for rank in ranks]):
            one.socket.close()


def test_without_descriptors_strangers_make_room_for_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(1) as threads, Listener([1]) as listener, strangers(listener.port, 100):
        rank = socket.create_connection(("localhost", listener.port))
        proved = threads.submit(handshake._prove, rank, 1, KEY, end)
        highest = max([int(one.name) for one in Path("/proc/self/fd").iterdir()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        try:
            (found,) = listener.accept(KEY)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        proved.result(SECONDS)
        for one in (found.socket, rank):
            one.close()


@pytest.mark.parametrize("place", [7, 0, -1])
def test_a_place_that_is_not_in_the_group_is_refused_and_the_rank_connects(monkeypatch, place):
    with ThreadPoolExecutor(2) as threads, Listener([1]) as listener:
        foreign = threads.submit(connect, place, 0, "localhost", listener.port, KEY)
        late = threads.submit(lambda: listener.accept(KEY))
        assert not foreign.done() or foreign.exception(0)
        rank = connect(1, 0, "localhost", listener.port, KEY)
        (found,) = late.result(SECONDS)
        listener._socket.close()
        assert foreign.exception(SECONDS)
        assert found.group_rank == 1
        for one in (found, rank):
            one.socket.close()


def test_a_second_connection_for_a_place_is_refused():
    with ThreadPoolExecutor(2) as threads, Listener([1, 2]) as listener:
        late = threads.submit(lambda: listener.accept(KEY))
        first = connect(1, 0, "localhost", listener.port, KEY)
        second = threads.submit(connect, 1, 0, "localhost", listener.port, KEY)
        last = connect(2, 0, "localhost", listener.port, KEY)
        found = late.result(SECONDS)
        listener._socket.close()
        assert second.exception(SECONDS)
        assert found[0].send(1, b"x")
        while (message := first.receive()) is None:
            pass
        assert message == (1, b"x")
        for one in (*found, first, last):
            one.socket.close()


@pytest.mark.parametrize("key", [b"another key", b""])
def test_without_the_key_nobody_connects(monkeypatch, key):
    monkeypatch.setattr(module, "_CONNECT_S", 0.3)
    with ThreadPoolExecutor(1) as threads, Listener([1]) as listener:
        stranger = threads.submit(connect, 1, 0, "localhost", listener.port, key)
        with pytest.raises(TimeoutError, match="timed out"):
            listener.accept(KEY)
        listener._socket.close()
        assert isinstance(stranger.exception(SECONDS), OSError)


def test_a_rank_sends_nothing_to_a_first_rank_without_the_key():
    with ThreadPoolExecutor(1) as threads, socket.create_server(("localhost", 0)) as false:
        rank = threads.submit(connect, 1, 0, "localhost", false.getsockname()[1], KEY)
        made, _ = false.accept()
        with made:
            made.sendall(bytes(32))
            answer = made.recv(1000)
            made.sendall(answer[-32:])  # the proof is not good for the other direction
            assert made.recv(1000) == b""
        error = rank.exception(SECONDS)
        assert "the process that listens there does not have the secret of the job" in str(error)


def test_who_does_not_come_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr(module, "_CONNECT_S", 0.1)
    with Listener([1]) as listener, pytest.raises(TimeoutError):
        listener.accept(KEY)


def test_the_copies_of_a_forked_process_do_not_keep_connections_open():
    with connected(2) as (made, _):
        here, there = socket.socketpair()
        with warnings.catch_warnings():  # Python 3.12 warns of the threads that this test has
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            there.recv(1)  # until the parent has seen the end
            os._exit(0)
        try:
            made[1].drop("the process ends")
            with pytest.raises(ConnectionError, match="Connection closed by rank 11"):
                made[0].start(b"x").wait(SECONDS)
        finally:
            here.send(b"x")
            os.waitpid(child, 0)
            here.close()
            there.close()
