"""Ranks as threads: what a star brings to each, and what it says once one of them has gone."""

from __future__ import annotations

import os
import random
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from fabric.guard import control_connections as module
from fabric.guard.control_connections import ControlConnections, Listener, connect

SECONDS = 20.0


@contextmanager
def stars(size: int):
    """One for each rank of a group, and threads to run them in. The ranks are called 10, 11, ..."""
    ranks = range(10, 10 + size)
    with ThreadPoolExecutor(size) as threads:
        with Listener(size - 1) as listener:
            lines = [threads.submit(connect, at, "localhost", *listener.told) for at in range(1, size)]
            made = [ControlConnections(listener.accept(), ranks, 0)]
        made += [ControlConnections(line.result(SECONDS), ranks, at) for at, line in enumerate(lines, 1)]
        yield made, threads
        for one in made:
            one.close("the test is over")


def take_turn(one: ControlConnections, own: bytes) -> list[bytes]:
    turn = one.start(own)
    assert turn.is_done(SECONDS)
    return [bytes(turn.rows[at : at + turn.size]) for at in range(0, len(turn.rows), turn.size)]


def all_take(
    made: list[ControlConnections], threads: ThreadPoolExecutor, owns: list[bytes]
) -> list[list[bytes]]:
    return list(threads.map(take_turn, made, owns, timeout=SECONDS))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_get_what_each_has_sent(size):
    draw = random.Random(size)
    with stars(size) as (made, threads):
        for _ in range(30):
            owns = [draw.randbytes(draw.choice([1, 24, 8192, 300_000])) for _ in made]
            longest = max(map(len, owns))
            expected = [own.ljust(longest, b"\0") for own in owns]
            assert all_take(made, threads, owns) == [expected] * size


def test_equal_messages_come_back_as_one():
    with stars(3) as (made, threads):
        assert all_take(made, threads, [b"same"] * 3) == [[b"same"]] * 3
        assert all_take(made, threads, [b"same", b"same", b"samf"])[1] == [b"same", b"same", b"samf"]


def test_more_than_connections_hold_at_a_time():
    owns = [bytes([at]) * 8_000_000 for at in range(3)]
    with stars(3) as (made, threads):
        assert all_take(made, threads, owns) == [owns] * 3


@pytest.mark.parametrize("first_to_leave", [0, 1, 2])
def test_turns_that_were_left_are_done_before_the_next_one(first_to_leave):
    with stars(3) as (made, threads):
        left = made[first_to_leave].start(bytes([first_to_leave]))
        assert not left.is_done(0.01), "the others have not come"
        owns = [[bytes([at]), bytes([10 + at])] for at in range(3)]
        todo = [own[1:] if at == first_to_leave else own for at, own in enumerate(owns)]
        run = lambda one, turns: [take_turn(one, own) for own in turns]  # noqa: E731
        got = list(threads.map(run, made, todo, timeout=SECONDS))
        assert [turns[-1] for turns in got] == [[b"\n", b"\x0b", b"\x0c"]] * 3
        assert (left.size, left.rows) == (1, bytearray([0, 1, 2]))


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_goes_is_named_to_all_that_wait_and_that_come_later(gone, sent):
    with stars(3) as (made, threads):
        all_take(made, threads, [b"a", b"b", b"c"])
        if sent:
            made[gone].start(b"d")
        made[gone].drop("the process ends")
        others = [one for at, one in enumerate(made) if at != gone]
        found = [threads.submit(take_turn, one, b"d").exception for one in others]
        first = {str(exception(SECONDS)) for exception in found}  # it may still end, if all have sent
        assert first == {f"Connection closed by rank {10 + gone}"} or (sent and first == {"None"})
        found = [threads.submit(take_turn, one, b"d").exception for one in others]
        assert {str(exception(SECONDS)) for exception in found} == {f"Connection closed by rank {10 + gone}"}
        assert {one.lost for one in others} == {10 + gone}


@pytest.mark.parametrize("tired", [0, 1, 2])
def test_a_rank_that_gives_up_is_not_taken_for_lost(tired):
    with stars(3) as (made, threads):
        all_take(made, threads, [b"a", b"b", b"c"])
        made[tired].close("too long")
        others = [one for at, one in enumerate(made) if at != tired]
        found = [threads.submit(take_turn, one, b"d").exception for one in others]
        assert {str(exception(SECONDS)) for exception in found} == {"not all ranks are here"}
        assert {one.lost for one in others} == {None}


def test_that_a_rank_has_gone_is_seen_behind_the_answer_to_the_turn_before():
    with stars(3) as (made, _):
        turns = [one.start(b"x") for one in made]
        assert turns[0].is_done(SECONDS)
        made[2].drop("the process ends")
        with pytest.raises(ConnectionError):
            made[0].start(b"y").is_done(SECONDS)
        assert turns[1].is_done(SECONDS)
        with pytest.raises(ConnectionError, match="Connection closed by rank 12"):
            made[1].start(b"y").is_done(SECONDS)


def test_an_interrupt_in_the_middle_of_a_message_is_not_taken_for_one_between_them():
    with stars(2) as (made, _):
        turn = made[1].start(b"x")
        made[0].start(b"x")
        with (
            mock.patch.object(module._Connection, "take", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            made[0].start(b"y").is_done(SECONDS)
        with pytest.raises(ConnectionError, match="an interrupt came in the middle of a message"):
            made[0].start(b"z").is_done(SECONDS)
        assert not turn.is_done(0.01)


def test_strangers_are_not_let_in():
    with mock.patch.object(module, "_HELLO_S", 0.2), Listener(1) as listener:
        port, word = listener.told
        at = ("localhost", int(port))
        with socket.create_connection(at) as silent, socket.create_connection(at) as chatty:
            chatty.sendall(b"GET / HTTP/1.1\r\n\r\n")
            socket.create_connection(at).close()
            line = connect(1, "localhost", port, word)
            (found,) = listener.accept()
            assert found.place == 1
            assert found.send(b"hello")
            while (message := line[0].take()) is None:
                pass
            assert message == b"hello"
            assert silent.recv(1) == b"", "closed"
            with suppress(ConnectionResetError):  # since what it said was not read to its end
                assert chatty.recv(1) == b""
            for one in (found, *line):
                one.socket.close()


def test_who_does_not_come_is_waited_for_only_so_long():
    with mock.patch.object(module, "_CONNECT_S", 0.1), Listener(1) as listener, pytest.raises(TimeoutError):
        listener.accept()


def test_the_copies_of_a_forked_process_do_not_keep_connections_open():
    with stars(2) as (made, _):
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
                made[0].start(b"x").is_done(SECONDS)
        finally:
            here.send(b"x")
            os.waitpid(child, 0)
            here.close()
            there.close()
