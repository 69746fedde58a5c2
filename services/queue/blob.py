"""Blobs: tensors too large for a script, in a key of their own: a list of parts, each below every limit of a server.

A single value above `proto-max-bulk-len` (512 MB, at least 1 MB), `client-query-buffer-limit` or the limit of a proxy
would break the connection. A server that refuses a part does so before the rest is sent. Pure: commands, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Size of a part. A server may read up to a part's size beyond the rest of a part before it checks its limit: a quarter
#: of the smallest limit (1 MB) stays below it wherever its reads begin and end.
PART_BYTES_MAX = 256 * 1024
#: Parts that are requested, or written without an answer, at a time: bounds what a server or a proxy buffers for one
#: connection.
PARTS_AT_ONCE = 16

Command = tuple[bytes | str | int, ...]


def write_commands(key: bytes, data: bytes, life_ms: int) -> Iterator[Command]:
    """Yield the commands, in order, that store `data` under `key` for `life_ms`, instead of what was there before.

    The first part and the expiry are set in one transaction: a connection that breaks leaves no key without expiry.
    """
    view = memoryview(data)
    yield ("MULTI",)
    yield ("DEL", key)
    yield ("RPUSH", key, bytes(view[:PART_BYTES_MAX]))
    yield ("PEXPIRE", key, life_ms)
    yield ("EXEC",)
    for at in range(PART_BYTES_MAX, len(view), PART_BYTES_MAX):
        yield ("RPUSH", key, bytes(view[at : at + PART_BYTES_MAX]))


def read_command(key: bytes, parts: int) -> Command:
    """Return the command that reads the next parts of a blob after the first `parts`."""
    return ("LRANGE", key, parts, parts + PARTS_AT_ONCE - 1)


def is_last(parts: list[bytes]) -> bool:
    """Return whether the parts that a `read_command` returned end with the last part of the blob."""
    return len(parts) < PARTS_AT_ONCE or len(parts[-1]) < PART_BYTES_MAX
