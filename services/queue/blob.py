"""Blobs: tensors too large for a script, in a key of their own. A list of parts, each below every limit of the server.

One value would break the connection above `proto-max-bulk-len` (512 MB, and 1 MB at least), `client-query-buffer-limit`
or a proxy's own limit; and a server that refuses a part says so before the rest is sent. Pure: commands, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

#: A server may read as much again behind what is left of a part before it counts: a quarter of the least limit keeps below
#: it however its reads fall.
PART_BYTES_MAX = 256 * 1024
#: parts that are read, or written and not answered yet, at a time: what a server or a proxy holds for one connection
PARTS_AT_ONCE = 16

Command = tuple[bytes | str | int, ...]


def write_commands(key: bytes, data: bytes, life_ms: int) -> Iterator[Command]:
    """Commands that make `key` hold `data` for `life_ms`, in order. What the key held before is gone.

    The first part and the expiry come together, so that a connection that breaks leaves nothing that stays for ever.
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
    """The command that reads the next parts of a blob of which `parts` are known already."""
    return ("LRANGE", key, parts, parts + PARTS_AT_ONCE - 1)


def is_last(parts: list[bytes]) -> bool:
    """Whether what a `read_command` brought ends with the blob's last part."""
    return len(parts) < PARTS_AT_ONCE or len(parts[-1]) < PART_BYTES_MAX
