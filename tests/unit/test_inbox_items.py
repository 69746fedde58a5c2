"""Items of a worker's inbox, packed by Redis as its scripts do: batches of any bytes and any length."""

from __future__ import annotations

import pytest

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import client
from millstream.services.wire.batch import read_item
from tests.kit.redis_server import redis_server

PACK = "return cmsgpack.pack({ARGV[1], ARGV[2], ARGV[3], ARGV[4]})"
PACK_TRIED = "return cmsgpack.pack({ARGV[1], ARGV[2], ARGV[3], ARGV[4], {ARGV[5], ARGV[6]}})"
LENGTHS = [0, 1, 31, 32, 255, 256, 65_535, 65_536, 1 << 20]


def test_what_redis_packs_is_read(tmp_path):
    with redis_server(choose_binary(), tmp_path) as address, client(address) as redis:
        for length in LENGTHS:
            batch = (bytes(range(256)) * (length // 256 + 1))[::-1][:length]
            item = redis.eval(PACK, 0, "lane", "1-0", batch, 3)
            assert read_item(item) == ("lane", b"1-0", batch, 3, ())
            item = redis.eval(PACK_TRIED, 0, "läne" * 20, "1-0", batch, 1, "cpu-0", "cpu-1")
            assert read_item(item) == ("läne" * 20, b"1-0", batch, 1, ("cpu-0", "cpu-1"))


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"\x90",
        b"\x94\xa1a\xa1b\xa1c\xa1d",
        b"\x94\xa1a\xa1b\x01\xa11",
        b"\x94\xa1a\xa1b\xdb\xff\xff\xff\xff",
        b"\xc1",
    ],
)
def test_anything_else_is_refused(item):
    with pytest.raises(ValueError):
        read_item(item)
