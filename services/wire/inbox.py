"""The items of a worker's inbox, as the scripts of the queue pack them (`leased_item` in _prelude.lua). Pure.

Lua packs any string, a batch too, as MessagePack's text, which msgspec reads only if it is UTF-8. So a batch is taken
as it is stored: a head that gives its length, and its bytes.
"""

from __future__ import annotations

import msgspec


class _Item(msgspec.Struct, array_like=True, gc=False):
    lane: str
    entry: str
    batch: msgspec.Raw
    attempt: str
    tried: tuple[str, ...] = ()  # workers that could not read the batch


_read = msgspec.msgpack.Decoder(_Item).decode
#: Bytes of the head of a string, by its first byte. Source: MessagePack specification, "str format family".
_HEAD_BYTES = {**dict.fromkeys(range(0xA0, 0xC0), 1), 0xD9: 2, 0xDA: 3, 0xDB: 5}


def read_item(item: bytes) -> tuple[str, bytes, bytes, int, tuple[str, ...]]:
    """Return lane, id, batch and attempt of a leased entry, and the workers that could not read the batch.

    Raises ValueError.
    """
    try:
        read = _read(item)
        batch = memoryview(read.batch)
        # A copy: the tensors of the batch are aligned from its first byte on.
        return read.lane, read.entry.encode(), bytes(batch[_HEAD_BYTES[batch[0]] :]), int(read.attempt), read.tried
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ValueError(f"not an item of an inbox: {error}") from error
