"""The messages of direct dispatch, between a gateway and a worker on its host. Pure: bytes in, bytes out.

    gateway ─> worker   batch    u32 term | u16 length of the lane | lane | the batch (wire/batch.py)
    worker ─> gateway   attach   u8 kind (3) | MessagePack [term, pool, worker]
                        detach   u8 kind (4) | MessagePack [term, names of batches that it will answer, writing]
                        return   u8 kind (5) | MessagePack [name of a batch that must take the queue, seconds]

A term is the time between an attach and the next detach; the worker numbers them. Messages of one direction keep their
order. So a gateway that reads a detach knows what the worker took: all other batches of the term never run. Replies and
batches that are given up have the kinds of wire/batch.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

KIND_ATTACH = 3
KIND_DETACH = 4
KIND_RETURN = 5
_HEAD = struct.Struct("<IH")
TERM_MAX = (1 << 32) - 1
_pack = msgspec.msgpack.Encoder().encode


class Attach(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The worker takes batches of its pool from this gateway, until it detaches."""

    term: int
    pool: str
    worker: str


class Detach(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The worker takes no more batches. It answers those in `taken`; the others of the term never run.

    With `writing`, one of them runs until the process ends: it has no answer, but may write into its shared memory.
    """

    term: int
    taken: list[str]
    writing: bool = False


class Return(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A batch that the worker cannot answer directly. For `pause_s` seconds, batches of its lane take the queue."""

    name: str
    pause_s: float


_read_attach = msgspec.msgpack.Decoder(Attach).decode
_read_detach = msgspec.msgpack.Decoder(Detach).decode
_read_return = msgspec.msgpack.Decoder(Return).decode


def batch_head(term: int, lane: str) -> bytes:
    """Return what stands before a batch in its message."""
    name = lane.encode()
    return _HEAD.pack(term, len(name)) + name


def read_batch(data: bytes) -> tuple[int, str, bytes]:
    """Return term, lane and batch. Raises ValueError."""
    try:
        term, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        # A copy: the tensors of the batch are aligned from its first byte on.
        return term, data[_HEAD.size : end].decode(), data[end:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a batch: {error}") from error


def attach_message(term: int, pool: str, worker: str) -> bytes:
    """Encode an Attach."""
    return bytes([KIND_ATTACH]) + _pack(Attach(term, pool, worker))


def detach_message(term: int, taken: Sequence[str], *, writing: bool = False) -> bytes:
    """Encode a Detach."""
    return bytes([KIND_DETACH]) + _pack(Detach(term, list(taken), writing))


def return_message(name: str, pause_s: float) -> bytes:
    """Encode a Return."""
    return bytes([KIND_RETURN]) + _pack(Return(name, pause_s))


def read_control(data: bytes) -> Attach | Detach | Return:
    """Return the worker's message. Raises ValueError."""
    body = memoryview(data)[1:]
    try:
        if data[0] == KIND_ATTACH:
            return _read_attach(body)
        if data[0] == KIND_DETACH:
            return _read_detach(body)
        if data[0] == KIND_RETURN:
            return _read_return(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a message of a worker: {error}") from error
    raise ValueError(f"a message of kind {data[0]}")


def is_control(data: bytes) -> bool:
    """Return whether a message of a worker is one of this module, and no reply."""
    return KIND_ATTACH <= data[0] <= KIND_RETURN
