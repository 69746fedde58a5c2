"""How series lie in a metric file: one record each, key and float64 values together. Pure.

    file   = header (64 bytes: magic) + records; mapped in pieces of CHUNK_BYTES that no record straddles
    record = size u32 | crc32(key) u32 | key bytes u16 | slots u16 | state u32 | values f64 x slots | key JSON | padding

A record counts once its head is written, which is the last thing its owner does; so an owner killed at any store leaves
either a whole record or one that `records` steps over. The key comes last: whoever reads, from front to back, while a
place goes to another series has the old checksum and the new key, and steps over it too.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from millstream.services.metrics.catalogue import Kind

MAGIC = b"MILLRAC1"
HEADER_BYTES = 64
CHUNK_BYTES = 128 * 1024
LABEL_CHARACTERS_MAX = 256

_HEAD = struct.Struct("<IIHHI")
_ALIGN = 64  # a cache line: two processes' or threads' series never share one
_FREE, _LIVE = 0, 1


@dataclass(frozen=True, slots=True)
class Key:
    """Which series: equal keys of several processes are merged."""

    kind: Kind
    name: str
    labels: tuple[str, ...]
    slots: int

    def encode(self) -> bytes:
        """The key as it stands in a record, without `slots`."""
        return json.dumps([self.kind, self.name, self.labels], separators=(",", ":")).encode()


def record_bytes(key: bytes, slots: int) -> int:
    """The size of the record of a series."""
    plain = _HEAD.size + 8 * slots + len(key)
    return -(-plain // _ALIGN) * _ALIGN


def values_offset(record: int) -> int:
    """Where the values of the record at `record` begin."""
    return record + _HEAD.size


def write_record(chunk: memoryview, record: int, key: bytes, slots: int) -> None:
    """Put a series with zero values at offset `record` of a mapped chunk. A place in use before keeps its size."""
    begin = values_offset(record)
    chunk[begin : begin + 8 * slots] = bytes(8 * slots)
    chunk[begin + 8 * slots : begin + 8 * slots + len(key)] = key
    _HEAD.pack_into(chunk, record, record_bytes(key, slots), zlib.crc32(key), len(key), slots, _LIVE)


def free_record(chunk: memoryview, record: int) -> int:
    """Take a series away; its place stays. Returns the size of the place."""
    size, crc, key_bytes, slots, _ = _HEAD.unpack_from(chunk, record)
    _HEAD.pack_into(chunk, record, size, crc, key_bytes, slots, _FREE)
    return int(size)


def records(content: memoryview) -> Iterator[tuple[Key, list[float]]]:
    """Yield the live series of a file. Torn or foreign bytes are stepped over, never raised on."""
    if has_series(content):
        keys: dict[bytes, Key] = {}
        for start in range(0, len(content), CHUNK_BYTES):
            yield from parsed_chunk(content[start : start + CHUNK_BYTES], start == 0, keys)


def has_series(content: memoryview | bytes) -> bool:
    """Whether a file is a metric file of this format."""
    return bytes(content[: len(MAGIC)]) == MAGIC


def parsed_chunk(chunk: memoryview, first: bool, keys: dict[bytes, Key]) -> Iterator[tuple[Key, list[float]]]:
    """Yield the live series of one piece of a file. `first`: it begins with the header. `keys`: known ones by bytes."""
    at = HEADER_BYTES if first else 0
    while at + _HEAD.size <= len(chunk):
        size, crc, key_bytes, slots, state = _HEAD.unpack_from(chunk, at)
        if size < _ALIGN or size % _ALIGN or at + size > len(chunk):
            return  # the end of what was written, or a head that was being written at the end
        begin = values_offset(at)
        key = bytes(chunk[begin + 8 * slots : begin + 8 * slots + key_bytes])
        if state == _LIVE and record_bytes(key, slots) == size and zlib.crc32(key) == crc:
            # The same key with other slots is another series: a release may have changed a histogram's buckets.
            known = keys.get(key)
            if known is None or known.slots != slots:
                kind, name, labels = json.loads(key)
                known = keys[key] = Key(Kind(kind), name, tuple(labels), slots)
            yield known, list(struct.unpack_from(f"<{slots}d", chunk, begin))
        at += size
