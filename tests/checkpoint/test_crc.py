"""CRC-32 in large pieces and in threads: the values of zlib, and each changed byte is found."""

from __future__ import annotations

import random
import zlib

import pytest

from fabric.checkpoint import crc as crcs
from fabric.checkpoint.crc import Crc32, combine_crcs, crc_of_range

DATA = random.Random(0).randbytes(12 << 20)
SIZES = (0, 1, 7, 8, 1000, 1 << 20, 2_559_999, 3 << 20)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    return tmp_path / "a"


@pytest.mark.parametrize("seed", range(15))
def test_pieces_of_any_size_have_the_value_of_zlib(seed):
    rng = random.Random(seed)
    size = rng.choice([0, 1, 4 << 20, (4 << 20) + 1, 6_000_003, rng.randrange(len(DATA)), len(DATA)])
    made, at = Crc32(), 0
    while at < size:
        piece = DATA[at : min(size, at + rng.choice(SIZES))]
        made.update(piece)
        at += len(piece)
        if rng.random() < 0.2:
            assert made.value == zlib.crc32(DATA[:at])
    assert (made.value, made.size) == (zlib.crc32(DATA[:size]), size)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_range_of_a_file_in_any_number_of_threads(file, threads):
    for start, length in ((0, len(DATA)), (5, 123), (3, 9_000_001), (0, 0)):
        assert crc_of_range(file, start, length, threads) == zlib.crc32(DATA[start : start + length])


def test_a_file_that_is_too_short(file):
    for length in (100, len(DATA)):
        assert crc_of_range(file, len(DATA) - length + 1, length, 2) == -1


def test_each_byte_is_read_once(file, monkeypatch):
    read = []

    class Counting(Crc32):
        def read(self, file, length):
            read.append((file.tell(), length))
            return super().read(file, length)

    monkeypatch.setattr(crcs, "Crc32", Counting)
    assert crc_of_range(file, 10, len(DATA) - 10, 2) == zlib.crc32(DATA[10:])
    (first, some), (second, rest) = sorted(read)
    assert (first, second, some + rest) == (10, 10 + some, len(DATA) - 10)


def test_values_of_neighbours_join():
    for size in (0, 1, 1000, 1 << 20):
        first, second = DATA[:777], DATA[777 : 777 + size]
        assert combine_crcs(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(first + second)


def test_one_flipped_bit_has_another_value():
    rng = random.Random(1)
    whole = zlib.crc32(DATA)
    for place in [0, len(DATA) - 1, *[rng.randrange(len(DATA)) for _ in range(20)]]:
        changed = bytearray(DATA)
        changed[place] ^= 1 << rng.randrange(8)
        made = Crc32()
        made.update(changed)
        assert made.value != whole
        assert made.value == zlib.crc32(changed)
