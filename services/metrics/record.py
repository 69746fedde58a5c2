"""The format of a metric file: one record per series, with its key and float64 values. Pure.

    file   = header (64 bytes: magic) + records; mapped in chunks of CHUNK_BYTES; no record crosses a boundary
    record = size u32 | crc32(key) u32 | key bytes u16 | slots u16 | state u32 | values f64 x slots | key JSON | padding

A record is valid when its head is written, which its owner does last. So an owner that is killed at any store leaves
either a whole record or one that `records` skips. The key comes last: a reader reads from front to back, so if a record
is reused for another series meanwhile, it gets the old checksum with the new key and skips the record, too.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add

from millstream.services.metrics.catalogue import Kind

MAGIC = b"MILLSTR1"
HEADER_BYTES = 64
CHUNK_BYTES = 128 * 1024
LABEL_CHARACTERS_MAX = 256

_HEAD = struct.Struct("<IIHHI")
_ALIGN = 64  # a cache line, so that series of different threads or processes never share one
_FREE, _LIVE = 0, 1
OTHER = "other"  # label value of series beyond a limit


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a series: series of several processes with equal keys are merged."""

    kind: Kind
    name: str
    labels: tuple[str, ...]
    slots: int

    def encode(self) -> bytes:
        """Return the key as stored in a record, without `slots`."""
        return json.dumps([self.kind, self.name, self.labels], separators=(",", ":")).encode()


#: a series and its values
Series = tuple[Key, Sequence[float]]


def record_bytes(key: bytes, slots: int) -> int:
    """Return the size of the record of a series."""
    plain = _HEAD.size + 8 * slots + len(key)
    return -(-plain // _ALIGN) * _ALIGN


def values_offset(record: int) -> int:
    """Return the offset of the values of the record at offset `record`."""
    return record + _HEAD.size


def write_record(chunk: memoryview, record: int, key: bytes, slots: int) -> None:
    """Write a series with zero values at offset `record` of a mapped chunk; a reused record keeps its size."""
    begin = values_offset(record)
    chunk[begin : begin + 8 * slots] = bytes(8 * slots)
    chunk[begin + 8 * slots : begin + 8 * slots + len(key)] = key
    _HEAD.pack_into(chunk, record, record_bytes(key, slots), zlib.crc32(key), len(key), slots, _LIVE)


def free_record(chunk: memoryview, record: int) -> int:
    """Free the record of a series for reuse; returns its size."""
    size, crc, key_bytes, slots, _ = _HEAD.unpack_from(chunk, record)
    _HEAD.pack_into(chunk, record, size, crc, key_bytes, slots, _FREE)
    return int(size)


def records(content: memoryview) -> Iterator[Series]:
    """Yield the live series of a file. Torn or foreign bytes are skipped and raise no error."""
    if has_series(content):
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            for key, at, slots in parse_chunk(chunk, start == 0):
                yield parse_key(key, slots), values_at(chunk, at, slots)


def has_series(content: memoryview | bytes) -> bool:
    """Return whether the content is a metric file of this format."""
    return bytes(content[: len(MAGIC)]) == MAGIC


def values_at(chunk: memoryview | bytes, at: int, slots: int) -> tuple[float, ...]:
    """Return the values that begin at offset `at` of a chunk."""
    return struct.unpack_from(f"<{slots}d", chunk, at)


def parse_chunk(chunk: memoryview, first: bool) -> Iterator[tuple[bytes, int, int]]:
    """Yield the live series of a chunk: the key as stored, the offset of the values and their number.

    The `first` chunk begins with the header.
    """
    at = HEADER_BYTES if first else 0
    while at + _HEAD.size <= len(chunk):
        size, crc, key_bytes, slots, state = _HEAD.unpack_from(chunk, at)
        if size < _ALIGN or size % _ALIGN or at + size > len(chunk):
            return  # the end of the records, or a head that is being written there
        begin = values_offset(at)
        key = bytes(chunk[begin + 8 * slots : begin + 8 * slots + key_bytes])
        if state == _LIVE and record_bytes(key, slots) == size and zlib.crc32(key) == crc:
            yield key, begin, slots
        at += size


def parse_key(key: bytes, slots: int) -> Key:
    """Return a key from its stored form."""
    kind, name, labels = json.loads(key)
    return Key(Kind(kind), name, tuple(labels), slots)


def name_of(key: bytes) -> str:
    """Return the name of the metric in a stored key."""
    return key.split(b'"', 4)[3].decode()


class Totals(dict[Key, list[float]]):
    """Merged values by series."""

    def merge(self, series: Iterable[Series], *, alive: bool, series_max: int | None = None) -> None:
        """Add the series of a process, gauges only if it is alive; beyond `series_max` they go to the label `other`."""
        for key, values in series:
            if not (alive or key.kind.lasting):
                continue
            if series_max is not None and len(self) >= series_max and key not in self:
                key = Key(key.kind, key.name, (OTHER,) * len(key.labels), key.slots)
            known = self.get(key)
            if known is None:
                self[key] = list(values)
            else:
                self[key] = list(map(max if key.kind.largest else add, known, values))
